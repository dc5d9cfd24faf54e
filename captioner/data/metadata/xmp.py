"""Reads and sets the description (``dc:description``) in an XMP packet or sidecar file.

The packet is edited as text: everything but the description keeps its bytes, so prefixes, comments
and properties of other programs survive. expat only finds the places.

Sources: XMP Specification Part 1 (2012), section 7 (RDF/XML) and 8.3 (dc:description is a language
alternative).
"""

from __future__ import annotations

import re
from typing import NamedTuple
from xml.parsers import expat

from captioner.errors import DataError

_DC = "http://purl.org/dc/elements/1.1/"
_RDF = "http://www.w3.org/1999/02/22-rdf-syntax-ns#"
_XML = "http://www.w3.org/XML/1998/namespace"

_EMPTY = """\
<?xpacket begin="\ufeff" id="W5M0MpCehiHzreSzNTczkc9d"?>
<x:xmpmeta xmlns:x="adobe:ns:meta/">
 <rdf:RDF xmlns:rdf="http://www.w3.org/1999/02/22-rdf-syntax-ns#">
 </rdf:RDF>
</x:xmpmeta>
<?xpacket end="w"?>
"""


def read_description(packet: bytes) -> str:
    """Return the default description of an XMP packet; empty if it has none.

    Raises:
        DataError: The packet is damaged.
    """
    found = _parse(packet).items
    default = [item.text for item in found if item.language == "x-default"]
    return (default or [item.text for item in found] or [""])[0].strip()


def set_description(packet: bytes | None, text: str) -> bytes:
    """A packet or sidecar file (None: a new one) with another default description.

    Those in other languages are kept.

    Raises:
        DataError: The packet is damaged, or not in the form that photo programs write.
    """
    from xml.sax.saxutils import escape, quoteattr  # here, since it imports an HTTP client

    packet = _EMPTY.encode() if packet is None else packet
    found = _parse(packet)
    items = [f'<rdf:li xml:lang="x-default">{escape(text)}</rdf:li>'.encode()]
    items += [packet[i.start : i.end] for i in found.items if i.language not in ("x-default", "")]
    description = (
        f'<dc:description xmlns:dc="{_DC}" xmlns:rdf="{_RDF}"><rdf:Alt>'.encode()
        + b"".join(items)
        + b"</rdf:Alt></dc:description>"
    )
    if found.description is not None:
        start, end = found.description
        return packet[:start] + description + packet[end:]
    about = quoteattr(found.about or "")
    opened = f'<rdf:Description xmlns:rdf="{_RDF}" rdf:about={about}>'.encode()
    new = b" " + opened + description + b"</rdf:Description>\n "
    return packet[: found.insert] + new + packet[found.insert :]


class _Item(NamedTuple):
    """A description in one language, with its bytes in the packet."""

    language: str
    text: str
    start: int
    end: int


def _parse(packet: bytes) -> _Reader:
    try:
        packet.decode()
    except UnicodeDecodeError as error:
        raise DataError("the XMP is not in UTF-8; convert it, or move it away") from error
    reader = _Reader(packet)
    try:
        reader.parser.Parse(packet, True)
    except expat.ExpatError as error:
        raise DataError(f"the XMP is damaged ({error}); restore it, or move it away") from error
    if not reader.insert:
        raise DataError("the XMP has no rdf:RDF element; restore it, or move it away")
    return reader


class _Reader:
    """Collects the descriptions and their places."""

    def __init__(self, packet: bytes) -> None:
        self.packet = packet
        self.items: list[_Item] = []
        self.description: tuple[int, int] | None = None
        """Bytes of the dc:description element."""
        self.insert = 0
        """Where a new rdf:Description goes: before the end of rdf:RDF."""
        self.about: str | None = None
        """``rdf:about`` of the first rdf:Description."""
        self._open: list[str] = []
        self._start = self._item_start = 0
        self._language = ""
        self._text: list[str] = []
        self.parser = expat.ParserCreate("utf-8", " ")
        self.parser.StartElementHandler = self._begin
        self.parser.EndElementHandler = self._end
        self.parser.CharacterDataHandler = self._text.append
        self.parser.StartDoctypeDeclHandler = self._refuse_doctype

    def _refuse_doctype(self, *_: object) -> None:
        raise DataError("the XMP has a document type declaration; restore it, or move it away")

    def _begin(self, name: str, attributes: dict[str, str]) -> None:
        parent = self._open[-1] if self._open else ""
        if name == f"{_RDF} Description" and parent == f"{_RDF} RDF":
            if f"{_DC} description" in attributes:
                raise DataError(
                    "the XMP has its description in an attribute, which is not supported; remove it"
                )
            if self.about is None:
                self.about = attributes.get(f"{_RDF} about", "")
        elif self._is_description(name, self._open):
            self._start = self.parser.CurrentByteIndex
            self._text.clear()
        elif name == f"{_RDF} li" and self._in_description():
            self._item_start = self.parser.CurrentByteIndex
            self._language = attributes.get(f"{_XML} lang", "")
            self._text.clear()
        self._open.append(name)

    def _end(self, name: str) -> None:
        self._open.pop()
        at = self.parser.CurrentByteIndex
        if name == f"{_RDF} RDF":
            if not self.packet.startswith(b"</", at):
                raise DataError("the XMP is empty (<rdf:RDF/>); move it away")
            self.insert = at
        elif name == f"{_RDF} li" and self._in_description():
            text = "".join(self._text)
            self.items.append(_Item(self._language, text, self._item_start, self._after(at)))
        elif self._is_description(name, self._open):
            if not self.items and (text := "".join(self._text)).strip():  # plain text, no rdf:Alt
                self.items.append(_Item("", text, self._start, self._after(at)))
            self.description = self._start, self._after(at)

    def _is_description(self, name: str, above: list[str]) -> bool:
        """Whether this is the photo's own description, not that of a part of it."""
        parents = [f"{_RDF} RDF", f"{_RDF} Description"]
        return name == f"{_DC} description" and above[-2:] == parents

    def _in_description(self) -> bool:
        """Whether the open elements end in the photo's dc:description and its rdf:Alt."""
        return self._is_description((self._open[-2:] or [""])[0], self._open[:-2])

    def _after(self, at: int) -> int:
        """Where the tag ends whose end event was at this byte (``<a/>`` has it at its start)."""
        tag = re.compile(rb"""<(?:[^>"']|"[^"]*"|'[^']*')*>""").match(self.packet, at)
        assert tag is not None  # expat has read it
        return tag.end()
