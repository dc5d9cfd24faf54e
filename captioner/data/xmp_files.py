"""Functions that read and edit the XMP packets in PNG, WebP and TIFF files.

    PNG     an iTXt chunk; packets in other text chunks, as ImageMagick writes them, move into it
    WebP    the chunk "XMP ", and its flag in the chunk VP8X, which is added where it is missing
    TIFF    the tag 700; the changed directory and the packet are appended, so that nothing moves

In PNG and WebP, every other byte is kept. In TIFF, every byte is kept except the address of the
first directory. Most camera RAW files have the structure of TIFF. `captioner.data.metadata` rejects
them (see `is_raw_tiff`), because captioner never changes camera RAW.

Sources: XMP Specification Part 3, 1.1.5 (PNG) and 1.1.8 (TIFF); RFC 9649 (WebP); TIFF 6.0; the
BigTIFF design of libtiff; ImageMagick's "Raw profile type xmp".
"""

from __future__ import annotations

import re
import struct
import zlib
from collections.abc import Callable, Iterator
from typing import NamedTuple

from captioner.data import iptc, xmp
from captioner.errors import DataError

EditPacket = Callable[[bytes | None], bytes | None]
"""Function that edits a packet. It receives None if the file has no packet, and it returns None to
remove the packet."""

_DAMAGED = "the {} is damaged; copy or download the file again"
_LARGEST_XMP = 1 << 24  # limit on the bytes of a packet after decompression


class _Place(NamedTuple):
    """An XMP packet, with the position of its chunk in the file."""

    start: int
    """Position of the chunk's first byte."""
    end: int
    """Position after the chunk's last byte."""
    packet: bytes
    """The packet, without the chunk's header."""


def _replaced(
    data: bytes, places: list[_Place], otherwise: int, edit: Callable[[bytes | None], bytes]
) -> bytes:
    """Return a file with edited XMP packets.

    All packets with a description are edited, or else one packet (see `xmp.to_edit`).

    Args:
        data: The file.
        places: The packets of the file.
        otherwise: Position at which a new chunk is inserted if the file has no packet.
        edit: Function that receives a packet, or None for a new chunk. It returns the whole chunk
            of the edited packet. Empty bytes remove the chunk.
    """
    chosen = [places[n] for n in xmp.to_edit([one.packet for one in places])]
    for one in reversed(chosen):
        data = data[: one.start] + edit(one.packet) + data[one.end :]
    return data if chosen else data[:otherwise] + edit(None) + data[otherwise:]


# --- PNG ------------------------------------------------------------------------------------------

PNG = b"\x89PNG\r\n\x1a\n"
_KEYWORDS = (b"XML:com.adobe.xmp\0", b"Raw profile type xmp\0")
_HEADER_END = 33  # position after the signature and the first chunk, IHDR


def png_packets(data: bytes) -> list[bytes]:
    """Return the XMP packets of a PNG file."""
    return [one.packet for one in _png_places(data)]


def edit_png(data: bytes, edit: EditPacket) -> bytes:
    """Return a PNG file with its XMP packet edited by ``edit``.

    ``edit`` receives the packet, or None if the file has no packet. It returns the new packet, or
    None to remove the packet.
    """

    def chunk(packet: bytes | None) -> bytes:
        """Return the edited packet as an iTXt chunk, or empty bytes to remove the chunk."""
        if (packet := edit(packet)) is None:
            return b""
        body = b"iTXt" + _KEYWORDS[0] + b"\0\0\0\0" + packet
        return struct.pack(">I", len(body) - 4) + body + struct.pack(">I", zlib.crc32(body))

    return _replaced(data, _png_places(data), _HEADER_END, chunk)


def _png_places(data: bytes) -> list[_Place]:
    """Return the XMP packets of a PNG file, with their positions."""
    at, found = len(PNG), []
    while (kind := data[at + 4 : at + 8]) != b"IEND":
        end = at + 12 + int.from_bytes(data[at : at + 4], "big")
        if len(data) < end:
            raise DataError(_DAMAGED.format("PNG"))
        content = data[at + 8 : end - 4]
        for keyword in _KEYWORDS:
            if kind in (b"iTXt", b"tEXt", b"zTXt") and content.startswith(keyword):
                text = _png_text(kind, content[len(keyword) :])
                packet = text if keyword is _KEYWORDS[0] else _raw_profile(text)
                found.append(_Place(at, end, packet))
        at = end
    return found


def _png_text(kind: bytes, content: bytes) -> bytes:
    """Return the text in a text chunk of a PNG file, decompressed if necessary.

    Args:
        kind: Type of the chunk: ``tEXt``, ``zTXt`` or ``iTXt``.
        content: Content of the chunk after its keyword.
    """
    compressed, text = kind == b"zTXt", content
    if kind == b"zTXt":
        text = content[1:]
    elif kind == b"iTXt":
        compressed = content.startswith(b"\1")
        text = content[2:].split(b"\0", 2)[-1]  # after the language and the translated keyword
    try:
        return zlib.decompressobj().decompress(text, _LARGEST_XMP) if compressed else text
    except zlib.error as error:
        raise DataError("the compressed XMP is damaged and cannot be decompressed") from error


