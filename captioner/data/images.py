"""Reads image files of any kind as RGB, or fails with a one-line error.

The format is detected from the content, not the extension. EXIF rotation is applied, transparent
pixels become white, and the first frame of an animation is used. Truncated images are refused: a
grey lower half would get a confident, wrong caption. Grey values of more than 8 bits are scaled,
where Pillow would clip them: see `captioner.data.pixels`. HEIC is read with ``pillow-heif``, if
installed, and of camera RAW the largest preview with ``rawpy``.

What decoding costs is bounded before it begins: pixels, sides, and the scans of a progressive JPEG,
each of which is a pass over all pixels and may take a few bytes; and the parts of a file, which
Pillow reads one by one.
"""

from __future__ import annotations

import io
import math
import os
import re
import stat
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray
from PIL import ExifTags, Image, ImageFile, ImageOps, UnidentifiedImageError

from captioner.data.formats import HEIC, RAW, PhotoFormat, format_by_content, register_heif
from captioner.data.pixels import image_from_array, to_rgb
from captioner.data.raw import raw_preview
from captioner.errors import ImageError, LargeImageError, NotAnImageError, first_line

MAX_PIXELS = 178_956_970
"""Larger images are refused before decoding; the size at which Pillow raises an error."""

MAX_SIDE = 65_535
"""Images with a longer side are refused: few formats have them, and decoders work row by row."""

MAX_SCANS = 100
"""Scans of a progressive JPEG; cameras and browsers write about 10."""

MAX_SCANNED = 20 * MAX_PIXELS
"""Pixels of all scans together."""

MAX_TILES = 65_536
"""Tiles or strips of a TIFF, each of which is a file of its own to the decoder."""

MAX_STREAM_BYTES = 1 << 30
"""Limit for standard input and pipes (bytes), which may be endless."""

USUAL_FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "HEIF")
"""Common photo formats, by Pillow's names; HEIF (HEIC) only if ``pillow-heif`` is installed."""

_READABLE = "JPEG, PNG, WebP, GIF, BMP or TIFF"
_AGAIN = "copy or download the file again"

Photo = str | os.PathLike[str] | bytes | Image.Image | NDArray[Any] | BinaryIO
"""What `open_image` reads."""

# What to give instead of values often mistaken for photos.
_ALTERNATIVES = {
    "Tensor": "give an array of (H, W, 3): tensor.permute(1, 2, 0).cpu().numpy()",
    "list": "give one photo",
    "generator": "give list(photos), or all of them to model.stream(photos)",
}

# Files often mistaken for photos, by their first bytes.
_UNSUPPORTED = (
    (re.compile(rb"....ftyp|\x1a\x45\xdf\xa3", re.DOTALL), "a video"),
    (re.compile(rb"%PDF"), "a PDF"),
    (re.compile(rb"\s*(<\?xml[^>]*>\s*)?<svg", re.IGNORECASE), "an SVG drawing"),
    (re.compile(rb"\s*<(!doctype|html)", re.IGNORECASE), "a web page"),
)
_URL = re.compile(r"(https?|ftps?|sftp|file|s3|gs):/|data:image/", re.IGNORECASE)
"""One slash: a ``Path`` of a URL has no more."""
_MARKER = re.compile(rb"\xff([^\x00\x01\xd0-\xd8\xff])", re.DOTALL)  # of a segment with a length
_SCAN, _END = b"\xda", b"\xd9"
_SIGNATURES = re.compile(rb"\xff\xd8\xff|\x89PNG|GIF8|RIFF....WEBP|BM|II\*\0|MM\0\*", re.DOTALL)

