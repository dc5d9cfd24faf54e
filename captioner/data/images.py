"""Any picture that a person may give becomes one plain RGB image, or one clear line.

What the file says is followed: its content decides (never its extension), the EXIF rotation is
applied, transparency lies on white, the first frame stands for an animation. A picture that is
broken is refused rather than half read: a grey lower half would get a confident, wrong caption.

Grey values beyond 8 bits are scaled, where Pillow would clip them: see `_to_8_bit`.
"""

from __future__ import annotations

import io
import math
import os
import re
import stat
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageChops, UnidentifiedImageError

from captioner.errors import ImageError, LargeImageError, NotAnImageError

MAX_PIXELS = 178_956_970
"""Larger pictures are refused before they are decoded; Pillow's own limit for an error."""

MAX_STREAM_BYTES = 1 << 30
"""Standard input and pipes are read up to here, in bytes: they may never end."""

USUAL_FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF")
"""What photos come in, by Pillow's names."""

_READABLE = "JPEG, PNG, WebP, GIF, BMP or TIFF"
_AGAIN = "copy or download the file again"

_ORIENTATION = 0x0112
_TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}

# What to give instead of what is no file and no picture, by its type.
_WAYS = {
    "bytes": "give io.BytesIO(data)",
    "list": "give one photo, or all of them to model.stream(photos)",
}

# What people give by mistake, by its first bytes.
_MISTAKEN = (
    (re.compile(rb"....ftyp(heic|heix|hevc|heim|mif1|msf1)", re.DOTALL), "a HEIC photo"),
    (re.compile(rb"....ftypavi[fs]", re.DOTALL), "an AVIF picture"),
    (re.compile(rb"....ftyp", re.DOTALL), "a video"),
    (re.compile(rb"%PDF"), "a PDF"),
    (re.compile(rb"%!PS"), "a PostScript drawing"),
    (re.compile(rb"\s*(<\?xml[^>]*>\s*)?<svg", re.IGNORECASE), "an SVG drawing"),
    (re.compile(rb"\s*<(!doctype|html)", re.IGNORECASE), "a web page"),
    (re.compile(rb"PK\x03\x04"), "a ZIP archive"),
)
_BEGINNINGS = re.compile(rb"\xff\xd8\xff|\x89PNG|GIF8|RIFF....WEBP|BM|II\*\0|MM\0\*", re.DOTALL)


def open_image(
    source: str | Path | BinaryIO | Image.Image,
    *,
    name: str | None = None,
    max_pixels: int = MAX_PIXELS,
    formats: tuple[str, ...] | None = None,
) -> Image.Image:
    """Read one picture as RGB, upright and fully loaded.

    Args:
        source: A file, an open binary file such as ``sys.stdin.buffer`` (read to its end), or a
            Pillow image, which is treated as its file would be.
        name: What messages call it; by default the path, or the open file's own name.
        max_pixels: A file of more is refused before it is decoded; ``MAX_PIXELS`` at most.
        formats: Pillow's names of the formats that are read; None: all that it knows.

    Returns:
        A new RGB image without metadata.

    Raises:
        NotAnImageError: It is no picture, one of a kind that is not read, or nothing that could
            hold one.
        LargeImageError: It has more than ``max_pixels`` pixels.
        ImageError: It cannot be read; one line that starts with the name.
    """
    if isinstance(source, Image.Image):
        return _plain(source, name or "the picture")
    called = name or _name_of(source)
    if isinstance(source, (str, Path)):
        with _open_file(source, called) as file:
            return _decode(_seekable(file, called), called, max_pixels, formats)
    if not hasattr(source, "read"):
        kind = type(source).__name__
        raise NotAnImageError(
            (f"{name}: " if name else "")
            + f"a photo is a file's name, an open binary file or a Pillow image, not {kind}; "
            + _WAYS.get(kind, "of an array in RGB, PIL.Image.fromarray(array) makes one")
        )
    return _decode(_seekable(source, called), called, max_pixels, formats)


def image_size(path: str | Path) -> tuple[int, int]:
    """Width and height in pixels of what `open_image` would return, from the header alone.

    Args:
        path: A picture file.

    Returns:
        Width, height.

    Raises:
        ImageError: It is missing or no picture.
    """
    with _open_file(path, str(path)) as file, _quiet_pillow():
        image = _identify(_seekable(file, str(path)), str(path), MAX_PIXELS)
        turned = _orientation(image) >= 5
        if turned and image.format == "TIFF":
            try:  # Pillow turns a TIFF itself: some versions at once, others on loading
                image.load()
            except Exception as error:
                raise _undecodable(error, str(path)) from error
            return image.size
        width, height = image.size
        return (height, width) if turned else (width, height)


