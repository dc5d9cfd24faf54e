"""A caption that shows itself in a notebook."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass

from PIL import Image

from captioner.caption import Caption
from captioner.visualization.heatmap import fit_photo
from captioner.visualization.pages import page

_SIDE = 640  # pixels; a copy of this size is some 60 kB, so that thousands can be kept


@dataclass(frozen=True, eq=False, repr=False)
class PhotoCaption(Caption):
    """A caption with a small copy of its photo: the viewer opens where a notebook shows it."""

    photo: bytes = b""
    """JPEG, 640 pixels on its longer side at most."""

    @classmethod
    def of(cls, captions: Sequence[Caption], photo: Image.Image) -> list[PhotoCaption]:
        """Captions with their photo, which all of them share."""
        buffer = io.BytesIO()
        fit_photo(photo, _SIDE).save(buffer, format="JPEG", quality=85)
        kept = buffer.getvalue()
        return [cls(**vars(caption), photo=kept) for caption in captions]

    def _repr_html_(self) -> str:
        with Image.open(io.BytesIO(self.photo)) as photo:
            return page(photo, self)._repr_html_()