def _raw_profile(text: bytes) -> bytes:
    """Return the packet in a text chunk by ImageMagick: a name, a size and hexadecimal digits."""
    try:
        return bytes.fromhex(text.split(None, 2)[2].decode())
    except (IndexError, ValueError) as error:
        raise DataError(
            "the XMP of ImageMagick is damaged (its text is not hexadecimal)"
        ) from error


# --- WebP -----------------------------------------------------------------------------------------

WEBP = re.compile(rb"RIFF....WEBP", re.DOTALL)
_XMP_FLAG, _ALPHA_FLAG = 4, 16
_XMP_CHUNKS = (b"XMP ", b"XMP\0")


def webp_packets(data: bytes) -> list[bytes]:
    """Return the XMP packets of a WebP file."""
    return [one.packet for one in _webp_places(data)]


def edit_webp(data: bytes, edit: EditPacket) -> bytes:
    """Return a WebP file with its XMP packet edited by ``edit``.

    ``edit`` receives the packet, or None if the file has no packet. It returns the new packet, or
    None to remove the packet.
    """

    def chunk(packet: bytes | None) -> bytes:
        """Return the edited packet as a WebP chunk, or empty bytes to remove the chunk."""
        packet = edit(packet)
        return b"" if packet is None else _webp_chunk(b"XMP ", packet)

    end = 8 + int.from_bytes(data[4:8], "little")
    whole, rest = data[:end], data[end:]
    whole += b"\0" * (len(whole) % 2)
    edited = _replaced(whole, _webp_places(data), len(whole), chunk)
    edited = edited[:4] + struct.pack("<I", len(edited) - 8) + edited[8:]
    has_xmp = bool(_webp_places(edited))
    new = bytearray(edited)
    if new[12:16] != b"VP8X" and has_xmp:
        new[12:12] = _webp_header(data)
    if new[12:16] == b"VP8X":
        new[20] = new[20] | _XMP_FLAG if has_xmp else new[20] & ~_XMP_FLAG
    new[4:8] = struct.pack("<I", len(new) - 8)
    return bytes(new) + rest


def _webp_chunks(data: bytes) -> Iterator[tuple[bytes, int, int, int]]:
    """Yield each chunk's type, its position, and the start and end of its content."""
    at, end = 12, 8 + int.from_bytes(data[4:8], "little")
    while at + 8 <= min(end, len(data)):
        stop = at + 8 + int.from_bytes(data[at + 4 : at + 8], "little")
        if len(data) < stop:
            raise DataError(_DAMAGED.format("WebP"))
        yield bytes(data[at : at + 4]), at, at + 8, stop
        at = stop + stop % 2


def _webp_places(data: bytes) -> list[_Place]:
    """Return the XMP packets of a WebP file, with their positions."""
    return [
        _Place(at, stop + stop % 2, bytes(data[begin:stop]))
        for kind, at, begin, stop in _webp_chunks(data)
        if kind in _XMP_CHUNKS
    ]


def _webp_chunk(kind: bytes, content: bytes) -> bytes:
    """Return the bytes of a chunk of this type, padded to an even length."""
    return kind + struct.pack("<I", len(content)) + content + b"\0" * (len(content) % 2)


def _webp_header(data: bytes) -> bytes:
    """Return a chunk VP8X with the picture's size, for a file that lacks this chunk.

    In a WebP file with XMP, this must be the first chunk. The caller sets its flag for XMP.
    """
    kind, _, begin, _ = next(_webp_chunks(data), (b"", 0, 0, 0))
    if kind == b"VP8L":
        bits = int.from_bytes(data[begin + 1 : begin + 5], "little")
        width, height, alpha = (bits & 0x3FFF) + 1, (bits >> 14 & 0x3FFF) + 1, bits >> 28 & 1
    elif kind == b"VP8 ":
        width, height = (size & 0x3FFF for size in struct.unpack_from("<HH", data, begin + 6))
        alpha = 0
    else:
        raise DataError(_DAMAGED.format("WebP"))
    size = (width - 1).to_bytes(3, "little") + (height - 1).to_bytes(3, "little")
    return _webp_chunk(b"VP8X", bytes([_ALPHA_FLAG * alpha, 0, 0, 0]) + size)


# --- TIFF -----------------------------------------------------------------------------------------

TIFF = re.compile(rb"II(?:\*|\+)\0|MM\0(?:\*|\+)")
_XMP_TAG, _IPTC_TAG, _PHOTOSHOP_TAG = 700, 33723, 34377
_REDUCED, _SUB_IFDS, _DNG = 254, 330, 50706  # tags that identify camera RAW
_SIZES = {1: 1, 2: 1, 3: 2, 4: 4, 6: 1, 7: 1, 13: 4, 16: 8}  # bytes of a value, by type
_BYTES = 1  # type of the values of the XMP tag