# Large images, odd EXIF. Per call, the filters of other threads would be changed too.
warnings.filterwarnings("ignore", module=r"PIL\b")


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
        source: A path; the bytes of an image file, or an open one, which is read to its end; a
            Pillow image, which is converted like a file; or an array, see `image_from_array`.
        name: Name in error messages; default: the path or the open file's name.
        max_pixels: Files with more pixels are refused before decoding; at most ``MAX_PIXELS``.
        formats: Formats to accept, by Pillow's names; None: all that Pillow supports.
        min_side: Decode a large JPEG at a reduced size, as `open_reduced` does; None: never.

    Returns:
        A new RGB image without metadata.

    Raises:
        NotAnImageError: The source is not an image, or its format or type is unsupported.
        LargeImageError: It has more than ``max_pixels`` pixels.
        ImageError: It cannot be read. The message is one line that starts with the name.
    """
    if isinstance(source, Image.Image):
        return _plain(source, name or "the image")
    if isinstance(source, np.ndarray):
        try:
            return _plain(image_from_array(source), name or "the array")
        except NotAnImageError as error:
            raise NotAnImageError(f"{name}: {error}" if name else str(error)) from None
    how: Any = {"min_side": min_side, "max_pixels": max_pixels, "formats": formats}
    if isinstance(source, (str, os.PathLike)):
        called = name or str(source)
        with open_file(source, called) as file:
            return open_reduced(file, name=called, **how)[0]
    if isinstance(source, (bytes, bytearray, memoryview)):
        source = io.BytesIO(source)
    if not hasattr(source, "read") or isinstance(source, io.StringIO | io.TextIOWrapper):
        kind = type(source).__name__
        raise NotAnImageError(
            f"{f'{name}: ' if name else ''}a photo must be a path, bytes, an open binary file, a "
            f"Pillow image or a NumPy array, not {kind}; {_ALTERNATIVES.get(kind, 'convert it')}"
        )
    own = getattr(source, "name", None)
    called = name or (own if isinstance(own, str) and own else "the given bytes")
    return open_reduced(source, name=called, **how)[0]


def open_reduced(
    source: BinaryIO,
    *,
    min_side: int | None,
    name: str,
    max_pixels: int = MAX_PIXELS,
    formats: tuple[str, ...] | None = None,
) -> tuple[Image.Image, tuple[int, int]]:
    """Read an image like `open_image`, a large JPEG at a half, a quarter or an eighth of its size.

    The JPEG decoder then computes fewer pixels, which takes less time and memory. The pixels differ
    a little from those of the whole image scaled down: give at least twice the size that they are
    scaled to, for which the difference is small.

    ``min_side`` is the lower bound of the shorter side of the reduced image (pixels).

    Returns:
        The image, and the width and height of the whole image, both upright.
    """
    file = _seekable(source, name)
    image = _identify(file, name, max_pixels, formats)
    width, height = image.size
    if image.info.get("progressive"):
        scans, most = _count_scans(image), min(MAX_SCANS, MAX_SCANNED // (width * height))
        if scans > most:
            problem = f"a JPEG of {scans:,} scans; the limit is {most} at this size; save it again"
            raise _error(name, problem, LargeImageError)
    if min_side is not None and image.format in {"JPEG", "MPO"}:
        image.draft(None, (min_side, min_side))
    reduced = image.size != (width, height)  # before loading, by which Pillow rotates some TIFFs
    rotated = reduced and _orientation(image) >= 5
    plain = _plain(image, name)
    if not reduced:
        return plain, plain.size
    return plain, (height, width) if rotated else (width, height)


def reduced_side(image_size: int) -> int:
    """Shorter side to decode large JPEGs at, for a model with this input size (pixels).

    Twice the input size, so that the input hardly differs, and enough to show the photo.
    """
    return max(2 * image_size, 640)


def header_work(file: BinaryIO, formats: tuple[str, ...] | None = None) -> float:
    """Pixels that decoding an open file takes as long as, by its header; it is read again then.

    Ten scans of a progressive JPEG take as long as another image of its size.
    """
    try:
        image = _identify(file, "the photo", MAX_PIXELS, formats)
        scans = _count_scans(image) if image.info.get("progressive") else 1
        return math.prod(image.size) * max(1, scans / 10)
    finally:
        file.seek(0)


def image_size(path: str | Path) -> tuple[int, int]:
    """Width and height (pixels) of the image that `open_image` would return, from its header."""
    with open_file(path, str(path)) as file:
        image = _identify(_seekable(file, str(path)), str(path), MAX_PIXELS)
        if _orientation(image) < 5:
            return image.size
        # Pillow rotates a TIFF itself: some versions at once, others on loading.
        return open_image(path).size if image.format == "TIFF" else image.size[::-1]


def is_photo(source: object) -> bool:
    """Whether a value is one photo, which `open_image` reads, rather than several."""
    kinds = (str, os.PathLike, bytes, bytearray, memoryview, Image.Image, np.ndarray)
    return isinstance(source, kinds) or hasattr(source, "read")


def open_file(path: str | os.PathLike[str], called: str) -> BinaryIO:
    """Open a file that may be a photo; ImageError for URLs, folders, pipes and missing files."""
    if _URL.match(str(path)):
        raise _error(called, "is a URL; download the image and give the file")
    try:
        mode = Path(path).stat().st_mode
        if stat.S_ISDIR(mode):
            raise _error(called, "is a folder, not an image; give a file")
        if not stat.S_ISREG(mode) and not str(path).startswith("/dev/"):
            # Opening a pipe would wait for somebody to write to it.
            raise _error(called, "a pipe, socket or device; give it as standard input (-)")
        return Path(path).open("rb")
    except FileNotFoundError:
        raise _error(called, "no such file; check the spelling and the folder") from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise _error(called, f"cannot be opened ({reason}); check the path") from error


def _seekable(file: BinaryIO, called: str) -> BinaryIO:
    """The file itself if it is on disk, otherwise its bytes; refuses an empty one."""
    try:
        status = os.fstat(file.fileno())
        if stat.S_ISREG(status.st_mode) and file.tell() == 0 and status.st_size:
            return file
    except (OSError, AttributeError, ValueError):
        pass  # not an operating system file: bytes in memory, an upload
    try:
        content = file.read(MAX_STREAM_BYTES + 1)
    except (OSError, ValueError) as error:  # ValueError: it is closed
        reason = getattr(error, "strerror", None) or str(error)
        raise _error(called, f"cannot be read ({reason}); {_AGAIN}") from error
    if not content:
        raise _error(called, "empty (0 bytes), or already read to its end; give an image")
    if len(content) > MAX_STREAM_BYTES:
        problem = f"more than {MAX_STREAM_BYTES:,} bytes; give an image file"
        raise _error(called, problem, LargeImageError)
    return io.BytesIO(content)


def _plain(image: Image.Image, called: str) -> Image.Image:
    """RGB, upright, without metadata."""
    try:
        image.load()
        # After loading: PNG may store EXIF after the pixels, and Pillow rotates TIFF itself.
        orientation = _orientation(image)
        rgb = to_rgb(image)
    except Exception as error:  # broken data makes decoders raise nearly anything
        raise _undecodable(error, called) from error
    rgb.info.clear()  # EXIF left here would rotate the image twice
    if orientation > 1:
        rgb.getexif()[ExifTags.Base.Orientation] = orientation
        ImageOps.exif_transpose(rgb, in_place=True)
    return rgb


def _identify(
    file: BinaryIO, called: str, max_pixels: int, formats: tuple[str, ...] | None = None
) -> Image.Image:
    """Read the header (of camera RAW, its preview's); refuse unsupported and too large files."""
    try:
        return _identify_image(file, called, max_pixels, formats)
    except _RawError:
        if file.seek(0, os.SEEK_END) > MAX_STREAM_BYTES:
            problem = f"more than {MAX_STREAM_BYTES:,} bytes; give an image file"
            raise _error(called, problem, LargeImageError) from None
    try:
        preview = raw_preview(file)
    except (ValueError, MemoryError) as error:
        problem = f"its preview cannot be read ({first_line(error)})"
        raise _error(called, f"{problem}; export it as JPEG with your photo software") from error
    return _identify_image(preview, called, max_pixels, USUAL_FORMATS)


def _identify_image(
    file: BinaryIO, called: str, max_pixels: int, formats: tuple[str, ...] | None
) -> Image.Image:
    too_large = f"the limit is {max_pixels:,} pixels; make the image smaller"
    head = file.read(256)
    metered: Any = _MeteredFile(file)
    try:
        image = Image.open(metered, formats=_to_try(head, formats))
        pixels = image.width * image.height
    except Image.DecompressionBombError as error:
        count = int(re.findall(r"\d+", str(error))[0])  # Pillow's own limit comes after it
        problem = f"{count:,} pixels; {too_large}"
        raise _error(called, problem, LargeImageError) from error
    except UnidentifiedImageError as error:
        raise _not_an_image(head, called, formats) from error
    except Exception as error:
        raise _undecodable(error, called) from error
    size = f"{image.width} x {image.height} pixels"
    if pixels > max_pixels:
        raise _error(called, f"{size}; {too_large}", LargeImageError)
    if max(image.size) > MAX_SIDE:
        problem = f"{size}; the limit is {MAX_SIDE:,} per side; cut or scale the image"
        raise _error(called, problem, LargeImageError)
    # Recognized only; and for PostScript, Pillow would run Ghostscript, and with it the file's code
    if image.format in {"EPS", "MPEG"} or isinstance(image, ImageFile.StubImageFile):
        kind = "PostScript" if image.format == "EPS" else image.format
        raise _error(called, f"{kind} is not supported; give {_READABLE}", NotAnImageError)
    if image.format in {"BMP", "DIB", "PPM", "QOI"}:  # their pixels are read one by one
        metered.reads_left = math.inf
    if image.format == "TIFF":
        tags = getattr(image, "tag_v2", {})
        if _is_raw(tags, head, called):
            raise _not_an_image(head, called, formats, RAW)
        if (count := max(np.size(tags.get(tag, ())) for tag in (273, 324))) > MAX_TILES:
            problem = f"{count:,} tiles or strips; the limit is {MAX_TILES:,}; save the image again"
            raise _error(called, problem, LargeImageError)
    return image


class _RawError(NotAnImageError):
    """The file is camera RAW, whose preview can be read."""


class _MeteredFile:
    """An image file of many parts of a few bytes (chunks, comments) would take a minute to read."""

    def __init__(self, file: BinaryIO) -> None:
        self.file = file
        file.seek(0, os.SEEK_END)
        self.reads_left: float = 100_000 + file.tell() // 64
        file.seek(0)

    def read(self, size: int = -1) -> bytes:
        self.reads_left -= 1
        if self.reads_left < 0:
            raise OSError("it has too many small parts")
        return self.file.read(size)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.file, name)


