"""Camera RAW as LibRaw reads it: a small DNG file, made with Pillow's writer of TIFF tags."""

from __future__ import annotations

import io

import numpy as np
from PIL import Image
from PIL.TiffImagePlugin import ImageFileDirectory_v2

_FIRST = {
    271: "maker", 272: "model", 50706: b"\x01\x04\0\0", 50708: "maker model", 50778: 21,
    50721: (1.0, 0.0, 0.0, 0.0, 1.0, 0.0, 0.0, 0.0, 1.0),
}  # fmt: skip


def tiny_dng(*previews: Image.Image, orientation: int = 1, jpeg: bool = True) -> bytes:
    """A DNG file of 64 x 64 random sensor values with these previews."""
    noise = np.random.default_rng(0).integers(4000, size=(64, 64), dtype="<u2")
    parts = [_preview(image, jpeg) for image in previews]
    sensor = {254: 0, 256: 64, 257: 64, 258: 16, 259: 1, 262: 32803, 277: 1, 278: 64}
    parts.append((sensor | {33421: (2, 2), 33422: b"\0\1\1\2"}, noise.tobytes()))
    starts: list[int] = [0] * len(parts)
    for _ in range(2):  # the second time with the places of the first
        made = bytearray(b"II*\0\x08\0\0\0")
        for number, (tags, data) in enumerate(parts):
            directory = ImageFileDirectory_v2(prefix=b"II")
            directory.tagtype |= {273: 4, 279: 4, 330: 4}
            first = _FIRST | {274: orientation, 330: tuple(starts[1:])} if number == 0 else {}
            for tag, value in sorted((tags | first | {273: 0, 279: len(data)}).items()):
                directory[tag] = value
            starts[number] = len(made)
            made += directory.tobytes(len(made)) + data
            made += b"\0" * (len(made) % 2)
    return bytes(made)


def _preview(image: Image.Image, jpeg: bool) -> tuple[dict[int, object], bytes]:
    size = {254: 1, 256: image.width, 257: image.height, 258: (8, 8, 8), 277: 3, 278: image.height}
    if not jpeg:
        return size | {259: 1, 262: 2}, image.tobytes()
    image.save(file := io.BytesIO(), "JPEG", quality=95)
    return size | {259: 7, 262: 6}, file.getvalue()
