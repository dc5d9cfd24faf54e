"""TIFF files of any variant, written by hand."""

from __future__ import annotations

import struct
from collections.abc import Sequence

SHORT, LONG = 3, 4
LONGS = {256, 257, 273, 278, 279, 322, 323, 324, 325}
"""Tags that are written as 32-bit integers; the others have 16 bits."""


def tiff(order: str, tags: dict[int, int | Sequence[int] | bytes], parts: Sequence[bytes]) -> bytes:
    """Return a TIFF of one picture.

    Args:
        order: Byte order, ``<`` or ``>``.
        tags: Values of the tags. Offsets and lengths of the parts are added: as tiles if the tags
            have a tile width, else as strips.
        parts: The strips or tiles.
    """
    first = 8
    offsets = [first + sum(map(len, parts[:at])) for at in range(len(parts))]
    tiled = 322 in tags
    known = {
        **tags,
        (324 if tiled else 273): offsets,
        (325 if tiled else 279): [len(part) for part in parts],
    }
    body = b"".join(parts)
    body += bytes(len(body) % 2)
    entries, extra = b"", b""
    start = first + len(body)
    behind = start + 2 + 12 * len(known) + 4
    for tag, given in sorted(known.items()):
        if isinstance(given, bytes):
            kind, count, data = 7, len(given), given
        else:
            values = [given] if isinstance(given, int) else list(given)
            kind = LONG if tag in LONGS else SHORT
            count = len(values)
            data = struct.pack(f"{order}{count}{'I' if kind == LONG else 'H'}", *values)
        if len(data) > 4:
            place, data = behind + len(extra), data + bytes(len(data) % 2)
            extra, data = extra + data, struct.pack(order + "I", place)
        entries += struct.pack(order + "HHI", tag, kind, count) + data.ljust(4, b"\0")
    magic = b"II*\0" if order == "<" else b"MM\0*"
    count = struct.pack(order + "H", len(known))
    return magic + struct.pack(order + "I", start) + body + count + entries + bytes(4) + extra
