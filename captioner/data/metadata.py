"""Sets description and keywords in XMP packets and sidecars, and in JPEG and PNG files.

    XMP     dc:description, a language alternative, and dc:subject, a bag
    JPEG    XMP in an APP1 segment; IPTC Caption-Abstract and Keywords in Photoshop's APP13 segment
    PNG     XMP in an iTXt chunk

A packet is edited as text, and a file as segments or chunks: everything else keeps its bytes, so
pixels, prefixes, comments and properties of other programs survive. expat only finds the places.
A DataError is raised for what is damaged, too large or not in the form that photo programs write.

Sources: XMP Specification Part 1 (2012), sections 7 (RDF/XML) and 8.3, and Part 3, sections 1.1.3
(JPEG) and 1.1.5 (PNG); IPTC Information Interchange Model 4.2 (2:25, 2:120 and 1:90); Adobe
Photoshop File Formats, "Image Resources Section".
"""

from __future__ import annotations

import hashlib
import re
import struct
import zlib
from collections.abc import Iterable, Iterator, Sequence
from html import escape
from itertools import chain
from typing import NamedTuple
from xml.parsers import expat

from captioner.errors import DataError

_JPEG = b"\xff\xd8\xff"
_PNG = b"\x89PNG\r\n\x1a\n"

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
_HEADER_END = 33  # of the signature and the first chunk, IHDR
_LARGEST_XMP = 1 << 24  # bytes of a compressed XMP chunk, once expanded

_DC = "http://purl.org/dc/elements/1.1/"
_RDF = "http://www.w3.org/1999/02/22-rdf-syntax-ns#"
_XML = "http://www.w3.org/XML/1998/namespace"
_ROOT, _RESOURCE = f"{_RDF} RDF", f"{_RDF} Description"

_EMPTY = """\
<?xpacket begin="\ufeff" id="W5M0MpCehiHzreSzNTczkc9d"?>
<x:xmpmeta xmlns:x="adobe:ns:meta/">
 <rdf:RDF xmlns:rdf="http://www.w3.org/1999/02/22-rdf-syntax-ns#">
 </rdf:RDF>
</x:xmpmeta>
<?xpacket end="w"?>
"""


# --- XMP ------------------------------------------------------------------------------------------


def read_description(packet: bytes) -> str:
    """Return the default description of an XMP packet; empty if it has none."""
    found = _items(_parse(packet), "description")
    default = [item.text for item in found if item.language == "x-default"]
    return (default or [item.text for item in found] or [""])[0].strip()


def set_description(packet: bytes | None, text: str, keywords: Sequence[str] = ()) -> bytes:
    """A packet or sidecar file (None: a new one) with another default description.

    Descriptions in other languages are kept. Keywords are added to its own, each once whatever its
    case.
    """
    packet = _EMPTY.encode() if packet is None else packet
    elements = _parse(packet)
    items = [f'<rdf:li xml:lang="x-default">{escape(text, quote=False)}</rdf:li>'.encode()]
    others = [i for i in _items(elements, "description") if i.language not in ("x-default", "")]
    items += [packet[item.start : item.end] for item in others]
    packet = _with_property(packet, "description", "Alt", items)
    old = [item.text.strip() for item in _items(elements, "subject")]
    if new := new_keywords(old, keywords):
        items = [f"<rdf:li>{escape(word, quote=False)}</rdf:li>".encode() for word in [*old, *new]]
        packet = _with_property(packet, "subject", "Bag", items)
    return packet


def new_keywords(old: Iterable[str], keywords: Iterable[str]) -> list[str]:
    """The keywords that are not among the old ones, each once, whatever their case."""
    known = {word.casefold() for word in old}
    new = {word.casefold(): word for word in keywords}
    return [word for folded, word in new.items() if folded not in known]


def _with_property(packet: bytes, name: str, kind: str, items: Sequence[bytes]) -> bytes:
    """A packet with another Dublin Core property: an ``rdf:Alt`` or ``rdf:Bag`` of items."""
    elements = _parse(packet)
    opened = f'<dc:{name} xmlns:dc="{_DC}" xmlns:rdf="{_RDF}"><rdf:{kind}>'.encode()
    element = opened + b"".join(items) + f"</rdf:{kind}></dc:{name}>".encode()
    if old := [one for one in elements if one.path[-3:] == _property(name)]:
        return packet[: old[-1].start] + element + packet[old[-1].end :]
    resources = [one for one in elements if one.path[-2:] == (_ROOT, _RESOURCE)]
    about = resources[0].attributes.get(f"{_RDF} about", "") if resources else ""
    opened = f'<rdf:Description xmlns:rdf="{_RDF}" rdf:about="{escape(about)}">'.encode()
    new = b" " + opened + element + b"</rdf:Description>\n "
    insert = next(one.closing for one in reversed(elements) if one.path[-1] == _ROOT)
    return packet[:insert] + new + packet[insert:]


class _Element(NamedTuple):
    """An element of a packet, with its bytes."""

    path: tuple[str, ...]
    """Names from the root to this element: namespace, space, local name."""
    attributes: dict[str, str]
    text: str
    """Its own, without that of elements in it."""
    start: int
    closing: int
    """Where its end tag starts, if it has one."""
    end: int

    @property
    def language(self) -> str:
        return self.attributes.get(f"{_XML} lang", "")


def _items(elements: Sequence[_Element], name: str) -> list[_Element]:
    """The items of a property, or the property itself if it is plain text."""
    items = [e for e in elements if e.path[-1] == f"{_RDF} li" and e.path[-5:-2] == _property(name)]
    return items or [e for e in elements if e.path[-3:] == _property(name) and e.text.strip()]


def _property(name: str) -> tuple[str, str, str]:
    """Path of a property of the photo itself, not of a part of it."""
    return _ROOT, _RESOURCE, f"{_DC} {name}"


