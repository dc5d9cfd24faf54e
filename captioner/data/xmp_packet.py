"""Functions that edit XMP packets as bytes, at positions that the XML parser expat reports.

Everything that is not edited keeps its bytes: prefixes, comments, padding, bytes around the XML and
the properties of other programs. Packets in UTF-16 are converted to UTF-8 for editing, and then
back to UTF-16.

Source: XMP Specification Part 1 (2012), section 7 (RDF/XML).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from html import escape
from typing import NamedTuple
from xml.parsers import expat

from captioner.errors import DataError

_RDF = "http://www.w3.org/1999/02/22-rdf-syntax-ns#"
_XML = "http://www.w3.org/XML/1998/namespace"
_META = "adobe:ns:meta/ xmpmeta"
_ROOT, _RESOURCE, _ABOUT = f"{_RDF} RDF", f"{_RDF} Description", f"{_RDF} about"

Property = tuple[str, str]
"""The namespace of a property, and its name with a prefix, such as ``dc:subject``."""

_EMPTY = """\
<?xpacket begin="\ufeff" id="W5M0MpCehiHzreSzNTczkc9d"?>
<x:xmpmeta xmlns:x="adobe:ns:meta/">
 <rdf:RDF xmlns:rdf="http://www.w3.org/1999/02/22-rdf-syntax-ns#">
 </rdf:RDF>
