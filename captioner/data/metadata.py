"""Functions for the description and keywords in XMP sidecars and in photo files.

    JPEG    XMP, and IPTC Caption-Abstract, Writer-Editor and Keywords (`jpeg_metadata`, `iptc`)
    PNG     XMP (`xmp_files`)
    WebP    XMP
    TIFF    XMP

Only the segments or chunks with these texts are edited. Pixels and the properties of other
programs therefore keep their bytes. No library with a suitable license does this for all four
formats. Pillow encodes the pixels again. piexif is not maintained and does not support XMP. exiv2
and its bindings have the GPL. For HEIC and AVIF, `captioner.data.photo_metadata` runs the program
exiftool.

The functions receive and return the content of a file. They raise a DataError for metadata that is
damaged, too large, or unlike the metadata of photo programs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import NamedTuple

from captioner.data import iptc, jpeg_metadata, xmp, xmp_files
from captioner.data.xmp import Found, Mark
from captioner.errors import DataError

__all__ = ["Found", "Mark"]

_IN_SIDECAR = "restore the sidecar from a backup, or move it to another folder"
_IN_PHOTO = "use --sidecar xmp"


# --- Sidecars -------------------------------------------------------------------------------------


def find_in_sidecar(packet: bytes) -> Found:
    """Return the description in an XMP sidecar, and whether captioner wrote it."""
    with _advice(_IN_SIDECAR):
        return xmp.find_description(packet)


def read_description(packet: bytes) -> str:
    """Return the text of the description in an XMP sidecar, or an empty text."""
    return find_in_sidecar(packet).text


def set_description(
    packet: bytes | None, text: str, keywords: Sequence[str] = (), *, mark: Mark | None = None
) -> bytes:
    """Return the content of an XMP sidecar file with this description and additional keywords.

    ``packet`` is the content of the old sidecar. If it is None, a new sidecar is made. ``mark``
    records that captioner wrote the text. It is None for a text by a person.
    """
    with _advice(_IN_SIDECAR):
        return xmp.set_description(packet, text, keywords, mark=mark)


def remove_from_sidecar(packet: bytes) -> bytes | None:
    """Return an XMP sidecar without captioner's texts, or None if it has no other content."""
    with _advice(_IN_SIDECAR):
        return xmp.remove_own(packet)


def sidecar_from(data: bytes) -> bytes | None:
    """Return a sidecar with the title and keywords of a photo file, or None without any of them.

    Programs that read only the sidecar then still show them.
    """
    kind = _known(data)
    resources = jpeg_metadata.resources(data) if kind is _JPEG else ()
    found = (iptc.titles(resources), iptc.keywords(resources))
    # Texts in a character set other than UTF-8 are left out.
    titles, words = ([t for t in texts if "\ufffd" not in t and t.isprintable()] for texts in found)
    return xmp.new_packet(kind.packets(data), titles, words)


# --- Photos ---------------------------------------------------------------------------------------


class _Format(NamedTuple):
    """The functions for XMP in one photo format."""

    packets: Callable[[bytes], list[bytes]]
    """Function that returns the XMP packets of a file."""
    edit: Callable[[bytes, xmp_files.EditPacket], bytes]
    """Function that returns a file with its XMP packet edited."""


_JPEG = _Format(jpeg_metadata.packets, jpeg_metadata.edit_xmp)
_PNG = _Format(xmp_files.png_packets, xmp_files.edit_png)
_WEBP = _Format(xmp_files.webp_packets, xmp_files.edit_webp)
_TIFF = _Format(xmp_files.tiff_packets, xmp_files.edit_tiff)


def _format(data: bytes) -> _Format | None:
    """Return the format of a file, or None if descriptions cannot be embedded in it."""
    if data.startswith(b"\xff\xd8\xff"):
        return _JPEG
    if data.startswith(xmp_files.PNG):
        return _PNG
    if xmp_files.WEBP.match(data):
        return _WEBP
    return _TIFF if xmp_files.TIFF.match(data) else None


def can_embed(data: bytes) -> bool:
    """Return whether a file has a format in which a description can be embedded."""
    return _format(data) is not None


def find_embedded(data: bytes) -> Found:
    """Return the description in a photo file, from XMP or else from IPTC.

    The description counts as captioner's own only if the file contains no different description.
    """
    kind = _known(data)
    with _advice(_IN_PHOTO):
        packets = [*map(xmp.find_description, kind.packets(data))]
    found = [one for one in packets if one.text]
    keywords = tuple(word for one in packets for word in one.keywords)
    digests = tuple(digest for one in packets for digest in one.digests)
    captions = []
    if kind is _JPEG:
        captions = iptc.captions(jpeg_metadata.resources(data))
    elif kind is _TIFF:
        captions = xmp_files.tiff_captions(data)
    if not found:
        return Found(next(iter(captions), ""), False, keywords, digests)
    first = found[0]
    same = all(one.text == first.text for one in found)
    same &= all(iptc.is_caption(first.text, caption) for caption in captions)
    return Found(first.text, first.own and same, keywords, digests)


def embedded_description(data: bytes) -> str:
    """Return the text of the description in a photo file, or an empty text."""
    return find_embedded(data).text


def embed_description(
    data: bytes, text: str, keywords: Sequence[str] = (), *, mark: Mark | None = None
) -> bytes:
    """Return a photo file with this description and additional keywords.

    The rest of the file is kept. ``mark`` records that captioner wrote the text. It is None for a
    text by a person.

    Raises:
        DataError: The format does not support this, or the metadata cannot be edited.
    """
    kind, known = _known(data), []
    if kind is _TIFF and xmp_files.is_raw_tiff(data):
        raise DataError("camera RAW files are never changed; use --sidecar xmp")
    if kind is _TIFF and any(
        not iptc.is_caption(text, old) for old in xmp_files.tiff_captions(data)
    ):
        raise DataError("the IPTC caption of a TIFF file cannot be replaced; use --sidecar xmp")
    if kind is _JPEG:
        known = iptc.keywords(jpeg_metadata.resources(data))
    edit = partial(xmp.set_description, text=text, keywords=keywords, mark=mark, known=known)
    with _advice(_IN_PHOTO):
        data = kind.edit(data, edit)
    if kind is _JPEG:
        edit_iptc = partial(iptc.set_caption, text=text, words=keywords, own=mark is not None)
        data = jpeg_metadata.edit_iptc(data, edit_iptc)
    return data


def remove_embedded(data: bytes) -> bytes:
    """Return a photo file without the description and keywords that captioner wrote."""
    kind, found = _known(data), find_embedded(data)
    if not found.digests:
        return data
    with _advice(_IN_PHOTO):
        data = kind.edit(data, lambda packet: packet and xmp.remove_own(packet))
    if kind is _JPEG:
        text = found.text if found.own else ""
        edit = partial(iptc.remove_own, text=text, digests=found.digests, words=found.keywords)
        data = jpeg_metadata.edit_iptc(data, edit)
    return data


def _known(data: bytes) -> _Format:
    """Return the format of a file.

    Raises:
        DataError: Descriptions cannot be embedded in this format.
    """
    if (kind := _format(data)) is None:
        raise DataError("captions cannot be embedded in photos of this format; use --sidecar xmp")
    return kind


@contextmanager
def _advice(advice: str) -> Iterator[None]:
    """Add a remedy (``advice``) to errors about XMP that the block raises without a remedy.

    The module `xmp` cannot name a remedy, because it does not know whether a packet is from a photo
    or from a sidecar.
    """
    try:
        yield
    except DataError as error:
        raise DataError(str(error) if ";" in str(error) else f"{error}; {advice}") from error
