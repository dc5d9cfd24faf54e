"""Decoding image files of any kind to RGB, or a one-line error."""

from __future__ import annotations

import io
import re
import subprocess
import sys
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from mutated_photos import chunk, encoded, png, progressive
from numpy.typing import NDArray
from PIL import Image, TiffImagePlugin
from tiny_raw import tiny_dng

from captioner.data import formats, images
from captioner.data.heif import check_complete
from captioner.data.images import USUAL_FORMATS, image_size, open_image
from captioner.errors import ImageError, LargeImageError, NotAnImageError

GREY16 = [0, 257, 25700, 65535]
GREY8 = [0, 1, 100, 255]


def pixels(source: Path | bytes) -> NDArray[np.uint8]:
    image = open_image(source)
    assert type(image) is Image.Image
    assert image.mode == "RGB"
    return np.asarray(image)


def photo(size: tuple[int, int] = (64, 48)) -> Image.Image:
    noise = np.random.default_rng(0).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
    return Image.fromarray(noise)


def failure(source: Path | bytes) -> str:
    with pytest.raises(ImageError) as caught:
        open_image(source)
    message = str(caught.value)
    assert message.startswith("the given bytes: " if isinstance(source, bytes) else f"{source}: ")
    assert "\n" not in message
    return message


@pytest.mark.parametrize("name", ["a.bmp", "фото 写真.png"])  # others below, with EXIF
def test_lossless_formats_keep_their_pixels(tmp_path: Path, name: str):
    photo().save(tmp_path / name)
    np.testing.assert_array_equal(pixels(tmp_path / name), np.asarray(photo()))


def test_cmyk_jpeg_with_and_without_adobe_marker():
    red, cyan = (
        encoded(Image.new("CMYK", (16, 16), inks), "JPEG", quality=100)
        for inks in ((0, 255, 255, 0), (255, 0, 0, 255))
    )
    # Pillow writes inverted inks, as Adobe does; without Adobe's marker the bytes are not inverted.
    marker = cyan.index(b"\xff\xee")
    length = int.from_bytes(cyan[marker + 2 : marker + 4], "big")
    for jpeg in (red, cyan[:marker] + cyan[marker + 2 + length :]):
        np.testing.assert_allclose(pixels(jpeg)[8, 8], (255, 0, 0), atol=3)


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


def tif(values: Any, kind: str) -> bytes:
    return encoded(Image.fromarray(np.array([values], kind)), "TIFF")


def veiled(mode: str) -> bytes:
    """Black, first transparent and last opaque."""
    black = Image.new(mode, (3, 1))
    black.putalpha(Image.fromarray(np.array([[0, 128, 255]], np.uint8)))
    return encoded(black, "PNG")


CLEAR_8, CLEAR_16 = chunk(b"tRNS", b"\0\1"), chunk(b"tRNS", b"\1\1")
BIG_ENDIAN = Image.frombytes("I;16B", (4, 1), np.array(GREY16, ">u2").tobytes())


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (encoded(BIG_ENDIAN, "TIFF"), GREY8),
        # Scaled by 65535, not by the image's maximum.
        (encoded(Image.fromarray(np.array([[0, 200, 255]], np.uint16)), "PNG"), [0, 1, 1]),
        (b"P5 3 1 65535\n" + bytes([0, 0, 0, 200, 0, 255]), [0, 1, 1]),
        # No fixed range: scaled by the values.
        (tif(GREY8, "i4"), GREY8),
        (tif(GREY16, "i4"), GREY8),
        (tif([-1000, 0, 50_000, 101_000], "i4"), [0, 2, 128, 255]),
        (tif([7, 7, 7, 7], "i4"), [7, 7, 7, 7]),
        (tif([0, 0.5, 1, np.nan], "f4"), [0, 128, 255, 0]),
        (tif(GREY8, "f4"), GREY8),
        (tif(GREY16, "f4"), GREY8),
        (tif([-1, 0, 1, np.inf], "f4"), [0, 128, 255, 255]),
        (tif([-3e38, 0, 0, 3e38], "f4"), [0, 128, 128, 255]),
        (tif([np.nan] * 4, "f4"), [0, 0, 0, 0]),
        # What is transparent becomes white.
        (veiled("LA"), [255, 127, 0]),
        (veiled("RGBA"), [255, 127, 0]),
        (png((2, 1), CLEAR_16, rows=b"\0\1\1\x64\x64", kind=(16, 0)), [255, 100]),
        (png((2, 1), CLEAR_8, rows=b"\0\1\x64", kind=(8, 0)), [255, 100]),
    ],
)
def test_the_greys_of_a_row(content: bytes, expected: list[int]):
    values = pixels(content)
    assert (values == values[..., :1]).all()
    assert values[0, :, 0].tolist() == expected


