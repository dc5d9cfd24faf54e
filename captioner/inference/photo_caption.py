"""A caption together with its photo, so that notebooks can show both."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from PIL import Image

from captioner.caption_types import Caption
from captioner.data.images import Photo
from captioner.data.pixels import fit_photo
from captioner.errors import ConfigError, ImageError
from captioner.hints import hinted

_SHOWN_SIDE = 640  # pixels of a photo in a notebook


@hinted
@dataclass(frozen=True, eq=False, repr=False)
class PhotoCaption(Caption):
    """A caption with its photo. Notebooks display it in the attention viewer."""

    photo: Image.Image | Path | None = None
    """The path of the photo. If the photo had no path, this is a copy with at most 640 pixels per
    side."""

    _hints: ClassVar[Mapping[str, str]] = {
        **{name: hint for name, hint in Caption._hints.items() if name != "show"},
        **dict.fromkeys(("plot", "draw", "display", "visualize", "overlay"), "show"),
        **dict.fromkeys(("image", "path", "file", "filename", "source"), "photo"),
    }

    def show(self, **options: Any) -> None:
        """Show the photo with an attention map for each word, below the notebook cell.

        Outside notebooks, the figure opens in the desktop's image viewer.

        Args:
            **options: Options of ``captioner.overlay``, such as ``theme="dark"``.

        Raises:
            ConfigError: Neither a notebook nor an image viewer is available, or an option is
                invalid.
            ImageError: The file of the photo cannot be read.
        """
        if self.photo is None:
            raise ConfigError(
                "the caption has no photo; use captioner.overlay(photo, caption).show()"
            )
        from captioner.drawing.figure import overlay

        overlay(self.photo, self, **options).show()

    def _repr_html_(self) -> str | None:
        if self.photo is None:
            return None
        from captioner.drawing.pages import page

        try:
            return page(self.photo, self, panel_size=_SHOWN_SIDE)._repr_html_()
        except ImageError:  # the file was moved or deleted; the text is displayed instead
            return None


def shown_photo(image: Image.Image, source: Photo) -> Image.Image | Path:
    """Return the value of ``PhotoCaption.photo``: the path of a photo, or a small copy.

    The file of a path is read again only when the caption is shown.

    Args:
        image: The photo as it was read from ``source``.
        source: The path, bytes, file or array from which ``image`` was read.
    """
    if isinstance(source, (str, os.PathLike)):
        return Path(source).absolute()
    return fit_photo(image, _SHOWN_SIDE)


def with_photo(captions: Sequence[Caption], photo: Image.Image | Path) -> list[PhotoCaption]:
    """Attach a photo from `shown_photo` to its captions."""
    return [PhotoCaption(**vars(caption), photo=photo) for caption in captions]
