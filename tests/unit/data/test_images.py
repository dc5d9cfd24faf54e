"""Decoding image files of any kind to RGB, or a one-line error."""

from __future__ import annotations

import io
import re
import struct
import subprocess
import sys
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from mutated_photos import chunk, progressive
from numpy.typing import NDArray
from PIL import Image, TiffImagePlugin
from tiny_raw import tiny_dng

from captioner.data import formats, images
from captioner.data.images import USUAL_FORMATS, image_size, open_image
from captioner.errors import ImageError, LargeImageError, NotAnImageError

GREY16 = np.array([[0, 257, 25700, 65535]], dtype=np.uint16)
GREY8 = [0, 1, 100, 255]


def pixels(path: Path) -> NDArray[np.uint8]:
    image = open_image(path)
    assert type(image) is Image.Image
    assert image.mode == "RGB"
    return np.asarray(image)


def row(path: Path) -> list[int]:
    """The grey values of an image one pixel high."""
    values = pixels(path)
    assert (values == values[..., :1]).all()
    return [int(value) for value in values[0, :, 0]]


def photo(size: tuple[int, int] = (64, 48)) -> Image.Image:
    noise = np.random.default_rng(0).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
    return Image.fromarray(noise)


def failure(path: Path) -> str:
    with pytest.raises(ImageError) as caught:
        open_image(path)
    message = str(caught.value)
    assert message.startswith(f"{path}: ")
    assert "\n" not in message
    return message


@pytest.mark.parametrize("name", ["a.bmp", "фото 写真.png"])  # others below, with EXIF
def test_lossless_formats_keep_their_pixels(tmp_path: Path, name: str):
    photo().save(tmp_path / name)
    np.testing.assert_array_equal(pixels(tmp_path / name), np.asarray(photo()))


def without_adobe(jpeg: bytes) -> bytes:
    start = jpeg.index(b"\xff\xee")
    return jpeg[:start] + jpeg[start + 2 + int.from_bytes(jpeg[start + 2 : start + 4], "big") :]


def test_cmyk_jpeg_with_and_without_adobe_marker(tmp_path: Path):
    Image.new("CMYK", (16, 16), (0, 255, 255, 0)).save(tmp_path / "adobe.jpg", quality=100)
    np.testing.assert_allclose(pixels(tmp_path / "adobe.jpg")[8, 8], (255, 0, 0), atol=3)
    # Pillow writes inverted inks, as Adobe does; without Adobe's marker the bytes are not inverted.
    Image.new("CMYK", (16, 16), (255, 0, 0, 255)).save(tmp_path / "plain.jpg", quality=100)
    plain = without_adobe((tmp_path / "plain.jpg").read_bytes())
    (tmp_path / "plain.jpg").write_bytes(plain)
    np.testing.assert_allclose(pixels(tmp_path / "plain.jpg")[8, 8], (255, 0, 0), atol=3)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="the peak is read from /proc")
@pytest.mark.parametrize("mode", ["RGB", "RGBA"])
@pytest.mark.parametrize(("name", "most"), [("a.webp", 25), ("a.png", 17), ("a.tif", 17)])
def test_decoding_stays_within_the_documented_memory(
    tmp_path: Path, mode: str, name: str, most: int
) -> None:
    """The server's limits rely on it; tracemalloc does not see the decoders' memory."""
    rotated = Image.Exif()
    rotated[0x0112] = 6
    colour = (255, 0, 0, 128)[: len(mode)]
    Image.new(mode, (3000, 3000), colour).save(tmp_path / name, exif=rotated)
    code = (
        "import sys; from captioner.data.images import open_image\n"
        "def peak(): return next(int(line.split()[1]) for line in open('/proc/self/status')"
        " if line.startswith('VmHWM'))\n"
        "open_image(sys.argv[1]); before = peak(); open_image(sys.argv[2]); print(peak() - before)"
    )
    Image.new("RGBA", (4, 4)).save(tmp_path / f"small{name[1:]}")
    files = [str(tmp_path / f"small{name[1:]}"), str(tmp_path / name)]
    done = subprocess.run(
        [sys.executable, "-c", code, *files], capture_output=True, text=True, check=True
    )
    assert int(done.stdout) * 1024 < most * 3000 * 3000


