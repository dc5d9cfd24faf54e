"""Functions that edit the caption, writer and keywords in IPTC data.

IPTC data is a sequence of datasets, such as 2:120 (the caption). A photo stores it as one of
Photoshop's image resources. Other resources and datasets keep their bytes and their order. This
includes repeated resources and datasets, signatures other than 8BIM, data longer than 32,767 bytes,
and the padding after them.

Sources: IPTC Information Interchange Model 4.2 (2:5, 2:25, 2:120, 2:122 and 1:90); Adobe Photoshop
File Formats, "Image Resources Section".
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from captioner.data.xmp import WRITER, is_own_writer, new_keywords, text_digest
from captioner.errors import DataError

SIGNATURES = (b"8BIM", b"AgHg", b"DCSR", b"PHUT", b"MeSa")
_IPTC, _DIGEST = 0x0404, 0x0425  # numbers of image resources
_CHARSET, _TITLE, _KEYWORD = (1, 90), (2, 5), (2, 25)  # dataset keys
_CAPTION, _WRITER = (2, 120), (2, 122)
_UTF8 = b"\x1b%G"
_LIMITS = {_KEYWORD: 64, _CAPTION: 2000, _WRITER: 32}  # bytes that the standard allows

Edit = Callable[[bytes], bytes]
"""Function that edits IPTC data and returns the result."""


class Resource(NamedTuple):
    """An image resource, or the padding after the last resource."""

    number: int
    """Number that identifies the kind of data."""
    data: bytes
    """Content of the resource, such as IPTC data."""
    head: bytes = b""
    """Signature, number and name. Empty for the padding after the last resource."""
    padded: bool = True
    """True if a padding byte follows data of odd length."""

    def encoded(self) -> bytes:
        """Return the bytes of the resource in a file."""
        if not self.head:
            return self.data
        padding = b"\0" * (len(self.data) % 2 and self.padded)
        return self.head + struct.pack(">I", len(self.data)) + self.data + padding


def read_resources(data: bytes) -> list[Resource]:
    """Return the image resources in the data of a Photoshop block, and the padding after them.

    Raises:
        DataError: The data is damaged.
    """
    found, at, end = [], 0, len(data.rstrip(b"\0"))
    while at < end:
        if data[at : at + 4] not in SIGNATURES or len(data) < at + 12:
            raise DataError("the photo's Photoshop data is damaged; use --sidecar xmp")
        number = int.from_bytes(data[at + 4 : at + 6], "big")
        after = at + 6 + (data[at + 6] // 2 + 1) * 2
        size = int.from_bytes(data[after : after + 4], "big")
        stop = after + 4 + size
        if len(data) < stop:
            raise DataError("the photo's Photoshop data is damaged; use --sidecar xmp")
        padded = not size % 2 or stop < len(data)
        found.append(Resource(number, data[after + 4 : stop], data[at:after], padded))
        at = stop + (size % 2 and padded)
    return [*found, Resource(0, data[at:])]


def captions(resources: Iterable[Resource]) -> list[str]:
    """Return the IPTC captions in image resources."""
    return [text for one in resources if _is_iptc(one) for text in texts(one.data)]


def texts(iptc: bytes, dataset: tuple[int, int] = _CAPTION) -> list[str]:
    """Return the texts in IPTC data that are stored in one dataset, by default the captions."""
    values = (
        one.value.decode(errors="replace").strip()
        for one in _datasets(iptc)[0]
        if one.key == dataset
    )
    return [value for value in values if value]


def titles(resources: Iterable[Resource]) -> list[str]:
    """Return the IPTC titles in image resources."""
    return [text for one in resources if _is_iptc(one) for text in texts(one.data, _TITLE)]


def keywords(resources: Iterable[Resource]) -> list[str]:
    """Return the IPTC keywords in image resources."""
    return [word for one in resources if _is_iptc(one) for word in texts(one.data, _KEYWORD)]


def edited(resources: Sequence[Resource], edit: Edit) -> list[Resource]:
    """Return image resources with edited IPTC data.

    ``edit`` receives the IPTC data of one resource. Every IPTC resource with a caption is edited.
    If no resource has a caption, the first IPTC resource is edited, or a new one is added.
    Photoshop's digest of the data is updated if it was correct or consisted of zeros. A wrong
    digest is kept, because it shows that another program has changed the data since the XMP was
    written.
    """
    places = [n for n, one in enumerate(resources) if _is_iptc(one)]
    chosen = [n for n in places if texts(resources[n].data)] or places[:1]
    new = [*resources]
    if not places:
        new.insert(0, Resource(_IPTC, b"", struct.pack(">4sHH", b"8BIM", _IPTC, 0)))
        chosen = [0]
    digests = {}
    for n in reversed(chosen):  # in reverse: `digest` then belongs to the first resource
        data = edit(new[n].data)
        digest = digests[_md5(new[n].data)] = _md5(data)
        new[n] = new[n]._replace(data=data, padded=True)
    for n, one in enumerate(new):
        if one.number == _DIGEST and one.head:
            right = digests.get(one.data, one.data) if any(one.data) else digest
            new[n] = one._replace(data=right)
    return [one for n, one in enumerate(new) if one.data or n not in chosen]


def set_caption(iptc: bytes, text: str, words: Sequence[str], *, own: bool) -> bytes:
    """Return IPTC data with this caption and additional keywords.

    Existing data that does not declare the character set UTF-8 can only store ASCII. If the caption
    or a keyword contains other characters, nothing is added to such data. The old caption is
    removed, so that only the XMP has a caption.

    Args:
        iptc: The data. Empty data becomes data in UTF-8.
        text: The caption.
        words: Keywords to add.
        own: True if captioner wrote the caption itself.
    """
    datasets, tail = _datasets(iptc)
    kept = [d for d in datasets if d.key != _CAPTION and not (d.key == _WRITER and (own or d.own))]
    charset = next((d.value for d in kept if d.key == _CHARSET), None)
    if charset != _UTF8 and not "".join([text, *words]).isascii():
        if kept:
            return b"".join(d.raw for d in kept) + tail
        kept = [_dataset(_CHARSET, _UTF8)]
    known = [d.value.decode(errors="replace") for d in kept if d.key == _KEYWORD]
    added = [(_KEYWORD, word) for word in new_keywords(known, words)] + [(_CAPTION, text)]
    for key, value in [*added, *[(_WRITER, WRITER)] * own]:
        after = next((n for n, d in enumerate(kept) if d.key > key), len(kept))
        kept.insert(after, _dataset(key, _short(key, value)))
    return b"".join(d.raw for d in kept) + tail


def remove_own(iptc: bytes, text: str, digests: Iterable[str], words: Iterable[str]) -> bytes:
    """Return IPTC data without the caption, writer and keywords that captioner wrote.

    Args:
        iptc: The data.
        text: The caption that captioner wrote, which IPTC may have shortened. Empty if a person
            has changed it in XMP.
        digests: Digests (hashes) of captions that captioner wrote. A caption with such a digest is
            removed.
        words: Keywords that captioner added.
    """
    gone = {(_CAPTION, _short(_CAPTION, text)), *((_KEYWORD, _short(_KEYWORD, w)) for w in words)}
    datasets, tail = _datasets(iptc)
    kept = [
        d
        for d in datasets
        if (d.key, d.value) not in gone
        and not d.own
        and not (d.key == _CAPTION and text_digest(d.value.decode(errors="replace")) in digests)
    ]
    if {d.key for d in kept} <= {_CHARSET} and len(kept) < len(datasets):
        return tail
    return b"".join(d.raw for d in kept) + tail


def is_caption(text: str, found: str) -> bool:
    """Return whether the IPTC caption ``found`` is ``text``, possibly cut to IPTC's limit."""
    return found in (text, _short(_CAPTION, text).decode().strip())


