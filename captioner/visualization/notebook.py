"""A caption that notebooks display with its photo."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from PIL import Image

from captioner.caption import Caption
from captioner.visualization.heatmap import fit_photo
from captioner.visualization.pages import page

_SIDE = 640  # pixels of a photo that was not given as a path


@dataclass(frozen=True, eq=False, repr=False)
class PhotoCaption(Caption):
    """A caption that knows its photo; notebooks show it in the attention viewer."""

    photo: Image.Image | Path | None = None
    """The path of the photo, or a copy of at most 640 pixels per side if it was not a file."""

    @classmethod
    def of(
        cls, captions: Sequence[Caption], image: Image.Image, source: Any = None
    ) -> list[PhotoCaption]:
        """Attach a photo to its captions; it is read again and encoded only when shown.

        Args:
            captions: Captions of the photo.
            image: The photo, opened.
            source: What it was opened from; a path is kept in place of the pixels.
        """
        is_path = isinstance(source, (str, Path))
        photo = Path(source).absolute() if is_path else fit_photo(image, _SIDE)
        return [cls(**vars(caption), photo=photo) for caption in captions]

    def _repr_html_(self) -> str | None:
        if self.photo is None:
            return None
        return page(self.photo, self, panel_size=_SIDE)._repr_html_()
