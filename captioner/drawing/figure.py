"""One figure for one or several captions: the photo and an attention map for each word.

All maps of a figure share one colour scale, so that words and models can be compared.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from captioner.caption import Caption
from captioner.data.images import Photo, open_image
from captioner.drawing.drawing import Drawing, check_size, check_suffix
from captioner.drawing.heatmap import check_colormap, fit_photo
from captioner.drawing.layout import FigureLayout
from captioner.drawing.maps import Combine, check_caption, combine_maps, find, mean_map
from captioner.drawing.primitives import encoded
from captioner.drawing.sheet import Block, Panel, Sheet
from captioner.drawing.theme import get_theme
from captioner.errors import ConfigError
from captioner.files import atomic_write

Masks = Mapping[int, Sequence[NDArray[np.bool_]]]
"""Masks (H, W) of the photo's size by position of a word, counted from 0."""

FIGURES = (".png", ".jpg", ".jpeg", ".svg", ".pdf")
"""File extensions of figures."""


class Figure:
    """A figure that can be saved or shown."""

    def __init__(self, drawing: Drawing) -> None:
        self._drawing = drawing
        self._image: Image.Image | None = None

    @property
    def size(self) -> tuple[int, int]:
        """Width and height in pixels."""
        return self._drawing.width, self._drawing.height

    def image(self) -> Image.Image:
        """The figure as an RGB picture."""
        if self._image is None:
            self._image = self._drawing.image()
        return self._image.copy()

    def save(self, path: str | Path) -> None:
        """Write the figure; the output is deterministic.

        Args:
            path: A file; its extension selects the format: ``.png``, ``.jpg``, or, with text and
                lines as vectors, ``.svg`` and ``.pdf``.

        Raises:
            ConfigError: The format is not supported.
            OSError: The file cannot be written; an existing file is kept.
        """
        atomic_write(path, self.encode(check_suffix("a figure", path, FIGURES)))

    def encode(self, suffix: str) -> bytes:
        """The content of a file with this extension (one of ``FIGURES``)."""
        if suffix == ".svg":
            return self._drawing.svg().encode()
        if suffix == ".pdf":
            return self._drawing.pdf()
        if suffix == ".png":
            return self._repr_png_()
        return encoded(self.image(), "JPEG", quality=92, subsampling=0, optimize=True)

    def _repr_png_(self) -> bytes:
        return encoded(self.image(), "PNG", compress_level=4)


def overlay(
    photo: Photo,
    captions: Caption | Sequence[Caption],
    *,
    labels: Sequence[str] = (),
    only: Sequence[str] = (),
    combine: Combine = "mean",
    coverage: bool = False,
    alternatives: int = 0,
    outlines: Sequence[Masks] = (),
    panel_size: int = 640,
    columns: int | None = None,
    smooth: bool = True,
    colormap: str = "inferno",
    theme: Literal["light", "dark"] = "light",
) -> Figure:
    """Draw where the model looked for each word of one or several captions.

    Args:
        photo: The captioned photo: a path, bytes, PIL image, array or binary file.
        captions: One caption, or several to compare side by side on one colour scale.
        labels: A name for each caption, such as its model's.
        only: Draw only these words: a word ("dog"), consecutive words ("brown dog"), a position
            counted from 1 ("3") or a range ("2-4"). Several words make one panel. With several
            captions, each must be found in at least one.
        combine: How to combine the maps of several words: ``mean``, or ``max`` per region, which
            is not renormalized.
        coverage: Add a panel with the mean of all words' maps (the coverage divided by the number
            of words, so that it shares the colour scale).
        alternatives: Number of most probable words to show below each word.
        outlines: For each caption, masks (H, W) of the photo's size by word position, counted
            from 0; their borders are drawn on the word's panel and on the photo.
        panel_size: Longest side of a panel in pixels; larger photos are scaled down, smaller ones
            are kept (0: never scale).
        columns: Panels per row of a caption; None: automatic.
        smooth: Interpolate the maps; False shows regions as blocks.
        colormap: One of ``COLORMAPS``. All are perceptually uniform with increasing luminance, and
            so readable in greyscale and by colour-blind readers.
        theme: ``light`` or ``dark`` background.

    Returns:
        The figure: for each caption, the photo and one panel per word.

    Raises:
        ConfigError: An option or a caption is invalid, or no caption has a word of ``only``.
        ImageError: The photo cannot be read.
    """
    check_colormap(colormap)
    colours = get_theme(theme)
    given = list(captions) if isinstance(captions, Sequence) else [captions]
    _check(given, labels, outlines, columns, alternatives)
    _check_only(given, only)
    original = open_image(photo)
    resized = fit_photo(original, panel_size)
    blocks = []
    for index, caption in enumerate(given):
        masks = outlines[index] if outlines else {}
        _check_masks(caption, masks, (original.height, original.width))
        panels = _panels(caption, masks, only, combine, alternatives)
        if coverage and caption.words:
            panels.append(_coverage_panel(caption))
        blocks.append(Block(caption, labels[index] if labels else "", panels))
    layout = FigureLayout.choose(
        resized.size,
        [len(block.panels) for block in blocks],
        columns,
        alternatives=alternatives,
        noted=any(panel.note for block in blocks for panel in block.panels),
    )
    check_size("figure", layout.width, layout.min_height)  # before the panels are drawn
    sheet = Sheet(layout, blocks, resized, colours, smooth=smooth, colormap=colormap)
    return Figure(sheet.drawing())


