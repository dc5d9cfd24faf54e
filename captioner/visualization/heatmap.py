"""One attention map on one photo: light falls where the model looked.

The photo is put in the dark and lit by a coloured light, added as two projectors add on a screen:

    s     = alpha / scale_max                            0 no attention, 1 the most in the caption
    dark  = 0.42 * photo, whose colours fade to 12% where s = 0
    light = 0.9 * colour(s) * (0.5 + 0.5 * grey)         grey: the photo's luma
    pixel = dark + light * (1 - dark)

The light takes the photo's own shading, so that the photo stays recognisable under it. No place
gets darker by getting more attention: dark keeps its luma, and the luma of every allowed colormap
rises with s (that is the proof for grey places; the tests go through the other colours).

Notation: a grid of Gh x Gw regions, row-major; a photo of W x H pixels.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray
from PIL import Image

from captioner.caption import CropBox
from captioner.data.images import to_rgb
from captioner.errors import ConfigError

COLORMAPS = ("inferno", "magma", "plasma", "viridis", "cividis", "gray")
"""The colormaps of matplotlib that are perceptually uniform and get brighter from end to end."""


class Light(NamedTuple):
    """The numbers of the equations above; the viewer in the browser is given the same."""

    dark: float = 0.42
    """Brightness of the photo without light."""
    faded: float = 0.12
    """How much of the photo's colour is left without light."""
    light: float = 0.9
    """Brightness of the strongest light."""
    floor: float = 0.5
    """The share of the light that even black reflects."""
    unseen: float = 0.2
    """Brightness of the photo where the model did not see it."""
    hatch: float = 0.13
    """Brightness that the lines add to it."""


LIGHT = Light()

_WHOLE = CropBox()


def check_colormap(name: str) -> None:
    """Refuse a colormap in which brighter would not mean more."""
    if name not in COLORMAPS:
        raise ConfigError(f"unknown colormap {name!r}; choose one of {', '.join(COLORMAPS)}")


def shared_scale(alphas: ArrayLike) -> float:
    """The attention that gets the brightest colour in every map of a caption.

    The largest value, but at least twice the uniform share: attention that is spread evenly
    is then drawn as the even middle of the scale, not as a peak everywhere.

    Args:
        alphas: Attention maps, (T, Gh, Gw) or (Gh, Gw).
    """
    maps = np.asarray(alphas, dtype=np.float32)
    if maps.size == 0:
        return 1.0
    uniform = 1.0 / (maps.shape[-2] * maps.shape[-1])
    return float(max(maps.max(), min(1.0, 2.0 * uniform)))


def fit_photo(photo: Image.Image, panel_size: int = 640) -> Image.Image:
    """The photo in RGB, scaled down (never up) until its longer side is ``panel_size`` pixels.

    Args:
        photo: The photo, any mode; what is transparent lies on white.
        panel_size: Longest side in pixels; 0 leaves every photo at its own size.
    """
    if panel_size < 0:
        raise ConfigError(f"panel_size is {panel_size}; give a number of pixels, or 0 for no limit")
    if photo.mode != "RGB":
        photo = to_rgb(photo)
    longer = max(photo.size)
    if panel_size == 0 or longer <= panel_size:
        return photo
    width, height = (max(1, round(side * panel_size / longer)) for side in photo.size)
    return photo.resize((width, height), Image.Resampling.LANCZOS, reducing_gap=3.0)


def attention_map(
    alpha: ArrayLike, size: tuple[int, int], crop_box: CropBox = _WHOLE, *, smooth: bool = True
) -> NDArray[np.float32]:
    """Attention at every pixel of a photo, in the unit of ``alpha``.

    Smooth maps are interpolated linearly between the centres of the regions and stay level from
    the outer centres to the border, so that no pixel exceeds the largest region.

    Args:
        alpha: Attention, (Gh, Gw).
        size: Width and height of the photo in pixels.
        crop_box: The part of the photo that the map covers.
        smooth: Interpolate; otherwise every region is a block of one value.

    Returns:
        (H, W), NaN where the model did not look.
    """
    grid = np.asarray(alpha, dtype=np.float32)
    if grid.ndim != 2 or grid.size == 0:
        raise ConfigError(f"an attention map has the shape (rows, columns), not {grid.shape}")
    if not (crop_box.left < crop_box.right and crop_box.top < crop_box.bottom):
        raise ConfigError(f"the crop box {tuple(crop_box)} is empty; left < right and top < bottom")
    width, height = size
    rows, seen_rows = _places(height, crop_box.top, crop_box.bottom, grid.shape[0], smooth)
    columns, seen_columns = _places(width, crop_box.left, crop_box.right, grid.shape[1], smooth)
    wide = _interpolated(grid.T, columns).T  # (Gh, W)
    pixels = _interpolated(wide, rows)  # (H, W)
    pixels[~seen_rows] = np.nan
    pixels[:, ~seen_columns] = np.nan
    return pixels


