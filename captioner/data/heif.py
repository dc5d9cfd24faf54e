"""A check that a HEIC or AVIF file contains all data of its picture.

A phone stores a photo as a grid of tiles. libheif leaves out tiles that it cannot decode, so a file
that was truncated during copying becomes a picture with black or green tiles. libheif's strict
mode cannot be reached from ``pillow-heif``. The metadata at the beginning of the file lists the
place of each tile. This is enough to find missing tiles without decoding anything.

The file consists of boxes, which may contain further boxes. The metadata box lists items. An item
is a picture, a tile, a grid of tiles, or data such as EXIF.

Source: ISO/IEC 14496-12 (boxes), 23008-12 (HEIF), 14496-15 (units of HEVC), H.265 section 7.4.2.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

_FORBIDDEN = re.compile(rb"\0\0[\0-\2]")
"""Bytes that an HEVC unit never contains, because encoders insert a byte 3 after two zeros."""

_ZEROS = bytes(256)
"""A run of zeros that AV1 never writes, because its arithmetic coder shortens predictable data."""

ZEROED = "part of the picture was overwritten with zeros"
"""The problem of a damaged picture, for error messages."""


class Reader:
    """A reader of numbers and boxes in a file. Reading past the end raises EOFError."""

    def __init__(self, data: bytes, start: int = 0, end: int | None = None) -> None:
        """Select the bytes of ``data`` from ``start`` up to ``end`` (default: all bytes)."""
        self.data, self.at = data, start
        self.end = len(data) if end is None else min(end, len(data))

    def number(self, size: int) -> int:
        """Read an unsigned big-endian number of this size (bytes). A number of size 0 is 0."""
        if self.at + size > self.end:
            raise EOFError("the list of tiles is truncated")
        self.at += size
        return int.from_bytes(self.data[self.at - size : self.at], "big")

    def numbers(self, size: int, count: int) -> list[int]:
        """Read several numbers of the same size (bytes)."""
        return [self.number(size) for _ in range(count)]

    def version(self) -> int:
        """Read the version at the beginning of a box, and skip the flags after it."""
        return self.number(4) >> 24

    def boxes(self) -> Iterator[tuple[bytes, Reader]]:
        """Yield the type and the content of each box, from the current position to the end."""
        while self.at + 8 <= self.end:
            start = self.at
            size, kind = self.number(4), self.data[start + 4 : start + 8]
            self.at += 4
            if size == 1:
                size = self.number(8)
            end = self.end if size == 0 else start + size
            if end < self.at:
                return
            yield kind, Reader(self.data, self.at, end)
            self.at = end


def check_complete(data: bytes) -> None:
    """Check that no part of the primary picture is missing or overwritten with zeros.

    Image sequences have no list of items and are not checked.

    Args:
        data: The whole file.

    Raises:
        EOFError: The file ends before the picture does.
        ValueError: A part of the picture is damaged.
    """
    meta = next((box for kind, box in Reader(data).boxes() if kind == b"meta"), None)
    if meta is None:
        return
    meta.version()
    parts = dict(meta.boxes())
    if not {b"pitm", b"iloc", b"iinf"} <= parts.keys():
        return
    kinds, places = _kinds(parts[b"iinf"]), _places(parts[b"iloc"])
    inputs = _inputs(parts[b"iref"]) if b"iref" in parts else {}
    primary = parts[b"pitm"]
    needed = [primary.number(2 if primary.version() == 0 else 4)]
    seen, left, shared = set(needed), len(data), set()
    for item in needed:  # the list grows during the loop
        more = inputs.get(item, [])
        needed += dict.fromkeys(more).keys() - seen
        seen.update(more)
        method, extents = places.get(item, (0, []))
        if (method, *extents) in shared:  # equal tiles may be stored once
            continue
        shared.add((method, *extents))
        kind = kinds.get(item, b"")
        content = _content(data, method, extents, parts.get(b"idat"), left)
        left -= len(content)
        if kind == b"grid" and (content[2] + 1) * (content[3] + 1) != len(more):
            raise EOFError("tiles are missing")
        if kind in {b"hvc1", b"hev1"}:
            _check_hevc(content)
        elif kind == b"av01" and _ZEROS in content:
            raise ValueError(ZEROED)


def _kinds(box: Reader) -> dict[int, bytes]:
    """Return the type of each item by the item's id, from the box ``iinf``."""
    kinds = {}
    box.number(2 if box.version() == 0 else 4)
    for kind, entry in box.boxes():
        if kind == b"infe" and (version := entry.version()) >= 2:
            item = entry.number(2 if version == 2 else 4)
            entry.number(2)
            kinds[item] = entry.number(4).to_bytes(4, "big")
    return kinds


