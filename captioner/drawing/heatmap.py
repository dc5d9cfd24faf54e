"""The drawing of an attention map over a photo.

With the colormap ``photo``, attended parts keep their colours and brightness, the rest is dimmed:

    s     = alpha / scale_max, at most 1               0: no attention, 1: fully lit
    t     = s^1.5
    dim   = (0.35 + 0.65 t) * photo, colours faded to 12% at t = 0
    pixel = dim + 0.08 t * (1 - dim)                   which also shows on black

With other colormaps, the photo is dimmed everywhere, and a heatmap is added by screen blending:

    dim   = 0.42 * photo, colours faded to 12% at s = 0
    heat  = 0.9 * colour(s) * (0.5 + 0.5 * grey)       grey: luma of the photo
    pixel = dim + heat * (1 - dim)

The photo's luma modulates the heatmap, so that the photo stays recognizable. More attention never
makes a pixel darker, because the luma of ``dim`` does not decrease with s, and the luma of every
supported colormap increases. This argument holds for grey pixels. Tests cover other colours.

Notation: a grid of Gh x Gw regions, row-major; a photo of W x H pixels.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple, get_args

import numpy as np
from numpy.typing import ArrayLike, NDArray
from PIL import Image

from captioner.caption_types import Caption
from captioner.data.pixels import fit_photo
from captioner.drawing.options import Colormap
from captioner.errors import ConfigError
from captioner.geometry import Geometry

COLORMAPS: tuple[str, ...] = get_args(Colormap)

MIN_PANEL = 160
"""Pixels of the longest side to which figures and animations enlarge smaller photos."""
_BAR_PHOTO, _BAR_HEATMAP = 208, 128  # grey levels under the colour scale


class HeatmapStyle(NamedTuple):
    """The constants of the equations above, which the viewer in the browser uses too."""

    rest: float = 0.35  # the photo where there is no attention, in its own colours
    lift: float = 0.08  # white added at s = 1, in its own colours
    dim: float = 0.42  # the photo under a heatmap
    saturation: float = 0.12  # saturation of the photo where there is no attention
    heat: float = 0.9  # the heatmap at s = 1
    floor: float = 0.5  # the heatmap over black, relative to white
    outside: float = 0.2  # the photo outside the crop box
    hatch: float = 0.13  # what the hatching adds there


HEATMAP_STYLE = HeatmapStyle()

CLOSED_GATE = 0.1
"""Gates below this are nearly closed; see ``shared_scale``. Chosen by looking at figures."""


def closed_words(gates: ArrayLike) -> NDArray[np.bool_]:
    """Return which words have a nearly closed gate, (T,), so that their maps hardly count.

    If all gates are nearly closed, such as with attention ``fixed_at_start``, no word is marked.
    """
    closed: NDArray[np.bool_] = np.asarray(gates, dtype=np.float32) < CLOSED_GATE
    return closed & ~closed.all()


def most_attended(alpha: ArrayLike) -> tuple[float, float]:
    """Measure the tenth of the regions with the most attention (rounded, at least one).

    Returns:
        The least attention of these regions, and their share of the map's sum (its focus, 0 to 1).
    """
    values = np.sort(np.ravel(alpha))[::-1]
    most = values[: max(1, int(len(values) / 10 + 0.5))]
    return float(most[-1]), float(most.sum() / (values.sum() or 1.0))


def shared_scale(alphas: ArrayLike, gates: ArrayLike | None = None) -> float:
    """Return the attention at which regions are fully lit, for one map or for several.

    For one map, a tenth of the regions reach this value (see ``most_attended``). For several maps,
    it is the largest of their values. It is at least twice the uniform share, so that uniform
    attention is drawn at the middle of the scale and not fully lit.

    Args:
        alphas: Attention maps, (T, Gh, Gw) or (Gh, Gw).
        gates: Gates of the T words. The ``closed_words`` do not count. None: all words count.
    """
    maps = np.asarray(alphas, dtype=np.float32)
    if maps.size == 0:
        return 1.0
    uniform = 1.0 / (maps.shape[-2] * maps.shape[-1])
    if gates is not None:
        maps = maps[~closed_words(gates)]
    levels = [most_attended(alpha)[0] for alpha in maps.reshape(-1, *maps.shape[-2:])]
    return float(max(*levels, min(1.0, 2.0 * uniform)))


def scale_of(caption: Caption, positions: Sequence[int] | None = None) -> float:
    """Return the ``shared_scale`` of a caption, or of the words at some of its positions.

    For methods other than attention, words with a closed gate count too: their maps measure the
    effect on the word itself, which can be strong through the words before it.
    """
    shown = slice(None) if positions is None else list(positions)
    gates = caption.gates[shown] if caption.method == "attention" else None
    return shared_scale(caption.alphas[shown], gates)


def attention_map(
    alpha: ArrayLike,
    size: tuple[int, int],
    regions: Geometry | None = None,
    *,
    smooth: bool = True,
) -> NDArray[np.float32]:
    """Return the attention at every pixel of a photo.

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
    colormap: str = "photo",
) -> Image.Image:
    """Draw one attention map over a photo.

    Args:
        photo: The photo; the result has its size.
        alpha: Attention, (Gh, Gw).
        scale_max: Attention that is fully lit; None: from this map alone. Pass
            ``shared_scale(caption.alphas, caption.gates)`` to make the words of a caption
            comparable.
        regions: Where the regions lie in the photo, such as ``caption.regions``; None: equal
            cells. What the encoder does not see is dark and hatched.
        smooth: Interpolate the map; False shows regions as blocks.
        colormap: One of ``COLORMAPS``; ``photo``: the photo's own colours.
    """
    values = attention_map(alpha, photo.size, regions, smooth=smooth)
    top = shared_scale(alpha) if scale_max is None else scale_max
    return _blend(fit_photo(photo, 0), values / np.float32(top), colormap)


