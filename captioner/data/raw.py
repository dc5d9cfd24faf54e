"""Previews in camera RAW files, read with ``rawpy`` (LibRaw), if installed."""

from __future__ import annotations

import io
from typing import BinaryIO


def raw_preview(file: BinaryIO) -> io.BytesIO:
    """Return the largest preview of an open RAW file: a JPEG file with its EXIF orientation.

    Raises:
        ValueError: There is no preview, or the file is damaged.
    """
    import rawpy

    file.seek(0)
    try:
        with rawpy.imread(file) as raw:
            preview = raw.extract_thumb()
    except (rawpy.LibRawError, rawpy.NotSupportedError) as error:
        reason = error.args[0]
        raise ValueError(reason.decode() if isinstance(reason, bytes) else str(reason)) from error
    # Others, of old cameras, are tiny; rawpy reads beyond their end if the file is damaged.
    if not isinstance(preview.data, bytes):
        raise ValueError("not a JPEG")
    return io.BytesIO(preview.data)  # LibRaw adds EXIF where there is none