def _count_scans(image: Any) -> int:
    """The scans of a JPEG that is not loaded yet, up to the end of its first image."""
    image.fp.seek(0)
    data, at, scans = image.fp.read(), 2, 0
    while (marker := _MARKER.search(data, at)) and marker[1] != _END:
        scans += marker[1] == _SCAN
        at = marker.end() + int.from_bytes(data[marker.end() : marker.end() + 2], "big")
    return scans


def _to_try(head: bytes, formats: tuple[str, ...] | None) -> tuple[str, ...] | None:
    """The formats without HEIF unless the file needs it: Pillow knows it only once registered."""
    accepted = formats is None or "HEIF" in formats
    if accepted and format_by_content(head) is HEIC and register_heif():
        return formats
    return formats if formats is None else tuple(name for name in formats if name != "HEIF")


def _is_raw(tags: Mapping[int, Any], head: bytes, called: str) -> bool:
    """Whether a TIFF is camera RAW, of which Pillow would read the small preview at best.

    DNG has a version tag (50706). The others are recognized by their name, or by a first image
    that is a reduced one (254) of the images in sub-directories (330).
    """
    if format_by_content(head) is RAW or called.lower().endswith(RAW.extensions):
        return True
    reduced = isinstance(tags.get(254), int) and tags[254] & 1 and 330 in tags
    return 50706 in tags or bool(reduced)


