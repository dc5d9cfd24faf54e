"""The base class of figures, animations, pages and archives, and checks of their captions."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

from captioner.caption_types import Caption
from captioner.errors import ConfigError
from captioner.files import atomic_write
from captioner.hints import hinted


@hinted
class Drawing(ABC):
    """A figure, animation, page or archive that can be saved or shown in a notebook."""

    kind: ClassVar[str]
    """The name of this kind of drawing in messages, with an article."""
    suffixes: ClassVar[tuple[str, ...]]
    """The supported file extensions."""

    @abstractmethod
    def encode(self, suffix: str) -> bytes:
        """Return the drawing as the content of a file with this extension, such as ``.png``."""

    def save(self, path: str | Path) -> None:
        """Write a file in the format of its extension. Equal drawings produce equal files.

        Raises:
            ConfigError: The format is not supported, or needs a package that is missing.
            OSError: The file cannot be written. An existing file is kept.
        """
        atomic_write(path, self.encode(self.check_suffix(path)))

    @classmethod
    def check_suffix(cls, path: str | Path) -> str:
        """Return the extension of a file name in lower case.

        Raises:
            ConfigError: The extension is not supported.
        """
        suffix = Path(path).suffix.lower()
        if suffix not in cls.suffixes:
            wanted, allowed = suffix or "a file without extension", ", ".join(cls.suffixes)
            raise ConfigError(f"{cls.kind} cannot be saved as {wanted} ({path}); use {allowed}")
        return suffix


def check_size(kind: str, width: int, height: int, max_side: int, max_pixels: int) -> None:
    """Check that a picture is small enough to be drawn.

    Args:
        kind: Name of the picture in the error message.
        width: Width of the picture (pixels).
        height: Height of the picture (pixels).
        max_side: Limit on the longer side (pixels).
        max_pixels: Limit on the number of pixels.

    Raises:
        ConfigError: The picture is too large.
    """
    if max(width, height) > max_side or width * height > max_pixels:
        raise ConfigError(
            f"the {kind} would have {width} x {height} pixels, but the limits are "
            f"{max_pixels:,} pixels and {max_side:,} per side; use a smaller panel_size, "
            "fewer words or fewer captions"
        )


def check_captions(
    captions: Caption | Sequence[Caption], labels: Sequence[str] = ()
) -> list[Caption]:
    """Check the captions and labels of a drawing, and return the captions as a list.

    Raises:
        ConfigError: The list is empty, an entry is not a caption, or the numbers of labels and
            captions differ.
    """
    given = list(captions) if isinstance(captions, Sequence) else [captions]
    if not given:
        raise ConfigError("captions is an empty list; pass at least one caption")
    if labels and len(labels) != len(given):
        raise ConfigError(
            f"labels has {len(labels)} entries for {len(given)} captions; pass one "
            "label per caption"
        )
    for caption in given:
        if not isinstance(caption, Caption):
            raise ConfigError(
                f"captions contains an object of type {type(caption).__name__}; pass results "
                "of model.caption(photo) or model.explain(photo, text)"
            )
    return given