class _Directory(NamedTuple):
    """The first directory of a TIFF file."""

    entries: dict[int, bytes]
    """Bytes of each entry by tag. An entry contains the tag, the type and number of its values, and
    the values themselves or their offset."""
    following: bytes
    """Bytes of the next directory's offset."""
    order: str
    """Byte order in the notation of ``struct``: ``<`` or ``>``."""
    big: bool
    """True if the file is BigTIFF, with offsets of 8 bytes."""

    @property
    def word(self) -> str:
        """The ``struct`` format of an offset."""
        return f"{self.order}{'Q' if self.big else 'I'}"


def tiff_packets(data: bytes) -> list[bytes]:
    """Return a list with the XMP packet of a TIFF file. It is empty if the file has no packet."""
    packet = _tiff_value(data, _directory(data), _XMP_TAG)
    return [packet] if packet else []


def tiff_captions(data: bytes) -> list[str]:
    """Return the captions in a TIFF file's IPTC tag and Photoshop tag. Damaged data is ignored."""
    directory, found = _directory(data), []
    for tag, read in ((_IPTC_TAG, iptc.texts), (_PHOTOSHOP_TAG, _resource_captions)):
        try:
            found += read(_tiff_value(data, directory, tag))
        except DataError:
            continue
    return found


def is_raw_tiff(data: bytes) -> bool:
    """Return whether a TIFF file is camera RAW.

    This is true for DNG and CR2 files, and for files that begin with a reduced version of other
    images.
    """
    directory = _directory(data)
    reduced = _tiff_value(data, directory, _REDUCED)
    sub_image = bool(reduced) and any(reduced) and _SUB_IFDS in directory.entries
    return _DNG in directory.entries or sub_image or data[8:10] == b"CR"


def edit_tiff(data: bytes, edit: EditPacket) -> bytes:
    """Return a TIFF file with its XMP packet edited by ``edit``.

    ``edit`` receives the packet, or None if the file has no packet. It returns the new packet, or
    None to remove the packet.
    """
    directory = _directory(data)
    packet = edit(_tiff_value(data, directory, _XMP_TAG) or None)
    entries, word = dict(directory.entries), directory.word
    data += b"\0" * (len(data) % 2)
    entries.pop(_XMP_TAG, None)
    if packet is not None:
        at, size = len(data), struct.calcsize(word)
        head = struct.pack(f"{directory.order}HH", _XMP_TAG, _BYTES)
        value = packet.ljust(size, b"\0") if len(packet) <= size else None
        if value is None:
            data += packet + b"\0" * (len(packet) % 2)
            value = struct.pack(word, at)
        entries[_XMP_TAG] = head + struct.pack(word, len(packet)) + value
    count = struct.pack(f"{directory.order}{'Q' if directory.big else 'H'}", len(entries))
    whole = [count, *(entry for _, entry in sorted(entries.items())), directory.following]
    if not directory.big and len(data) > 0xFFFF0000:
        raise DataError("the TIFF would exceed 4 GB with the caption; use --sidecar xmp")
    address = 8 if directory.big else 4
    first = struct.pack(word, len(data))
    return data[:address] + first + data[address + len(first) :] + b"".join(whole)


def _resource_captions(data: bytes) -> list[str]:
    """Return the IPTC captions in the value of the Photoshop tag."""
    return iptc.captions(iptc.read_resources(data))


def _directory(data: bytes) -> _Directory:
    """Return the first directory of a TIFF file.

    Raises:
        DataError: The file is damaged, or the directory contains a tag twice.
    """
    order, big = ("<" if data[:1] == b"I" else ">"), b"+" in data[2:4]
    word, counts, entry = (f"{order}Q", f"{order}Q", 20) if big else (f"{order}I", f"{order}H", 12)
    try:
        (at,) = struct.unpack_from(word, data, 8 if big else 4)
        (count,) = struct.unpack_from(counts, data, at)
    except struct.error as error:
        raise DataError(_DAMAGED.format("TIFF")) from error
    begin = at + struct.calcsize(counts)
    end = begin + count * entry
    following = data[end : end + struct.calcsize(word)]
    if len(following) < struct.calcsize(word):
        raise DataError(_DAMAGED.format("TIFF"))
    entries = (data[n : n + entry] for n in range(begin, end, entry))
    found = {int.from_bytes(e[:2], "little" if order == "<" else "big"): e for e in entries}
    if len(found) != count:
        raise DataError("the TIFF contains a duplicate tag; use --sidecar xmp")
    return _Directory(found, following, order, big)


def _tiff_value(data: bytes, directory: _Directory, tag: int) -> bytes:
    """Return the value of a tag as bytes, or empty bytes if the tag is missing."""
    if (entry := directory.entries.get(tag)) is None:
        return b""
    (kind,) = struct.unpack_from(f"{directory.order}H", entry, 2)
    (count,) = struct.unpack_from(directory.word, entry, 4)
    size, value = count * _SIZES.get(kind, 0), entry[4 + struct.calcsize(directory.word) :]
    if size > len(value):
        (at,) = struct.unpack(directory.word, value)
        value = data[at : at + size]
        if len(value) < size:
            raise DataError(_DAMAGED.format("TIFF"))
    return value[:size]
