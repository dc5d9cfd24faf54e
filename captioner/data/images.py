"""A reader of image files that returns RGB images or raises one-line errors.

The format is detected from the content, not from the extension. EXIF rotation is applied,
transparent pixels become white, and colour profiles are converted to sRGB. From an animation, only
the first frame is read. From camera RAW, the largest preview is read. Grey values of more than 8
bits are scaled, because Pillow would clip them.

Truncated images are rejected, because a grey lower half would get a confident, wrong caption.
Variants of a format that Pillow would decode wrongly are rejected too (`variants`).

The cost of decoding is limited before it begins. Pixels and sides are limited. The parts of a file
are limited, because Pillow reads them one by one. The scans of a progressive JPEG are limited,
because each scan is a pass over all pixels.
"""

from __future__ import annotations

import functools
import importlib.util
import io
import logging
import math
import os
import re
import stat
import warnings
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO, cast

import numpy as np
from numpy.typing import NDArray
from PIL import (
    ExifTags,
    Image,
    ImageFile,
    ImageOps,
    JpegImagePlugin,
    UnidentifiedImageError,
)

from captioner.data import variants
from captioner.data.formats import (
    HEIC,
    RAW,
    PhotoFormat,
    format_by_content,
    format_by_name,
    register_heif,
)
from captioner.data.heif import ZEROED, check_complete
from captioner.data.pixels import image_from_array, to_rgb
from captioner.errors import ImageError, LargeImageError, NotAnImageError
from captioner.messages import first_line

MAX_PIXELS = 178_956_970
"""Limit on the pixels of an image, checked before decoding. Above it, Pillow raises an error too.
"""

MAX_SIDE = 65_535
"""Limit on the longer side of an image (pixels). Few formats allow longer sides. Decoders work row
by row, so a large number of rows takes long even if the rows are short."""

MAX_SCANS = 100
"""Limit on the scans of a progressive JPEG. Cameras and browsers write about 10."""

MAX_SCANNED = 20 * MAX_PIXELS
"""Limit on the total number of pixels in all scans of a JPEG."""

MAX_TILES = 65_536
"""Limit on the tiles or strips of a TIFF. Each of them takes time, because Pillow decodes it like a
separate file."""

MAX_STREAM_BYTES = 1 << 30
"""Limit on standard input and pipes (bytes), which may be endless."""

USUAL_FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "HEIF")
"""Common photo formats, by Pillow's names. HEIF (HEIC) works only if ``pillow-heif`` is installed.
"""

_READABLE = "JPEG, PNG, WebP, GIF, BMP or TIFF"
_AGAIN = "copy or download the file again"
_TOO_MANY_BYTES = f"the file has more than {MAX_STREAM_BYTES:,} bytes; pass a smaller image"

Photo = str | os.PathLike[str] | bytes | Image.Image | NDArray[Any] | BinaryIO
"""The types that `open_image` reads."""

# Remedies for values that are often mistaken for photos.
_ALTERNATIVES = {
    "Tensor": "pass an array of shape (H, W, 3): tensor.permute(1, 2, 0).cpu().numpy()",
    "list": "pass a single photo",
    "generator": "pass list(photos), or use model.stream(photos)",
}

# Files often mistaken for photos, by their first bytes.
_UNSUPPORTED = (
    (re.compile(rb"....ftyp|\x1a\x45\xdf\xa3", re.DOTALL), "a video"),
    (re.compile(rb"%PDF"), "a PDF"),
    (re.compile(rb"\s*(<\?xml[^>]*>\s*)?<svg", re.IGNORECASE), "an SVG drawing"),
    (re.compile(rb"\s*<(!doctype|html)", re.IGNORECASE), "a web page"),
)
_URL = re.compile(r"(https?|ftps?|sftp|file|s3a?|gc?s|az|abfss?|hdfs):/|data:image/", re.IGNORECASE)
"""One slash is enough, because ``Path`` turns the two slashes of a URL into one."""
_MARKER = re.compile(rb"\xff([^\x00\x01\xd0-\xd8\xff])", re.DOTALL)  # a segment with a size
_SCAN, _END = b"\xda", b"\xd9"
_SIGNATURES = re.compile(rb"\xff\xd8\xff|\x89PNG|GIF8|RIFF....WEBP|BM|II[*+]\0|MM\0[*+]", re.DOTALL)
_BARE_PNG = {b"IHDR", b"PLTE", b"tRNS", b"IDAT", b"IEND", b"eXIf"}
"""Chunks that a PNG needs to be shown correctly."""
_PNG_CICP = re.compile(rb"\x00\x00\x00\x04cICP(..)", re.DOTALL)
_HEIF_CICP = re.compile(rb"colrnclx\x00(.)\x00(.)", re.DOTALL)
_BY_CAMERA = re.compile(
    r"\W*|([\w-]+ )?digital (still )?camera|sony dsc|dcim\S*|exif.jpeg.picture|samsung|default|"
    "untitled|cof|dav|edf|hdr|oznor|sdr",
    re.IGNORECASE | re.DOTALL,
)
"""Descriptions that cameras and phones write into every photo."""
_ZEROS = bytes(64)
"""A run of zeros that is rare in the pixel data of JPEG files; see `_zeros_in_scan`."""