</x:xmpmeta>
<?xpacket end="w"?>
"""
_DEPTH = 100
"""Limit on nested elements. Photo programs nest about 10."""
_TAG = re.compile(rb"""<(?:[^>"']|"[^"]*"|'[^']*')*>""")
_ENCODINGS = (
    (re.compile(rb"\xff\xfe(?!\0\0)|(?:\s\0)*<\0"), "utf-16-le"),
    (re.compile(rb"\xfe\xff|(?:\0\s)*\0<\0"), "utf-16-be"),
)
"""The first bytes of packets in UTF-16. All other packets are read as UTF-8."""


# --- Bytes around the XML -------------------------------------------------------------------------


class Opened(NamedTuple):
    """A packet in UTF-8, split into its XML and the bytes around it."""

    head: bytes
    """Bytes before the XML, such as a byte order mark."""
    body: bytes
    """The XML. Empty if the packet contains no XML."""
    tail: bytes
    """Bytes after the XML, such as zeros."""
    encoding: str
    """Encoding of the packet in the file."""


def opened_packet(packet: bytes) -> Opened:
    """Split a packet into its XML and the bytes around it.

    Raises:
        DataError: The packet is not valid text, or contains something other than XML.
    """
    encoding = next((name for pattern, name in _ENCODINGS if pattern.match(packet)), "utf-8")
    try:
        text = packet if encoding == "utf-8" else packet.decode(encoding).encode()
    except UnicodeError as error:
        raise DataError(f"the XMP is damaged (it is not valid {encoding.upper()})") from error
    start, end = text.find(b"<"), text.rfind(b">") + 1
    if start < 0 or end <= start:
        if text.strip(b"\0 \r\n\t\xef\xbb\xbf"):
            raise DataError("the XMP is damaged (it contains text that is not XML)")
        return Opened(b"", b"", b"", "utf-8")
    return Opened(text[:start], text[start:end], text[end:], encoding)


def edited_packet(packet: bytes | None, edit: Callable[[bytes], bytes]) -> bytes | None:
    """Return a packet after an edit of its XML, or None if the edited XML describes nothing.

    Args:
        packet: The packet. If it is None or describes nothing, a new packet is edited.
        edit: Function that receives the XML in UTF-8 and returns the edited XML.
    """
    opened = opened_packet(packet or b"")
    if not opened.body or not parse_packet(opened.body):
        opened = Opened(b"", _EMPTY.encode().rstrip(), b"\n", "utf-8")
    body = edit(opened.body)
    if not any(one.path[-2:-1] == (_ROOT,) for one in parse_packet(body)):
        return None
    whole = opened.head + body + opened.tail
    return whole if opened.encoding == "utf-8" else whole.decode().encode(opened.encoding)


# --- Properties -----------------------------------------------------------------------------------


def rdf_list(kind: str, items: Iterable[bytes]) -> bytes:
    """Return an RDF list with these ``rdf:li`` elements.

    ``kind`` is ``Alt`` (alternatives), ``Bag`` (no order) or ``Seq`` (a sequence).
    """
    return f'<rdf:{kind} xmlns:rdf="{_RDF}">'.encode() + b"".join(items) + f"</rdf:{kind}>".encode()


def rdf_bag(words: Iterable[str]) -> bytes:
    """Return an ``rdf:Bag`` element, an RDF list without order, that contains these texts."""
    return rdf_list(
        "Bag", (f"<rdf:li>{escape(word, quote=False)}</rdf:li>".encode() for word in words)
    )


def with_properties(body: bytes, new: dict[Property, bytes]) -> bytes:
    """Return the XML of a packet with new content for some properties of the photo.

    ``new`` maps each property to its content, as XML. Empty content removes the property. An
    existing property is replaced in its place. If it is written as an attribute, the attribute is
    removed and the property becomes an element. New properties are added at the end, in a separate
    ``rdf:Description``.
    """
    elements, edits, added = parse_packet(body), [], b""
    for prop, content in new.items():
        element = _element(prop, content) if content else b""
        old = [one for one in elements if one.path[-3:] == _path(prop)]
        edits += [(one.start, one.end, b"") for one in old[:-1]]
        edits += [(one.start, one.end, element) for one in old[-1:]]
        places = (one.attribute(body, full_name(prop)) for one in resources_of(elements))
        edits += [(*place, b"") for place in places if place]
        added += b"" if old else element
    if added:
        resources = resources_of(elements)
        about = escape(resources[0].attributes.get(_ABOUT, "")) if resources else ""
        opened = f'<rdf:Description xmlns:rdf="{_RDF}" rdf:about="{about}">'.encode()
        block = b" " + opened + added + b"</rdf:Description>\n "
        root = next(one for one in reversed(elements) if one.path[-1] == _ROOT)
        edits.append(root.inserted(body, block))
    for start, end, text in sorted(edits, reverse=True):
        body = body[:start] + text + body[end:]
    return body


def _element(prop: Property, content: bytes) -> bytes:
    """Return a property with this content as an XML element that declares its own prefix."""
    namespace, name = prop
    opened = f'<{name} xmlns:{name.partition(":")[0]}="{namespace}">'
    return opened.encode() + content + f"</{name}>".encode()


def without_empty_resources(body: bytes) -> bytes:
    """Return the XML of a packet without ``rdf:Description`` elements that contain nothing."""
    elements = parse_packet(body)
    for one in reversed(resources_of(elements)):
        inside = any(
            other.path[:-1] == one.path and one.start < other.start < one.end for other in elements
        )
        if not inside and not one.text.strip() and not {*one.attributes} - {_ABOUT}:
            own = body[one.start - 1 : one.start] == b" " and body.startswith(b"\n ", one.end)
            body = body[: one.start - own] + body[one.end + 2 * own :]
    return body


class Element(NamedTuple):
    """An element of a packet's XML. Positions count bytes from the start of the XML."""

    path: tuple[str, ...]
    """Names of the elements from the root to this element. Each name consists of the namespace, a
    space and the local name."""
    attributes: dict[str, str]
    """Value of each attribute by its name, in the form of the names in ``path``."""
    prefixes: dict[str, str]
    """Prefix of each attribute by its name. Empty for an attribute without a prefix."""
    text: str
    """The element's own text, without the text of elements in it."""
    start: int
    """Position of the start tag."""
    closing: int
    """Position of the end tag. For <a/>, the position of the tag itself."""
    end: int
    """Position after the end tag."""

    @property
    def language(self) -> str:
        """The value of ``xml:lang``, or an empty text if it is missing."""
        return self.attributes.get(f"{_XML} lang", "")

    def attribute(self, body: bytes, name: str) -> tuple[int, int] | None:
        """Return the start and end of an attribute in the XML, or None if it is missing.

        The white space before the attribute is included.
        """
        if name not in self.attributes:
            return None
        written = f"{self.prefixes[name]}:{name.rpartition(' ')[2]}".encode()
        pattern = rb"\s+" + re.escape(written) + rb"\s*=\s*(?:\"[^\"]*\"|'[^']*')"
        found = re.compile(pattern).search(body, self.start)
        return found.span() if found else None

    def inserted(self, body: bytes, block: bytes) -> tuple[int, int, bytes]:
        """Return the edit that adds a block of XML at the end of the element's content.

        The edit consists of a start, an end, and the bytes that replace the bytes between them.
        """
        if body.startswith(b"</", self.closing):
            return self.closing, self.closing, block
        tag = re.compile(rb"<([^\s/>]+)").match(body, self.start)
        name = tag[1] if tag else b"rdf:RDF"
        return self.end - 2, self.end, b">\n" + block + b"</" + name + b">"


def full_name(prop: Property) -> str:
    """Return the name of a property in the form of the names in ``Element.path``."""
    return f"{prop[0]} {prop[1].partition(':')[2]}"


def _path(prop: Property) -> tuple[str, str, str]:
    """Return the last three names in ``Element.path`` for a property of the whole photo."""
    return _ROOT, _RESOURCE, full_name(prop)


def resources_of(elements: Iterable[Element]) -> list[Element]:
    """Return the ``rdf:Description`` elements that describe the whole photo."""
    return [one for one in elements if one.path[-2:] == (_ROOT, _RESOURCE)]


def items_of(elements: Sequence[Element], prop: Property) -> list[Element]:
    """Return the list items of a property, or the property's own element if it is plain text."""
    items = [e for e in elements if e.path[-1] == f"{_RDF} li" and e.path[-5:-2] == _path(prop)]
    return items or [e for e in elements if e.path[-3:] == _path(prop) and e.text.strip()]


def texts_of(elements: Sequence[Element], prop: Property) -> list[str]:
    """Return the texts of a property that are not empty, from its elements and attributes."""
    found = [item.text for item in items_of(elements, prop)]
    found += [one.attributes.get(full_name(prop), "") for one in resources_of(elements)]
    return [text.strip() for text in found if text.strip()]


def parse_packet(body: bytes) -> list[Element]:
    """Return the elements of a packet's XML, in the order of their end tags.

    The result is empty if the packet describes nothing.

    Raises:
        DataError: The XML is damaged, is nested too deeply, or does not contain ``rdf:RDF``.
    """
    elements: list[Element] = []
    # Name, attributes, prefixes, start and pieces of text of each open element.
    opened: list[tuple[str, dict[str, str], dict[str, str], int, list[str]]] = []

    def begin(name: str, given: dict[str, str]) -> None:
        """Open an element."""
        if len(opened) == _DEPTH:
            raise DataError(f"the XMP is nested more than {_DEPTH} levels deep")
        attributes, prefixes = {}, {}
        for key, value in given.items():
            parts = key.split(" ")
            attributes[" ".join(parts[:2])] = value
            prefixes[" ".join(parts[:2])] = parts[2] if len(parts) > 2 else ""
        called = " ".join(name.split(" ")[:2])
        opened.append((called, attributes, prefixes, parser.CurrentByteIndex, []))

    def end(_: str) -> None:
        """Close the innermost open element, and record it with its positions."""
        path = tuple(name for name, *_ in opened)
        _, attributes, prefixes, start, text = opened.pop()
        # For <a/>, expat reports the position of its end, so the start tag's position is used.
        tag = _TAG.match(body, start)
        empty = tag is not None and tag[0].endswith(b"/>")
        at = start if empty else parser.CurrentByteIndex
        tag = _TAG.match(body, at)
        after = tag.end() if tag else at
        elements.append(Element(path, attributes, prefixes, "".join(text), start, at, after))

    def add(text: str) -> None:
        """Add text to the innermost open element."""
        opened[-1][4].append(text)

    def refuse_doctype(*_: object) -> None:
        """Reject a document type declaration, because its entities could expand to any size."""
        raise DataError(
            "the XMP contains a document type declaration (<!DOCTYPE>), which is not supported"
        )

    parser = expat.ParserCreate("utf-8", " ")
    parser.namespace_prefixes = True
    parser.StartElementHandler, parser.EndElementHandler = begin, end
    parser.CharacterDataHandler = add
    parser.StartDoctypeDeclHandler = refuse_doctype
    try:
        body.decode()
        parser.Parse(body, True)
    except UnicodeDecodeError as error:
        raise DataError("the XMP is not encoded in UTF-8") from error
    except expat.ExpatError as error:
        raise DataError(f"the XMP is damaged ({error})") from error
    if not any(one.path[-1] == _ROOT for one in elements):
        if [one.path for one in elements] == [(_META,)] and not elements[0].text.strip():
            return []
        raise DataError("the XMP is incomplete (its element rdf:RDF is missing)")
    return elements
