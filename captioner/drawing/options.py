"""The options of figures, animations and pages."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal

from annotated_types import Ge, Interval

from captioner.schema import Checked, Shown, Untrusted

Colormap = Literal["photo", "inferno", "magma", "plasma", "viridis", "cividis", "gray"]
"""The photo's own colours, or a colormap of matplotlib that gets brighter at every step."""

Combine = Literal["mean", "max"]

ON_AXES = "on axes"
"""The mark of options that also apply when ``overlay`` draws on axes of the caller."""


@dataclass(frozen=True, kw_only=True)
class DrawingOptions(Checked):
    """Options of all pictures."""

    panel_size: Annotated[int, Ge(0), Untrusted(request=1280), ON_AXES] = 640
    """Scale photos so that their longer side has at most this many pixels. Photos below 160 pixels
    are enlarged to 160. 0: never scale."""
    smooth: Annotated[bool, Shown(hidden=True), ON_AXES] = True
    """Interpolate the maps. false: show regions as blocks."""
    scale: Literal["word", "common"] = "word"
    """Choose the scale of the maps. word: a separate scale for each word, shown with the share of
    its strongest tenth (focus). common: one scale for all words and captions, to compare them."""
    colormap: Colormap = "photo"
    """Choose the colours of the maps. photo: dim the photo where the model did not look. All
    others: add a heatmap that gets evenly brighter with attention. All maps are readable in
    greyscale and by colour-blind people."""


@dataclass(frozen=True, kw_only=True)
class FigureOptions(DrawingOptions):
    """Options of figures."""

    only: Annotated[list[str], ON_AXES] = field(default_factory=list)
    """Draw only these words: a word ("dog"), consecutive words ("brown dog"), a position counted
    from 1 ("3") or a range ("2-4"). Several words share one panel. With several captions, at least
    one caption must contain each of them."""
    content_words: Annotated[bool, ON_AXES] = False
    """Draw only content words: leave out the panels of words such as a, of, on, with and is."""
    plain: bool = False
    """Draw only the sentence and the maps of its words, without numbers, legend and left-out words,
    for example for a slide."""
    combine: Combine = "mean"
    """Choose how the maps of several words are combined. mean: their mean. max: the maximum of each
    region, which is not renormalized."""
    coverage: bool = False
    """Add a panel with the mean of all words' maps. This is the coverage divided by the number of
    words, so that it shares the colour scale."""
    alternatives: Annotated[int, Ge(0)] = 0
    """Show this many of the most probable words below each word."""
    columns: Annotated[int, Ge(1), Untrusted(request=50)] | None = None
    """Draw this many panels per row of a caption (default: the number that suits the width best,
    with text of at least 6 points)."""
    width: Annotated[float, Interval(ge=1, le=100)] = 6.5
    """Lay out the figure for this printed width in inches, such as the width of a paper's text. It
    sets the size of .svg and .pdf, and the resolution noted in .png and .jpg."""
    dpi: Annotated[int, Ge(1)] = 300
    """Limit the resolution of photos in .svg and .pdf to this, in pixels per inch."""
    theme: Literal["light", "dark"] = "light"
    """Choose the background of the figure."""


@dataclass(frozen=True, kw_only=True)
class AnimationOptions(DrawingOptions):
    """Options of animations."""

    seconds_per_word: Annotated[float, Interval(ge=0.05, le=60)] = 1.0
    """Show each word for this many seconds, including the transition to it."""
    panel_size: Annotated[int, Ge(0), Untrusted(request=1280)] = 480
    """Scale the photo so that its longer side has at most this many pixels. Photos below 160 pixels
    are enlarged to 160. 0: never scale."""
    theme: Literal["light", "dark"] = "light"
    """Choose the background of the frames."""


@dataclass(frozen=True, kw_only=True)
class PageOptions(DrawingOptions):
    """Options of pages."""

    title: Annotated[str, Shown(hidden=True)] = ""
    """Set the title of the page."""
    panel_size: Annotated[int, Ge(0), Untrusted(request=1280)] = 1280
    """Scale embedded photos down so that their longer side has at most this many pixels. 0: never
    scale."""
    theme: Literal["auto", "light", "dark"] = "auto"
    """Choose the background. auto: follow the reader's system."""
