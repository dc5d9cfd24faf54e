"""Options of figures, animations and pages."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal

from annotated_types import Ge, Interval

from captioner.schema import Checked, Shown, Untrusted

Colormap = Literal["photo", "inferno", "magma", "plasma", "viridis", "cividis", "gray"]
"""``photo`` for the photo's own colours, or the name of a matplotlib colormap that becomes steadily
brighter."""

Combine = Literal["mean", "max"]

ON_AXES = "on axes"
"""Mark of options that also apply when ``overlay`` draws on axes that the caller passes."""


@dataclass(frozen=True, kw_only=True)
class DrawingOptions(Checked):
    """Options of all pictures."""

    panel_size: Annotated[int, Ge(0), Untrusted(request=1280), ON_AXES] = 640
    """Scale photos so that their longer side has at most this many pixels, and at least 160. 0:
    never scale."""
    smooth: Annotated[bool, Shown(hidden=True), ON_AXES] = True
    """Interpolate the maps. false: show regions as blocks."""
    scale: Literal["word", "common"] = "word"
    """Choose how attention becomes brightness. word: each word has its own scale, so that every map
    is easy to see. common: all words and captions share a scale, so that you can compare them."""
    colormap: Colormap = "photo"
    """Choose the colours of the maps. photo: dim the photo where the model did not look. Every
    other value: cover the photo with a heatmap that gets evenly brighter with attention. All maps
    are readable in greyscale and by colour-blind people."""


@dataclass(frozen=True, kw_only=True)
class SentenceOptions(DrawingOptions):
    """Options of figures and pages."""

    plain: bool = False
    """Draw only the sentence and the maps of its words, for example for a slide or a client.
    Numbers, the legend and the words that the caption left out are not shown."""


@dataclass(frozen=True, kw_only=True)
class FigureOptions(SentenceOptions):
    """Options of figures."""

    only: Annotated[list[str], Shown("WORDS"), ON_AXES] = field(default_factory=list)
    """Draw only these words: a word ("dog"), consecutive words ("brown dog"), a position counted
    from 1 ("3") or a range ("2-4"). Consecutive words and ranges share one panel. With several
    captions, each entry must occur in at least one caption."""
    content_words: Annotated[bool, ON_AXES] = False
    """Draw only content words. Function words such as "the", "with" and "is" get no panels."""
    combine: Combine = "mean"
    """Choose how the maps of several words are combined in one panel. mean: the mean of the maps.
    max: the largest value at each region."""
    coverage: bool = False
    """Add a panel with the mean map of all words, which shows where the model looked during the
    whole caption. It has the same colour scale as the other panels."""
    alternatives: Annotated[int, Ge(0)] = 0
    """Show this many of the most probable words below each word."""
    columns: Annotated[int, Ge(1), Untrusted(request=50)] | None = None
    """Draw this many panels per row (default: the number that fits the width best and keeps all
    text at 6 points or more)."""
    width: Annotated[float, Interval(ge=1, le=100)] = 6.5
    """Lay out the figure for this printed width in inches, such as the width of a page's text. The
    width sets the size of .svg and .pdf files. In .png and .jpg files, it sets the stored
    resolution."""
    dpi: Annotated[int, Ge(1)] = 300
    """Limit the resolution of photos in .svg and .pdf files to this many pixels per inch."""
    theme: Literal["light", "dark"] = "light"
    """Choose the background of the figure."""


@dataclass(frozen=True, kw_only=True)
class AnimationOptions(DrawingOptions):
    """Options of animations."""

    seconds_per_word: Annotated[float, Interval(ge=0.05, le=60)] = 1.0
    """Show each word for this many seconds, including the transition to it."""
    panel_size: Annotated[int, Ge(0), Untrusted(request=1280)] = 480
    """Scale the photo so that its longer side has at most this many pixels, and at least 160. 0:
    never scale."""
    theme: Literal["light", "dark"] = "light"
    """Choose the background of the frames."""


@dataclass(frozen=True, kw_only=True)
class PageOptions(SentenceOptions):
    """Options of pages."""

    title: str = ""
    """Set the heading of the page (default: the number of photos, or the name of the only
    photo)."""
    panel_size: Annotated[int, Ge(0), Untrusted(request=1280)] = 1280
    """Scale embedded photos down so that their longer side has at most this many pixels. 0: never
    scale."""
    theme: Literal["auto", "light", "dark"] = "auto"
    """Choose the background. auto: follow the setting of the reader's system."""
