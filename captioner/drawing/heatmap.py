"""An attention map as a heatmap over a photo.

The photo is dimmed, and the heatmap is added by screen blending:

    s     = alpha / scale_max                          0: no attention, 1: the caption's maximum
    dim   = 0.42 * photo, colours faded to 12% at s = 0
    heat  = 0.9 * colour(s) * (0.5 + 0.5 * grey)       grey: luma of the photo
    pixel = dim + heat * (1 - dim)

The heatmap is modulated by the photo's luma, so that the photo stays recognizable. More attention
never makes a pixel darker: the luma of dim does not depend on s, and the luma of every supported
colormap increases with s (this proves it for grey pixels; tests cover other colours).

Notation: a grid of Gh x Gw regions, row-major; a photo of W x H pixels.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple, get_args

import numpy as np
from numpy.typing import ArrayLike, NDArray
from PIL import Image

from captioner.caption import Caption
from captioner.data.pixels import to_rgb
from captioner.drawing.options import Colormap
from captioner.errors import ConfigError
from captioner.geometry import Geometry

COLORMAPS: tuple[str, ...] = get_args(Colormap)


class HeatmapStyle(NamedTuple):
    """Constants of the equations above, also used by the viewer in the browser."""

    dim: float = 0.42
    """Brightness of the photo under the heatmap."""
    saturation: float = 0.12
    """Saturation of the photo where there is no attention."""
    heat: float = 0.9
    """Brightness of the heatmap at s = 1."""
    floor: float = 0.5
    """Brightness of the heatmap over black, relative to white."""
    outside: float = 0.2
    """Brightness of the photo outside the crop box."""
    hatch: float = 0.13
    """Brightness that the hatching adds there."""


HEATMAP_STYLE = HeatmapStyle()

CLOSED_GATE = 0.1
"""Gates below this are nearly closed; see ``shared_scale``. Chosen by looking at figures."""


def closed_words(gates: ArrayLike) -> NDArray[np.bool_]:
    """Which words have a nearly closed gate, (T,): their maps hardly reach the decoder.

    None of them if all gates are nearly closed, such as with attention ``fixed_at_start``.
    """
    closed: NDArray[np.bool_] = np.asarray(gates, dtype=np.float32) < CLOSED_GATE
    return closed & ~closed.all()


def shared_scale(alphas: ArrayLike, gates: ArrayLike | None = None) -> float:
    """Attention drawn in the brightest colour, shared by all maps of a caption.

    The maximum, but at least twice the uniform share, so that uniform attention is drawn at the
    middle of the scale rather than as a peak everywhere.

    Args:
        alphas: Attention maps, (T, Gh, Gw) or (Gh, Gw).
        gates: Gates of the T words: those of ``closed_words`` do not count. None: all count.
    """
    maps = np.asarray(alphas, dtype=np.float32)
    if maps.size == 0:
        return 1.0
    uniform = 1.0 / (maps.shape[-2] * maps.shape[-1])
    if gates is not None:
        maps = maps[~closed_words(gates)]
    return float(max(maps.max(), min(1.0, 2.0 * uniform)))


def scale_of(caption: Caption, positions: Sequence[int] | None = None) -> float:
    """The ``shared_scale`` of a caption, or of the words at some of its positions.

    All words count for methods that measure the effect on the word itself: one with a closed gate
    may have a strong effect, through the words before it.
    """
    shown = slice(None) if positions is None else list(positions)
    gates = caption.gates[shown] if caption.method == "attention" else None
    return shared_scale(caption.alphas[shown], gates)


def above_scale(caption: Caption, scale_max: float) -> NDArray[np.bool_]:
    """Which words were left out of the scale and exceed it, (T,)."""
    exceeds: NDArray[np.bool_] = caption.alphas.max(axis=(1, 2), initial=0.0) > scale_max
    return exceeds & closed_words(caption.gates) & (caption.method == "attention")


def fit_photo(photo: Image.Image, panel_size: int = 640) -> Image.Image:
    """Convert a photo to RGB and scale it down (never up) to ``panel_size``.

    Transparent pixels are blended with white; ``panel_size`` is the longest side in pixels (0:
    never scale).
    """
    if photo.mode != "RGB":
        photo = to_rgb(photo)
    longer = max(photo.size)
    if panel_size == 0 or longer <= panel_size:
        return photo
    width, height = (max(1, round(side * panel_size / longer)) for side in photo.size)
    return photo.resize((width, height), Image.Resampling.LANCZOS, reducing_gap=3.0)


def attention_map(
    alpha: ArrayLike,
    size: tuple[int, int],
    regions: Geometry | None = None,
    *,
    smooth: bool = True,
) -> NDArray[np.float32]:
    """Attention at every pixel of a photo.

    Smooth maps are interpolated bilinearly between the centres of the regions and constant
    outside the outer centres, so that no pixel exceeds the largest region.

    Args:
        alpha: Attention, (Gh, Gw).
        size: Width and height of the photo in pixels.
        regions: Where the regions lie in the photo; None: equal cells.
        smooth: Interpolate; False gives every pixel the value of the nearest region.

    Returns:
        (H, W), in the unit of ``alpha``; NaN where the encoder sees nothing.
    """
    grid = np.asarray(alpha, dtype=np.float32)
    if grid.ndim != 2 or grid.size == 0:
        raise ConfigError(f"an attention map must have shape (rows, columns), not {grid.shape}")
    y, x = regions or Geometry.even(grid.shape)
    width, height = size
    rows, seen_rows = y.samples(height, grid.shape[0], smooth=smooth)
    columns, seen_columns = x.samples(width, grid.shape[1], smooth=smooth)
    wide = _interpolate_rows(grid.T, columns).T  # (Gh, W)
    pixels = _interpolate_rows(wide, rows)  # (H, W)
    pixels[~seen_rows] = np.nan
    pixels[:, ~seen_columns] = np.nan
    return pixels


def attention_image(
    photo: Image.Image,
    alpha: ArrayLike,
    *,
    scale_max: float | None = None,
    regions: Geometry | None = None,
    smooth: bool = True,
    colormap: str = "inferno",
) -> Image.Image:
    """Draw one attention map as a heatmap over a photo.

    Args:
        photo: The photo; the result has its size.
        alpha: Attention, (Gh, Gw).
        scale_max: Attention drawn in the brightest colour; None: from this map alone. Pass
            ``shared_scale(caption.alphas, caption.gates)`` to make the words of a caption
            comparable.
        regions: Where the regions lie in the photo, such as ``caption.regions``; None: equal
            cells. What the encoder does not see is dark and hatched.
        smooth: Interpolate the map; False shows regions as blocks.
        colormap: One of ``COLORMAPS``.
    """
    values = attention_map(alpha, photo.size, regions, smooth=smooth)
    top = shared_scale(alpha) if scale_max is None else scale_max
    return _blend(fit_photo(photo, 0), values / np.float32(top), colormap)


def scale_bar(width: int, height: int, colormap: str = "inferno") -> Image.Image:
    """Draw the colour scale over mid-grey, from 0 (left) to ``scale_max`` (right)."""
    grey = Image.new("RGB", (width, height), (128, 128, 128))
    levels = np.broadcast_to(np.linspace(0.0, 1.0, width, dtype=np.float32), (height, width))
    return _blend(grey, levels, colormap)


def _interpolate_rows(
    values: NDArray[np.float32], samples: NDArray[np.float32]
) -> NDArray[np.float32]:
    """Rows of ``values`` (N, M) at fractional indices ``samples`` (P,); returns (P, M).

    Uses indexing, as a matrix product is ten times slower when BLAS threads compete for cores.
    """
    lower = samples.astype(np.intp)
    upper = np.minimum(lower + 1, len(values) - 1)
    part = (samples - lower)[:, None]
    result: NDArray[np.float32] = values[lower] * (1.0 - part) + values[upper] * part
    return result


def _blend(photo: Image.Image, levels: NDArray[np.float32], colormap: str) -> Image.Image:
    """Blend ``levels`` (H, W), 0 to 1 or NaN where nothing is seen, with the photo."""
    colours = _colours(colormap)
    outside = np.isnan(levels)
    strength = np.clip(np.where(outside, np.float32(0.0), levels), 0.0, 1.0)
    entry = (strength * 255.0 + 0.5).astype(np.uint8)
    planes = [np.asarray(band, dtype=np.float32) / np.float32(255.0) for band in photo.split()]
    grey = 0.299 * planes[0] + 0.587 * planes[1] + 0.114 * planes[2]
    style = HEATMAP_STYLE
    heat = style.heat * (style.floor + (1.0 - style.floor) * grey)
    saturation = style.dim * (style.saturation + (1.0 - style.saturation) * strength)
    hatched = None
    if outside.any():  # thin diagonal lines
        period = max(4, round(max(grey.shape) / 50))
        rows, columns = np.ogrid[: grey.shape[0], : grey.shape[1]]
        lines = (rows + columns) % period < max(1, period // 5)
        hatched = style.outside * grey + style.hatch * lines
    bands = []
    # Channel by channel, several times faster than arrays with a last axis of three.
    for plane, colour in zip(planes, colours, strict=True):
        dim = style.dim * grey + saturation * (plane - grey)
        pixels = dim + heat * np.take(colour, entry) * (1.0 - dim)
        if hatched is not None:
            pixels = np.where(outside, hatched, pixels)
        bands.append(Image.fromarray((pixels * 255.0 + 0.5).astype(np.uint8)))
    return Image.merge("RGB", bands)


def palette(colormap: str = "inferno") -> str:
    """The 256 colours of a colormap as concatenated ``rrggbb``, from no attention to the most."""
    colours: NDArray[np.uint8] = np.rint(_colours(colormap).T * 255.0).astype(np.uint8)
    return colours.tobytes().hex()


@lru_cache(maxsize=len(COLORMAPS))
def _colours(name: str) -> NDArray[np.float32]:
    """Red, green and blue of the 256 colours of a colormap, (3, 256), 0 to 1."""
    import matplotlib

    colours: NDArray[np.float32] = matplotlib.colormaps[name](np.arange(256))[:, :3].T
    return np.ascontiguousarray(colours, dtype=np.float32)
