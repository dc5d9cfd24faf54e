"""Formats of drawings, the options of each, and checks of what is drawn."""

from __future__ import annotations

import base64
import io
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from annotated_types import Ge, Interval

from captioner.caption import Caption
from captioner.errors import ConfigError
from captioner.files import atomic_write
from captioner.option_fields import Checked, Shown, Untrusted

if TYPE_CHECKING:
    from PIL import Image

Colormap = Literal["photo", "inferno", "magma", "plasma", "viridis", "cividis", "gray"]
"""The photo's own colours, or matplotlib's perceptually uniform colormaps of rising luminance."""

Combine = Literal["mean", "max"]


@dataclass(frozen=True, kw_only=True)
class DrawingOptions(Checked):
    """Options of every picture."""

    panel_size: Annotated[int, Ge(0), Untrusted(request=1280)] = 640
    """Longest side of a photo in pixels; larger photos are scaled down, those below 160 pixels up
    (0: never scale)."""
    smooth: Annotated[bool, Shown(hidden=True)] = True
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

    only: list[str] = field(default_factory=list)
    """Draw only these words: a word ("dog"), consecutive words ("brown dog"), a position counted
    from 1 ("3") or a range ("2-4"). Several words make one panel. With several captions, each must
    be found in at least one."""
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
    frames_per_second: Annotated[int, Interval(ge=1, le=50)] = 15
    """Frame rate."""
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


class Drawing(ABC):
    """What can be saved, or shown in a notebook."""

    kind: ClassVar[str]
    """What it is, for messages."""
    suffixes: ClassVar[tuple[str, ...]]
    """The file extensions that it is saved with."""

    @abstractmethod
    def encode(self, suffix: str) -> bytes:
        """The content of a file with this extension."""

    def save(self, path: str | Path) -> None:
        """Write a file, in the format of its extension; the output is deterministic.

        Raises:
            ConfigError: The format is not supported, or needs a package that is missing.
            OSError: The file cannot be written; an existing file is kept.
        """
        atomic_write(path, self.encode(self.check_suffix(path)))

    @classmethod
    def check_suffix(cls, path: str | Path) -> str:
        """The extension of a file name in lower case; ConfigError: it is not supported."""
        suffix = Path(path).suffix.lower()
        if suffix not in cls.suffixes:
            wanted, allowed = suffix or "a file without extension", ", ".join(cls.suffixes)
            raise ConfigError(f"{path}: cannot write {wanted} as {cls.kind}; use {allowed}")
        return suffix


def base64_uri(kind: str, data: bytes) -> str:
    """The content of a picture file as a data URI."""
    return f"data:image/{kind};base64,{base64.b64encode(data).decode()}"


def encoded(image: Image.Image, kind: str, **options: Any) -> bytes:
    """A picture as the bytes of a file of Pillow's format ``kind``, with its options."""
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def check_size(kind: str, width: int, height: int, max_side: int, max_pixels: int) -> None:
    """Raise ConfigError if a picture is too large to render."""
    if max(width, height) > max_side or width * height > max_pixels:
        raise ConfigError(
            f"the {kind} would have {width} x {height} pixels (limits: {max_pixels:,} pixels, "
            f"{max_side:,} per side); use a smaller panel_size, fewer words or captions"
        )


def check_captions(
    captions: Caption | Sequence[Caption], labels: Sequence[str] = ()
) -> list[Caption]:
    """One or several captions as a list; raises ConfigError if they cannot be drawn."""
    given = list(captions) if isinstance(captions, Sequence) else [captions]
    if not given:
        raise ConfigError("captions is empty; pass at least one caption")
    if labels and len(labels) != len(given):
        raise ConfigError(f"{len(labels)} labels for {len(given)} captions; pass one each")
    for caption in given:
        if not isinstance(caption, Caption):
            raise ConfigError(
                f"expected a Caption, not {type(caption).__name__}; use the result of "
                "model.caption(photo) or model.explain(photo, text)"
            )
    return given