def test_a_truncated_rotated_tiff(tmp_path: Path) -> None:
    rotated = Image.Exif()
    rotated[0x0112] = 6
    file = tmp_path / "a.tif"
    Image.new("RGB", (60, 40)).save(file, exif=rotated)  # the header first, then the pixels
    assert image_size(file) == (40, 60)
    file.write_bytes(file.read_bytes()[:-100])
    for read in (image_size, open_image):
        with pytest.raises(ImageError, match=r"a\.tif: the image is truncated"):
            read(file)


def test_16_bit_grey_of_either_byte_order_and_dark(tmp_path: Path):
    big = Image.frombytes("I;16B", (4, 1), GREY16.astype(">u2").tobytes())
    big.save(tmp_path / "a.tif")
    assert row(tmp_path / "a.tif") == GREY8
    Image.fromarray(np.array([[0, 200, 255]], dtype=np.uint16)).save(tmp_path / "dark.png")
    assert row(tmp_path / "dark.png") == [0, 1, 1]  # scaled by 65535, not by the image's maximum
    (tmp_path / "dark.pgm").write_bytes(b"P5 3 1 65535\n" + bytes([0, 0, 0, 200, 0, 255]))
    assert row(tmp_path / "dark.pgm") == [0, 1, 1]


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        (np.array([0, 1, 100, 255], np.int32), GREY8),
        (np.array([0, 257, 25700, 65535], np.int32), GREY8),
        (np.array([-1000, 0, 50_000, 101_000], np.int32), [0, 2, 128, 255]),
        (np.array([7, 7, 7, 7], np.int32), [7, 7, 7, 7]),
        (np.array([0, 0.5, 1, np.nan], np.float32), [0, 128, 255, 0]),
        (np.array([0, 1, 100, 255], np.float32), GREY8),
        (np.array([0, 257, 25700, 65535], np.float32), GREY8),
        (np.array([-1, 0, 1, np.inf], np.float32), [0, 128, 255, 255]),
        (np.array([-3e38, 0, 0, 3e38], np.float32), [0, 128, 128, 255]),
        (np.array([np.nan] * 4, np.float32), [0, 0, 0, 0]),
    ],
)
def test_grey_without_a_fixed_range_is_scaled_by_its_values(
    tmp_path: Path, values: NDArray[np.generic], expected: list[int]
):
    Image.fromarray(values[None]).save(tmp_path / "a.tif")
    assert row(tmp_path / "a.tif") == expected


@pytest.mark.parametrize("mode", ["LA", "RGBA"])
def test_transparent_pixels_become_white(tmp_path: Path, mode: str):
    alpha = Image.fromarray(np.array([[0, 128, 255]], dtype=np.uint8))
    black = Image.new(mode, (3, 1))
    black.putalpha(alpha)
    black.save(tmp_path / "a.png")
    assert row(tmp_path / "a.png") == [255, 127, 0]


def png(header: tuple[int, ...], scanline: bytes, *extra: bytes) -> bytes:
    head = chunk(b"IHDR", struct.pack(">IIBBBBB", *header, 0, 0, 0))
    data = chunk(b"IDAT", zlib.compress(scanline))
    return b"\x89PNG\r\n\x1a\n" + b"".join([head, *extra, data, chunk(b"IEND", b"")])


def test_the_transparent_value_of_a_grey_png_is_white(tmp_path: Path):
    for bits, scanline in ((16, b"\0\1\1\x64\x64"), (8, b"\0\1\x64")):
        transparent = chunk(b"tRNS", b"\1\1" if bits == 16 else b"\0\1")
        (tmp_path / "a.png").write_bytes(png((2, 1, bits, 0), scanline, transparent))
        assert row(tmp_path / "a.png") == [255, 100]


