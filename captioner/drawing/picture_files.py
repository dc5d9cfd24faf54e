"""Functions that turn pictures into the bytes of a file, or into data URIs."""

from __future__ import annotations

import base64
import io
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from PIL import Image


def base64_uri(kind: str, data: bytes) -> str:
    """Return the content of a picture file as a data URI. ``kind`` is a type such as ``png``."""
    return f"data:image/{kind};base64,{base64.b64encode(data).decode()}"


def encoded(image: Image.Image, kind: str, **options: Any) -> bytes:
    """Return a picture as the bytes of a file. ``kind`` and ``options`` are passed to Pillow."""
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()