def attention_image(
    photo: Image.Image,
    alpha: ArrayLike,
    *,
    scale_max: float | None = None,
    crop_box: CropBox = _WHOLE,
    smooth: bool = True,
    colormap: str = "inferno",
) -> Image.Image:
    """One attention map on one photo, pixel for pixel; the brighter, the more attention.

    Args:
        photo: The photo; the result has its size.
        alpha: Attention, (Gh, Gw).
        scale_max: Attention that gets the brightest colour; None: of this map alone. Give
            ``shared_scale(caption.alphas)`` to make the words of a caption comparable.
        crop_box: The part of the photo that the map covers; the rest is hatched in the dark.
        smooth: Interpolate between the regions; otherwise show them as blocks.
        colormap: One of ``COLORMAPS``.
    """
    values = attention_map(alpha, photo.size, crop_box, smooth=smooth)
    top = shared_scale(alpha) if scale_max is None else scale_max
    if not top > 0:
        raise ConfigError(f"scale_max is {top}; give the attention above 0 that is drawn brightest")
    return _lit(fit_photo(photo, 0), values / np.float32(top), colormap)


def scale_bar(width: int, height: int, colormap: str = "inferno") -> Image.Image:
    """The colours from no attention (left) to ``scale_max`` (right), as they look on grey.

    Args:
        width: Width in pixels.
        height: Height in pixels.
        colormap: One of ``COLORMAPS``.
    """
    grey = Image.new("RGB", (width, height), (128, 128, 128))
    levels = np.broadcast_to(np.linspace(0.0, 1.0, width, dtype=np.float32), (height, width))
    return _lit(grey, levels, colormap)


def _places(
    pixels: int, start: float, stop: float, cells: int, smooth: bool
) -> tuple[NDArray[np.float32], NDArray[np.bool_]]:
    """Where the pixel centres of one axis lie among the centres of ``cells`` regions.

    Returns:
        (pixels,) 0 at the first region's centre to cells - 1 at the last one's, and (pixels,)
        whether the pixel was seen.
    """
    centres = (np.arange(pixels) + 0.5) / pixels
    inside = (centres - start) / (stop - start)  # 0 to 1 within the region
    seen = (inside >= 0.0) & (inside < 1.0)
    place = np.clip(inside * cells - 0.5, 0.0, cells - 1.0)
    return (place if smooth else np.floor(place + 0.5)).astype(np.float32), seen


def _interpolated(values: NDArray[np.float32], places: NDArray[np.float32]) -> NDArray[np.float32]:
    """Rows of ``values`` (N, M) at fractional ``places`` (P,); the result is (P, M).

    Two look-ups, not a product of matrices: BLAS threads on a busy machine cost ten times more.
    """
    lower = places.astype(np.intp)
    upper = np.minimum(lower + 1, len(values) - 1)
    part = (places - lower)[:, None]
    between: NDArray[np.float32] = values[lower] * (1.0 - part) + values[upper] * part
    return between


def _lit(photo: Image.Image, levels: NDArray[np.float32], colormap: str) -> Image.Image:
    """The photo under a light of ``levels`` (H, W), 0 to 1 or NaN for not seen."""
    colours = _colours(colormap)
    unseen = np.isnan(levels)
    strength = np.clip(np.where(unseen, np.float32(0.0), levels), 0.0, 1.0)
    entry = (strength * 255.0 + 0.5).astype(np.uint8)
    planes = [np.asarray(band, dtype=np.float32) / np.float32(255.0) for band in photo.split()]
    grey = 0.299 * planes[0] + 0.587 * planes[1] + 0.114 * planes[2]
    reflected = LIGHT.light * (LIGHT.floor + (1.0 - LIGHT.floor) * grey)
    colour_left = LIGHT.dark * (LIGHT.faded + (1.0 - LIGHT.faded) * strength)
    outside = LIGHT.unseen * grey + LIGHT.hatch * _hatching(unseen.shape) if unseen.any() else None
    bands = []
    # One channel after the other: a last axis of three would be several times slower.
    for plane, colour in zip(planes, colours, strict=True):
        dark = LIGHT.dark * grey + colour_left * (plane - grey)
        pixels = dark + reflected * np.take(colour, entry) * (1.0 - dark)
        if outside is not None:
            pixels = np.where(unseen, outside, pixels)
        bands.append(Image.fromarray((pixels * 255.0 + 0.5).astype(np.uint8)))
    return Image.merge("RGB", bands)


def _hatching(shape: tuple[int, int]) -> NDArray[np.bool_]:
    """Fine diagonal lines, (H, W): True on a line."""
    period = max(4, round(max(shape) / 50))
    rows, columns = np.ogrid[: shape[0], : shape[1]]
    lines: NDArray[np.bool_] = (rows + columns) % period < max(1, period // 5)
    return lines


def palette(colormap: str = "inferno") -> str:
    """A colormap's 256 colours as ``rrggbb`` after ``rrggbb``, from no attention to the most."""
    colours: NDArray[np.uint8] = np.rint(_colours(colormap).T * 255.0).astype(np.uint8)
    return colours.tobytes().hex()


@lru_cache(maxsize=len(COLORMAPS))
def _colours(name: str) -> NDArray[np.float32]:
    """The red, green and blue of a colormap's 256 colours, (3, 256), 0 to 1."""
    check_colormap(name)
    import matplotlib

    colours: NDArray[np.float32] = matplotlib.colormaps[name](np.arange(256))[:, :3].T
    return np.ascontiguousarray(colours, dtype=np.float32)
