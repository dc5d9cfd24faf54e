"""Functions that edit the XMP and IPTC segments of JPEG files, and adjust offsets.

A file is edited segment by segment. All other segments, the scans, and the pictures and data after
the photo keep their bytes. When a segment grows, these pictures move. Offsets to them are adjusted
in Multi-Picture Format (a gain map, a second view) and in EXIF (previews).

Sources: XMP Specification Part 3, 1.1.3 (APP1, extended XMP); CIPA DC-007 (Multi-Picture Format).
"""

from __future__ import annotations

import re
import struct
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import NamedTuple

from captioner.data import iptc, xmp
from captioner.errors import DataError

_APP0, _APP1, _APP2, _APP13 = 0xE0, 0xE1, 0xE2, 0xED
_SCAN, _END = 0xDA, 0xD9
_EXIF, _MPF = b"Exif\0\0", b"MPF\0"
_XMP, _EXTENSION = b"http://ns.adobe.com/xap/1.0/\0", b"http://ns.adobe.com/xmp/extension/\0"
_PHOTOSHOP = b"Photoshop 3.0\0"
_LARGEST = 65533  # bytes of a segment's data
_MP_ENTRY = 0xB002  # tag of the list of pictures in Multi-Picture Format
_PICTURES = 64  # limit on the pictures after the photo
_OFFSETS = {
    "<": rb"\x04\0\x01\0\0\0|\x07\0....",
    ">": rb"\0\x04\0\0\0\x01|\0\x07....",
}
"""The bytes before the offset of a picture in EXIF (type and number of values), by byte order."""
_SMALL = 0xFFFF  # up to this value, other numbers may equal an offset by chance


class _Segment(NamedTuple):
    """A segment of a JPEG file, such as EXIF."""

    marker: int
    """Second byte of the segment's marker."""
    data: bytes
    """Content of the segment, after its length."""
    at: int = 0
    """Position of the segment's data in the file. 0 for a new segment."""

    def starts(self, marker: int, name: bytes) -> bool:
        """Return whether the segment has this marker and its data begins with this name."""
        return self.marker == marker and self.data.startswith(name)


def _read(data: bytes) -> tuple[list[_Segment], int]:
    """Return the segments before the first scan, and the position where the scan begins.

    Raises:
        DataError: The file is damaged.
    """
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
        segments.append(_Segment(marker, data[at + 4 : at + 2 + size], at + 4))
        at += 2 + size


def _find(segments: Sequence[_Segment], marker: int, name: bytes) -> list[int]:
    """Return the indices of the segments with this marker and name."""
    return [n for n, segment in enumerate(segments) if segment.starts(marker, name)]


def _after_exif(segments: Sequence[_Segment]) -> int:
    """Return the index for a new segment: after JFIF and EXIF, because these must come first."""
    first = [s.marker == _APP0 or s.starts(_APP1, _EXIF) for s in segments]
    return [*first, False].index(False)


# --- XMP ------------------------------------------------------------------------------------------


def packets(data: bytes) -> list[bytes]:
    """Return the XMP packets of a JPEG file, followed by its extended packets.

    Extended packets contain the properties that do not fit into one segment.
    """
    segments, _ = _read(data)
    found = [segments[n].data[len(_XMP) :] for n in _find(segments, _APP1, _XMP)]
    return [*found, *_extended(segments)]


def _extended(segments: Sequence[_Segment]) -> Iterator[bytes]:
    """Yield the extended XMP packets, each joined from its segments.

    A segment contains a GUID, the total size of the packet, the offset of the part, and the part.
    """
    parts: dict[bytes, dict[int, bytes]] = {}
    for n in _find(segments, _APP1, _EXTENSION):
        body = segments[n].data[len(_EXTENSION) :]
        parts.setdefault(body[:32], {})[int.from_bytes(body[36:40], "big")] = body[40:]
    for found in parts.values():
        yield b"".join(part for _, part in sorted(found.items()))