@pytest.mark.parametrize("kind", ["GIF", "WEBP", "PNG", "TIFF"])
def test_the_first_frame_of_an_animation_is_used(kind: str):
    first, second = Image.new("RGB", (8, 8), "red"), Image.new("RGB", (8, 8), "blue")
    more = {"lossless": True} if kind == "WEBP" else {}
    content = encoded(first, kind, save_all=True, append_images=[second], **more)
    assert (pixels(content) == (255, 0, 0)).all()


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
    with pytest.raises(
        NotAnImageError, match="camera RAW is not accepted; convert the photo to JPEG"
    ):
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
    assert "the HEIC image header is truncated or damaged; copy" in failure(heic()[:200])
    assert open_image(tmp_path / "a.heic", formats=USUAL_FORMATS).size == (64, 48)
    with pytest.raises(NotAnImageError, match="HEIC is not accepted; convert the photo to JPEG"):
        open_image(tmp_path / "a.heic", formats=("JPEG",))


def tiled(tile: int = 64) -> bytes:
    pillow_heif = pytest.importorskip("pillow_heif")
    if not hasattr(pillow_heif.options, "GRID_TILE_SIZE"):
        pytest.skip("this pillow-heif writes no tiles")
    file = io.BytesIO()
    pillow_heif.from_pillow(photo((128, 128))).save(file, quality=60, tile_size=tile)
    return file.getvalue()


