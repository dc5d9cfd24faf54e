"""Description (``dc:description``) and keywords (``dc:subject``) in an XMP packet or sidecar file.

The packet is edited as text: everything else keeps its bytes, so prefixes, comments and properties
of other programs survive. expat only finds the places.

Sources: XMP Specification Part 1 (2012), section 7 (RDF/XML) and 8.3 (dc:description is a language
alternative, dc:subject a bag).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple
from xml.parsers import expat

from captioner.errors import DataError

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


def read_description(packet: bytes) -> str:
    """Return the default description of an XMP packet; empty if it has none.

    Raises:
        DataError: The packet is damaged.
    """
    found = _items(_parse(packet), "description")
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
    elements = _parse(packet)
    items = [f'<rdf:li xml:lang="x-default">{escape(text)}</rdf:li>'.encode()]
    for item in _items(elements, "description"):
        if item.language not in ("x-default", ""):
            items.append(packet[item.start : item.end])
    packet = _with_property(packet, "description", "Alt", items)
    old = [item.text.strip() for item in _items(elements, "subject")]
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

    elements = _parse(packet)
    opened = f'<dc:{name} xmlns:dc="{_DC}" xmlns:rdf="{_RDF}"><rdf:{kind}>'.encode()
    element = opened + b"".join(items) + f"</rdf:{kind}></dc:{name}>".encode()
    if old := [one for one in elements if one.path[-3:] == _property(name)]:
        return packet[: old[-1].start] + element + packet[old[-1].end :]
    resources = [one for one in elements if one.path[-2:] == (_ROOT, _RESOURCE)]
    about = resources[0].attributes.get(f"{_RDF} about", "") if resources else ""
    opened = f'<rdf:Description xmlns:rdf="{_RDF}" rdf:about={quoteattr(about)}>'.encode()
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
