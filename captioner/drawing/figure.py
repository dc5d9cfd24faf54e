"""One figure for one or several captions: the photo and an attention map for each word."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from PIL import Image

from captioner.caption import Caption
from captioner.data.images import Photo, open_image
from captioner.drawing.document import encoded
from captioner.drawing.heatmap import MIN_PANEL, attention_map, fit_photo
from captioner.drawing.options import (
    FIGURES,
    Drawing,
    FigureOptions,
    check_captions,
    check_size,
)
from captioner.drawing.word_queries import find, find_all
from captioner.errors import ConfigError
from captioner.option_fields import build_options

if TYPE_CHECKING:
    import matplotlib.axes
    import matplotlib.figure

    from captioner.drawing.sheet import Masks

_MAX_SIDE = 65_500  # pixels; matplotlib's renderer uses 16-bit coordinates
_MAX_PIXELS = 89_478_485  # what Pillow reads without a warning; twice that needs 5 GB


class Figure(Drawing):
    """A figure: ``.png``, ``.jpg``, or with text and lines as vectors ``.svg`` and ``.pdf``."""

    kind, suffixes = "a figure", FIGURES

    def __init__(self, figure: matplotlib.figure.Figure, title: str) -> None:
        self.figure = figure
        """The matplotlib figure."""
        self._title = title

    @property
    def size(self) -> tuple[int, int]:
        """Width and height in pixels."""
        return round(self.figure.bbox.width), round(self.figure.bbox.height)

    def image(self) -> Image.Image:
        """The figure as an RGB picture."""
        from captioner.drawing.canvas import to_image

        return to_image(self.figure)

    def encode(self, suffix: str) -> bytes:
        """The content of a file with this extension."""
        if suffix in (".svg", ".pdf"):
            from captioner.drawing.canvas import to_vectors

            return to_vectors(self.figure, suffix[1:], self._title)
        dpi = self.figure.dpi, self.figure.dpi
        if suffix == ".png":
            return encoded(self.image(), "PNG", compress_level=4, dpi=dpi)
        return encoded(self.image(), "JPEG", quality=92, subsampling=0, optimize=True, dpi=dpi)

    def _repr_png_(self) -> bytes:
        return self.encode(".png")


def overlay(
    photo: Photo,
    captions: Caption | Sequence[Caption],
    *,
    labels: Sequence[str] = (),
    outlines: Sequence[Masks] = (),
    ax: matplotlib.axes.Axes | None = None,
    **options: Any,
) -> Figure:
    """Draw where the model looked for each word of one or several captions.

    Args:
        photo: The captioned photo: a path, bytes, PIL image, array or binary file.
        captions: One caption, or several to compare; their keywords are drawn beside them (not with
            ``ax``).
        labels: A name for each caption, such as its model's.
        outlines: For each caption, masks (H, W) of the photo's size by word position, counted
            from 0; their borders are drawn on the word's panel and on the photo.
        ax: Axes of a figure of your own: the photo and over it, as images, the mean map of the
            words of ``only`` (none: of all words) of one caption. Options are ``only``,
            ``panel_size``, ``smooth`` and those of ``Axes.imshow``, such as ``cmap`` and ``alpha``.
        **options: Fields of ``FigureOptions``, e.g. ``only=["dog"]`` or ``theme="dark"``.

    Returns:
        The figure: for each caption, the photo and one panel per word; or that of ``ax``.

    Raises:
        ConfigError: An option or a caption is invalid, or no caption has a word of ``only``.
        ImageError: The photo cannot be read.
    """
    shown: dict[str, Any] = {"cmap": "inferno", "alpha": 0.6}
    if ax is not None:
        of_axes = {*options} - {"only", "panel_size", "smooth"}
        shown |= {name: options.pop(name) for name in of_axes}
    wanted = build_options(FigureOptions, options)
    given = check_captions(captions, labels)
    for caption in given:
        known = min((len(words) for words in caption.alternatives), default=0)
        if caption.words and known < wanted.alternatives:
            raise ConfigError(
                f"the caption has {known or 'no'} alternatives per word, not "
                f"{wanted.alternatives}; use model.caption(photo, "
                f"alternatives={wanted.alternatives})"
            )
    plain: list[Masks] = [{}] * len(given)
    entries = [*zip(given, labels or [""] * len(given), outlines or plain, strict=True)]
    if ax is None:
        entries += [(one.of_keywords(), "keywords", {}) for one in given if one.keywords]
    for query in wanted.only:
        if not any(find_all(caption, [query]) for caption, _, _ in entries):
            find(given[0].words, query, given[0].pieces)  # raises
    resized = fit_photo(open_image(photo), wanted.panel_size, MIN_PANEL)
    if ax is not None:
        found = find_all(given[0], wanted.only) or [tuple(range(len(given[0].words)))]
        alpha = given[0].alphas[[i for positions in found for i in positions]].mean(axis=0)
        regions = given[0].regions
        ax.imshow(resized)
        ax.imshow(attention_map(alpha, resized.size, regions, smooth=wanted.smooth), **shown)
        own: Any = ax.figure
        return Figure(own, given[0].text)
    from captioner.drawing.canvas import matplotlib_settings  # imports matplotlib
    from captioner.drawing.sheet import Block, Sheet, choose_layout, panels_of

    blocks = [Block(one, label, panels_of(one, masks, wanted)) for one, label, masks in entries]
    layout = choose_layout(resized.size, blocks, wanted.columns, wanted.width)
    check_size("figure", layout.width, layout.min_height, _MAX_SIDE, _MAX_PIXELS)
    with matplotlib_settings():
        figure = Sheet(layout, blocks, resized, wanted).draw()
    texts = (
        f"{one.label}: {one.caption.text}" if one.label else one.caption.text for one in blocks
    )
    return Figure(figure, " | ".join(texts))
