"""One figure for a caption, or for several: the photo and where the model looked for each word.

All maps of a figure are drawn on one scale, so that words, and models, can be compared. How the
page is laid out: see `captioner.visualization.layout`.
"""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from captioner.caption import Caption
from captioner.data.images import open_image
from captioner.errors import ConfigError
from captioner.files import atomic_write
from captioner.visualization.drawing import Drawing, check_size
from captioner.visualization.heatmap import check_colormap, fit_photo
from captioner.visualization.layout import Page
from captioner.visualization.maps import Combine, check_caption, combined, coverage, find
from captioner.visualization.sheet import Block, Look, Panel, Sheet
from captioner.visualization.theme import theme_of

Masks = Mapping[int, Sequence[NDArray[np.bool_]]]
"""By word place, counted from 0: masks (H, W) of the photo's size."""

FIGURES = (".png", ".jpg", ".jpeg", ".svg", ".pdf")
"""File name endings of figures."""


class Figure:
    """A drawn page that can be saved or shown."""

    def __init__(self, drawing: Drawing) -> None:
        self._drawing = drawing
        self._image: Image.Image | None = None

    @property
    def size(self) -> tuple[int, int]:
        """Width and height in pixels."""
        return self._drawing.width, self._drawing.height

    def image(self) -> Image.Image:
        """The page as an RGB picture."""
        if self._image is None:
            self._image = self._drawing.image()
        return self._image.copy()

    def save(self, path: str | Path) -> None:
        """Write the page; the same page gives the same bytes.

        Args:
            path: A file whose ending says the format: ``.png``, ``.jpg``, or with letters and
                lines as vectors ``.svg`` and ``.pdf``.

        Raises:
            ConfigError: No such format.
            OSError: It cannot be written; the old file stays.
        """
        ending = Path(path).suffix.lower()
        check_ending(path)
        if ending == ".svg":
            atomic_write(path, self._drawing.svg())
        elif ending == ".pdf":
            atomic_write(path, self._drawing.pdf())
        elif ending == ".png":
            atomic_write(path, self._repr_png_())
        else:
            buffer = io.BytesIO()
            self.image().save(buffer, format="JPEG", quality=92, subsampling=0, optimize=True)
            atomic_write(path, buffer.getvalue())

    def _repr_png_(self) -> bytes:
        """What a notebook shows."""
        buffer = io.BytesIO()
        self.image().save(buffer, format="PNG", compress_level=4)
        return buffer.getvalue()


def check_ending(path: str | Path) -> None:
    """Refuse a file name whose ending is no format of a figure."""
    if Path(path).suffix.lower() not in FIGURES:
        raise ConfigError(
            f"{path}: a figure cannot be saved as {Path(path).suffix or 'a file without ending'}; "
            f"give one of {', '.join(FIGURES)}"
        )


