"""Sets description and keywords of a JPEG or PNG file; the pixels keep their bytes.

    JPEG    XMP in an APP1 segment; IPTC Caption-Abstract and Keywords in Photoshop's APP13 segment
    PNG     XMP in an iTXt chunk

Sources: XMP Specification Part 3 (2012), sections 1.1.3 (JPEG) and 1.1.5 (PNG); IPTC Information
Interchange Model 4.2 (2:25, 2:120 and 1:90); Adobe Photoshop File Formats, "Image Resources
Section".
"""

from __future__ import annotations

import hashlib
import struct
import zlib
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import NamedTuple

from captioner.data.metadata.xmp import new_keywords, read_description, set_description
from captioner.errors import DataError

_JPEG = b"\xff\xd8\xff"
_PNG = b"\x89PNG\r\n\x1a\n"
HEAD = len(_PNG)
"""First bytes of a file that decide whether its format is supported."""

_APP0, _APP1, _APP13 = 0xE0, 0xE1, 0xED
_SCAN, _END = 0xDA, 0xD9
_EXIF = b"Exif\0\0"
_XMP_IN_JPEG = b"http://ns.adobe.com/xap/1.0/\0"
_PHOTOSHOP = b"Photoshop 3.0\0"
_LARGEST_SEGMENT = 65533

_IPTC, _IPTC_DIGEST = 0x0404, 0x0425  # Photoshop image resources
_CHARSET, _KEYWORD, _CAPTION = (1, 90), (2, 25), (2, 120)  # IPTC datasets
_UTF8 = b"\x1b%G"

_XMP_IN_PNG = b"XML:com.adobe.xmp\0"
_LARGEST_XMP = 1 << 24  # bytes of a compressed XMP chunk, once expanded


def can_embed(head: bytes) -> bool:
    """Whether the format of a file that begins with these ``HEAD`` bytes is supported."""
    return head.startswith((_JPEG, _PNG))


def embedded_description(data: bytes) -> str:
    """Return the description in a JPEG or PNG file, from XMP or else IPTC; empty if it has none.

    Raises:
        DataError: The file or its metadata is damaged.
    """
    if data.startswith(_PNG):
        packets = [_packet_in_chunk(c.data) for c in _chunks(data) if _holds_xmp(c)]
        return read_description(packets[0]) if packets else ""
    segments, _ = _segments(data)
    xmp = (s.data[len(_XMP_IN_JPEG) :] for s in segments if s.starts(_APP1, _XMP_IN_JPEG))
    resources = (r for s in segments if s.starts(_APP13, _PHOTOSHOP) for r in _resources(s.data))
    iptc = (dict(_datasets(r.data)).get(_CAPTION, b"") for r in resources if r.number == _IPTC)
    texts = chain(map(read_description, xmp), (text.decode(errors="replace") for text in iptc))
    return next((text for text in texts if text.strip()), "")


def embed_description(data: bytes, text: str, keywords: Sequence[str] = ()) -> bytes:
    """Return a JPEG or PNG file with another description, and more keywords; all else is kept.

    Raises:
        DataError: The file or its metadata is damaged or too large.
    """
    embed = _embed_in_png if data.startswith(_PNG) else _embed_in_jpeg
    return embed(data, text, keywords)


# --- JPEG ----------------------------------------------------------------------------------------


class _Segment(NamedTuple):
    marker: int
    data: bytes

    def starts(self, marker: int, name: bytes) -> bool:
        return self.marker == marker and self.data.startswith(name)

    def encoded(self) -> bytes:
        if len(self.data) > _LARGEST_SEGMENT:
            raise DataError("the metadata is too large for JPEG; use --sidecar xmp")
        return struct.pack(">BBH", 0xFF, self.marker, len(self.data) + 2) + self.data


def _segments(data: bytes) -> tuple[list[_Segment], int]:
    """The segments before the first scan, and the byte where it begins."""
    segments: list[_Segment] = []
    at = 2
    while True:
        while data[at : at + 2] == b"\xff\xff":  # padding
            at += 1
        if len(data) < at + 4 or data[at] != 0xFF:
            raise DataError("the JPEG is damaged; copy or download the file again")
        marker, size = data[at + 1], int.from_bytes(data[at + 2 : at + 4], "big")
        if marker in (_SCAN, _END):
            return segments, at
        segments.append(_Segment(marker, data[at + 4 : at + 2 + size]))
        at += 2 + size


def _embed_in_jpeg(data: bytes, text: str, keywords: Sequence[str]) -> bytes:
    segments, scan = _segments(data)
    xmp = [n for n, segment in enumerate(segments) if segment.starts(_APP1, _XMP_IN_JPEG)]
    old = segments[xmp[0]].data[len(_XMP_IN_JPEG) :] if xmp else None
    packet = _Segment(_APP1, _XMP_IN_JPEG + set_description(old, text, keywords))
    if xmp:
        segments[xmp[0]] = packet
    else:  # JFIF and EXIF come first
        first = [s.marker == _APP0 or s.starts(_APP1, _EXIF) for s in segments]
        segments.insert(first.index(False) if False in first else len(first), packet)
        xmp = [segments.index(packet)]
    iptc = [n for n, segment in enumerate(segments) if segment.starts(_APP13, _PHOTOSHOP)]
    if not iptc:
        new = _Segment(_APP13, _PHOTOSHOP + _with_iptc(b"", text, keywords))
        segments.insert(xmp[0] + 1, new)
    elif len(iptc) == 1:  # more: resources are split over several segments; XMP has the text
        resources = segments[iptc[0]].data[len(_PHOTOSHOP) :]
        segments[iptc[0]] = _Segment(_APP13, _PHOTOSHOP + _with_iptc(resources, text, keywords))
    return data[:2] + b"".join(segment.encoded() for segment in segments) + data[scan:]


