"""Functions that read, set and remove the description in a photo file.

JPEG, PNG, WebP and TIFF are edited by `captioner.data.metadata`. For other formats, such as HEIC
and AVIF, exiftool writes the XMP packet, because no maintained library does this without encoding
the picture again. Camera RAW is never changed.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

from captioner.data.formats import RAW, format_by_name
from captioner.data.metadata import (
    Found,
    Mark,
    can_embed,
    embed_description,
    find_embedded,
    find_in_sidecar,
    remove_embedded,
    remove_from_sidecar,
    set_description,
    sidecar_from,
)
from captioner.data.xmp import new_packet
from captioner.errors import ConfigError, DataError

_XMP = re.compile(rb"<x:xmpmeta[\s>].*?</x:xmpmeta>", re.DOTALL)


class NotEditableError(DataError):
    """An error for a photo in a format in which captioner cannot store a description."""


def find_in_photo(photo: Path, *, exiftool: bool) -> Found:
    """Return the description in a photo.

    Args:
        photo: Path of the photo.
        exiftool: Read formats that captioner cannot edit with the program exiftool.

    Raises:
        NotEditableError: A description cannot be stored in this format.
    """
    data = _readable(photo, exiftool=exiftool)
    return find_in_sidecar(_packet(photo)) if data is None else find_embedded(data)


def find_inside(photo: Path) -> Found:
    """Return the description in a photo of any format, even if the format cannot be edited.

    Unreadable files and damaged metadata count as a photo without a description.
    """
    try:
        data = b"" if photo.is_fifo() else photo.read_bytes()
        if can_embed(data):
            return find_embedded(data)
        packet = _XMP.search(data)  # HEIC, AVIF and GIF store XMP without compression
        return find_in_sidecar(packet[0]) if packet else Found()
    except (DataError, OSError):
        return Found()


def new_sidecar(photo: Path) -> bytes | None:
    """Return a sidecar with the title and keywords of a photo, or None without any of them.

    Unreadable files and damaged metadata count as a photo without them.
    """
    try:
        data = b"" if photo.is_fifo() else photo.read_bytes()
        return sidecar_from(data) if can_embed(data) else new_packet(_XMP.findall(data)[:1])
    except (DataError, OSError):
        return None


def with_description(
    photo: Path, text: str, keywords: Sequence[str], mark: Mark | None, *, exiftool: bool
) -> bytes:
    """Return the content of a photo file with this description.

    Args:
        photo: Path of the photo. The file itself is not changed.
        text: The description.
        keywords: Keywords to add.
        mark: The mark of a caption that captioner wrote. None if a person wrote it.
        exiftool: Let the program exiftool edit formats that captioner cannot edit.
    """
    data = _readable(photo, exiftool=exiftool)
    if data is not None:
        return embed_description(data, text, keywords, mark=mark)
    return _with_packet(photo, set_description(_packet(photo), text, keywords, mark=mark))


def without_own_description(photo: Path, *, exiftool: bool) -> bytes:
    """Return the content of a photo file without the texts that captioner wrote into it."""
    data = _readable(photo, exiftool=exiftool)
    if data is not None:
        return remove_embedded(data)
    return _with_packet(photo, remove_from_sidecar(_packet(photo)))


def require_exiftool() -> None:
    """Check that the program exiftool is installed.

    Raises:
        ConfigError: The program is not installed.
    """
    if shutil.which("exiftool") is None:
        raise ConfigError(
            "--exiftool needs the program exiftool; run apt-get install libimage-exiftool-perl or "
            "brew install exiftool, or leave out --exiftool"
        )


def _readable(photo: Path, *, exiftool: bool) -> bytes | None:
    """Return the content of a file that captioner can edit, or None if exiftool has to edit it.

    Raises:
        NotEditableError: The file is camera RAW, or its format needs exiftool and ``exiftool`` is
            False.
    """
    data = b"" if photo.is_fifo() else photo.read_bytes()
    if format_by_name(photo) is RAW:
        raise NotEditableError("camera RAW files are never changed; use --sidecar xmp")
    if can_embed(data):
        return data
    if exiftool:
        return None
    raise NotEditableError(
        "captions can be embedded only in JPEG, PNG, WebP and TIFF; use --sidecar xmp, or add "
        "--exiftool"
    )


def _packet(photo: Path) -> bytes:
    """Return the XMP packet of a photo, which exiftool extracts. Empty if the photo has no XMP."""
    return _run("-b", "-XMP", photo)


def _with_packet(photo: Path, packet: bytes | None) -> bytes:
    """Return the content of a photo with this XMP packet, or without XMP if it is None."""
    with tempfile.TemporaryDirectory(prefix="captioner-") as folder:
        # exiftool expands % in names of files that it writes.
        suffix = photo.suffix if photo.suffix[1:].isalnum() else ""
        source, new = Path(folder, "packet.xmp"), Path(folder, f"photo{suffix}")
        source.write_bytes(packet or b"")
        _run("-q", f"-XMP<={source}" if packet else "-XMP:all=", "-o", new, photo)
        return new.read_bytes()


def _run(*arguments: str | Path) -> bytes:
    """Run exiftool with these arguments, and return its output.

    Raises:
        DataError: exiftool reported an error.
    """
    # Absolute names, because a name that begins with a dash would be an option.
    names = [str(a.absolute()) if isinstance(a, Path) else a for a in arguments]
    done = subprocess.run(["exiftool", *names], capture_output=True, check=False)
    if done.returncode:
        lines = done.stderr.decode(errors="replace").splitlines()
        problem = (lines or [f"exit code {done.returncode}"])[0]
        raise DataError(f"exiftool failed ({problem}); use --sidecar xmp")
    return done.stdout