def _panels(
    caption: Caption,
    masks: Masks,
    only: Sequence[str],
    how: Combine,
    alternatives: int,
) -> list[Panel]:
    """The photo, and all or the selected words."""
    words = caption.words
    all_masks = [mask for position in sorted(masks) for mask in masks[position]]
    panels = [Panel("photo", "", (), None, all_masks)]
    for positions in _find_all(caption, only) if only else [(i,) for i in range(len(words))]:
        single = len(positions) == 1
        kind = "mean" if how == "mean" else "greatest"
        panels.append(
            Panel(
                "".join(caption.pieces[i] for i in positions).strip()
                if caption.pieces and not single
                else " ".join(words[i] for i in positions),
                "" if single else f"{kind} of {len(positions)} words",
                positions,
                combine_maps(caption.alphas, positions, how),
                [mask for i in positions for mask in masks.get(i, ())],
                caption.alternatives[positions[0]][:alternatives]
                if single and alternatives
                else (),
            )
        )
    return panels


def _coverage_panel(caption: Caption) -> Panel:
    count = len(caption.words)
    title = f"all {count} words" if count > 1 else "all 1 word"
    return Panel(title, "mean", tuple(range(count)), mean_map(caption.alphas), [])


def _find_all(caption: Caption, only: Sequence[str]) -> list[tuple[int, ...]]:
    """Positions of all queries in a caption, without duplicates; missing ones are skipped."""
    found: list[tuple[int, ...]] = []
    for query in only:
        with suppress(ConfigError):
            found += find(caption.words, query, caption.pieces)
    return list(dict.fromkeys(found))


def _check_only(captions: Sequence[Caption], only: Sequence[str]) -> None:
    """Raise ConfigError for a query that no caption has."""
    if isinstance(only, str):
        raise ConfigError(f"only must be a list, not a string; use only=[{only!r}]")
    for query in only:
        if not any(_find_all(caption, [query]) for caption in captions):
            find(captions[0].words, query, captions[0].pieces)  # raises


def _check(
    captions: list[Caption],
    labels: Sequence[str],
    outlines: Sequence[Masks],
    columns: int | None,
    alternatives: int,
) -> None:
    if not captions:
        raise ConfigError("captions is empty; pass at least one caption")
    for caption in captions:
        check_caption(caption)
    if isinstance(labels, str):
        raise ConfigError("labels must be a list with one label per caption, not a string")
    for name, values in (("labels", labels), ("outlines", outlines)):
        if values and len(values) != len(captions):
            raise ConfigError(f"{len(values)} {name} for {len(captions)} captions; pass one each")
    if columns is not None and columns < 1:
        raise ConfigError(f"columns is {columns}; use 1 or more, or None for automatic")
    if alternatives < 0:
        raise ConfigError(f"alternatives is {alternatives}; use 0 or more")
    for caption in captions:
        known = min((len(words) for words in caption.alternatives), default=0)
        if alternatives and caption.words and known < alternatives:
            raise ConfigError(
                f"the caption has {known or 'no'} alternatives per word, not {alternatives}; use "
                f"model.caption(photo, alternatives={alternatives})"
            )


def _check_masks(caption: Caption, masks: Masks, shape: tuple[int, int]) -> None:
    for position, several in masks.items():
        if not 0 <= position < len(caption.words):
            raise ConfigError(
                f"outlines has position {position}, but the caption has {len(caption.words)} "
                "words; positions count from 0"
            )
        for mask in several:
            if np.shape(mask) != shape:
                raise ConfigError(
                    f"a mask of outlines must have the photo's shape {shape}, not {np.shape(mask)}"
                )
