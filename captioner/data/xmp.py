"""Functions for the description, keywords and authorship in XMP packets and sidecar files.

An XMP packet is an XML document in which photo programs store metadata. It is either a part of a
photo file or the content of a sidecar file (photo.xmp). captioner uses these properties:

    dc:description             texts in several languages; the caption is the default text
    dc:subject                 a list of keywords without order
    dc:title                   texts in several languages; only read for a new sidecar file
    photoshop:CaptionWriter    "captioner 0.2.0", if captioner wrote the caption itself
    captioner:Version          the version of captioner that wrote the caption
    captioner:Confidence       the confidence of the caption, 0 to 1
    captioner:Digest           a digest of the caption, to detect that a person has changed it
    captioner:Keywords         the keywords that captioner added

The last four properties are the mark of a caption by captioner. Everything else in a packet is kept
(see `captioner.data.xmp_packet`). For a damaged packet, the functions raise a DataError.

Sources: XMP Specification Part 1 (2012), 8.3 (Dublin Core), and Part 2, 3.2 (Photoshop).
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Sequence
from html import escape
from itertools import chain
from typing import NamedTuple

from captioner.data.xmp_packet import (
    Element,
    Property,
    edited_packet,
    items_of,
    opened_packet,
    parse_packet,
    rdf_bag,
    rdf_list,
    texts_of,
    with_properties,
    without_empty_resources,
)
from captioner.version import __version__

DC = "http://purl.org/dc/elements/1.1/"
PHOTOSHOP = "http://ns.adobe.com/photoshop/1.0/"
CAPTIONER = "urn:captioner:xmp:1.0/"
_DESCRIPTION, _SUBJECT, _TITLE = (
    (DC, f"dc:{name}") for name in ("description", "subject", "title")
)
_WRITER = (PHOTOSHOP, "photoshop:CaptionWriter")
_VERSION, _CONFIDENCE, _DIGEST, _ADDED = (
    (CAPTIONER, f"captioner:{name}") for name in ("Version", "Confidence", "Digest", "Keywords")
)
_MARKS = (_VERSION, _CONFIDENCE, _DIGEST, _ADDED)

WRITER = f"captioner {__version__}"
"""The name that captioner writes as the author of a description."""

_PADDING = re.compile(rb"\s+(?=<\?xpacket\s+end)")


class Mark(NamedTuple):
    """The mark of a caption that captioner wrote itself. A text by a person has no mark."""

    confidence: float | None = None
    """Probability that the caption is right, 0 to 1, or None if it is unknown."""


class Found(NamedTuple):
    """The description of a photo, and traces of what captioner wrote."""

    text: str = ""
    """The description, or an empty text if the photo has no description."""
    own: bool = False
    """True if captioner wrote exactly this text. False after a person has changed it."""
    keywords: tuple[str, ...] = ()
    """The keywords that captioner added together with a description. They remain listed after a
    person has changed the description."""
    digests: tuple[str, ...] = ()
    """Digests of the descriptions that captioner wrote (see `text_digest`). They remain listed
    after a person has changed the description."""


def find_description(packet: bytes) -> Found:
    """Return the default description of a packet or sidecar, and whether captioner wrote it.

    The default description is the text for the language ``x-default``, or else the first text.
    """
    body = opened_packet(packet).body
    elements = parse_packet(body) if body else []
    text = _default_text(elements, _DESCRIPTION)
    digests = tuple(texts_of(elements, _DIGEST))
    own = bool(text) and text_digest(text) in digests
    return Found(text, own, tuple(texts_of(elements, _ADDED)), digests)


def _default_text(elements: Sequence[Element], prop: Property) -> str:
    """Return the text of a property for the language ``x-default``, or else its first text."""
    default = (i.text.strip() for i in items_of(elements, prop) if i.language == "x-default")
    return next(filter(None, chain(default, texts_of(elements, prop))), "")


def new_packet(
    packets: Sequence[bytes], titles: Iterable[str] = (), words: Iterable[str] = ()
) -> bytes | None:
    """Return a new packet with the title and the keywords of a photo, or None without any of them.

    Keywords that captioner added to the photo are left out.

    Args:
        packets: The packets of the photo.
        titles: Titles that the photo has outside its packets, such as in IPTC data.
        words: Keywords that the photo has outside its packets.
    """
    bodies = [opened.body for packet in packets if (opened := opened_packet(packet)).body]
    photo = [element for body in bodies for element in parse_packet(body)]
    found, own = texts_of(photo, _SUBJECT), texts_of(photo, _ADDED)
    subjects = new_keywords(own, [*found, *new_keywords(found, words)])
    title = next(filter(None, [_default_text(photo, _TITLE), *titles]), "")
    item = f'<rdf:li xml:lang="x-default">{escape(title, quote=False)}</rdf:li>'.encode()
    new = {
        _TITLE: rdf_list("Alt", [item]) if title else b"",
        _SUBJECT: rdf_bag(subjects) if subjects else b"",
    }
    return edited_packet(None, lambda body: with_properties(body, new))


def set_description(
    packet: bytes | None,
    text: str,
    keywords: Sequence[str] = (),
    *,
    mark: Mark | None = None,
    known: Iterable[str] = (),
) -> bytes:
    """Return a packet or sidecar file with this default description.

    Descriptions in other languages are kept. Keywords are added if the packet does not contain them
    yet, ignoring case.

    Args:
        packet: The packet. If it is None or empty, a new packet is made.
        text: The description.
        keywords: The keywords to add.
        mark: The mark of a caption that captioner wrote. None if a person wrote it.
        known: Keywords that the photo has outside the packet, such as in IPTC data. They are not
            listed as added by captioner, so that `remove_own` keeps them.
    """

    def edit(body: bytes) -> bytes:
        """Return the XML of the packet with the new description, keywords and mark."""
        elements = parse_packet(body)
        others = [
            i for i in items_of(elements, _DESCRIPTION) if i.language not in ("x-default", "")
        ]
        items = [f'<rdf:li xml:lang="x-default">{escape(text, quote=False)}</rdf:li>'.encode()]
        items += [body[item.start : item.end] for item in others]
        new: dict[Property, bytes] = {_DESCRIPTION: rdf_list("Alt", items)}
        old = texts_of(elements, _SUBJECT)
        if added := new_keywords(old, keywords):
            new[_SUBJECT] = rdf_bag([*old, *added])
        # After a person's correction, the list of captioner's keywords is kept with the digest of
        # the previous caption, so that `remove_own` still removes these keywords.
        listed = mark is None and texts_of(elements, _ADDED)
        new |= {one: b"" for one in _MARKS if not (listed and one in (_DIGEST, _ADDED))}
        if listed and text_digest(text) in texts_of(elements, _DIGEST):
            new[_DIGEST] = text_digest("").encode()  # the new text is not captioner's
        if mark is not None:
            certain = "" if mark.confidence is None else f"{mark.confidence:.4f}"
            before = texts_of(elements, _ADDED) if find_description(body).own else ()
            ours = [*before, *new_keywords([*known, *before], added)]
            new[_WRITER], new[_VERSION] = WRITER.encode(), __version__.encode()
            new[_CONFIDENCE], new[_DIGEST] = certain.encode(), text_digest(text).encode()
            new[_ADDED] = rdf_bag(ours) if ours else b""
        elif is_own_writer(*texts_of(elements, _WRITER)):
            new[_WRITER] = b""
        return with_properties(body, new)

    return edited_packet(packet, edit) or b""


def remove_own(packet: bytes) -> bytes | None:
    """Return a packet without the description and keywords that captioner wrote.

    Texts by people are kept, including a caption that a person has changed. If the packet
    contains nothing else, the result is None. A packet without captioner's mark is returned
    unchanged.
    """
    found = find_description(packet)
    if not found.digests:
        return packet

    def edit(body: bytes) -> bytes:
        """Return the XML of the packet without captioner's texts and mark."""
        elements = parse_packet(body)
        others = [
            i for i in items_of(elements, _DESCRIPTION) if i.language not in ("x-default", "")
        ]
        kept = [word for word in texts_of(elements, _SUBJECT) if word not in found.keywords]
        new: dict[Property, bytes] = dict.fromkeys(_MARKS, b"")
        if found.own:
            new[_DESCRIPTION] = b""
        if found.own and others:
            new[_DESCRIPTION] = rdf_list("Alt", [body[item.start : item.end] for item in others])
        if found.keywords:
            new[_SUBJECT] = rdf_bag(kept) if kept else b""
        if is_own_writer(*texts_of(elements, _WRITER)):
            new[_WRITER] = b""
        return without_empty_resources(with_properties(body, new))

    return edited_packet(packet, edit)


