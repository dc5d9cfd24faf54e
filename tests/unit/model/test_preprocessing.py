"""Compare preprocessing with known values, and crop boxes with pixels."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from captioner.model.backbones import PACKAGES_MEAN, PACKAGES_STD
from captioner.model.preprocessing import Preprocessing


def test_efficientnet_lite_normalization():
    """The normalization is (255 x - 127) / 128 for x in 0..1, as in the authors' code."""
    preprocessing = Preprocessing(32, mean=PACKAGES_MEAN, std=PACKAGES_STD)
    values = torch.arange(256, dtype=torch.uint8).reshape(1, 16, 16, 1).expand(-1, -1, -1, 3)
    x = torch.arange(256) / 255
    expected = ((255 * x - 127) / 128).reshape(1, 1, 16, 16).expand(-1, 3, -1, -1)
    torch.testing.assert_close(preprocessing.normalize(values), expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("size", [(32, 32), (100, 70), (7, 9)])
def test_pixels_are_scaled_once(size: tuple[int, int]):
    """White stays 255 through resizing and is normalized once, to (1 - mean) / std."""
    preprocessing = Preprocessing(32, mean=(0.5,) * 3, std=(0.5,) * 3)
    pixels = preprocessing.pixels(Image.new("RGB", size, "white"))
    assert pixels.dtype == np.uint8
    assert (pixels == 255).all()
    found = preprocessing.normalize(torch.from_numpy(np.array(pixels))[None])
    torch.testing.assert_close(found, torch.ones(1, 3, 32, 32))


@pytest.mark.parametrize("size", [(40, 40), (80, 40), (40, 80), (400, 40), (53, 37), (1000, 999)])
def test_crop_box_matches_the_pixels(size: tuple[int, int]):
    """With red inside the crop box and blue outside, only red is visible.

    Up to the edge, where the bicubic kernel mixes in neighbouring pixels.
    """
    width, height = size
    preprocessing = Preprocessing(32)
    left, top, right, bottom = preprocessing.crop_box(width, height)
    photo = np.zeros((height, width, 3), np.uint8)
    photo[..., 2] = 255
    rows = slice(math.floor(top * height), math.ceil(bottom * height))
    columns = slice(math.floor(left * width), math.ceil(right * width))
    photo[rows, columns] = (255, 0, 0)
    pixels = preprocessing.pixels(Image.fromarray(photo))
    assert (pixels[2:-2, 2:-2] == (255, 0, 0)).all()
    assert (pixels[..., 0] > 240).all()
    photo[rows, columns] = (0, 255, 0)  # the whole crop box is visible
    photo[rows.start, columns.start] = photo[rows.stop - 1, columns.stop - 1] = (255, 0, 0)
    if max(size) < 100:
        pixels = preprocessing.pixels(Image.fromarray(photo))
        assert pixels[0, 0, 0] > 30
        assert pixels[-1, -1, 0] > 30


def test_the_mean_colour_is_normalized_to_zero():
    preprocessing = Preprocessing(image_size=8)
    pixels = (255 * torch.tensor(preprocessing.mean)).round().byte().expand(1, 8, 8, 3)
    assert preprocessing.normalize(pixels).abs().max() < 0.01  # half of 1 / 255 / 0.225


@pytest.mark.parametrize("size", [(32, 32), (50, 40)])
def test_bgr_reverses_the_channels(size: tuple[int, int]):
    photo = Image.new("RGB", size, (10, 20, 30))
    assert (Preprocessing(32).pixels(photo)[5, 5] == (10, 20, 30)).all()
    backwards = Preprocessing(32, channel_order="BGR").pixels(photo)
    assert (backwards[5, 5] == (30, 20, 10)).all()
    assert backwards.shape == (32, 32, 3)


@given(width=st.integers(1, 300), height=st.integers(1, 300), size=st.integers(1, 64))
def test_crop_box_lies_inside_photos_of_any_size(width: int, height: int, size: int):
    preprocessing = Preprocessing(size)
    assert preprocessing.pixels(Image.new("RGB", (width, height))).shape == (size, size, 3)
    left, top, right, bottom = preprocessing.crop_box(width, height)
    assert 0 <= left < right <= 1
    assert 0 <= top < bottom <= 1
    seen = (right - left) * width, (bottom - top) * height
    assert seen == (pytest.approx(min(width, height)), pytest.approx(min(width, height)))