def _name_of(source: str | Path | BinaryIO) -> str:
    if isinstance(source, (str, Path)):
        return str(source)
    own = getattr(source, "name", None)
    return own if isinstance(own, str) and own else "the given bytes"


def _open_file(path: str | Path, called: str) -> BinaryIO:
    if str(path).startswith(("http://", "https://")):
        raise _error(called, "is a web address; download the picture and give the file")
    try:
        if Path(path).is_dir():
            raise _error(called, "is a folder, not a picture; give a file in it")
        return Path(path).open("rb")
    except FileNotFoundError:
        raise _error(called, "no such file; check the spelling and the folder") from None
    except PermissionError:
        raise _error(called, "no permission to read this file; allow it or copy the file") from None
    except (OSError, ValueError) as error:
        reason = (error.strerror if isinstance(error, OSError) else None) or str(error)
        raise _error(called, f"cannot be opened ({reason}); check the path") from error


def _seekable(file: BinaryIO, called: str) -> BinaryIO:
    """The file itself where it lies on disk, otherwise its bytes; refuses an empty one."""
    try:
        status = os.fstat(file.fileno())
        if stat.S_ISREG(status.st_mode) and file.tell() == 0:
            if status.st_size == 0:
                raise _error(called, f"the file is empty (0 bytes); {_AGAIN}")
            return file
    except (OSError, AttributeError):
        pass  # no file of the system's: bytes in memory, an upload
    try:
        content = file.read(MAX_STREAM_BYTES + 1)
    except OSError as error:
        raise _error(called, f"cannot be read ({error.strerror or error}); {_AGAIN}") from error
    if not content:
        raise _error(called, "empty (0 bytes); give a picture")
    if len(content) > MAX_STREAM_BYTES:
        problem = f"more than {MAX_STREAM_BYTES:,} bytes; give a picture file"
        raise _error(called, problem, LargeImageError)
    return io.BytesIO(content)


def _decode(
    file: BinaryIO, called: str, max_pixels: int, formats: tuple[str, ...] | None
) -> Image.Image:
    with _quiet_pillow():
        return _plain(_identify(file, called, max_pixels, formats), called)


def _plain(image: Image.Image, called: str) -> Image.Image:
    """RGB, upright, without metadata."""
    with _quiet_pillow():
        try:
            image.load()
            # After loading: PNG may hold its EXIF behind the pixels, and Pillow turns TIFF itself.
            turn = _TURNS.get(_orientation(image))
            rgb = to_rgb(image)
        except Exception as error:  # broken data makes decoders raise nearly anything
            raise _undecodable(error, called) from error
        rgb = rgb if turn is None else rgb.transpose(turn)
    rgb.info.clear()  # an orientation left behind would turn the picture twice
    return rgb


def _identify(
    file: BinaryIO, called: str, max_pixels: int, formats: tuple[str, ...] | None = None
) -> Image.Image:
    """Read the header; refuse what is no picture, or too large to decode."""
    try:
        image = Image.open(file, formats=formats)
        pixels = image.width * image.height
    except Image.DecompressionBombError as error:
        problem = f"{_first_line(error)}; {_too_large(max_pixels)}"
        raise _error(called, problem, LargeImageError) from error
    except UnidentifiedImageError as error:
        raise _not_a_picture(file, called) from error
    except Exception as error:
        raise _undecodable(error, called) from error
    if pixels > max_pixels:
        size = f"{image.width} x {image.height} pixels"
        raise _error(called, f"{size}; {_too_large(max_pixels)}", LargeImageError)
    if image.format == "EPS":  # Pillow would start Ghostscript, which runs what the file says
        problem = f"a PostScript drawing, not a picture; give {_READABLE}"
        raise _error(called, problem, NotAnImageError)
    return image


def to_rgb(image: Image.Image) -> Image.Image:
    """A picture of any mode as RGB, what is transparent on white; a new one, not turned."""
    if image.mode in {"I", "F"} or image.mode.startswith("I;16"):
        return Image.fromarray(_to_8_bit(image)).convert("RGB")
    if image.has_transparency_data:
        white = Image.new("RGBA", image.size, "white")
        return Image.alpha_composite(white, _to_rgba(image)).convert("RGB")
    if image.mode == "CMYK" and image.format in {"JPEG", "MPO"} and "adobe" not in image.info:
        # Adobe stores inks inverted and says so; Pillow takes every CMYK JPEG for one of Adobe's.
        return ImageChops.invert(image).convert("RGB")
    return image.convert("RGB")  # always a new image, never Pillow's file object


def _to_rgba(image: Image.Image) -> Image.Image:
    return image.convert("LA").convert("RGBA") if image.mode == "La" else image.convert("RGBA")