def to_edit(packets: Sequence[bytes]) -> list[int]:
    """Return the indices of the packets in which a file's description is edited.

    These are all packets with a description. If no packet has a description, it is the first packet
    with any content, or else the first packet.
    """
    found = [n for n, packet in enumerate(packets) if find_description(packet).text]
    filled = [n for n, packet in enumerate(packets) if opened_packet(packet).body]
    return found or filled[:1] or [n for n, _ in enumerate(packets)][:1]


def without_padding(packet: bytes) -> bytes:
    """Return a packet without its padding, the white space reserved for later edits."""
    return _PADDING.sub(b"\n", packet)


def new_keywords(old: Iterable[str], keywords: Iterable[str]) -> list[str]:
    """Return the keywords that are not in ``old``, without duplicates. Case is ignored."""
    known = {word.casefold() for word in old}
    new = {word.casefold(): word for word in keywords}
    return [word for folded, word in new.items() if folded not in known]


def is_own_writer(*names: str) -> bool:
    """Return whether one of these names of writers stands for captioner, in any version."""
    return any(name.startswith("captioner ") for name in names)


def text_digest(text: str) -> str:
    """Return the first 16 hexadecimal digits of a text's SHA-256.

    White space around the text is ignored.
    """
    return hashlib.sha256(text.strip().encode()).hexdigest()[:16]