def greyed(picture: Image.Image) -> Image.Image:
    """Return a picture in grey, as the maps of left-out words are shown."""
    return picture.convert("L").convert("RGB")


def scale_bar(width: int, height: int, colormap: str = "photo") -> Image.Image:
    """Draw the colour scale over grey, from 0 (left) to ``scale_max`` (right)."""
    level = _BAR_PHOTO if colormap == "photo" else _BAR_HEATMAP
    grey = Image.new("RGB", (width, height), (level, level, level))
    levels = np.broadcast_to(np.linspace(0.0, 1.0, width, dtype=np.float32), (height, width))
    return _blend(grey, levels, colormap)


def _interpolate_rows(
    values: NDArray[np.float32], samples: NDArray[np.float32]
) -> NDArray[np.float32]:
    """Interpolate rows of ``values`` (N, M) at fractional indices ``samples`` (P,), to (P, M).

    Indexing is used because a matrix product is ten times slower when BLAS threads compete for
    cores.
    """
    lower = samples.astype(np.intp)
    upper = np.minimum(lower + 1, len(values) - 1)
    part = (samples - lower)[:, None]
    result: NDArray[np.float32] = values[lower] * (1.0 - part) + values[upper] * part
    return result


def _blend(photo: Image.Image, levels: NDArray[np.float32], colormap: str) -> Image.Image:
    """Blend ``levels`` (H, W), 0 to 1 or NaN where nothing is seen, with the photo."""
    outside = np.isnan(levels)
    strength = np.clip(np.where(outside, np.float32(0.0), levels), 0.0, 1.0)
    entry = (strength * 255.0 + 0.5).astype(np.uint8)
    planes = [np.asarray(band, dtype=np.float32) / np.float32(255.0) for band in photo.split()]
    grey = 0.299 * planes[0] + 0.587 * planes[1] + 0.114 * planes[2]
    style = HEATMAP_STYLE
    colours = None if colormap == "photo" else _colours(colormap)
    light: Any = style.dim
    heat = style.heat * (style.floor + (1.0 - style.floor) * grey)
    if colours is None:
        strength *= np.sqrt(strength)
        light = style.rest + (1.0 - style.rest) * strength
        heat = style.lift * strength
    saturation = light * (style.saturation + (1.0 - style.saturation) * strength)
    hatched = None
    if outside.any():  # thin diagonal lines
        period = max(4, round(max(grey.shape) / 50))
        rows, columns = np.ogrid[: grey.shape[0], : grey.shape[1]]
        lines = (rows + columns) % period < max(1, period // 5)
        hatched = style.outside * grey + style.hatch * lines
    bands = []
    # Channel by channel, several times faster than arrays with a last axis of three.
    for channel, plane in enumerate(planes):
        pixels = light * grey + saturation * (plane - grey)
        colour = 1.0 if colours is None else np.take(colours[channel], entry)
        pixels += heat * colour * (1.0 - pixels)
        if hatched is not None:
            pixels = np.where(outside, hatched, pixels)
        bands.append(Image.fromarray((pixels * 255.0 + 0.5).astype(np.uint8)))
    return Image.merge("RGB", bands)


def palette(colormap: str) -> str:
    """Return the 256 colours of a colormap as joined ``rrggbb``, from no attention to the most.

    The result is empty for ``photo``, which adds no colours.
    """
    if colormap == "photo":
        return ""
    colours: NDArray[np.uint8] = np.rint(_colours(colormap).T * 255.0).astype(np.uint8)
    return colours.tobytes().hex()


@lru_cache(maxsize=len(COLORMAPS))
def _colours(name: str) -> NDArray[np.float32]:
    """Return the 256 colours of a colormap as red, green and blue, (3, 256), 0 to 1."""
    from captioner.drawing.backend import matplotlib

    colours: NDArray[np.float32] = matplotlib.colormaps[name](np.arange(256))[:, :3].T
    return np.ascontiguousarray(colours, dtype=np.float32)