# Pillow warns of large images and odd EXIF. A filter per call would affect other threads too.
warnings.filterwarnings("ignore", module=r"PIL\b")
# Without a handler, Python would print Pillow's log to standard error.
logging.getLogger("PIL").addHandler(logging.NullHandler())


def open_image(
    source: Photo,
    *,
    name: str | None = None,
    max_pixels: int = MAX_PIXELS,
    formats: tuple[str, ...] | None = None,
    min_side: int | None = None,
) -> Image.Image:
    """Read an image as RGB, upright and fully loaded.

    Args:
        source: A path, the bytes of an image file, an open image file, a Pillow image or an array.
            An open file is read to its end. An array is (H, W, 3) RGB, (H, W, 4) RGBA, or (H, W) or
            (H, W, 1) grey (see `image_from_array`).
        name: Name in error messages (default: the path or the name of the open file).
        max_pixels: Limit on the pixels, checked before decoding. At most ``MAX_PIXELS``.
        formats: Formats to accept, by Pillow's names. None accepts all formats of Pillow.
        min_side: Decode a large JPEG at a half, a quarter or an eighth of its size, which takes
            less time and memory. The shorter side keeps at least this length (pixels). If this is
            twice the size that the image is scaled to later, the result hardly differs from
            scaling the whole image. None decodes all images at full size.

    Returns:
        A new RGB image without metadata. Its ``info["size"]`` has the width and height of the whole
        image, upright.

    Raises:
        NotAnImageError: The source is not an image, or its format or type is not supported.
        LargeImageError: The image has more than ``max_pixels`` pixels.
        ImageError: The image cannot be read. The message is one line that starts with the name.
    """
    called = name or _name_of(source)
    with _named(called):
        if isinstance(source, Image.Image | np.ndarray):
            return _plain(image_from_array(source) if isinstance(source, np.ndarray) else source)
        with _opened(source) as file:
            image = _identify(file, max_pixels, formats, called)
            size = image.size
            if image.info.get("progressive"):
                scans, most = _count_scans(image), min(MAX_SCANS, MAX_SCANNED // math.prod(size))
                if scans > most:
                    raise LargeImageError(
                        f"the JPEG has {scans:,} scans, but the limit at this size is {most}; open "
                        "the image in a photo editor and save a new JPEG"
                    )
            if image.format in {"HEIF", "AVIF"}:
                _check_heif(image)
            if min_side is not None and image.format in {"JPEG", "MPO"}:
                image.draft(None, (min_side, min_side))
            reduced = image.size != size  # compared before loading, which rotates some TIFFs
            rotated = reduced and _orientation(image) >= 5
            metered: Any = getattr(image, "fp", None)
            try:
                plain = _plain(image)
            except ImageError:
                if (bare := _bare_png(file)) is None:
                    raise
                plain = _plain(_identify(bare, max_pixels))
            if metered.zeros and image.format in {"JPEG", "MPO"} and _zeros_in_scan(metered.file):
                raise ImageError(f"the image is damaged ({ZEROED}); {_AGAIN}")
            if reduced:
                plain.info["size"] = size[::-1] if rotated else size
            return plain


def reduced_side(image_size: int) -> int:
    """Return a value of ``min_side`` in `open_image` that suits a model's input size (pixels).

    Photos that are decoded with this value are also large enough to be shown.
    """
    return max(2 * image_size, 640)


def header_work(file: BinaryIO, formats: tuple[str, ...] | None = None) -> float:
    """Estimate the work of decoding an open file from its header, in pixels.

    The estimate is the number of pixels. For a progressive JPEG with more than ten scans, it is
    multiplied by a tenth of the number of scans. The caller has to rewind the file afterwards.
    """
    image = _identify(file, MAX_PIXELS, formats)
    scans = _count_scans(image) if image.info.get("progressive") else 1
    return math.prod(image.size) * max(1, scans / 10)


def image_size(path: str | Path) -> tuple[int, int]:
    """Return the width and height (pixels) of the image that `open_image` would return.

    The size is read from the header. Only for some rotated TIFFs, the image is decoded.
    """
    with _named(str(path)), _opened(path) as file:
        image = _identify(file, MAX_PIXELS, name=str(path))
        if _orientation(image) < 5:
            return image.size
        if image.format != "TIFF":
            return image.size[::-1]
    return open_image(path).size  # some versions of Pillow rotate a TIFF only when they load it


def exif_description(path: str | Path) -> str:
    """Return the text of a person in EXIF ImageDescription, or an empty text.

    Texts that cameras write into every photo do not count. The image is not decoded. Camera RAW,
    unreadable files and damaged EXIF data count as photos without a description.
    """
    if format_by_name(path) is RAW:
        return ""  # opening the preview takes long
    try:
        with _opened(path) as file:
            image = _identify(file, MAX_PIXELS, name=str(path))
            if image.format == "PNG" and "exif" not in image.info:
                return ""  # Pillow would decode the image to look for EXIF after the pixels
            text = str(image.getexif().get(ExifTags.Base.ImageDescription, "")).strip(" \0")
    except Exception:  # as in `_orientation`
        return ""
    return "" if _BY_CAMERA.fullmatch(text) else text


def is_photo(source: object) -> bool:
    """Return whether a value is a single photo that `open_image` can read."""
    kinds = (str, os.PathLike, bytes, bytearray, memoryview, Image.Image, np.ndarray)
    return isinstance(source, kinds) or hasattr(source, "read")


def _name_of(source: Photo) -> str:
    """Return the name of a photo for error messages."""
    name = source if isinstance(source, str | os.PathLike) else getattr(source, "name", "")
    if isinstance(name, str | os.PathLike) and str(name):
        return str(name)
    in_file = isinstance(source, bytes | bytearray | memoryview) or hasattr(source, "read")
    return "the given bytes" if in_file else "the photo"


@contextmanager
def _named(name: str) -> Iterator[None]:
    """Put the photo's name at the beginning of the message of an ImageError."""
    try:
        yield
    except ImageError as error:
        raise type(error)(f"{name.replace(chr(10), ' ')}: {error}") from error


@contextmanager
def _opened(source: Photo) -> Iterator[BinaryIO]:
    """Open a photo as a file, positioned at its start.

    Raises:
        ImageError: The source is not a photo, or it cannot be opened.
    """
    if isinstance(source, str | os.PathLike):
        with open_file(source) as file:
            yield _seekable(file)
    elif isinstance(source, bytes | bytearray | memoryview):
        yield io.BytesIO(source)
    elif hasattr(source, "read") and not isinstance(source, io.StringIO | io.TextIOWrapper):
        yield _seekable(cast(BinaryIO, source))
    else:
        kind = type(source).__name__
        raise NotAnImageError(
            "a photo must be a path, bytes, an open binary file, a Pillow image or a NumPy array, "
            f"not {kind}; {_ALTERNATIVES.get(kind, 'convert it to one of these')}"
        )


def open_file(path: str | os.PathLike[str]) -> BinaryIO:
    """Open a file that may be a photo.

    Raises:
        ImageError: The path is a URL, a folder or a pipe, or the file does not exist.
    """
    if found := _URL.match(str(path)):
        if found[0].lower().startswith(("s3", "g", "a", "hdfs")):
            raise ImageError(
                "the photo is in object storage; use captioner caption --engine ray -o FOLDER, or "
                "download the photo"
            )
        raise ImageError("the path is a URL; download the image and pass the file")
    try:
        mode = Path(path).stat().st_mode
        if stat.S_ISDIR(mode):
            raise ImageError("the path is a folder, not an image; pass an image file")
        if not stat.S_ISREG(mode) and not str(path).startswith("/dev/"):
            # Opening a pipe would wait for somebody to write to it.
            raise ImageError(
                "the path is a pipe, socket or device; pass its data as standard input (-)"
            )
        return Path(path).open("rb")
    except FileNotFoundError:
        raise ImageError("the file does not exist; check its name and folder") from None
    except (OSError, ValueError) as error:
        raise ImageError(
            f"the file cannot be opened ({_reason(error)}); check the path and your permissions"
        ) from error


def _seekable(file: BinaryIO) -> BinaryIO:
    """Return the file if it supports seeking, or else a copy of its bytes in memory."""
    try:
        file.seek(0)
        return file
    except (OSError, AttributeError, ValueError):
        pass
    try:
        content = file.read(MAX_STREAM_BYTES + 1)
    except (OSError, ValueError) as error:  # ValueError: the file is closed
        raise ImageError(f"the file cannot be read ({_reason(error)}); {_AGAIN}") from error
    if len(content) > MAX_STREAM_BYTES:
        raise LargeImageError(_TOO_MANY_BYTES)
    return io.BytesIO(content)


def _reason(error: Exception) -> str:
    """Return the operating system's description of an error, or else the error's message."""
    return getattr(error, "strerror", None) or str(error)


def _plain(image: Image.Image) -> Image.Image:
    """Return an image as RGB, upright and without metadata except its size.

    Raises:
        ImageError: The image cannot be decoded.
    """
    try:
        image.load()
        # After loading: PNG may store EXIF after the pixels, and Pillow rotates TIFF itself.
        orientation = _orientation(image)
        rgb = to_rgb(image)
        rgb.info.clear()  # EXIF left here would rotate the image twice
        if orientation > 1:
            rgb.getexif()[ExifTags.Base.Orientation] = orientation
            ImageOps.exif_transpose(rgb, in_place=True)
        rgb.info["size"] = rgb.size
    except Exception as error:  # broken data makes decoders raise nearly anything
        if variants.unusual_compression(image):
            tags = getattr(image, "tag_v2", {})
            raise _unsupported("TIFF", variants.described_tiff(tags)) from error
        raise _undecodable(error, image.format) from error
    return rgb


def _identify(
    file: BinaryIO, max_pixels: int, formats: tuple[str, ...] | None = None, name: str = ""
) -> Image.Image:
    """Read the header of an image. Reject files that are unsupported or too large.

    For camera RAW, the header of the preview is read. ``name`` is the name of the file. Some camera
    RAW files can be recognized only by their name.
    """
    file.seek(0)
    head = file.read(256)
    kind = format_by_content(head)
    metered: Any = _MeteredFile(file)
    image = problem = None
    try:
        if kind is not RAW:
            image = Image.open(metered, formats=_to_try(kind, formats))
    except Image.DecompressionBombError as error:
        count = int(re.findall(r"\d+", str(error))[0])  # the second is Pillow's limit
        raise LargeImageError(
            f"the image has {count:,} pixels, but {_too_large(max_pixels)}"
        ) from error
    except Exception as error:  # broken headers make Pillow raise nearly anything
        problem = error
    tags = getattr(image, "tag_v2", {}) if image and image.format == "TIFF" else None
    if kind is RAW or ((not image or tags is not None) and _is_raw(tags or {}, name)):
        if formats is not None or not RAW.decodable:
            raise _not_an_image(head, RAW, formats)
        return _identify(_raw_preview(file), max_pixels, USUAL_FORMATS)
    if image is None:
        if (bare := _bare_png(file)) is not None:
            return _identify(bare, max_pixels, formats)
        _explain(file, head, problem)
        raise _not_an_image(head, kind, formats, name)
    _check_limits(image, max_pixels)
    # Pillow cannot decode these. For PostScript, it would run Ghostscript and the code in the file.
    if image.format in {"EPS", "MPEG"} or isinstance(image, ImageFile.StubImageFile):
        known = "PostScript" if image.format == "EPS" else image.format
        raise NotAnImageError(f"{known} is not supported; use {_READABLE}")
    if tags is not None:
        _silence_libtiff()
        if variants.wrong_tiff(image):
            raise _unsupported("TIFF", variants.described_tiff(tags))
    if image.format in {"BMP", "DIB", "PPM", "QOI"}:  # their pixels are read one by one
        metered.reads_left = math.inf
    if image.format == "PNG" and (cicp := _PNG_CICP.search(head)):
        image.info["cicp"] = tuple(cicp[1])
    return image


def _check_limits(image: Image.Image, max_pixels: int) -> None:
    """Reject an image with too many pixels, a side that is too long, or too many tiles."""
    size = f"{image.width} x {image.height} pixels"
    if image.width * image.height > max_pixels:
        raise LargeImageError(f"the image is {size}, but {_too_large(max_pixels)}")
    if max(image.size) > MAX_SIDE:
        raise LargeImageError(
            f"the image is {size}, but the limit is {MAX_SIDE:,} per side; crop or scale the image"
        )
    if image.format != "TIFF":
        return
    tags = getattr(image, "tag_v2", {})
    if (count := max(np.size(tags.get(tag, ())) for tag in (273, 324))) > MAX_TILES:
        raise LargeImageError(
            f"the TIFF has {count:,} tiles or strips, but the limit is {MAX_TILES:,}; save the "
            "image as JPEG or PNG"
        )


def _too_large(max_pixels: int) -> str:
    """Return the end of an error message about an image with too many pixels."""
    return f"the limit is {max_pixels:,} pixels; make the image smaller"


class _MeteredFile:
    """A file that limits the number of reads and notes a run of zeros in its data.

    Without the limit, a file with many parts of a few bytes (chunks, comments) could take a minute.
    """

    def __init__(self, file: BinaryIO) -> None:
        self.file = file
        self.zeros = False
        """True if the data read so far contains ``_ZEROS``."""
        file.seek(0, os.SEEK_END)
        self.reads_left: float = 100_000 + file.tell() // 64
        file.seek(0)

    def read(self, size: int = -1) -> bytes:
        self.reads_left -= 1
        if self.reads_left < 0:
            raise OSError("the file has too many small parts")
        content = self.file.read(size)
        if len(content) >= len(_ZEROS) and not self.zeros:  # headers are read in smaller pieces
            self.zeros = _ZEROS in content
        return content

    def __getattr__(self, name: str) -> Any:
        return getattr(self.file, name)


def _count_scans(image: Any) -> int:
    """Count the scans in the first image of a JPEG that is not loaded yet."""
    image.fp.seek(0)
    data, at, scans = image.fp.read(), 2, 0
    while (marker := _MARKER.search(data, at)) and marker[1] != _END:
        scans += marker[1] == _SCAN
        at = marker.end() + int.from_bytes(data[marker.end() : marker.end() + 2], "big")
    return scans


def _zeros_in_scan(file: BinaryIO) -> bool:
    """Return whether pixels of a JPEG were overwritten with zeros, as far as this can be detected.

    A lost block of a memory card or disk reads as zeros, and libjpeg decodes zeros without an
    error. In a Huffman code, zero bits decode to the most frequent symbol of a scan, repeated many
    times. If this symbol is a coefficient, no photo repeats it a hundred times. If the symbol is
    the end of a block, zeros may be correct, because large even areas of a photo consist of such
    symbols. Such scans are not checked. Scans without coefficients are not checked either.
    """
    file.seek(0)
    data, at, progressive = file.read(), 2, False
    symbols: dict[int, int] = {}  # symbol of the all-zero code, by table
    while (marker := _MARKER.search(data, at)) and marker[1] != _END:
        kind, at = marker[1], marker.end()
        segment = data[at + 2 : (at := at + int.from_bytes(data[at : at + 2], "big"))]
        progressive = progressive or kind == b"\xc2"
        while kind == b"\xc4" and len(segment) > 17:
            if segment[0] >> 4:
                symbols[segment[0] & 15] = segment[17]
            segment = segment[17 + sum(segment[1:17]) :]
        if kind == _SCAN and len(segment) > 5:
            first, refined = segment[-3], segment[-1] >> 4
            tables = {table & 15 for table in segment[2:-3:2]}
            if progressive and (first == 0 or refined):
                continue
            end = _MARKER.search(data, at)
            found = data.find(_ZEROS, at, end.start() if end else len(data)) >= 0
            if found and any(symbols.get(table, 0) & 15 for table in tables):
                return True
    return False


def _bare_png(file: BinaryIO) -> BinaryIO | None:
    """Return a PNG without its optional chunks, or None if no chunk can be left out.

    Pillow rejects a PNG for an error in any chunk, such as a long text or a frame out of order.
    """
    metered: Any = _MeteredFile(file)
    if metered.read(8) != b"\x89PNG\r\n\x1a\n":
        return None
    kept, left_out = [b"\x89PNG\r\n\x1a\n"], False
    try:
        while len(head := metered.read(8)) == 8:
            size, kind = int.from_bytes(head[:4], "big") + 4, head[4:]
            if kind in _BARE_PNG:
                chunk = metered.read(size)
                whole = zlib.crc32(kind + chunk[:-4]).to_bytes(4, "big") == chunk[-4:]
                if whole or kind != b"eXIf":
                    kept += [head, chunk]
                    continue
            else:
                metered.seek(size, os.SEEK_CUR)
            left_out = True
    except OSError:
        return None
    return io.BytesIO(b"".join(kept)) if left_out else None


def _check_heif(image: Any) -> None:
    """Reject a HEIC or AVIF file with missing data, and record its colour space (CICP)."""
    file = image.fp.file
    file.seek(0)
    data = file.read()
    try:
        check_complete(data)
    except (EOFError, ValueError, IndexError) as error:
        raise _undecodable(error) from error
    named = set(_HEIF_CICP.findall(data, 0, 1 << 16))
    if "icc_profile" not in image.info and len(named) == 1:
        image.info["cicp"] = tuple(ord(number) for number in named.pop())


@functools.cache
def _silence_libtiff() -> None:
    """Keep the copy of libtiff inside Pillow from printing to standard error.

    Pillow itself turns off libtiff's warnings, but not its error messages. Pillow also raises the
    errors that matter, so no information is lost. Where libtiff's functions are not visible, as on
    Windows, nothing is changed.
    """
    import ctypes

    library = importlib.util.find_spec("PIL._imaging")
    with suppress(OSError, AttributeError):
        ctypes.CDLL(library.origin if library else None).TIFFSetErrorHandler(None)


def _to_try(kind: PhotoFormat | None, formats: tuple[str, ...] | None) -> tuple[str, ...] | None:
    """Return the names of the formats that Pillow should try, or None for all formats.

    ``kind`` is the format that the file seems to have. ``formats`` are the accepted formats. HEIF
    is included only for a file that needs it, because Pillow supports HEIF only after registration.
    """
    accepted = formats is None or "HEIF" in formats
    if accepted and kind is HEIC and register_heif():
        return formats
    return formats if formats is None else tuple(name for name in formats if name != "HEIF")


def _is_raw(tags: Mapping[int, Any], name: str) -> bool:
    """Return whether a TIFF is camera RAW. Pillow could only read a small preview of it.

    DNG has a version tag (50706). Other camera RAW is recognized by its name. It can also be
    recognized by a first image that is a reduced version (tag 254) of images in sub-directories
    (tag 330).
    """
    reduced = isinstance(tags.get(254), int) and tags[254] & 1 and 330 in tags
    return name.lower().endswith(RAW.extensions) or 50706 in tags or bool(reduced)


def _raw_preview(file: BinaryIO) -> BinaryIO:
    """Return the largest preview in a camera RAW file, as a JPEG file with EXIF orientation."""
    import rawpy

    if file.seek(0, os.SEEK_END) > MAX_STREAM_BYTES:  # rawpy reads all bytes
        raise LargeImageError(_TOO_MANY_BYTES)
    file.seek(0)
    try:
        with rawpy.imread(file) as raw:
            preview: Any = raw.extract_thumb().data
        # Other previews, from old cameras, are tiny, and rawpy reads past the end of damaged ones.
        problem = "" if isinstance(preview, bytes) else "not a JPEG"
    except (rawpy.LibRawError, rawpy.NotSupportedError, MemoryError) as error:
        reason = error.args[0] if error.args else type(error).__name__
        problem = reason.decode() if isinstance(reason, bytes) else str(reason)
    if problem:
        raise ImageError(
            f"the preview in the camera RAW file is unusable ({problem}); export the photo as JPEG "
            "with your photo software"
        )
    return io.BytesIO(preview)  # LibRaw adds EXIF where it is missing


def _orientation(image: Image.Image) -> int:
    """Return the EXIF orientation, 1 to 8, or 1 (upright) if it is missing or unreadable."""
    try:
        value: Any = image.getexif().get(ExifTags.Base.Orientation, 1)
    except Exception:  # broken EXIF raises nearly anything; the image itself may be fine
        return 1
    return value if isinstance(value, int) and 1 <= value <= 8 else 1


def _explain(file: BinaryIO, head: bytes, problem: Exception | None) -> None:
    """Raise an error that explains why Pillow cannot open a file, if the reason is known."""
    metered: Any = _MeteredFile(file)
    if head[:4] in {b"II*\0", b"MM\0*", b"II+\0", b"MM\0+"}:
        if (tags := variants.tiff_directory(metered)) is not None:
            raise _unsupported("TIFF", variants.described_tiff(tags)) from problem
    elif head.startswith(b"\xff\xd8\xff"):
        try:
            JpegImagePlugin.JpegImageFile(metered)
        except Exception as error:
            if variants.unsupported(str(error)):
                raise _unsupported("JPEG", first_line(error)) from error
    elif re.match(rb"PF\s", head):
        raise _unsupported("PFM", "colour")
    if problem is not None and not isinstance(problem, UnidentifiedImageError):
        raise _undecodable(problem, "image") from problem


def _unsupported(name: str, variant: str) -> NotAnImageError:
    """Return the error for a variant of a format that Pillow cannot decode."""
    return NotAnImageError(f"this kind of {name} is not supported ({variant}); {variants.SAVE}")


def _undecodable(error: Exception, name: str | None = None) -> ImageError:
    """Return the error for an image that cannot be decoded, from the error of the decoder.

    ``name`` is the name of the format. It is used if the decoder does not support the variant.
    """
    reason = first_line(error).rstrip(".")
    if isinstance(error, MemoryError):
        return ImageError(
            "decoding the image needs more memory than is free; make the image smaller"
        )
    if name and variants.unsupported(reason):
        return _unsupported(name, reason)
    truncated = isinstance(error, EOFError) or "truncated" in reason.lower()
    problem = "truncated" if truncated else "damaged"
    detail = "" if reason.startswith("image file is truncated") else f" ({reason})"
    return ImageError(f"the image is {problem}{detail}; {_AGAIN}")


def _not_an_image(
    head: bytes, kind: PhotoFormat | None, formats: tuple[str, ...] | None, name: str = ""
) -> ImageError:
    """Return the error for a file that Pillow does not recognize as an image.

    Args:
        head: The first bytes of the file.
        kind: The format that these bytes identify, if any.
        formats: The accepted formats, or None for all formats.
        name: Name of the file.
    """
    if not head:
        closed = "the input is empty (0 bytes) or closed; pass an image file"
        empty = "the file is empty; copy or download it again"
        return ImageError(empty if name and Path(name).is_file() else closed)
    if kind is not None and formats is not None and not (kind is HEIC and "HEIF" in formats):
        return NotAnImageError(
            f"the format {kind.name} is not accepted; convert the photo to {_READABLE}"
        )
    if kind is not None and not kind.decodable:
        return NotAnImageError(kind.problem)
    if kind is not None or _SIGNATURES.match(head):
        name = f"{kind.name} " if kind else ""
        return ImageError(f"the {name}image header is truncated or damaged; {_AGAIN}")
    other = next((other for signature, other in _UNSUPPORTED if signature.match(head)), "")
    if other == "a video" and formats is None:
        return NotAnImageError(
            f"the file is {other}; to caption its frames, use captioner caption --every 5s"
        )
    unknown = f"not a supported image (its first bytes are {head[:12].decode('latin-1')!a})"
    problem = f"{other}, not a supported image" if other else unknown
    return NotAnImageError(f"the file is {problem}; use {_READABLE}")