@pytest.mark.parametrize("make", [tiled, heic], ids=["tiles", "one picture"])
def test_a_heic_file_of_which_data_are_missing(make: Any):
    whole = make()
    assert open_image(whole).size in {(128, 128), (64, 48)}
    for part in (0.3, 0.6, 0.9, 0.99):
        assert "truncated" in failure(whole[: int(len(whole) * part)])
    start, rest = whole.index(b"mdat") + 4, len(whole) - whole.index(b"mdat") - 4
    for at in (start, start + rest // 3, start + rest // 2):
        length = min(rest // 3, 200)
        zeroed = whole[:at] + bytes(length) + whole[at + length :]
        assert "the image is damaged (part of the picture was overwritten with zeros)" in failure(
            zeroed
        )


def test_tiles_that_the_file_does_not_list():
    unlisted = tiled().replace(b"dimg", b"free")
    failure(unlisted)
    with pytest.raises(EOFError, match="tiles are missing"):
        check_complete(unlisted)


def test_an_avif_file_of_which_data_are_missing():
    whole = encoded(photo((128, 128)), "AVIF", speed=10)
    assert open_image(whole).size == (128, 128)
    assert "truncated" in failure(whole[: len(whole) * 9 // 10])
    middle = len(whole) // 2
    zeroed = whole[:middle] + bytes(300) + whole[middle + 300 :]
    assert "damaged" in failure(zeroed)


@pytest.mark.parametrize(
    ("more", "place"), [({}, 0.6), ({"optimize": True}, 0.6), ({"progressive": True}, 0.25)]
)
def test_zeros_in_the_pixels_of_a_jpeg(more: dict[str, Any], place: float):
    whole = encoded(photo((256, 256)), "JPEG", quality=90, exif=bytes(200), **more)
    assert open_image(whole).size == (256, 256)
    middle = int(len(whole) * place)  # progressive: not in bits added later, which may be zeros
    zeroed = whole[:middle] + bytes(512) + whole[middle + 512 :]
    assert "the image is damaged (part of the picture was overwritten with zeros)" in failure(
        zeroed
    )
    even = encoded(Image.new("RGB", (1000, 1000), "white"), "JPEG", **more)
    assert open_image(even).size == (1000, 1000)


@pytest.mark.parametrize(
    "chunks",
    [
        [chunk(b"tEXt", b"a\0" + bytes(2_000_000))],
        [chunk(b"zTXt", b"a\0\0" + zlib.compress(bytes(2_000_000)))],
        [chunk(b"zTXt", b"a\0\7")],
        [chunk(b"iCCP", b"a\0\0" + zlib.compress(bytes(2_000_000)))],
        [chunk(b"gAMA", b"\0")],
        [chunk(b"pHYs", b"\0")],
        [chunk(b"tEXt", b"a\0b")[:-1] + b"?"],  # its checksum
        [chunk(b"acTL", bytes([0, 0, 0, 2, 0, 0, 0, 0])), chunk(b"fcTL", b"\0\0\0\7" + bytes(22))],
    ],
    ids=["text", "compressed", "method", "profile", "gamma", "size", "checksum", "frames"],
)
def test_a_png_with_a_part_that_nobody_needs(chunks: list[bytes]):
    turned = Image.Exif()
    turned[0x0112] = 6
    exif = chunk(b"eXIf", turned.tobytes()[6:])
    rows = b"".join(b"\0" + row.tobytes() for row in RGB)
    content = png((7, 5), exif, *chunks, rows=rows, kind=(8, 2))
    np.testing.assert_array_equal(pixels(content), np.rot90(RGB, 3))


def test_a_png_with_a_frame_out_of_order_after_its_pixels():
    rows = b"".join(b"\0" + row.tobytes() for row in RGB)
    loose = chunk(b"fdAT", b"\0\0\0\0" + zlib.compress(rows))
    start = chunk(b"acTL", bytes([0, 0, 0, 1, 0, 0, 0, 0]))
    content = png((7, 5), start, loose, rows=rows, kind=(8, 2), after=1)
    np.testing.assert_array_equal(pixels(content), RGB)


def test_libtiff_prints_nothing(capfd: pytest.CaptureFixture[str]):
    whole = encoded(photo(), "TIFF", compression="tiff_lzw")
    broken = bytearray(whole)
    broken[20:400] = bytes(380)
    failure(bytes(broken))
    assert capfd.readouterr().err == ""


def test_without_pillow_heif_the_error_names_the_pip_command(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "pillow_heif", None)
    monkeypatch.setattr(Image, "ID", [name for name in Image.ID if name != "HEIF"])
    formats.register_heif.cache_clear()
    content = b"\0\0\0\x18ftypheic\0\0\0\0mif1heic"

    problem = "HEIC needs pillow-heif; run: pip install 'captioner[heif]'"
    assert failure(content).endswith(problem)
    with pytest.raises(NotAnImageError, match=re.escape(problem)):
        open_image(content, formats=USUAL_FORMATS)
    formats.register_heif.cache_clear()


def test_missing_files_folders_and_urls(tmp_path: Path):
    assert "the file does not exist" in failure(tmp_path / "none.jpg")
    assert "is a folder" in failure(tmp_path)
    with pytest.raises(ImageError, match=r"^https://a\.b/c\.jpg: the path is a URL; download"):
        open_image("https://a.b/c.jpg")
    for name in ("s3://bucket/a.jpg", "gs://bucket/a.jpg", "az://container/a.jpg"):
        with pytest.raises(
            ImageError, match=r"is in object storage; use captioner caption .*engine ray"
        ):
            open_image(name)
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
        (b"\0\0\0\x18ftypcrx \0\0\0\1crx isom", "camera RAW|the preview"),
        (b"\0\0\0\x1cftypavif\0\0\0\0avif", "AVIF"),
        (b"<!DOCTYPE html><title>404</title>", "a web page"),
        (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EndComments\n", "PostScript"),
    ],
)
def test_unsupported_files(content: bytes, expected: str):
    message = failure(content)
    assert re.search(expected, message)
    assert ";" in message  # followed by advice


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "GIF", "WEBP", "BMP", "TIFF"])
@pytest.mark.parametrize("part", [0.01, 0.3, 0.6, 0.9])
def test_truncated_images_are_refused(kind: str, part: float):
    content = encoded(photo(), kind)
    message = failure(content[: int(len(content) * part)])
    if (kind, part) == ("JPEG", 0.6):
        assert "the image is truncated; copy" in message


def test_ten_bits_are_read_pixel_by_pixel_by_pillow() -> None:
    white = np.full((400, 400), 1023, ">u2")
    assert pixels(b"P5 400 400 1023\n" + white.tobytes()).min() == 255


@pytest.mark.parametrize(("side", "refused"), [(13_377, False), (13_378, True), (60_000, True)])
def test_a_decompression_bomb_is_refused_before_decoding(side: int, refused: bool):
    # There is no pixel data: decoding would raise a different error.
    message = failure(png((side, side), rows=b"", kind=(8, 2)))
    assert (side * side > images.MAX_PIXELS) == refused
    assert ("limit is 178,956,970 pixels" in message) == refused


def test_the_scans_of_a_progressive_jpeg_are_bounded(monkeypatch: pytest.MonkeyPatch):
    assert open_image(progressive((64, 48), 90)).size == (64, 48)
    assert "the JPEG has 3,010 scans, but the limit at this size is 100" in failure(
        progressive((64, 48), 3000)
    )
    monkeypatch.setattr(images, "MAX_SCANNED", 64 * 48 * 20)
    limit = "the JPEG has 21 scans, but the limit at this size is 20"
    assert limit in failure(progressive((64, 48), 11))
    whole = progressive((64, 48), 10)
    comment = b"\xff\xfe\0\x06\xff\xda\xff\xda"  # its length covers what looks like scans
    assert open_image(whole[:2] + 9 * comment + whole[2:]).size == (64, 48)
    assert open_image(whole + 99 * b"\xff\xda").size == (64, 48)  # such as a video
    hidden = whole[:-2] + b"\xff\xfe\0\x04\xff\xd9" + whole[whole.rindex(b"\xff\xda") :]
    assert limit in failure(hidden)


class Pipe(io.BytesIO):
    def seek(self, *_: int) -> int:
        raise io.UnsupportedOperation


def test_bytes_and_streams(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    content = encoded(photo(), "PNG")
    np.testing.assert_array_equal(np.asarray(open_image(io.BytesIO(content))), np.asarray(photo()))
    (tmp_path / "a.png").write_bytes(content)
    with (tmp_path / "a.png").open("rb") as file:
        assert open_image(file).size == (64, 48)
    (tmp_path / "empty.jpg").touch()
    with pytest.raises(ImageError, match=r"empty\.jpg: the file is empty; copy"):
        open_image(tmp_path / "empty.jpg")
    with pytest.raises(ImageError, match=r"^standard input: the input is empty"):
        open_image(io.BytesIO(), name="standard input")
    assert "not a supported image" in failure(b"text")
    assert open_image(Pipe(content)).size == (64, 48)
    monkeypatch.setattr(images, "MAX_STREAM_BYTES", 100)
    with pytest.raises(LargeImageError, match=r"more than .* bytes; pass"):
        open_image(Pipe(content))
    monkeypatch.setattr(images, "to_rgb", lambda _: bytearray(1 << 60))
    assert "needs more memory than is free; make the image smaller" in failure(content)


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
        (RGB.astype(float), "float64 values from 0 to 248; pass floats from 0 to 1"),
        (np.full((4, 4), np.nan), "float64 values from nan to nan; pass"),
        (RGB.astype(np.int64), "int64 values from 0 to 248; pass floats from 0 to 1, or uint8"),
        (RGB.transpose(2, 0, 1), r"the shape \(3, 5, 7\); pass one photo as \(H, W, 3\)"),
        (RGB[:0], r"the shape \(0, 7, 3\)"),
    ],
)
def test_invalid_arrays_are_refused(array: Any, expected: str):
    with pytest.raises(NotAnImageError, match=f"^frame 3: the array has {expected}"):
        open_image(array, name="frame 3")
