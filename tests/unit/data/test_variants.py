"""Formats and variants: a picture agrees with a second decoder or is rejected in one line."""

from __future__ import annotations

import io
import itertools
import zlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from mutated_photos import chunk, encoded, png
from numpy.typing import NDArray
from PIL import Image
from tiny_tiff import tiff

from captioner.data.images import open_image
from captioner.errors import ImageError, NotAnImageError

W, H = 48, 32
RAMP = np.stack(np.meshgrid(np.arange(W) * 5, np.arange(H) * 8), -1)
PHOTO = np.dstack([RAMP, RAMP.sum(-1) // 2, 255 - RAMP[..., 0], 64 + RAMP[..., 1] // 2])
"""Smooth values of five samples, 0 to 255."""


def opened(content: bytes) -> NDArray[np.int64] | str:
    """Return the pixels or the message, which must not call a whole file damaged."""
    try:
        return np.asarray(open_image(content)).astype(int)
    except ImageError as error:
        message = str(error)
        assert "\n" not in message
        assert "; save the image as JPEG or PNG" in message, message
        if not isinstance(error, NotAnImageError):
            raise
        return message


def agree(content: bytes, expected: NDArray[Any], tolerance: float = 2) -> bool:
    """Compare pixels; return False if the variant is rejected instead."""
    made = opened(content)
    if isinstance(made, str):
        return False
    assert made.shape == expected.shape
    assert np.abs(made - expected).max() <= tolerance
    return True


# --- TIFF ---

COLOURS = {0: 1, 1: 1, 2: 3, 3: 1, 5: 4, 6: 3, 8: 3}  # samples by photometric interpretation


def samples_of(photometric: int, extra: tuple[int, ...]) -> tuple[NDArray[Any], NDArray[Any]]:
    """Return samples from 0 to 255, and the RGB picture that they mean."""
    count = COLOURS[photometric]
    values = PHOTO[..., : count + len(extra)]
    colours = values[..., :count].astype(float)
    rgb = {
        0: lambda: np.repeat(255 - colours, 3, -1),
        1: lambda: np.repeat(colours, 3, -1),
        2: lambda: colours,
        3: lambda: 255 - np.repeat(colours, 3, -1),
        5: lambda: (255 - colours[..., :3]) * (255 - colours[..., 3:]) / 255,
    }[photometric]()
    if extra == (2,):
        alpha = values[..., count:] / 255
        rgb = rgb * alpha + 255 * (1 - alpha)
    return values, rgb


def tiffs() -> Iterator[tuple[str, bytes, NDArray[Any]]]:
    """Yield names, files and expected pixels of the variants, those that Pillow misreads too."""
    kinds = ("u1", "u2", "u4", "i2", "f2", "f4", "f8")
    for order, kind, photometric, extra, planes, compression, tiled in itertools.product(
        "<>", kinds, (0, 1, 2, 3, 5), ((), (0,), (2,)), (1, 2), (1, 8), (False, True)
    ):
        values, rgb = samples_of(photometric, extra)
        count = values.shape[-1]
        if planes == 2 and count == 1:
            continue
        number = np.dtype(order + kind)
        scale = 1 / 255 if kind[0] == "f" else np.iinfo(number).max / 255
        stored = (values * scale).astype(number)
        bits = 8 * number.itemsize
        tags: dict[int, Any] = {
            256: W, 257: H, 258: [bits] * count, 259: compression, 262: photometric, 277: count,
            284: planes, 339: [{"u": 1, "i": 2, "f": 3}[kind[0]]] * count,
        }  # fmt: skip
        if extra:
            tags[338] = list(extra)
        if photometric == 3:
            tags[320] = list(range(65535, -1, -257)) * 3
        layers = [stored] if planes == 1 else [stored[..., [at]] for at in range(count)]
        if tiled:
            tags |= {322: 32, 323: 16}
            parts = [
                np.pad(layer, ((0, 0), (0, 16), (0, 0)))[y : y + 16, x : x + 32]
                for layer in layers
                for y in (0, 16)
                for x in (0, 32)
            ]
        else:
            tags[278] = 10
            parts = [layer[y : y + 10] for layer in layers for y in range(0, H, 10)]
        pack = zlib.compress if compression == 8 else bytes
        name = f"{order}{kind} {photometric} {extra} planes {planes} {compression} {tiled}"
        yield name, tiff(order, tags, [pack(part.tobytes()) for part in parts]), rgb


@pytest.mark.slow
def test_every_variant_of_tiff_agrees_or_is_rejected():
    read = set()
    for name, content, expected in tiffs():
        if name[1:3] in {"u4", "i2"}:  # no fixed range: taken from the values, see pixels
            made = opened(content)
            if not isinstance(made, str):
                assert np.corrcoef(made.ravel(), expected.ravel())[0, 1] > 0.999, name
                read.add(name)
        elif agree(content, expected):
            read.add(name)

    assert len(read) > 150
    for usual in ("<u1 2 () planes 1 8 False", ">u2 2 () planes 1 1 True", "<u2 0 () planes 1 8",
                  "<u1 2 (2,) planes 2 8", "<f4 1 () planes 1 1", "<u4 1 () planes 1"):  # fmt: skip
        assert any(name.startswith(usual) for name in read), usual


@pytest.mark.parametrize("bits", [1, 2, 4, 8, 10, 12, 14, 16])
@pytest.mark.parametrize("photometric", [0, 1])
def test_tiffs_of_few_bits(bits: int, photometric: int):
    values = PHOTO[..., 0] * (2**bits - 1) // 255
    digits = "".join(format(value, f"0{bits}b") for value in values.ravel())  # rows of whole bytes
    content = int(digits, 2).to_bytes(len(digits) // 8, "big")
    tags = {256: W, 257: H, 258: bits, 259: 1, 262: photometric, 277: 1, 278: H}
    grey = np.rint(values / (2**bits - 1) * 255)
    expected = np.repeat((grey if photometric else 255 - grey)[..., None], 3, -1)
    read = agree(tiff(">" if bits < 10 else "<", tags, [content]), expected) if bits != 16 else True
    assert read or bits in (10, 12, 14)


@pytest.mark.parametrize("sampling", [(1, 1), (2, 1), (2, 2)])
def test_a_tiff_with_colours_at_a_lower_resolution(sampling: tuple[int, int]):
    """Pillow would take brightness for colour."""
    across, down = sampling
    block = bytes([200] * across * down + [128, 128])
    tags = {256: W, 257: H, 258: [8] * 3, 259: 1, 262: 6, 277: 3, 278: 8, 530: list(sampling)}
    strip = block * (W * 8 // (across * down))
    read = agree(tiff("<", tags, [strip] * 4 + [strip]), np.full((H, W, 3), 200))
    assert read == (sampling == (1, 1))


def test_a_tiff_with_a_palette_of_8_bits_is_rejected():
    """Pillow would show it black."""
    tags = {256: W, 257: H, 258: 8, 259: 1, 262: 3, 277: 1, 278: H, 320: list(range(256)) * 3}
    assert "this kind of TIFF is not supported (palette, 1 x 8 bits" in str(
        opened(tiff("<", tags, [PHOTO[..., 0].astype(np.uint8).tobytes()]))
    )


def test_tiffs_as_a_second_decoder_reads_them():
    tifffile = pytest.importorskip("tifffile")
    pytest.importorskip("imagecodecs")
    for kind, compression, predictor, planes in itertools.product(
        ("u1", "u2"), (None, "lzw", "adobe_deflate", "packbits"), (None, 2), ("contig", "separate")
    ):
        if predictor and compression in (None, "packbits"):
            continue
        photo = (PHOTO[..., :3] * (1 if kind == "u1" else 257)).astype(kind)
        stored = photo if planes == "contig" else np.moveaxis(photo, -1, 0).copy()
        file = io.BytesIO()
        tifffile.imwrite(file, stored, photometric="rgb", planarconfig=planes,
                         compression=compression, predictor=predictor, rowsperstrip=9)  # fmt: skip
        second = tifffile.imread(io.BytesIO(file.getvalue()))
        np.testing.assert_array_equal(second, stored)
        agree(file.getvalue(), PHOTO[..., :3])


# --- Others, by imagecodecs ---


def rgb_of(decoded: Any) -> NDArray[Any]:
    """Return a decoder's grey, RGB or opaque RGBA array of 8 or 16 bits as RGB from 0 to 255."""
    values = np.asarray(decoded, dtype=float) / (257 if decoded.dtype == np.uint16 else 1)
    values = values if values.ndim == 3 else values[..., None]
    return np.repeat(values, 3, -1) if values.shape[-1] < 3 else values[..., :3]


RGB8 = PHOTO[..., :3].astype(np.uint8)


@pytest.mark.parametrize(
    ("codec", "options", "tolerance"),
    [
        ("jpeg", {"quality": 90}, 4),
        ("jpeg", {"quality": 90, "progressive": True}, 4),
        ("jpeg", {"quality": 90, "subsampling": 0, "restart_marker_rows": 1}, 4),
        ("jpeg", {"quality": 90, "subsampling": 1, "optimize": True}, 4),
        ("jpeg", {"quality": 90, "grey": True}, 4),
        ("png", {}, 0),
        ("png", {"grey": True}, 0),
        ("webp", {"quality": 90}, 4),
        ("webp", {"lossless": True}, 0),
        ("gif", {}, 0),
        ("jpeg2k", {}, 0),
        ("avif", {"speed": 10}, 6),
    ],
)
def test_pillow_agrees_with_a_second_decoder(codec: str, options: dict[str, Any], tolerance: int):
    imagecodecs = pytest.importorskip("imagecodecs")
    image = Image.fromarray(RGB8)
    if options.get("grey"):
        image = image.convert("L")
    more = {name: value for name, value in options.items() if name != "grey"}
    content = encoded(image, {"jpeg2k": "JPEG2000"}.get(codec, codec.upper()), **more)
    try:
        second = getattr(imagecodecs, f"{codec}_decode")(content)
    except imagecodecs.DelayedImportError:
        pytest.skip(f"imagecodecs without {codec}")
    if codec == "gif":
        second = second[0] if second.ndim == 4 else second
    assert agree(content, rgb_of(second), tolerance)


@pytest.mark.parametrize(
    ("bits", "colour"), [(1, 0), (2, 0), (4, 0), (8, 0), (16, 0), (8, 2), (16, 2), (8, 3), (4, 3)]
)
def test_pngs_of_every_depth(bits: int, colour: int):
    values = PHOTO[..., : 3 if colour == 2 else 1] * (2**bits - 1) // 255
    digits = ["".join(format(value, f"0{bits}b") for value in row.ravel()) for row in values]
    rows = b"".join(b"\0" + int(row, 2).to_bytes(len(row) // 8, "big") for row in digits)
    palette = bytes(255 - value for value in range(256) for _ in range(3))[: 3 * 2**bits]
    chunks = [chunk(b"PLTE", palette)] if colour == 3 else []
    shown = 255 - values if colour == 3 else values * 255 / (2**bits - 1)
    assert agree(png((W, H), *chunks, rows=rows, kind=(bits, colour)),
                 np.broadcast_to(shown, (H, W, 3)), 1)  # fmt: skip


@pytest.mark.parametrize("order", "<>")
@pytest.mark.parametrize(("most", "scale"), [(1, 1), (1, 7), (255, 1), (65535, 1)])
def test_pfm_is_scaled_by_its_values(order: str, most: float, scale: float):
    grey = (PHOTO[..., 0] / 255 * most).astype(order + "f4")
    head = b"Pf\n%d %d\n%g\n" % (W, H, -scale if order == "<" else scale)
    assert agree(head + grey[::-1].tobytes(), np.repeat(PHOTO[..., :1], 3, -1))


def test_a_colour_pfm_is_named():
    content = b"PF\n%d %d\n-1\n" % (W, H) + PHOTO[..., :3].astype("<f4").tobytes()
    assert "this kind of PFM is not supported (colour)" in str(opened(content))


def test_highlights_do_not_darken_a_float_picture():
    grey = (PHOTO[..., 0] / 255).astype("<f4")
    grey[0, :3] = (30, 300, 3e6)
    expected = np.repeat(PHOTO[..., :1], 3, -1)
    expected[0, :3] = 255
    assert agree(b"Pf\n%d %d\n-1\n" % (W, H) + grey[::-1].tobytes(), expected)


def test_a_bmp_and_a_jpeg_of_another_kind_are_named():
    bmp = bytearray(encoded(Image.fromarray(RGB8), "BMP"))
    bmp[28] = 2  # bits per pixel
    assert "not supported (Unsupported BMP pixel depth (2)); save the image" in str(
        opened(bytes(bmp))
    )
    jpeg = encoded(Image.fromarray(RGB8), "JPEG")
    at = jpeg.index(b"\xff\xc0") + 4
    twelve = jpeg[:at] + b"\x0c" + jpeg[at + 1 :]
    assert "this kind of JPEG is not supported (cannot handle 12-bit layers)" in str(opened(twelve))
