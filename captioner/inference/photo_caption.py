"""A caption that notebooks display with its photo."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from PIL import Image

from captioner.caption import Caption
from captioner.data.images import Photo
from captioner.data.pixels import fit_photo

_SHOWN_SIDE = 640  # pixels of a photo in a notebook


@dataclass(frozen=True, eq=False, repr=False)
class PhotoCaption(Caption):
    """A caption that knows its photo; notebooks show it in the attention viewer."""

    photo: Image.Image | Path | None = None
    """The path of the photo, or a copy of at most 640 pixels per side if it was not a path."""

    def _repr_html_(self) -> str | None:
        if self.photo is None:
            return None
        from captioner.drawing.pages import page

        return page(self.photo, self, panel_size=_SHOWN_SIDE)._repr_html_()


def shown_photo(image: Image.Image, source: Photo) -> Image.Image | Path:
    """Return what a caption keeps of its photo: the path, or else a small copy.

    The photo is read and encoded only when the caption is shown. ``source`` is what the image was
    opened from.
    """
    if isinstance(source, (str, os.PathLike)):
        return Path(source).absolute()
    return fit_photo(image, _SHOWN_SIDE)


def with_photo(captions: Sequence[Caption], photo: Image.Image | Path) -> list[PhotoCaption]:
    """Attach what `shown_photo` returned to the captions of the photo."""
    return [PhotoCaption(**vars(caption), photo=photo) for caption in captions]