def _orientation(image: Image.Image) -> int:
    """EXIF orientation, 1 to 8; 1 (upright) if it is missing or cannot be read."""
    try:
        value: Any = image.getexif().get(ExifTags.Base.Orientation, 1)
    except Exception:  # broken EXIF raises nearly anything; the image itself may be fine
        return 1
    return value if isinstance(value, int) and 1 <= value <= 8 else 1


def _undecodable(error: Exception, called: str) -> ImageError:
    reason = first_line(error).rstrip(".")
    if isinstance(error, MemoryError):
        return _error(called, "out of memory; make the image smaller")
    truncated = isinstance(error, EOFError) or "truncated" in reason.lower()
    problem = "truncated" if truncated else "damaged"
    return _error(called, f"the image is {problem} ({reason}); {_AGAIN}")


def _not_an_image(
    head: bytes, called: str, formats: tuple[str, ...] | None, kind: PhotoFormat | None = None
) -> ImageError:
    kind = kind or format_by_content(head)
    if kind is None and called.lower().endswith(RAW.extensions):
        kind = RAW
    if kind is not None and formats is not None and not (kind is HEIC and "HEIF" in formats):
        problem = f"{kind.name} is not supported here; give {_READABLE}"
        return _error(called, problem, NotAnImageError)
    if kind is not None and not kind.decodable:
        return _error(called, kind.problem, NotAnImageError)
    if kind is RAW:
        return _error(called, RAW.name, _RawError)
    if kind is not None or _SIGNATURES.match(head):
        name = f"{kind.name} " if kind else ""
        return _error(called, f"the {name}image header is truncated or damaged; {_AGAIN}")
    kinds = (other for signature, other in _UNSUPPORTED if signature.match(head))
    unknown = f"not a supported image (it begins with {head[:12].decode('latin-1')!a})"
    other = next(kinds, "")
    if other == "a video" and formats is None:
        return _error(called, f"{other}; captioner caption captions its frames with --every 5s")
    problem = f"{other}, which is not supported" if other else unknown
    return _error(called, f"{problem}; give {_READABLE}", NotAnImageError)


def _error(called: str, problem: str, kind: type[ImageError] = ImageError) -> ImageError:
    return kind(f"{called.replace(chr(10), ' ')}: {problem}")
