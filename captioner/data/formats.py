"""Photo formats, with their file name extensions and the packages that decode them.

JPEG XL cannot be decoded. It is listed so that its files are reported as photos.
"""

from __future__ import annotations

import functools
import importlib.util
import re
from dataclasses import dataclass
from pathlib import PurePath

from PIL import features


@dataclass(frozen=True)
class PhotoFormat:
    """A photo format and its decoder."""

    name: str
    """Name of the format in messages."""
    extensions: tuple[str, ...]
    """File name extensions in lower case."""
    codec: str | None = None
    """Feature of Pillow that decodes the format. None if every Pillow can decode it."""
    package: str | None = None
    """Package that decodes the format. None if Pillow decodes it."""
    unsupported: str = "is not supported by the installed Pillow; run: pip install --upgrade pillow"
    """The reason why the format cannot be decoded, and the remedy. In messages, this text follows
    the name of the format."""
    signature: re.Pattern[bytes] | None = None
    """First bytes of the file, for formats that Pillow may not recognize."""

    @property
    def decodable(self) -> bool:
        """True if this installation can decode the format."""
        if self.package is not None:
            return importlib.util.find_spec(self.package) is not None
        known = {**features.modules, **features.codecs}  # older versions of Pillow lack some
        return self.codec is None or (self.codec in known and bool(features.check(self.codec)))

    @property
    def problem(self) -> str:
        """The reason why the format cannot be decoded, and the remedy, in one line."""
        return f"{self.name} {self.unsupported}"


HEIC = PhotoFormat(
    "HEIC",
    (".heic", ".heif", ".hif"),
    unsupported="needs pillow-heif; run: pip install 'captioner[heif]'",
    package="pillow_heif",
    signature=re.compile(rb"....ftyp(heic|heix|heim|heis|hevc|hevx|mif1|msf1)", re.DOTALL),
)

RAW = PhotoFormat(
    "camera RAW",
    (
        ".3fr", ".arw", ".cr2", ".cr3", ".crw", ".dcr", ".dng", ".erf", ".fff", ".iiq", ".kdc",
        ".mef", ".mrw", ".nef", ".nrw", ".orf", ".pef", ".raf", ".rw2", ".rwl", ".sr2", ".srf",
        ".srw", ".x3f",
    ),
    unsupported="needs rawpy; run: pip install 'captioner[raw]'",
    package="rawpy",
    signature=re.compile(
        rb"FUJIFILMCCD-RAW|FOVb|II(RO|RS|U\0)|MMOR|\0MRM|....ftypcrx|II....HEAPCCDR|"
        rb"II\*\0....CR", re.DOTALL,
    ),
)  # fmt: skip

FORMATS = (
    PhotoFormat("JPEG", (".jpg", ".jpeg", ".jpe", ".jfif", ".mpo")),
    PhotoFormat("PNG", (".png", ".apng")),
    PhotoFormat("WebP", (".webp",), codec="webp"),
    PhotoFormat("GIF", (".gif",)),
    PhotoFormat("BMP", (".bmp", ".dib")),
    PhotoFormat("TIFF", (".tif", ".tiff")),
    PhotoFormat(
        "AVIF",
        (".avif", ".avifs"),
        codec="avif",
        signature=re.compile(rb"....ftypavi[fs]", re.DOTALL),
    ),
    PhotoFormat(
        "JPEG 2000",
        (".jp2", ".j2k", ".j2c", ".jpc", ".jpf", ".jpx"),
        codec="jpg_2000",
        signature=re.compile(rb"\0\0\0\x0cjP  |\xff\x4f\xff\x51"),
    ),
    PhotoFormat("PPM", (".ppm", ".pgm", ".pbm", ".pnm", ".pfm")),
    PhotoFormat("ICO", (".ico",)),
    PhotoFormat("TGA", (".tga",)),
    PhotoFormat("PCX", (".pcx",)),
    PhotoFormat("PSD", (".psd",)),
    PhotoFormat("QOI", (".qoi",)),
    HEIC,
    RAW,
    PhotoFormat(
        "JPEG XL",
        (".jxl",),
        codec="jpegxl",  # unknown to Pillow
        unsupported="is not supported; convert the photo to JPEG",
        signature=re.compile(rb"\xff\x0a|\0\0\0\x0cJXL "),
    ),
)
"""Photo formats. Files of these formats are found when folders are searched. Formats of textures
and scientific data are left out, although Pillow can decode them."""

VIDEO = PhotoFormat(
    "MP4, MOV, MKV, WebM, AVI, ...",
    (
        ".3gp", ".avi", ".flv", ".m2ts", ".m4v", ".mkv", ".mov", ".mp4", ".mpeg", ".mpg", ".mts",
        ".ogv", ".webm", ".wmv",
    ),
)  # fmt: skip
"""All video formats in one. With this format, a search of folders finds videos instead of
photos."""

_BY_EXTENSION = {extension: kind for kind in FORMATS for extension in kind.extensions}


def format_by_name(name: str | PurePath) -> PhotoFormat | None:
    """Return a photo's format by the extension of its name, or None if it is not a photo.

    Upper and lower case are equal.
    """
    return _BY_EXTENSION.get(PurePath(name).suffix.lower())


def format_by_content(head: bytes) -> PhotoFormat | None:
    """Return a photo's format by the first bytes of its file, or None if they are not known.

    Only formats that Pillow may not recognize are detected.
    """
    return next((kind for kind in FORMATS if kind.signature and kind.signature.match(head)), None)


@functools.cache
def register_heif() -> bool:
    """Let Pillow decode HEIC, and return whether this is possible (with ``pillow-heif``).

    The function is called when the first HEIC photo is read, because the import takes a moment.
    """
    try:
        import pillow_heif
    except ImportError:
        return False
    pillow_heif.register_heif_opener()
    return True