@pytest.mark.parametrize("suffix", ["gif", "webp", "png", "tif"])
def test_the_first_frame_of_an_animation_is_used(tmp_path: Path, suffix: str):
    first, second = Image.new("RGB", (8, 8), "red"), Image.new("RGB", (8, 8), "blue")
    more = {"lossless": True} if suffix == "webp" else {}
    first.save(tmp_path / f"a.{suffix}", save_all=True, append_images=[second], **more)
    assert (pixels(tmp_path / f"a.{suffix}") == (255, 0, 0)).all()


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("suffix", ["png", "tif", "webp"])
def test_exif_rotation_is_applied_once(tmp_path: Path, suffix: str, orientation: int):
    upright = np.asarray(photo((6, 4)))
    stored = {  # pixels stored for each orientation, by the EXIF standard
        1: upright,
        2: upright[:, ::-1],
        3: upright[::-1, ::-1],
        4: upright[::-1],
        5: upright.transpose(1, 0, 2),
        6: upright.transpose(1, 0, 2)[::-1],
        7: upright.transpose(1, 0, 2)[::-1, ::-1],
        8: upright.transpose(1, 0, 2)[:, ::-1],
    }[orientation]
    exif = Image.Exif()
    exif[0x0112] = orientation
    file = tmp_path / f"a.{suffix}"
    more = {"lossless": True} if suffix == "webp" else {}
    Image.fromarray(np.ascontiguousarray(stored)).save(file, exif=exif, **more)
    np.testing.assert_array_equal(pixels(file), upright)
    assert image_size(file) == (6, 4)
    assert open_image(file).getexif().get(0x0112) is None


@pytest.mark.parametrize(
    ("name", "tags"),
    [
        ("a.NEF", {}),  # recognized by name only
        ("a.tif", {50706: 1}),  # DNGVersion
        ("a.tif", {254: 1, 330: 8}),  # NewSubfileType (reduced) and SubIFDs
    ],
)
def test_camera_raw_without_rawpy_is_refused(tmp_path: Path, monkeypatch, name, tags):
    """Pillow would read its smallest preview."""
    monkeypatch.setitem(sys.modules, "rawpy", None)
    known = TiffImagePlugin.ImageFileDirectory_v2()
    for tag, value in tags.items():
        known[tag] = value
    photo((16, 12)).save(tmp_path / name, format="TIFF", tiffinfo=known)

    assert "camera RAW needs rawpy; run: pip install 'captioner[raw]'" in failure(tmp_path / name)


@pytest.mark.parametrize("orientation", [1, 3, 6, 8])
def test_the_largest_preview_of_camera_raw_is_read_upright(orientation, tmp_path: Path):
    pytest.importorskip("rawpy")
    large = Image.new("RGB", (480, 320), "red")
    large.paste("blue", (0, 0, 160, 320))
    file = tmp_path / "a.dng"
    file.write_bytes(tiny_dng(Image.new("RGB", (96, 64)), large, orientation=orientation))
    turns = {1: 0, 3: 2, 6: 3, 8: 1}[orientation]  # by 90 degrees, anticlockwise

    made = pixels(file).astype(int)

    assert np.abs(made - np.rot90(np.asarray(large), turns).astype(int)).mean() < 3
    assert image_size(file) == made.shape[1::-1]
    np.testing.assert_array_equal(pixels(file.read_bytes()), made)  # whatever its name
    with pytest.raises(NotAnImageError, match="camera RAW is not supported here; give JPEG"):
        open_image(file, formats=USUAL_FORMATS)
    with pytest.raises(LargeImageError):
        open_image(file, max_pixels=480 * 320 - 1)