def edit_xmp(data: bytes, edit: Callable[[bytes | None], bytes | None]) -> bytes:
    """Return a JPEG file with an edited XMP packet.

    ``edit`` receives a packet, or empty bytes if the file has no packet. It returns the edited
    packet, or None to remove the packet.

    Raises:
        DataError: The description is in an extended packet, or the metadata cannot be edited.
    """
    segments, scan = _read(data)
    if any(xmp.find_description(packet).text for packet in _extended(segments)):
        raise DataError(
            "the photo's description is in extended XMP, which is never changed; use --sidecar xmp"
        )
    found = _find(segments, _APP1, _XMP)
    chosen = xmp.to_edit([segments[n].data[len(_XMP) :] for n in found])
    places = [found[n] for n in chosen]
    if not places:
        places = [_after_exif(segments)]
        segments.insert(places[0], _Segment(_APP1, _XMP))
    for n in places:
        packet = edit(segments[n].data[len(_XMP) :])
        if packet and len(_XMP + packet) > _LARGEST:
            packet = xmp.without_padding(packet)
        segments[n] = segments[n]._replace(data=_XMP + packet if packet else b"")
    kept = [segment for n, segment in enumerate(segments) if segment.data or n not in places]
    return _written(data, kept, scan)


# --- Photoshop ------------------------------------------------------------------------------------


def resources(data: bytes) -> list[iptc.Resource]:
    """Return the image resources in a JPEG file. Damaged Photoshop segments are ignored."""
    return [one for _, found in _streams(_read(data)[0]) for one in found]


def _streams(segments: Sequence[_Segment]) -> list[tuple[list[int], list[iptc.Resource]]]:
    """Return groups of Photoshop segments, each with the image resources in the group.

    A group is a list of indices of ``segments``. All Photoshop segments form one group if they can
    be read as one block, because resources may continue from segment to segment. Otherwise, each
    segment is a group. Damaged segments are left out.
    """
    places = _find(segments, _APP13, _PHOTOSHOP)
    found = []
    for group in (places, *([n] for n in places)):
        try:
            joined = b"".join(segments[n].data[len(_PHOTOSHOP) :] for n in group)
            found.append((group, iptc.read_resources(joined)))
        except DataError:
            continue
        if group == places:
            break
    return found


def edit_iptc(data: bytes, edit: iptc.Edit) -> bytes:
    """Return a JPEG file with edited IPTC data. Damaged Photoshop segments are kept unchanged.

    Raises:
        DataError: The IPTC data is damaged, or the metadata becomes too large.
    """
    segments, scan = _read(data)
    streams = _streams(segments)
    if not _find(segments, _APP13, _PHOTOSHOP):
        xmp_at = _find(segments, _APP1, _XMP)
        at = xmp_at[0] + 1 if xmp_at else _after_exif(segments)
        segments.insert(at, _Segment(_APP13, _PHOTOSHOP))
        streams = [([at], [])]
    new: dict[int, list[_Segment]] = {}
    for group, found in [one for one in streams if iptc.captions(one[1])] or streams[:1]:
        body = b"".join(one.encoded() for one in iptc.edited(found, edit))
        size = _LARGEST - len(_PHOTOSHOP)
        parts = [body[at : at + size] for at in range(0, len(body), size)]
        added = [_Segment(_APP13, _PHOTOSHOP + part) for part in parts]
        last = len(group) - 1
        new |= {n: added[k : k + 1] if k < last else added[k:] for k, n in enumerate(group)}
    changed = [one for n, segment in enumerate(segments) for one in new.get(n, [segment])]
    return _written(data, changed, scan)


# --- Offsets --------------------------------------------------------------------------------------


