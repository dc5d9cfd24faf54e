"""Description (``dc:description``) and keywords (``dc:subject``) in an XMP packet or sidecar file.

The packet is edited as text: everything else keeps its bytes, so prefixes, comments and properties
of other programs survive. expat only finds the places.

Sources: XMP Specification Part 1 (2012), section 7 (RDF/XML) and 8.3 (dc:description is a language
alternative, dc:subject a bag).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
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
    found = _parse(packet).properties["description"].items
    default = [item.text for item in found if item.language == "x-default"]
    return (default or [item.text for item in found] or [""])[0].strip()


def set_description(packet: bytes | None, text: str, keywords: Sequence[str] = ()) -> bytes:
    """A packet or sidecar file (None: a new one) with another default description.

    Descriptions in other languages are kept. Keywords are added to its own, each once whatever its
    case.

    Raises:
        DataError: The packet is damaged, or not in the form that photo programs write.
    """
    from xml.sax.saxutils import escape

    packet = _EMPTY.encode() if packet is None else packet
    found = _parse(packet).properties
    items = [f'<rdf:li xml:lang="x-default">{escape(text)}</rdf:li>'.encode()]
    for item in found["description"].items:
        if item.language not in ("x-default", ""):
            items.append(packet[item.start : item.end])
    packet = _with_property(packet, "description", "Alt", items)
    old = [item.text.strip() for item in found["subject"].items]
    if new := new_keywords(old, keywords):
        items = [f"<rdf:li>{escape(word)}</rdf:li>".encode() for word in [*old, *new]]
        packet = _with_property(packet, "subject", "Bag", items)
    return packet


def new_keywords(old: Iterable[str], keywords: Iterable[str]) -> list[str]:
    """The keywords that are not among the old ones, each once, whatever their case."""
    known, new = {word.casefold() for word in old}, []
    for word in keywords:
        if word.casefold() not in known:
            known.add(word.casefold())
            new.append(word)
    return new


def _with_property(packet: bytes, name: str, kind: str, items: Sequence[bytes]) -> bytes:
    """A packet with another Dublin Core property: an ``rdf:Alt`` or ``rdf:Bag`` of items."""
    from xml.sax.saxutils import quoteattr  # here, since it imports an HTTP client

    found = _parse(packet)
    opened = f'<dc:{name} xmlns:dc="{_DC}" xmlns:rdf="{_RDF}"><rdf:{kind}>'.encode()
    element = opened + b"".join(items) + f"</rdf:{kind}></dc:{name}>".encode()
    if (span := found.properties[name].span) is not None:
        return packet[: span[0]] + element + packet[span[1] :]
    about = quoteattr(found.about or "")
    opened = f'<rdf:Description xmlns:rdf="{_RDF}" rdf:about={about}>'.encode()
    new = b" " + opened + element + b"</rdf:Description>\n "
    return packet[: found.insert] + new + packet[found.insert :]


class _Item(NamedTuple):
    """A description in one language, or a keyword, with its bytes in the packet."""

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


@dataclass
class _Property:
    items: list[_Item] = field(default_factory=list)
    span: tuple[int, int] | None = None
    """Bytes of its element."""


class _Reader:
    """Collects the descriptions and keywords, and their places."""

    def __init__(self, packet: bytes) -> None:
        self.packet = packet
        self.properties = {name: _Property() for name in ("description", "subject")}
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
        elif self._property(name, self._open):
            self._start = self.parser.CurrentByteIndex
            self._text.clear()
        elif name == f"{_RDF} li" and self._property_around():
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
        elif name == f"{_RDF} li" and (around := self._property_around()):
            text = "".join(self._text)
            around.items.append(_Item(self._language, text, self._item_start, self._after(at)))
        elif found := self._property(name, self._open):
            if not found.items and (text := "".join(self._text)).strip():  # plain text, no rdf:Alt
                found.items.append(_Item("", text, self._start, self._after(at)))
            found.span = self._start, self._after(at)

    def _property(self, name: str, above: list[str]) -> _Property | None:
        """The property that an element is, if it is the photo's own, not that of a part of it."""
        space, _, local = name.rpartition(" ")
        own = space == _DC and above[-2:] == [f"{_RDF} RDF", f"{_RDF} Description"]
        return self.properties.get(local) if own else None

    def _property_around(self) -> _Property | None:
        """The property in whose rdf:Alt or rdf:Bag the open elements end."""
        return self._property((self._open[-2:] or [""])[0], self._open[:-2])

    def _after(self, at: int) -> int:
        """Where the tag ends whose end event was at this byte (``<a/>`` has it at its start)."""
        tag = re.compile(rb"""<(?:[^>"']|"[^"]*"|'[^']*')*>""").match(self.packet, at)
        assert tag is not None  # expat has read it
        return tag.end()
