"""Functions that draw an attention map over a photo.

With the colormap ``photo``, attended parts keep their colours and brightness. The other parts are
dimmed:

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
from captioner.hints import hinted

COLORMAPS: tuple[str, ...] = get_args(Colormap)

MIN_PANEL = 160
"""Figures and animations enlarge smaller photos until the longest side has this many pixels."""
_BAR_PHOTO, _BAR_HEATMAP = 208, 128  # grey levels under the colour scale


class HeatmapStyle(NamedTuple):
    """The constants of the equations at the top of this file, also used by the viewer."""

    rest: float = 0.35  # colormap photo: brightness of the photo at s = 0
    lift: float = 0.08  # colormap photo: white that is added at s = 1
    dim: float = 0.42  # other colormaps: brightness of the photo under the heatmap
    saturation: float = 0.12  # saturation of the photo at s = 0
    heat: float = 0.9  # other colormaps: strength of the heatmap
    floor: float = 0.5  # other colormaps: strength of the heatmap over black, relative to white
    outside: float = 0.2  # brightness of the photo outside the part that the encoder sees
    hatch: float = 0.13  # brightness that the hatching adds to this part


HEATMAP_STYLE = HeatmapStyle()

CLOSED_GATE = 0.1
"""Gates below this value are nearly closed, so the map of the word hardly counts (see
``shared_scale``). The value was chosen by looking at figures."""


def closed_words(gates: ArrayLike) -> NDArray[np.bool_]:
    """Return which words have a nearly closed gate, (T,), so that their maps hardly count.

    The gate, 0 to 1, is the weight of the attended features in the prediction of a word.

    If all gates are nearly closed, such as with attention ``fixed_at_start``, no word is marked.
    """
    closed: NDArray[np.bool_] = np.asarray(gates, dtype=np.float32) < CLOSED_GATE
    return closed & ~closed.all()


def most_attended(alpha: ArrayLike) -> tuple[float, float]:
    """Measure the most attended tenth of the regions (rounded, at least one region).

    Returns:
        The lowest attention among these regions, and their share of the sum of the map. The share
        (0 to 1) is the focus of the map.
    """
    values = np.sort(np.ravel(alpha))[::-1]
    most = values[: max(1, int(len(values) / 10 + 0.5))]
    return float(most[-1]), float(most.sum() / (values.sum() or 1.0))


def shared_scale(alphas: ArrayLike, gates: ArrayLike | None = None) -> float:
    """Return the attention at which regions are fully lit, for one map or for several.

    For one map, a tenth of the regions reach this value (see ``most_attended``). For several maps,
    the largest of these values is used. The result is at least twice the attention of a region in
    a uniform map. Uniform attention is therefore drawn at most at the middle of the scale.

    Args:
        alphas: Attention maps, (T, Gh, Gw) or (Gh, Gw).
        gates: Gates of the T words. Words with a nearly closed gate (``closed_words``) do not
            count. None: all words count.
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
    """Return the ``shared_scale`` of a caption, or of the words at some positions.

    For methods other than attention, words with a closed gate count too. These methods measure the
    effect of a region on the word. The effect can be strong even if the gate is closed, because it
    also acts through earlier words.
    """
    shown = slice(None) if positions is None else list(positions)
    gates = caption.gates[shown] if caption.method == "attention" else None
    return shared_scale(caption.alphas[shown], gates)


@hinted
def attention_map(
    alpha: ArrayLike,
    size: tuple[int, int],
    regions: Geometry | None = None,
    *,
    smooth: bool = True,
) -> NDArray[np.float32]:
    """Return the attention at every pixel of a photo.

    Smooth maps are interpolated bilinearly between the centres of the regions. Outside the
    outermost centres, they are constant, so that no pixel exceeds the largest region.

    Args:
        alpha: Attention, (Gh, Gw).
        size: Width and height of the photo in pixels.
        regions: The positions of the regions in the photo, or None for equal cells.
        smooth: Interpolate the map. If False, every pixel gets the value of the nearest region.

    Returns:
        The attention, (H, W), in the unit of ``alpha``; NaN outside the part that the encoder sees.
    """
    grid = np.asarray(alpha, dtype=np.float32)
    if grid.ndim != 2 or grid.size == 0:
        raise ConfigError(
            f"the attention map has the shape {grid.shape}; pass an array of shape (rows, columns)"
        )
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
        photo: The photo, which sets the size of the result.
        alpha: Attention, (Gh, Gw).
        scale_max: The attention that is drawn fully lit, or None to compute it from this map. To
            make the words of a caption comparable, pass
            ``shared_scale(caption.alphas, caption.gates)``.
        regions: The positions of the regions in the photo, such as ``caption.regions``, or None for
            equal cells. Parts that the encoder does not see are dark and hatched.
        smooth: Interpolate the map. If False, regions are shown as blocks.
        colormap: A name in ``COLORMAPS``. ``photo`` shows the photo's own colours.
    """
    values = attention_map(alpha, photo.size, regions, smooth=smooth)
    top = shared_scale(alpha) if scale_max is None else scale_max
    return _blend(fit_photo(photo, 0), values / np.float32(top), colormap)


def greyed(picture: Image.Image) -> Image.Image:
    """Return a picture in shades of grey, as used for the maps of left-out words."""
    return picture.convert("L").convert("RGB")


def scale_bar(width: int, height: int, colormap: str = "photo") -> Image.Image:
    """Draw the colour scale over a grey background, from 0 (left) to ``scale_max`` (right)."""
    level = _BAR_PHOTO if colormap == "photo" else _BAR_HEATMAP
    grey = Image.new("RGB", (width, height), (level, level, level))
    levels = np.broadcast_to(np.linspace(0.0, 1.0, width, dtype=np.float32), (height, width))
    return _blend(grey, levels, colormap)


def _interpolate_rows(
    values: NDArray[np.float32], samples: NDArray[np.float32]
) -> NDArray[np.float32]:
    """Interpolate linearly between the rows of a matrix, and return the new rows, (P, M).

    ``values`` is the matrix, (N, M). ``samples`` are fractional indices of its rows, (P,), from 0
    to N - 1.

    The code indexes rows instead of multiplying matrices. A matrix product is ten times slower when
    BLAS threads compete for cores.
    """
    lower = samples.astype(np.intp)
    upper = np.minimum(lower + 1, len(values) - 1)
    part = (samples - lower)[:, None]
    result: NDArray[np.float32] = values[lower] * (1.0 - part) + values[upper] * part
    return result


def _blend(photo: Image.Image, levels: NDArray[np.float32], colormap: str) -> Image.Image:
    """Blend a map with a photo, so that attended parts of the photo are brighter or coloured.

    ``levels`` is the map s, (H, W), 0 to 1, or NaN at pixels that the encoder does not see.
    """
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
    # The channels are blended one by one. Arrays with a last axis of three are several times
    # slower.
    for channel, plane in enumerate(planes):
        pixels = light * grey + saturation * (plane - grey)
        colour = 1.0 if colours is None else np.take(colours[channel], entry)
        pixels += heat * colour * (1.0 - pixels)
        if hatched is not None:
            pixels = np.where(outside, hatched, pixels)
        bands.append(Image.fromarray((pixels * 255.0 + 0.5).astype(np.uint8)))
    return Image.merge("RGB", bands)


def palette(colormap: str) -> str:
    """Return the 256 colours of a colormap as joined ``rrggbb`` values, lowest attention first.

    The string is empty for ``photo``, which adds no colours.
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