def _written(data: bytes, segments: Sequence[_Segment], scan: int) -> bytes:
    """Return a file with new segments, and with adjusted offsets to the pictures after the photo.

    ``scan`` is the position in ``data`` where the first scan begins.

    Raises:
        DataError: A segment is too large, or data after the photo cannot be moved.
    """
    if any(len(segment.data) > _LARGEST for segment in segments):
        raise DataError("the metadata is too large for JPEG; use --sidecar xmp")
    new_scan = 2 + sum(len(segment.data) + 4 for segment in segments)
    if new_scan != scan and data[-12:-8] in (b"AXS!", b"AXS*"):
        raise DataError("the photo ends with AFCP data, which cannot be moved; use --sidecar xmp")
    starts, pieces, at = _pictures_after(data, scan), [data[:2]], 2
    for one in segments:
        # Number of bytes by which the distance from this segment's data, where offsets begin, to
        # the scan grows.
        growth = (new_scan - at - 4) - (scan - one.at) if one.at else 0
        body = one.data
        if one.at and new_scan != scan and one.starts(_APP2, _MPF):
            body = _moved_pictures(one, scan, growth, new_scan - scan)
        elif growth and starts and one.starts(_APP1, _EXIF):
            body = _moved_previews(one, starts, growth)
        pieces.append(struct.pack(">BBH", 0xFF, one.marker, len(body) + 2) + body)
        at += len(body) + 4
    return b"".join([*pieces, data[scan:]])


def _pictures_after(data: bytes, scan: int) -> list[int]:
    """Return the positions of the pictures that follow the end of the photo."""
    end = data.find(b"\xff\xd9", scan)
    found = re.compile(rb"\xff\xd8\xff").finditer(data, end if end >= 0 else len(data))
    return [one.start() for one in islice(found, _PICTURES)]


def _moved_pictures(segment: _Segment, scan: int, growth: int, whole: int) -> bytes:
    """Adjust the offsets in a Multi-Picture segment. They count from the segment's TIFF header.

    Args:
        segment: The segment.
        scan: Position in the old file where the first scan begins.
        growth: Number of bytes by which the distance from the segment to the scan grows.
        whole: Number of bytes by which the photo grows.
    """
    body = bytearray(segment.data)
    order = ">" if body[4:6] == b"MM" else "<"
    base = len(_MPF)
    try:
        (at,) = struct.unpack_from(f"{order}I", body, base + 4)
        (count,) = struct.unpack_from(f"{order}H", body, base + at)
        for n in range(count):
            tag, _, size, value = struct.unpack_from(f"{order}HHII", body, base + at + 2 + 12 * n)
            if tag != _MP_ENTRY:
                continue
            for entry in range(base + value, base + value + size // 16 * 16, 16):
                length, offset = struct.unpack_from(f"{order}II", body, entry + 4)
                if entry == base + value:  # the photo itself
                    struct.pack_into(f"{order}I", body, entry + 4, length + whole)
                elif offset and segment.at + base + offset >= scan:
                    struct.pack_into(f"{order}I", body, entry + 8, offset + growth)
    except struct.error as error:
        raise DataError("the photo's Multi-Picture data is damaged; use --sidecar xmp") from error
    return bytes(body)


def _moved_previews(segment: _Segment, starts: Sequence[int], growth: int) -> bytes:
    """Adjust the offsets in an EXIF segment to pictures after the photo.

    Offsets count from the segment's TIFF header. Their fields are found by their bytes, because the
    fields may be in a part with the camera maker's own format. Such a field contains a type, a
    number of values (1, or the number of bytes), and exactly the offset of a picture.

    Args:
        segment: The segment.
        starts: Positions in the old file of the pictures after the photo.
        growth: Number of bytes by which the distance from the segment to the pictures grows.
    """
    body, offsets = segment.data, [start - segment.at - len(_EXIF) for start in starts]
    for order, field in _OFFSETS.items():
        new = {struct.pack(f"{order}I", n): struct.pack(f"{order}I", n + growth) for n in offsets}
        pattern = b"(?<=(?:%b))(?:%b)" % (field, b"|".join(map(re.escape, new)))
        found = Counter(re.findall(pattern, body, re.DOTALL))
        for old, offset in zip(new, offsets, strict=True):
            if offset > _SMALL and body.count(old) > found[old]:
                raise DataError(
                    "the EXIF data refers to a picture after the photo, which cannot be moved; use "
                    "--sidecar xmp"
                )
        body = re.sub(pattern, lambda offset, new=new: new[offset[0]], body, flags=re.DOTALL)  # type: ignore[misc]
    return body