def test_camera_raw_that_cannot_be_read_is_one_line(tmp_path: Path):
    pytest.importorskip("rawpy")
    whole = tiny_dng(Image.new("RGB", (480, 320)))
    for name, content in {
        "none.dng": tiny_dng(),
        "bitmap.dng": tiny_dng(Image.new("RGB", (480, 320)), jpeg=False),
        "short.dng": whole[: len(whole) // 8],
        "text.nef": b"not a RAW file",
    }.items():
        (tmp_path / name).write_bytes(content)
        assert failure(tmp_path / name).startswith(f"{tmp_path / name}: ")


def heic(**options: Any) -> bytes:
    pillow_heif = pytest.importorskip("pillow_heif")
    file = io.BytesIO()
    pillow_heif.from_pillow(Image.new("RGB", (64, 48), "red")).save(file, **options)
    return file.getvalue()


def test_heic_is_read_with_pillow_heif(tmp_path: Path):
    (tmp_path / "a.heic").write_bytes(heic(quality=100))
    made = pixels(tmp_path / "a.heic")
    assert made.shape == (48, 64, 3)
    assert np.abs(made.astype(int) - (255, 0, 0)).max() < 8
    assert image_size(tmp_path / "a.heic") == (64, 48)
    (tmp_path / "b.heic").write_bytes(heic()[:200])
    assert "the HEIC image header is truncated or damaged; copy" in failure(tmp_path / "b.heic")
    assert open_image(tmp_path / "a.heic", formats=USUAL_FORMATS).size == (64, 48)
    with pytest.raises(NotAnImageError, match="HEIC is not supported here; give JPEG"):
        open_image(tmp_path / "a.heic", formats=("JPEG",))


def test_without_pillow_heif_the_error_names_the_pip_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setitem(sys.modules, "pillow_heif", None)
    monkeypatch.setattr(Image, "ID", [name for name in Image.ID if name != "HEIF"])
    formats.register_heif.cache_clear()
    (tmp_path / "a.jpg").write_bytes(b"\0\0\0\x18ftypheic\0\0\0\0mif1heic")

    problem = "HEIC needs pillow-heif; run: pip install 'captioner[heif]'"
    assert failure(tmp_path / "a.jpg").endswith(problem)
    with pytest.raises(NotAnImageError, match=re.escape(problem)):
        open_image(tmp_path / "a.jpg", formats=USUAL_FORMATS)
    formats.register_heif.cache_clear()


def test_missing_files_folders_and_urls(tmp_path: Path):
    assert "no such file" in failure(tmp_path / "none.jpg")
    assert "is a folder" in failure(tmp_path)
    with pytest.raises(ImageError, match=r"^https://a\.b/c\.jpg: is a URL; download"):
        open_image("https://a.b/c.jpg")
    with pytest.raises(ImageError, match="cannot be opened"):
        open_image(tmp_path / ("x" * 300))


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"", "empty"),
        (b"hello world, no picture", "not a supported image .*hello world"),
        (b"\xff\xd8\xff\xe0\0\x10JF", "truncated"),
        (b"\x89PNG\r\n\x1a\n", "truncated"),
        (b"\0\0\0\x18ftypheic\0\0\0\0mif1heic", "HEIC"),
        (b"\0\0\0\x18ftypcrx \0\0\0\1crx isom", "camera RAW|its preview"),
        (b"\0\0\0\x1cftypavif\0\0\0\0avif", "AVIF"),
        (b"<!DOCTYPE html><title>404</title>", "a web page"),
        (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EndComments\n", "PostScript"),
    ],
)
def test_unsupported_files(tmp_path: Path, content: bytes, expected: str):
    (tmp_path / "a.jpg").write_bytes(content)
    with pytest.raises(ImageError, match=expected):
        open_image(tmp_path / "a.jpg")
    assert ";" in failure(tmp_path / "a.jpg")  # followed by advice


@pytest.mark.parametrize("suffix", ["jpg", "png", "gif", "webp", "bmp", "tif"])
@pytest.mark.parametrize("part", [0.01, 0.3, 0.6, 0.9])
def test_truncated_images_are_refused(tmp_path: Path, suffix: str, part: float):
    file = tmp_path / f"a.{suffix}"
    photo().save(file)
    content = file.read_bytes()
    file.write_bytes(content[: int(len(content) * part)])
    failure(file)
    if (suffix, part) == ("jpg", 0.6):
        assert "the image is truncated (image file is truncated" in failure(file)


def test_ten_bits_are_read_pixel_by_pixel_by_pillow(tmp_path: Path) -> None:
    white = np.full((400, 400), 1023, ">u2")
    (tmp_path / "x.pgm").write_bytes(b"P5 400 400 1023\n" + white.tobytes())

    assert pixels(tmp_path / "x.pgm").min() == 255


@pytest.mark.parametrize(("side", "refused"), [(13_377, False), (13_378, True), (60_000, True)])
def test_a_decompression_bomb_is_refused_before_decoding(tmp_path: Path, side: int, refused: bool):
    # There is no pixel data: decoding would raise a different error.
    file = tmp_path / "a.png"
    file.write_bytes(png((side, side, 8, 2), b""))
    assert (side * side > images.MAX_PIXELS) == refused
    assert ("limit is 178,956,970 pixels" in failure(file)) == refused


