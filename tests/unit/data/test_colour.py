"""Colours of photos are converted to sRGB."""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
import pytest
from mutated_photos import chunk, encoded, png
from PIL import Image, ImageCms

from captioner.data import colour
from captioner.data.images import open_image

SRGB = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()
P3 = colour._cicp_profile(12, 13)
COLOURS = np.stack(np.meshgrid(*[np.arange(40, 216, 25, dtype=np.uint8)] * 3), -1).reshape(8, -1, 3)


def in_p3() -> Image.Image:
    """Return the colours as values of Display P3, by numbers of the literature.

    Source: the matrix from linear sRGB to Display P3, CSS Color Module Level 4, section 17.
    """
    matrix = np.array([[0.82246, 0.17754, 0], [0.03319, 0.96681, 0], [0.01708, 0.07240, 0.91052]])
    values = COLOURS / 255
    linear = np.where(values <= 0.04045, values / 12.92, ((values + 0.055) / 1.055) ** 2.4)
    linear = linear @ matrix.T
    encoded = np.where(linear <= 0.0031308, linear * 12.92, 1.055 * linear ** (1 / 2.4) - 0.055)
    return Image.fromarray(np.rint(encoded * 255).astype(np.uint8))


def values(content: bytes) -> Any:
    return np.asarray(open_image(content)).astype(int)


@pytest.mark.parametrize("kind", ["PNG", "TIFF", "WEBP"])
def test_display_p3_is_converted(kind: str):
    more = {"lossless": True, "exact": True} if kind == "WEBP" else {}
    content = encoded(in_p3(), kind, icc_profile=P3, **more)
    assert np.abs(values(content) - COLOURS).max() <= 2


def test_display_p3_by_its_number_in_png():
    rows = b"".join(b"\0" + row.tobytes() for row in np.asarray(in_p3()))
    height, width = COLOURS.shape[:2]
    content = png((width, height), chunk(b"cICP", bytes([12, 13, 0, 1])), rows=rows, kind=(8, 2))
    assert np.abs(values(content) - COLOURS).max() <= 2


@pytest.mark.parametrize(
    "profile", [SRGB, b"", b"no profile" * 50, P3[:300], SRGB[:16] + b"CMYK" + SRGB[20:]]
)
def test_srgb_and_damaged_profiles_change_nothing(profile: bytes):
    for image in (Image.fromarray(COLOURS), Image.fromarray(COLOURS[..., 0])):
        made = values(encoded(image, "PNG", icc_profile=profile))
        np.testing.assert_array_equal(made, np.asarray(image.convert("RGB")))


def test_a_grey_profile():
    curve = struct.pack(">4s4xIH", b"curv", 1, 256) + bytes(2)  # linear: 256 / 256
    tags = struct.pack(">I4sII", 1, b"kTRC", 144, 14)
    header = struct.pack(">I4xI4s4s4s12x4s28x3i", 160, 0x02400000, b"mntr", b"GRAY", b"XYZ ",
                         b"acsp", 63190, 65536, 54061)  # fmt: skip
    profile = header.ljust(128, b"\0") + tags + curve
    grey = Image.new("L", (4, 4), 55)  # 0.2140 of the light: 128 in sRGB
    assert np.abs(values(encoded(grey, "PNG", icc_profile=profile)) - 128).max() <= 1


def test_the_gamma_of_a_png():
    rows = b"\0" + bytes([128])
    linear = png((1, 1), chunk(b"gAMA", struct.pack(">I", 100_000)), rows=rows, kind=(8, 0))
    usual = png((1, 1), chunk(b"gAMA", struct.pack(">I", 45_455)), rows=rows, kind=(8, 0))
    assert abs(values(linear)[0, 0, 0] - 188) <= 1
    assert values(usual)[0, 0, 0] == 128


@pytest.mark.parametrize(("transfer", "white"), [(16, 148), (18, 191)])
def test_the_white_of_paper_is_bright_in_high_dynamic_range(transfer: int, white: int):
    """203 cd/m2 have the value 148 (PQ) or 191 (HLG) of 255, by ITU-R BT.2408."""
    profile = colour._cicp_profile(9, transfer)
    steps = Image.fromarray(np.array([[[0] * 3, [white] * 3, [255] * 3]], np.uint8))
    black, paper, light = values(encoded(steps, "PNG", icc_profile=profile))[0, :, 0]
    assert black == 0
    assert 215 < paper < light


def test_colours_stay_where_the_colour_management_is_missing(monkeypatch: pytest.MonkeyPatch):
    def missing(*_: Any) -> None:
        raise ImportError("_imagingcms")

    monkeypatch.setattr(ImageCms, "buildTransform", missing)
    colour._transform.cache_clear()
    content = encoded(in_p3(), "PNG", icc_profile=P3)
    np.testing.assert_array_equal(values(content), np.asarray(in_p3()))
    colour._transform.cache_clear()