def overlay(
    photo: Image.Image | str | Path,
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
    """Draw where the model looked for every word of a caption, or of several captions.

    Args:
        photo: The photo that was captioned, or its path.
        captions: The caption, or several to stand side by side: of several models, of a model and
            a person. All their maps are drawn on one scale.
        labels: A name for each caption, such as its model's.
        only: Draw no other panels than these: a word ("dog"), words in a row ("brown dog"), a
            place counted from 1 ("3") or places ("2-4"). Several words make one panel. A caption
            that lacks what another has is drawn without it.
        combine: The map of several words: the ``mean`` of theirs, or ``max`` for the greatest at
            every region, which is not renormalised.
        coverage: One more panel: the mean of all words' maps. (Their sum, the coverage of the
            literature, divided by their number: it shares the scale.)
        alternatives: Below each word, so many of the most probable words at its place.
        outlines: For each caption, masks (H, W) of the photo's size by word place counted from 0;
            their borders are drawn on the word's panel and on the photo.
        panel_size: Longest side of a panel in pixels: larger photos are scaled down, smaller ones
            never up. 0 leaves every photo at its own size.
        columns: Panels beside each other for a caption; None makes a well-shaped page.
        smooth: Interpolate the maps; False shows the regions as the blocks they are.
        colormap: One of ``COLORMAPS``; all are perceptually even and get brighter with more
            attention, so that colour-blind readers and black-and-white print keep the order.
        theme: ``light`` or ``dark`` paper.

    Returns:
        The figure: for each caption the photo, then one panel a word.

    Raises:
        ConfigError: An option that cannot be; a word that no caption has; what is no caption.
        ImageError: The photo cannot be read.
    """
    check_colormap(colormap)
    colours = theme_of(theme)
    given = list(captions) if isinstance(captions, Sequence) else [captions]
    _check(given, labels, outlines, columns, alternatives)
    _check_only(given, only)
    original = open_image(photo)
    shown = fit_photo(original, panel_size)
    blocks = []
    for place, caption in enumerate(given):
        masks = outlines[place] if outlines else {}
        _check_masks(caption, masks, (original.height, original.width))
        blocks.append(
            Block(
                caption,
                labels[place] if labels else "",
                _panels(
                    caption,
                    masks,
                    only=only,
                    how=combine,
                    with_coverage=coverage,
                    alternatives=alternatives,
                ),
            )
        )
    page = Page.of(
        shown.size,
        [len(block.panels) for block in blocks],
        columns,
        alternatives=alternatives,
        noted=any(panel.note for block in blocks for panel in block.panels),
    )
    check_size(page.width, page.least_height)  # before the panels are drawn
    return Figure(Sheet(page, blocks, shown, Look(colours, smooth, colormap)).drawing())


def _panels(
    caption: Caption,
    masks: Masks,
    *,
    only: Sequence[str],
    how: Combine,
    with_coverage: bool,
    alternatives: int,
) -> list[Panel]:
    """The photo, the words or what was chosen of them, the coverage."""
    words = caption.words
    every = [mask for place in sorted(masks) for mask in masks[place]]
    panels = [Panel("photo", "", (), None, every)]
    chosen: list[tuple[int, ...]] = [(place,) for place in range(len(words))]
    if only:
        chosen = _places(words, only)
    for places in chosen:
        single = len(places) == 1
        note = "" if single else f"{'mean' if how == 'mean' else 'greatest'} of {len(places)} words"
        panels.append(
            Panel(
                " ".join(words[place] for place in places),
                note,
                places,
                combined(caption.alphas, places, how),
                [mask for place in places for mask in masks.get(place, ())],
                caption.alternatives[places[0]][:alternatives] if single and alternatives else (),
            )
        )
    if with_coverage and words:
        title = f"all {len(words)} words" if len(words) > 1 else "all 1 word"
        every_place = tuple(range(len(words)))
        panels.append(Panel(title, "mean", every_place, coverage(caption.alphas), []))
    return panels


def _places(words: Sequence[str], only: Sequence[str]) -> list[tuple[int, ...]]:
    """Where a caption has what is asked for; nowhere where it lacks it."""
    found: list[tuple[int, ...]] = []
    for what in only:
        with suppress(ConfigError):
            found += find(words, what)
    return list(dict.fromkeys(found))  # what was named twice is drawn once


def _check_only(captions: Sequence[Caption], only: Sequence[str]) -> None:
    """Refuse what no caption has; of several, others may lack it."""
    if isinstance(only, str):
        raise ConfigError(f"only is one text; give a list: only=[{only!r}]")
    for what in only:
        if not any(_places(caption.words, [what]) for caption in captions):
            find(captions[0].words, what)  # says so


def _check(
    captions: list[Caption],
    labels: Sequence[str],
    outlines: Sequence[Masks],
    columns: int | None,
    alternatives: int,
) -> None:
    """Refuse what cannot be drawn truthfully."""
    if not captions:
        raise ConfigError("captions is empty; give at least one caption")
    for caption in captions:
        check_caption(caption)
    for name, values in (("labels", labels), ("outlines", outlines)):
        if values and len(values) != len(captions):
            raise ConfigError(f"{len(values)} {name} for {len(captions)} captions; give one each")
    if isinstance(labels, str):
        raise ConfigError("labels is one text; give a list of them, one a caption")
    if columns is not None and columns < 1:
        raise ConfigError(f"columns is {columns}; give 1 or more, or None to let the page choose")
    if alternatives < 0:
        raise ConfigError(f"alternatives is {alternatives}; give 0 or more")
    for caption in captions:
        known = min((len(place) for place in caption.alternatives), default=0)
        if alternatives and caption.words and known < alternatives:
            raise ConfigError(
                f"the caption holds {known or 'no'} alternatives a word, not {alternatives}; "
                f"make it with model.caption(photo, alternatives={alternatives})"
            )


def _check_masks(caption: Caption, masks: Masks, shape: tuple[int, int]) -> None:
    for place, several in masks.items():
        if not 0 <= place < len(caption.words):
            raise ConfigError(
                f"there is no word {place} to outline in a caption of {len(caption.words)} words; "
                "places count from 0"
            )
        for mask in several:
            if np.shape(mask) != shape:
                raise ConfigError(
                    f"an outline's mask has the photo's rows and columns {shape}, "
                    f"not {np.shape(mask)}"
                )
