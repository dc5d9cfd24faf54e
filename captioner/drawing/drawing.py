"""The base class of figures, animations, pages and archives, and checks of what they show."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

from captioner.caption_types import Caption
from captioner.errors import ConfigError
from captioner.files import atomic_write


class Drawing(ABC):
    """A figure, animation, page or archive, which can be saved or shown in a notebook."""

    kind: ClassVar[str]
    """The name of the kind in messages, with an article."""
    suffixes: ClassVar[tuple[str, ...]]
    """The supported file extensions."""

    @abstractmethod
    def encode(self, suffix: str) -> bytes:
        """Return the content of a file with this extension."""

    def save(self, path: str | Path) -> None:
        """Write a file in the format of its extension. Equal drawings make equal files.

        Raises:
            ConfigError: The format is not supported, or needs a package that is missing.
            OSError: The file cannot be written; an existing file is kept.
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
            raise ConfigError(f"{path}: cannot write {wanted} as {cls.kind}; use {allowed}")
        return suffix


def check_size(kind: str, width: int, height: int, max_side: int, max_pixels: int) -> None:
    """Check that a picture is small enough to render.

    Raises:
        ConfigError: The picture is too large.
    """
    if max(width, height) > max_side or width * height > max_pixels:
        raise ConfigError(
            f"the {kind} would have {width} x {height} pixels (limits: {max_pixels:,} pixels, "
            f"{max_side:,} per side); use a smaller panel_size, fewer words or captions"
        )


def check_captions(
    captions: Caption | Sequence[Caption], labels: Sequence[str] = ()
) -> list[Caption]:
    """Return one or several captions as a list.

    Raises:
        ConfigError: A caption cannot be drawn, or the number of labels differs.
    """
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
