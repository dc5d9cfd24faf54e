"""The options of figures, animations and pages."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal

from annotated_types import Ge, Interval

from captioner.schema import Checked, Shown, Untrusted

Colormap = Literal["photo", "inferno", "magma", "plasma", "viridis", "cividis", "gray"]
"""The photo's own colours, or matplotlib's perceptually uniform colormaps of rising luminance."""

Combine = Literal["mean", "max"]

ON_AXES = "on axes"
"""Mark of an option that also applies to a map drawn on axes of the caller's figure."""


@dataclass(frozen=True, kw_only=True)
class DrawingOptions(Checked):
    """Options of every picture."""

    panel_size: Annotated[int, Ge(0), Untrusted(request=1280), ON_AXES] = 640
    """Longest side of a photo in pixels; larger photos are scaled down, those below 160 pixels up
    (0: never scale)."""
    smooth: Annotated[bool, Shown(hidden=True), ON_AXES] = True
    """Interpolate the maps; false shows regions as blocks."""
    scale: Literal["word", "common"] = "word"
    """Scale of the maps: word, each on its own, with the share of its strongest tenth beside it
    (focus), or common, one for all words and captions, for comparing them."""
    colormap: Colormap = "photo"
    """Colours of the maps: photo dims the photo where there is no attention; the others add a
    heatmap, perceptually uniform with increasing luminance. All are readable in greyscale and by
    colour-blind readers."""


@dataclass(frozen=True, kw_only=True)
class FigureOptions(DrawingOptions):
    """Options of figures."""

    only: Annotated[list[str], ON_AXES] = field(default_factory=list)
    """Draw only these words: a word ("dog"), consecutive words ("brown dog"), a position counted
    from 1 ("3") or a range ("2-4"). Several words make one panel. With several captions, each must
    be found in at least one."""
    content_words: Annotated[bool, ON_AXES] = False
    """Draw only the content words: leave out the panels of words such as a, of, on, with and is."""
    plain: bool = False
    """Draw only the sentence and the maps of its words, without numbers, legend and left-out words,
    such as for a slide."""
    combine: Combine = "mean"
    """How to combine the maps of several words: mean, or max per region, which is not
    renormalized."""
    coverage: bool = False
    """Add a panel with the mean of all words' maps (the coverage divided by the number of words, so
    that it shares the colour scale)."""
    alternatives: Annotated[int, Ge(0)] = 0
    """Number of most probable words to show below each word."""
    columns: Annotated[int, Ge(1), Untrusted(request=50)] | None = None
    """Panels per row of a caption; none: as many as leave room for text of 6 points at this width.
    """
    width: Annotated[float, Interval(ge=1, le=100)] = 6.5
    """Width in inches where the figure is printed, such as that of the text of a paper: the size of
    .svg and .pdf, and the resolution noted in .png and .jpg. Text is laid out for it."""
    dpi: Annotated[int, Ge(1)] = 300
    """Largest resolution of the photos in .svg and .pdf, in pixels per inch."""
    theme: Literal["light", "dark"] = "light"
    """Background of the figure."""


@dataclass(frozen=True, kw_only=True)
class AnimationOptions(DrawingOptions):
    """Options of animations."""

    seconds_per_word: Annotated[float, Interval(ge=0.05, le=60)] = 1.0
    """Duration of a word, including the transition to it."""
    panel_size: Annotated[int, Ge(0), Untrusted(request=1280)] = 480
    """Longest side of the photo in pixels; larger photos are scaled down, those below 160 pixels up
    (0: never scale)."""
    theme: Literal["light", "dark"] = "light"
    """Background of the frames."""


@dataclass(frozen=True, kw_only=True)
class PageOptions(DrawingOptions):
    """Options of pages."""

    title: Annotated[str, Shown(hidden=True)] = ""
    """Title of the page."""
    panel_size: Annotated[int, Ge(0), Untrusted(request=1280)] = 1280
    """Longest side of an embedded photo in pixels; larger photos are scaled down, smaller ones are
    kept (0: never scale)."""
    theme: Literal["auto", "light", "dark"] = "auto"
    """Background; auto follows the reader's system."""
