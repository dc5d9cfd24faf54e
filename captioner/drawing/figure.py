"""Figures that show a photo and an attention map for each word of one or several captions."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from PIL import Image

from captioner.caption_types import BRACKETS, Caption, join_words, text_of
from captioner.data.images import Photo, open_image
from captioner.data.pixels import fit_photo
from captioner.drawing.drawing import Drawing, check_captions, check_size
from captioner.drawing.heatmap import MIN_PANEL, attention_map
from captioner.drawing.options import ON_AXES, FigureOptions
from captioner.drawing.picture_files import encoded
from captioner.drawing.viewer import show_figure
from captioner.errors import ConfigError
from captioner.hints import hinted
from captioner.schema import build_options, marked
from captioner.text.tokenizer import normalize, tokenize
from captioner.text.vocabulary import content_words

if TYPE_CHECKING:
    import matplotlib.axes
    import matplotlib.figure

    from captioner.drawing.sheet import Masks

_MAX_SIDE = 65_500  # pixels; matplotlib's renderer uses 16-bit coordinates
_MAX_PIXELS = 89_478_485  # Pillow reads this many without a warning; twice as many need 5 GB
_POSITIONS = re.compile(r"\s*(\d+)(?:\s*[-–]\s*(\d+))?\s*")


@hinted
class Figure(Drawing):
    """A figure, saved in pixels (``.png``, ``.jpg``) or as vectors (``.svg``, ``.pdf``)."""

    kind, suffixes = "a figure", (".png", ".jpg", ".jpeg", ".svg", ".pdf")

    def __init__(self, figure: matplotlib.figure.Figure, title: str) -> None:
        """Store a drawn figure. ``title`` is its title in ``.svg`` and ``.pdf`` files."""
        self.figure = figure
        """The matplotlib figure."""
        self._title = title

    @property
    def size(self) -> tuple[int, int]:
        """The width and height in pixels."""
        return round(self.figure.bbox.width), round(self.figure.bbox.height)

    def image(self) -> Image.Image:
        """Render the figure as an RGB picture."""
        from captioner.drawing.canvas import to_image

        return to_image(self.figure)

    def encode(self, suffix: str) -> bytes:
        """Return the content of a file with this extension."""
        if suffix in (".svg", ".pdf"):
            from captioner.drawing.canvas import to_vectors

            return to_vectors(self.figure, suffix[1:], self._title)
        dpi = self.figure.dpi, self.figure.dpi
        if suffix == ".png":
            return encoded(self.image(), "PNG", compress_level=4, dpi=dpi)
        return encoded(self.image(), "JPEG", quality=92, subsampling=0, optimize=True, dpi=dpi)

    def show(self) -> None:
        """Show the figure below the cell of a notebook, or else in the desktop's image viewer.

        Raises:
            ConfigError: Neither a notebook nor an image viewer is available.
        """
        show_figure(self)

    def _repr_png_(self) -> bytes:
        """Return the figure as a PNG file for notebooks."""
        return self.encode(".png")


@hinted
def overlay(
    photo: Photo,
    captions: Caption | Sequence[Caption],
    *,
    labels: Sequence[str] = (),
    outlines: Sequence[Masks] = (),
    ax: matplotlib.axes.Axes | None = None,
    max_pixels: int = _MAX_PIXELS,
    **options: Any,
) -> Figure:
    """Draw where the model looked for each word of one or several captions.

    Args:
        photo: The captioned photo: a path, bytes, PIL image, array or binary file.
        captions: One caption, or several to compare. Keywords and left-out words (in grey) are
            drawn too, except with ``ax``.
        labels: A name for each caption, such as the name of its model.
        outlines: For each caption, masks (H, W) of the photo's size by word position, counted from
            0. The borders of a mask are drawn on the word's panel and on the photo.
        ax: Axes of your own figure, for a single caption. The photo and the mean map of the shown
            words are added to the axes as images. The options are then ``only``, ``content_words``,
            ``panel_size``, ``smooth`` and the options of ``Axes.imshow``, such as ``cmap``.
        max_pixels: The maximum number of pixels. Larger figures raise an error.
        **options: Fields of ``FigureOptions``, e.g. ``only=["dog"]`` or ``theme="dark"``.

    Returns:
        The figure, with the photo and one panel per word for each caption. With ``ax``, the figure
        that contains the axes.

    Raises:
        ConfigError: An option or a caption is invalid, no caption contains a word in ``only``, or
            the figure is too large.
        ImageError: The photo cannot be read.
    """
    shown: dict[str, Any] = {"cmap": "inferno", "alpha": 0.6}
    if ax is not None:
        of_axes = {*options} - {*marked(FigureOptions, ON_AXES)}
        shown |= {name: options.pop(name) for name in of_axes}
    wanted = build_options(FigureOptions, options)
    if wanted.only and wanted.content_words:
        raise ConfigError("only and content_words both choose the words; pass only one of them")
    given = check_captions(captions, labels)
    if wanted.plain:
        given = [replace(caption, left_out=None) for caption in given]
    for caption in given:
        known = min((len(words) for words in caption.alternatives), default=0)
        if caption.words and known < wanted.alternatives:
            raise ConfigError(
                f"the caption has {known or 'no'} alternatives per word, but alternatives is "
                f"{wanted.alternatives}; use model.caption(photo, "
                f"alternatives={wanted.alternatives})"
            )
    plain: list[Masks] = [{}] * len(given)
    entries = [*zip(given, labels or [""] * len(given), outlines or plain, strict=True)]
    if ax is None:
        entries += [(one.of_keywords(), "keywords", {}) for one in given if one.keywords]
    shown_words = given if ax is not None else [caption.whole() for caption, _, _ in entries]
    if wanted.content_words:
        found = [content_positions(one) for one in shown_words]
    else:
        found = find_words(shown_words, wanted.only)
    resized = fit_photo(open_image(photo), wanted.panel_size, MIN_PANEL)
    if ax is not None:
        alpha = given[0].alphas[[i for positions in found[0] for i in positions]].mean(axis=0)
        regions = given[0].regions
        ax.imshow(resized)
        ax.imshow(attention_map(alpha, resized.size, regions, smooth=wanted.smooth), **shown)
        own: Any = ax.figure
        return Figure(own, given[0].text)
    from captioner.drawing.canvas import matplotlib_settings  # here, as it imports matplotlib
    from captioner.drawing.sheet import Block, Sheet, choose_layout, panels_of

    blocks = [
        Block(one, label, panels_of(one, positions, masks, wanted))
        for (one, label, masks), positions in zip(entries, found, strict=True)
    ]
    layout = choose_layout(resized.size, blocks, wanted)
    check_size("figure", layout.width, layout.min_height, _MAX_SIDE, max_pixels)
    with matplotlib_settings():
        figure = Sheet(layout, blocks, resized, wanted).draw()
    texts = (
        f"{one.label}: {one.caption.text}" if one.label else one.caption.text for one in blocks
    )
    return Figure(figure, " | ".join(texts))


def find_words(captions: Sequence[Caption], only: Sequence[str]) -> list[list[tuple[int, ...]]]:
    """Return the positions (from 0) at which each caption contains the queries in ``only``.

    A query is a word ("dog"), consecutive words or sub-words as the sentence spells them
    ("brown dog"), a position counted from 1 ("3"), or a range of positions ("2-4"). Digits are
    always positions. Without queries, every word is found.

    Returns:
        For each caption, the occurrences of all queries. An occurrence is a tuple of positions.

    Raises:
        ConfigError: A query does not occur in any caption.
    """
    if not only:
        return [[(position,) for position in range(len(one.words))] for one in captions]
    found = [[_occurrences(one, query) for query in only] for one in captions]
    for query, everywhere in zip(only, zip(*found, strict=True), strict=True):
        if not any(everywhere):
            numbered = " ".join(f"{n} {word}" for n, word in enumerate(captions[0].words, 1))
            what = "position " if _POSITIONS.fullmatch(query) else ""
            raise ConfigError(
                f"{what}{query!r} is not in the caption ({numbered or 'no words'}); use the words "
                "or positions of this caption"
            )
    return [list(dict.fromkeys(at for each in of for at in each)) for of in found]


def content_positions(caption: Caption) -> list[tuple[int, ...]]:
    """Return the position of each content word, or of each word in a caption without content words.

    All keywords count as content words.
    """
    if caption.method == "keywords":
        return [(position,) for position in range(len(caption.words))]
    content = content_words(word.lower() for word in caption.words)
    return [(n,) for n, shown in enumerate(content) if shown or not any(content)]


def _occurrences(caption: Caption, query: str) -> list[tuple[int, ...]]:
    """Return the positions of all occurrences of a query in a caption."""
    if match := _POSITIONS.fullmatch(query):
        first, last = int(match[1]), int(match[2] or match[1])
        return [tuple(range(first - 1, last))] if 1 <= first <= last <= len(caption.words) else []
    words = tuple(BRACKETS.get(word, word).casefold() for word in caption.words)
    pieces = tuple(piece.casefold() for piece in caption.pieces)
    text = text_of(words, pieces)
    spans = [
        (len(text_of(words[:n], pieces[:n])), n)
        for n in range(1, len(words) + 1)
        if (pieces or words)[n - 1].strip()
    ]
    ends = dict(spans)
    starts = [(end - len(words[n - 1]), n - 1) for end, n in spans]
    for spelling in (join_words(normalize(query).split()), join_words(tokenize(query))):
        wanted = spelling.casefold()
        found = [
            tuple(range(first, ends.get(start + len(wanted), 0)))
            for start, first in starts
            if text.startswith(wanted, start)
        ]
        if any(found):
            return [positions for positions in found if positions]
    return []