def _is_iptc(one: Resource) -> bool:
    """Return whether a resource contains IPTC data."""
    return one.number == _IPTC and one.head.startswith(b"8BIM")


def _md5(data: bytes) -> bytes:
    return hashlib.md5(data, usedforsecurity=False).digest()


class _Dataset(NamedTuple):
    """One value in IPTC data, such as the caption or a keyword."""

    key: tuple[int, int]
    """Record number and dataset number."""
    value: bytes
    """The value, without the header."""
    raw: bytes
    """The whole dataset, with its header."""

    @property
    def own(self) -> bool:
        """True if the dataset names captioner as the writer of the caption."""
        return self.key == _WRITER and is_own_writer(self.value.decode(errors="replace"))


def _dataset(key: tuple[int, int], value: bytes) -> _Dataset:
    """Return a dataset with this value."""
    return _Dataset(key, value, struct.pack(">BBBH", 0x1C, *key, len(value)) + value)


def _short(key: tuple[int, int], text: str) -> bytes:
    """Return text in UTF-8, cut to the length that the IPTC standard allows."""
    return text.encode()[: _LIMITS[key]].decode(errors="ignore").encode()


def _datasets(iptc: bytes) -> tuple[list[_Dataset], bytes]:
    """Return the datasets of IPTC data, and the bytes that follow them.

    Raises:
        DataError: The data is damaged.
    """
    found, at = [], 0
    while at + 5 <= len(iptc) and iptc[at] == 0x1C:
        record, number, size = struct.unpack(">BBH", iptc[at + 1 : at + 5])
        begin = at + 5
        if size & 0x8000:  # extended dataset: the rest is the number of bytes of the size
            begin += size & 0x7FFF
            size = int.from_bytes(iptc[at + 5 : begin][:9], "big")
        end = begin + size
        if len(iptc) < end:
            raise DataError("the photo's IPTC data is damaged; use --sidecar xmp")
        found.append(_Dataset((record, number), iptc[begin:end], iptc[at:end]))
        at = end
    return found, iptc[at:]