def _to_8_bit(image: Image.Image) -> NDArray[np.uint8]:
    """Scale grey values of more than 8 bits to 0..255.

    16-bit modes, and the 32-bit mode where the file is known to be 16-bit (PNG, PGM): divided by
    257. Other 32-bit integers and floats do not say their range, so it is read off the values: all
    within 0..1 (floats only) is times 255; within 0..255 stays; within 0..65535 is divided by 257;
    anything else is stretched from its smallest to its largest value. NaN counts as 0, an infinity
    as the nearest finite value. The value that a PNG declares transparent becomes white.
    """
    values = np.asarray(image)
    low, high = _range(values)
    made = np.empty(values.shape, dtype=np.uint8)
    for start in range(0, len(values), _STRIP):  # the numbers in between are 8 times as large
        strip = slice(start, start + _STRIP)
        made[strip] = _strip_to_8_bit(values[strip].astype(np.float64), image, low, high)
    return made


_STRIP = 256
"""Rows that are scaled at once."""


def _range(values: NDArray[Any]) -> tuple[float, float]:
    """The least and the greatest finite value; 0 and 0 where there is none."""
    low, high = math.inf, -math.inf
    for start in range(0, len(values), _STRIP):
        strip = values[start : start + _STRIP]
        finite = strip[np.isfinite(strip)]
        if finite.size:
            low, high = min(low, float(finite.min())), max(high, float(finite.max()))
    return (low, high) if low <= high else (0.0, 0.0)


def _strip_to_8_bit(
    values: NDArray[np.float64], image: Image.Image, low: float, high: float
) -> NDArray[np.uint8]:
    grey = np.nan_to_num(values, nan=0.0, posinf=high, neginf=low)
    if image.mode.startswith("I;16") or image.format in {"PNG", "PPM"}:
        grey /= 257
    elif low < 0 or high > 65535:
        grey = (grey - low) * (255 / (high - low) if high > low else 0)
    elif high > 255:
        grey /= 257
    elif high <= 1 and image.mode == "F":
        grey *= 255
    transparent = image.info.get("transparency")
    if isinstance(transparent, int):
        grey[values == transparent] = 255
    return np.clip(np.rint(grey), 0, 255).astype(np.uint8)


def _orientation(image: Image.Image) -> int:
    """The EXIF orientation, 1 to 8; 1 (upright) where it is missing or cannot be read."""
    try:
        value: Any = image.getexif().get(_ORIENTATION, 1)
    except Exception:  # broken EXIF raises nearly anything and is no reason to refuse a photo
        return 1
    return value if isinstance(value, int) and 1 <= value <= 8 else 1


def _undecodable(error: Exception, called: str) -> ImageError:
    reason = _first_line(error)
    if isinstance(error, MemoryError):
        return _error(called, "too large for the memory that is free; make the picture smaller")
    if isinstance(error, EOFError) or "truncated" in reason.lower():
        return _error(called, f"the picture breaks off before its end ({reason}); {_AGAIN}")
    return _error(called, f"the picture is broken ({reason}); {_AGAIN}")


def _not_a_picture(file: BinaryIO, called: str) -> ImageError:
    file.seek(0)
    head = file.read(256)
    if _BEGINNINGS.match(head):
        return _error(called, f"the picture's header is broken or breaks off; {_AGAIN}")
    begins = f"not a picture that can be read (it begins with {head[:12].decode('latin-1')!a})"
    kinds = (kind for beginning, kind in _MISTAKEN if beginning.match(head))
    known = next((f"{kind}, which cannot be read" for kind in kinds), begins)
    return _error(called, f"{known}; give {_READABLE}", NotAnImageError)


def _too_large(max_pixels: int) -> str:
    return f"more than {max_pixels:,} pixels are not decoded; make the picture smaller"


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0].rstrip(".")


def _error(called: str, problem: str, kind: type[ImageError] = ImageError) -> ImageError:
    return kind(f"{called.replace(chr(10), ' ')}: {problem}")


_quiet = threading.Lock()
_quiet_depth = 0
_quiet_filters: warnings.catch_warnings[None] | None = None


@contextmanager
def _quiet_pillow() -> Iterator[None]:
    """Keep Pillow's warnings (large picture, odd EXIF) from the user while pictures are read.

    `warnings.catch_warnings` alone breaks when threads leave it in another order than they entered:
    here the first one in changes the filters and the last one out restores them.
    """
    global _quiet_depth, _quiet_filters  # noqa: PLW0603
    with _quiet:
        if _quiet_depth == 0:
            _quiet_filters = warnings.catch_warnings()
            _quiet_filters.__enter__()
            warnings.filterwarnings("ignore", module=r"PIL\b")
        _quiet_depth += 1
    try:
        yield
    finally:
        with _quiet:
            _quiet_depth -= 1
            if _quiet_depth == 0 and _quiet_filters is not None:
                _quiet_filters.__exit__(None, None, None)
