"""Functions that edit XMP packets as text. The parser expat finds the properties to edit.

Everything that is not edited keeps its bytes: prefixes, comments, padding, bytes around the XML and
the properties of other programs. Packets in UTF-16 are edited in UTF-8 and encoded again.

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
"""Namespace and prefixed name of a property, such as ``dc:subject``."""

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


# --- Bytes around the XML -------------------------------------------------------------------------


class Opened(NamedTuple):
    """A packet in UTF-8, and the bytes around its XML, such as zeros."""

    head: bytes
    body: bytes
    tail: bytes
    encoding: str


def opened_packet(packet: bytes) -> Opened:
    """Return the XML of a packet, which may be empty, and the bytes around it."""
    encoding = next((name for pattern, name in _ENCODINGS if pattern.match(packet)), "utf-8")
    try:
        text = packet if encoding == "utf-8" else packet.decode(encoding).encode()
    except UnicodeError as error:
        raise DataError(f"the XMP is damaged (it is not valid {encoding.upper()})") from error
    start, end = text.find(b"<"), text.rfind(b">") + 1
    if start < 0 or end <= start:
        if text.strip(b"\0 \r\n\t\xef\xbb\xbf"):
            raise DataError("the XMP is damaged (it is not XML)")
        return Opened(b"", b"", b"", "utf-8")
    return Opened(text[:start], text[start:end], text[end:], encoding)


def edited_packet(packet: bytes | None, edit: Callable[[bytes], bytes]) -> bytes | None:
    """Return a packet after an edit of its XML, or None if the edit leaves nothing.

    If ``packet`` is None or contains no XML, a new packet is edited.
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
    """Return an ``rdf:Alt``, ``rdf:Bag`` or ``rdf:Seq`` of ``rdf:li`` elements."""
    return f'<rdf:{kind} xmlns:rdf="{_RDF}">'.encode() + b"".join(items) + f"</rdf:{kind}>".encode()


def rdf_bag(words: Iterable[str]) -> bytes:
    """Return an ``rdf:Bag`` of texts."""
    return rdf_list(
        "Bag", (f"<rdf:li>{escape(word, quote=False)}</rdf:li>".encode() for word in words)
    )


def with_properties(body: bytes, new: dict[Property, bytes]) -> bytes:
    """Return a packet with new content for these properties of the photo.

    Empty content removes a property. An existing property is replaced in its place, and an
    attribute becomes an element. New properties are added at the end, in a separate element.
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
    namespace, name = prop
    opened = f'<{name} xmlns:{name.partition(":")[0]}="{namespace}">'
    return opened.encode() + content + f"</{name}>".encode()


def without_empty_resources(body: bytes) -> bytes:
    """Return a packet without empty ``rdf:Description`` elements."""
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
    """An element of a packet, with the position of its bytes."""

    path: tuple[str, ...]
    """Names of the elements from the root to this element. Each name consists of the namespace, a
    space and the local name."""
    attributes: dict[str, str]
    prefixes: dict[str, str]
    """Prefix of each attribute, or an empty text for an attribute without a prefix."""
    text: str
    """The element's own text, without the text of elements in it."""
    start: int
    closing: int
    """Position of the end tag. For <a/>, the position of the tag itself."""
    end: int

    @property
    def language(self) -> str:
        """The value of ``xml:lang``, or an empty text if it is missing."""
        return self.attributes.get(f"{_XML} lang", "")

    def attribute(self, body: bytes, name: str) -> tuple[int, int] | None:
        """Return the place of an attribute and the space before it, or None if it is missing."""
        if name not in self.attributes:
            return None
        written = f"{self.prefixes[name]}:{name.rpartition(' ')[2]}".encode()
        pattern = rb"\s+" + re.escape(written) + rb"\s*=\s*(?:\"[^\"]*\"|'[^']*')"
        found = re.compile(pattern).search(body, self.start)
        return found.span() if found else None

    def inserted(self, body: bytes, block: bytes) -> tuple[int, int, bytes]:
        """Return the edit that adds a block at the end of the element."""
        if body.startswith(b"</", self.closing):
            return self.closing, self.closing, block
        tag = re.compile(rb"<([^\s/>]+)").match(body, self.start)
        name = tag[1] if tag else b"rdf:RDF"
        return self.end - 2, self.end, b">\n" + block + b"</" + name + b">"


def full_name(prop: Property) -> str:
    """Return the name of a property in the form that `Element` uses."""
    return f"{prop[0]} {prop[1].partition(':')[2]}"


def _path(prop: Property) -> tuple[str, str, str]:
    """Return the end of the path of a property that describes the whole photo."""
    return _ROOT, _RESOURCE, full_name(prop)


def resources_of(elements: Iterable[Element]) -> list[Element]:
    """Return the ``rdf:Description`` elements that describe the whole photo."""
    return [one for one in elements if one.path[-2:] == (_ROOT, _RESOURCE)]


def items_of(elements: Sequence[Element], prop: Property) -> list[Element]:
    """Return the items of a property, or the property itself if it is plain text."""
    items = [e for e in elements if e.path[-1] == f"{_RDF} li" and e.path[-5:-2] == _path(prop)]
    return items or [e for e in elements if e.path[-3:] == _path(prop) and e.text.strip()]


def texts_of(elements: Sequence[Element], prop: Property) -> list[str]:
    """Return the texts of a property, which may be written as an attribute."""
    found = [item.text for item in items_of(elements, prop)]
    found += [one.attributes.get(full_name(prop), "") for one in resources_of(elements)]
    return [text.strip() for text in found if text.strip()]


def parse_packet(body: bytes) -> list[Element]:
    """Return the elements of a packet, in the order of their end tags.

    The result is empty if the packet describes nothing.
    """
    elements: list[Element] = []
    opened: list[tuple[str, dict[str, str], dict[str, str], int, list[str]]] = []

    def begin(name: str, given: dict[str, str]) -> None:
        if len(opened) == _DEPTH:
            raise DataError("the XMP is nested too deeply")
        attributes, prefixes = {}, {}
        for key, value in given.items():
            parts = key.split(" ")
            attributes[" ".join(parts[:2])] = value
            prefixes[" ".join(parts[:2])] = parts[2] if len(parts) > 2 else ""
        called = " ".join(name.split(" ")[:2])
        opened.append((called, attributes, prefixes, parser.CurrentByteIndex, []))

    def end(_: str) -> None:
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
        opened[-1][4].append(text)

    def refuse_doctype(*_: object) -> None:
        raise DataError("the XMP contains a document type declaration")

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
        raise DataError("the XMP has no rdf:RDF element")
    return elements