def _parse(packet: bytes) -> list[_Element]:
    """The elements of a packet, in the order in which they end."""
    elements: list[_Element] = []
    opened: list[tuple[str, dict[str, str], int, list[str]]] = []

    def begin(name: str, attributes: dict[str, str]) -> None:
        opened.append((name, attributes, parser.CurrentByteIndex, []))

    def end(_: str) -> None:
        path = tuple(name for name, *_ in opened)
        _, attributes, start, text = opened.pop()
        at = parser.CurrentByteIndex  # of the end tag or of <a/>; the end if <a/> is the root
        tag = re.compile(rb"""<(?:[^>"']|"[^"]*"|'[^']*')*>""").match(packet, at)
        after = tag.end() if tag else at
        elements.append(_Element(path, attributes, "".join(text), start, at, after))

    def add(text: str) -> None:
        opened[-1][3].append(text)

    def refuse_doctype(*_: object) -> None:
        raise DataError("the XMP has a document type declaration; restore it, or move it away")

    parser = expat.ParserCreate("utf-8", " ")
    parser.StartElementHandler, parser.EndElementHandler = begin, end
    parser.CharacterDataHandler = add
    parser.StartDoctypeDeclHandler = refuse_doctype
    try:
        packet.decode()
        parser.Parse(packet, True)
    except UnicodeDecodeError as error:
        raise DataError("the XMP is not in UTF-8; convert it, or move it away") from error
    except expat.ExpatError as error:
        raise DataError(f"the XMP is damaged ({error}); restore it, or move it away") from error
    roots = [one for one in elements if one.path[-1] == _ROOT]
    if not roots or not packet.startswith(b"</", roots[-1].closing):
        raise DataError("the XMP has no rdf:RDF element with content; restore it, or move it away")
    resources = [one for one in elements if one.path[-2:] == (_ROOT, _RESOURCE)]
    if any(f"{_DC} description" in one.attributes for one in resources):
        raise DataError(
            "the XMP has its description in an attribute, which is not supported; remove it"
        )
    return elements


# --- Photos ---------------------------------------------------------------------------------------


def can_embed(data: bytes) -> bool:
    """Whether the format of a file is supported."""
    return data.startswith((_JPEG, _PNG))


def embedded_description(data: bytes) -> str:
    """Return the description in a JPEG or PNG file, from XMP or else IPTC; empty if it has none."""
    if data.startswith(_PNG):
        packet = _xmp_in_png(data)[2]
        return "" if packet is None else read_description(packet)
    segments, _ = _segments(data)
    xmp = (s.data[len(_XMP_IN_JPEG) :] for s in segments if s.starts(_APP1, _XMP_IN_JPEG))
    resources = (r for s in segments if s.starts(_APP13, _PHOTOSHOP) for r in _resources(s.data))
    iptc = (dict(_datasets(r.data)).get(_CAPTION, b"") for r in resources if r.number == _IPTC)
    texts = chain(map(read_description, xmp), (text.decode(errors="replace") for text in iptc))
    return next((text for text in texts if text.strip()), "")


def embed_description(data: bytes, text: str, keywords: Sequence[str] = ()) -> bytes:
    """Return a JPEG or PNG file with another description, and more keywords; all else is kept."""
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

    def find(marker: int, name: bytes, otherwise: int) -> tuple[int, bytes]:
        """Index of a segment, which is inserted if there is none, and what follows its name."""
        for n, segment in enumerate(segments):
            if segment.starts(marker, name):
                return n, segment.data[len(name) :]
        segments.insert(otherwise, _Segment(marker, name))
        return otherwise, b""

    first = [s.marker == _APP0 or s.starts(_APP1, _EXIF) for s in segments]  # JFIF, EXIF
    at, packet = find(_APP1, _XMP_IN_JPEG, [*first, False].index(False))
    packet = set_description(packet or None, text, keywords)
    segments[at] = _Segment(_APP1, _XMP_IN_JPEG + packet)
    # If resources are split over several segments, only XMP gets the text.
    if sum(segment.starts(_APP13, _PHOTOSHOP) for segment in segments) < 2:
        at, resources = find(_APP13, _PHOTOSHOP, at + 1)
        segments[at] = _Segment(_APP13, _PHOTOSHOP + _with_iptc(resources, text, keywords))
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


def _xmp_in_png(data: bytes) -> tuple[int, int, bytes | None]:
    """Where the XMP chunk begins and ends, and its packet; None: it would be after the header."""
    at = len(_PNG)
    while (kind := data[at + 4 : at + 8]) != b"IEND":
        end = at + 12 + int.from_bytes(data[at : at + 4], "big")
        if len(data) < end:
            raise DataError("the PNG is damaged; copy or download the file again")
        if kind == b"iTXt" and data.startswith(_XMP_IN_PNG, at + 8):
            content = data[at + 8 + len(_XMP_IN_PNG) : end - 4]
            packet = content[2:].split(b"\0", 2)[-1]  # after language and translated keyword
            try:
                if content.startswith(b"\1"):
                    packet = zlib.decompressobj().decompress(packet, _LARGEST_XMP)
            except zlib.error as error:
                raise DataError("the PNG's XMP is damaged; use --sidecar xmp") from error
            return at, end, packet
        at = end
    return _HEADER_END, _HEADER_END, None


def _embed_in_png(data: bytes, text: str, keywords: Sequence[str]) -> bytes:
    start, end, old = _xmp_in_png(data)
    body = b"iTXt" + _XMP_IN_PNG + b"\0\0\0\0" + set_description(old, text, keywords)
    new = struct.pack(">I", len(body) - 4) + body + struct.pack(">I", zlib.crc32(body))
    return data[:start] + new + data[end:]