def _inputs(box: Reader) -> dict[int, list[int]]:
    """Return the items that each item is made from, by id, such as the tiles of a grid.

    ``box`` is the box ``iref``.
    """
    size = 2 if box.version() == 0 else 4
    return {
        entry.number(size): entry.numbers(size, entry.number(2))
        for kind, entry in box.boxes()
        if kind == b"dimg"
    }


def _places(box: Reader) -> dict[int, tuple[int, list[tuple[int, int]]]]:
    """Return the place of each item by the item's id, from the box ``iloc``.

    A place consists of the storage method (the box from which offsets count), and the offset and
    length of each part in bytes.
    """
    places = {}
    version, sizes = box.version(), box.number(2)
    offset_size, length_size, base_size = sizes >> 12, sizes >> 8 & 15, sizes >> 4 & 15
    index_size = sizes & 15 if version else 0
    id_size = 2 if version < 2 else 4
    for _ in range(box.number(id_size)):
        item = box.number(id_size)
        method = box.number(2) & 15 if version else 0
        box.number(2)
        base = box.number(base_size)
        extents = []
        for _ in range(box.number(2)):
            box.number(index_size)
            extents.append((base + box.number(offset_size), box.number(length_size)))
        places[item] = method, extents
    return places


def _content(
    data: bytes, method: int, extents: list[tuple[int, int]], inside: Reader | None, most: int
) -> bytes:
    """Return the bytes of an item.

    Args:
        data: The whole file.
        method: Storage method. 0: offsets count from the start of the file. 1: offsets count from
            the start of the box ``idat``.
        extents: Offset and length of each part of the item (bytes). Length 0 means up to the end.
        inside: The box ``idat``, or None if the file lacks it.
        most: Limit on the bytes of the item. More bytes show that parts of the file overlap.

    Raises:
        EOFError: Bytes of the item are missing.
        ValueError: Parts of the file overlap.
    """
    if not extents or method > 1 or (method == 1 and inside is None):
        raise EOFError("tiles are missing")
    first, end = (inside.at, inside.end) if method == 1 and inside else (0, len(data))
    spans = [(first + at, first + at + size if size else end) for at, size in extents]
    missing = max(stop - end if start < stop else 1 for start, stop in spans)
    if missing > 0:
        raise EOFError(f"{missing:,} bytes of a tile are missing")
    if sum(stop - start for start, stop in spans) > most:
        raise ValueError("tiles overlap in the file")
    return b"".join(data[start:stop] for start, stop in spans)


def _check_hevc(content: bytes) -> None:
    """Check the units of an HEVC picture. Each unit begins with its length.

    All cameras and encoders write four bytes per length, so four bytes are expected.

    Raises:
        EOFError: The last unit is truncated.
        ValueError: A unit was overwritten with zeros.
    """
    reader = Reader(content)
    while reader.at < len(content):
        start, length = reader.at + 4, reader.number(4)
        reader.at = start + length
        if length == 0 or _FORBIDDEN.search(content, start, reader.at):
            raise ValueError(ZEROED)
        if reader.at > len(content):
            raise EOFError("a tile is shorter than its stated length")