# --- IPTC ----------------------------------------------------------------------------------------


class _Resource(NamedTuple):
    number: int
    name: bytes
    """Pascal string, padded to an even length."""
    data: bytes

    def encoded(self) -> bytes:
        padding = b"\0" * (len(self.data) % 2)
        head = struct.pack(">4sH", b"8BIM", self.number) + self.name
        return head + struct.pack(">I", len(self.data)) + self.data + padding


def _resources(data: bytes) -> Iterator[_Resource]:
    """The image resources of Photoshop."""
    at = len(_PHOTOSHOP) if data.startswith(_PHOTOSHOP) else 0
    while data[at:].strip(b"\0"):  # some programs pad the segment
        if data[at : at + 4] != b"8BIM" or len(data) < at + 12:
            raise DataError("its IPTC metadata is damaged; use --sidecar xmp")
        number = int.from_bytes(data[at + 4 : at + 6], "big")
        after = at + 6 + (data[at + 6] // 2 + 1) * 2
        size = int.from_bytes(data[after : after + 4], "big")
        if len(data) < after + 4 + size:
            raise DataError("its IPTC metadata is damaged; use --sidecar xmp")
        yield _Resource(number, data[at + 6 : after], data[after + 4 : after + 4 + size])
        at = after + 4 + size + size % 2


def _with_iptc(resources: bytes, text: str, keywords: Sequence[str]) -> bytes:
    """Image resources with another IPTC caption, and more keywords.

    Unchanged if they are not in UTF-8 and the new text needs it.
    """
    found = list(_resources(resources))
    old = next((resource.data for resource in found if resource.number == _IPTC), b"")
    datasets = [pair for pair in _datasets(old) if pair[0] != _CAPTION]
    charset = dict(datasets).get(_CHARSET)
    if charset != _UTF8 and not "".join([text, *keywords]).isascii():
        if datasets:  # their text is in another character set
            return resources
        datasets = [(_CHARSET, _UTF8)]
    known = [value.decode(errors="replace") for key, value in datasets if key == _KEYWORD]
    added = [(_KEYWORD, word, 64) for word in new_keywords(known, keywords)]
    for dataset, value, limit in [*added, (_CAPTION, text, 2000)]:  # the standard's limits
        short = value.encode()[:limit].decode(errors="ignore").encode()
        after = next((n for n, (key, _) in enumerate(datasets) if key > dataset), len(datasets))
        datasets.insert(after, (dataset, short))
    iptc = b"".join(struct.pack(">BBBH", 0x1C, *key, len(value)) + value for key, value in datasets)
    kept = [resource for resource in found if resource.number != _IPTC]
    digest = hashlib.md5(iptc, usedforsecurity=False).digest()
    kept = [r._replace(data=digest) if r.number == _IPTC_DIGEST else r for r in kept]
    return b"".join(r.encoded() for r in [_Resource(_IPTC, b"\0\0", iptc), *kept])


def _datasets(iptc: bytes) -> Iterator[tuple[tuple[int, int], bytes]]:
    """IPTC datasets: ((record, number), value)."""
    at = 0
    while at + 5 <= len(iptc) and iptc[at] == 0x1C:
        record, number, size = struct.unpack(">BBH", iptc[at + 1 : at + 5])
        if size & 0x8000 or len(iptc) < at + 5 + size:  # extended datasets: previews, not text
            raise DataError("its IPTC metadata is damaged or too large; use --sidecar xmp")
        yield (record, number), iptc[at + 5 : at + 5 + size]
        at += 5 + size


# --- PNG -----------------------------------------------------------------------------------------


class _Chunk(NamedTuple):
    kind: bytes
    data: bytes
    start: int
    end: int


def _chunks(data: bytes) -> Iterator[_Chunk]:
    at = len(_PNG)
    while at < len(data):
        size = int.from_bytes(data[at : at + 4], "big")
        end = at + 12 + size
        if len(data) < end:
            raise DataError("the PNG is damaged; copy or download the file again")
        yield _Chunk(data[at + 4 : at + 8], data[at + 8 : at + 8 + size], at, end)
        if data[at + 4 : at + 8] == b"IEND":
            return
        at = end


def _holds_xmp(chunk: _Chunk) -> bool:
    return chunk.kind == b"iTXt" and chunk.data.startswith(_XMP_IN_PNG)


def _packet_in_chunk(data: bytes) -> bytes:
    compressed = data[len(_XMP_IN_PNG)]
    _, _, packet = data[len(_XMP_IN_PNG) + 2 :].split(b"\0", 2)  # language, translated keyword
    if not compressed:
        return packet
    try:
        return zlib.decompressobj().decompress(packet, _LARGEST_XMP)
    except zlib.error as error:
        raise DataError("the PNG's XMP is damaged; use --sidecar xmp") from error


def _embed_in_png(data: bytes, text: str, keywords: Sequence[str]) -> bytes:
    chunks = list(_chunks(data))
    old = next((chunk for chunk in chunks if _holds_xmp(chunk)), None)
    packet = set_description(None if old is None else _packet_in_chunk(old.data), text, keywords)
    body = b"iTXt" + _XMP_IN_PNG + b"\0\0\0\0" + packet
    new = struct.pack(">I", len(body) - 4) + body + struct.pack(">I", zlib.crc32(body))
    start, end = (chunks[0].end, chunks[0].end) if old is None else (old.start, old.end)
    return data[:start] + new + data[end:]