def test_the_scans_of_a_progressive_jpeg_are_bounded(monkeypatch: pytest.MonkeyPatch):
    assert open_image(io.BytesIO(progressive((64, 48), 90))).size == (64, 48)
    with pytest.raises(LargeImageError, match="a JPEG of 3,010 scans; the limit is 100"):
        open_image(io.BytesIO(progressive((64, 48), 3000)))
    monkeypatch.setattr(images, "MAX_SCANNED", 64 * 48 * 20)
    with pytest.raises(LargeImageError, match="a JPEG of 21 scans; the limit is 20 at this size"):
        open_image(io.BytesIO(progressive((64, 48), 11)))
    whole = progressive((64, 48), 10)
    comment = b"\xff\xfe\0\x06\xff\xda\xff\xda"  # its length covers what looks like scans
    assert open_image(io.BytesIO(whole[:2] + 9 * comment + whole[2:])).size == (64, 48)
    assert open_image(io.BytesIO(whole + 99 * b"\xff\xda")).size == (64, 48)  # such as a video
    hidden = whole[:-2] + b"\xff\xfe\0\x04\xff\xd9" + whole[whole.rindex(b"\xff\xda") :]
    with pytest.raises(LargeImageError, match="21 scans"):
        open_image(io.BytesIO(hidden))


class Pipe(io.BytesIO):
    def seek(self, *_: int) -> int:
        raise io.UnsupportedOperation


def test_bytes_and_streams(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    photo().save(tmp_path / "a.png")
    content = (tmp_path / "a.png").read_bytes()
    np.testing.assert_array_equal(np.asarray(open_image(io.BytesIO(content))), np.asarray(photo()))
    with (tmp_path / "a.png").open("rb") as file:
        assert open_image(file).size == (64, 48)
    with pytest.raises(ImageError, match=r"^standard input: empty"):
        open_image(io.BytesIO(), name="standard input")
    with pytest.raises(ImageError, match=r"^the given bytes: not a supported image"):
        open_image(io.BytesIO(b"text"))
    assert open_image(Pipe(content)).size == (64, 48)
    monkeypatch.setattr(images, "MAX_STREAM_BYTES", 100)
    with pytest.raises(LargeImageError, match=r"more than .* bytes; give"):
        open_image(Pipe(content))


RGB = np.random.default_rng(0).integers(256, size=(5, 7, 3), dtype=np.uint8)


@pytest.mark.parametrize(
    ("array", "expected"),
    [
        (RGB, RGB),
        (RGB.astype(np.float32) / 255, RGB),
        (RGB.astype(np.float64) / 255, RGB),
        (RGB[::-1, ::-2], RGB[::-1, ::-2]),
        (RGB[..., 0], np.repeat(RGB[..., :1], 3, axis=2)),
        (RGB[..., :1], np.repeat(RGB[..., :1], 3, axis=2)),
        (np.dstack([RGB, np.full((5, 7), 255, np.uint8)]), RGB),
        (np.dstack([RGB, np.zeros((5, 7), np.uint8)]), np.full((5, 7, 3), 255)),
        (np.zeros((4, 4, 3)), np.zeros((4, 4, 3))),
    ],
    ids=["RGB", "float32", "float64", "strided", "(H, W)", "grey", "opaque", "clear", "black"],
)
def test_arrays_are_accepted_as_photos(array: Any, expected: Any):
    np.testing.assert_array_equal(np.asarray(open_image(array)), expected)


@pytest.mark.parametrize(
    ("array", "expected"),
    [
        (RGB.astype(float), "float64 from 0 to 248; give floats from 0 to 1"),
        (np.full((4, 4), np.nan), "float64 from nan to nan; give"),
        (RGB.astype(np.int64), "int64 from 0 to 248; give floats from 0 to 1, or uint8"),
        (RGB.transpose(2, 0, 1), r"shape \(3, 5, 7\); give one photo as \(H, W, 3\)"),
        (RGB[:0], r"shape \(0, 7, 3\)"),
    ],
)
def test_invalid_arrays_are_refused(array: Any, expected: str):
    with pytest.raises(NotAnImageError, match=f"^frame 3: an array of {expected}"):
        open_image(array, name="frame 3")
