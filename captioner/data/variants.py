"""Format variants that Pillow decodes wrongly or not at all, although the file is complete.

A variant is recognized by the file's header, not by the look of its pixels. The variants were found
by comparing Pillow with a second decoder on files of many variants
(tests/unit/data/test_variants.py).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, BinaryIO

import numpy as np

_COLOURS = {
    0: "grey", 1: "grey", 2: "RGB", 3: "palette", 4: "mask", 5: "CMYK", 6: "YCbCr", 8: "CIELAB",
    9: "ICCLAB", 10: "ITULAB", 32803: "camera RAW", 32844: "LogL", 32845: "LogLuv",
    34892: "linear RAW",
}  # fmt: skip
"""Names of the colour spaces of a TIFF, by the value of tag 262."""

_COMPRESSIONS = {
    1: "not compressed", 2: "CCITT", 3: "CCITT", 4: "CCITT", 5: "LZW", 6: "old JPEG", 7: "JPEG",
    8: "deflate", 32773: "PackBits", 32946: "deflate", 33003: "JPEG 2000", 33005: "JPEG 2000",
    34661: "JBIG", 34676: "SGILog", 34712: "JPEG 2000", 34887: "LERC", 34925: "LZMA",
    50000: "Zstandard", 50001: "WebP", 50002: "JPEG XL", 52546: "JPEG XL",
}  # fmt: skip
"""Names of the compressions of a TIFF, by the value of tag 259."""

_USUAL = {1, 2, 3, 4, 5, 7, 8, 32773, 32946}
"""Compressions that every build of libtiff decodes."""

_NUMBERS = {2: "signed", 3: "float", 5: "complex", 6: "complex"}
"""Names of the kinds of numbers in a TIFF, by the value of tag 339."""

_UNSUPPORTED = re.compile(
    r"unsupported|not (yet )?supported|not implemented|cannot handle|"
    r"unknown (raw mode|pixel mode|\w+ mode|\w+ map depth|\w+ orientation)",
    re.IGNORECASE,
)
"""Pillow's error messages about unsupported variants, as opposed to damaged files."""

SAVE = "save the image as JPEG or PNG"
"""The remedy for a variant that is not supported, for error messages."""


def unsupported(reason: str) -> bool:
    """Return whether an error message by Pillow is about a variant that Pillow does not support."""
    return bool(_UNSUPPORTED.search(reason))


def wrong_tiff(image: Any) -> bool:
    """Return whether Pillow would decode an opened TIFF wrongly without an error.

    This happens for:

    - Samples in separate planes, if Pillow skips their last bytes (16 bits, not compressed), takes
      them for interleaved samples (grey or palette with alpha, CIELAB), or mixes them up (more than
      one extra sample).
    - Colours at a lower resolution than the brightness, if they are not compressed.
    - 32-bit values in big-endian order, if they are compressed. libtiff has swapped them already.
    - A palette of 8-bit values. Pillow takes the upper 8 of 16 bits, so the picture is black.
    """
    tags = image.tag_v2
    compressed = image.info.get("compression") != "raw"
    samples = tags.get(277, 1)
    if tags.get(284) == 2 and samples > 1:
        deep = not compressed and max(tags.get(258, (1,))) != 8
        known = {"RGB", "RGBA", "CMYK", *({"L", "I;16", "I;16B", "P"} if compressed else ())}
        extra = any(tags.get(338, ())) and samples > len(image.getbands())
        if deep or extra or image.mode not in known:
            return True
    if tags.get(262) == 6 and not compressed and tuple(tags.get(530, (2, 2))) != (1, 1):
        return True
    if image.mode in {"I", "F"} and compressed and tags.prefix == b"MM":
        return True
    return image.mode in {"P", "PA"} and 0 < max(tags.get(320, (0,))) < 256


def tiff_directory(file: BinaryIO) -> Mapping[int, Any] | None:
    """Return the tags of a TIFF that Pillow does not open, or None if the file is damaged."""
    from PIL.TiffImagePlugin import ImageFileDirectory_v2

    try:
        file.seek(0)
        head = file.read(8)
        directory = ImageFileDirectory_v2(head + (file.read(8) if b"+" in head[:4] else b""))
        file.seek(directory.next)
        directory.load(file)
        places, lengths = ((273, 279), (324, 325))[324 in directory]
        end = np.add(directory[places], directory[lengths]).max()
        whole = all(directory[tag] > 0 for tag in (256, 257)) and end <= file.seek(0, 2)
    except Exception:  # damage makes Pillow raise nearly anything
        return None
    return directory if whole else None


def described_tiff(tags: Mapping[int, Any]) -> str:
    """Describe the variant of a TIFF for a message, such as ``RGB, 3 x 16 bits, LZW``."""
    bits, samples = tags.get(258, (1,)), tags.get(277, 1)
    number = _NUMBERS.get(tags.get(339, (1,))[0], "")
    compression = tags.get(259, 1)
    return ", ".join(
        part
        for part in (
            _COLOURS.get(tags.get(262, 0), "unknown colours"),
            f"{samples} x {bits[0]} bits" if len(set(bits)) == 1 else f"bits {bits}",
            number,
            _COMPRESSIONS.get(compression, f"compression {compression}"),
            "separate planes" if tags.get(284) == 2 and samples > 1 else "",
        )
        if part
    )


def unusual_compression(image: Any) -> bool:
    """Return whether an opened TIFF has a compression that the installed libtiff may lack."""
    return image.format == "TIFF" and image.tag_v2.get(259, 1) not in _USUAL
