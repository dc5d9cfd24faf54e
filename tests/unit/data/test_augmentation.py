"""Augmentation: bounds, and dependence on seed, epoch and photo only."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from PIL import Image
from torchvision.transforms.v2 import functional

from captioner.data.augmentation import Augmentation

WIDTH, HEIGHT = 240, 160


@pytest.fixture(scope="module")
def gradient() -> Image.Image:
    """Red encodes the column, green the row, so that a crop's position can be read."""
    across = np.broadcast_to(np.linspace(0, 255, WIDTH), (HEIGHT, WIDTH))
    down = np.broadcast_to(np.linspace(0, 255, HEIGHT)[:, None], (HEIGHT, WIDTH))
    pixels = np.stack([across, down, np.full_like(across, 90)], axis=2)
    return Image.fromarray(pixels.round().astype(np.uint8))


def augmented(
    augmentation: Augmentation, image: Image.Image, epoch: int = 0, photo: int = 1
) -> Image.Image:
    return augmentation.augmented(image, seed=0, epoch=epoch, key=str(photo))


def edges(image: Image.Image) -> NDArray[np.float64]:
    """Left, upper, right and lower edge of a crop of ``gradient``, as fractions of the photo."""
    pixels = np.asarray(image).astype(np.float64) / 255
    middle = pixels[HEIGHT // 2, :, 0], pixels[:, WIDTH // 2, 1]
    return np.array([middle[0][0], middle[1][0], middle[0][-1], middle[1][-1]])


def test_default_is_the_identity(gradient: Image.Image) -> None:
    assert augmented(Augmentation(), gradient) is gradient


@given(least=st.floats(0.2, 0.99), epoch=st.integers(0, 10**6), photo=st.integers(0, 10**9))
def test_crops_respect_the_minimum_area(
    gradient: Image.Image, least: float, epoch: int, photo: int
) -> None:
    cropped = augmented(Augmentation(min_crop=least), gradient, epoch, photo)

    left, upper, right, lower = edges(cropped)
    assert cropped.size == gradient.size
    width, height = right - left, lower - upper
    assert width * height > least - 0.02  # bytes, and centres of pixels
    assert 0.78 < width / height < 1.28
    assert np.all(np.asarray(cropped)[..., 2] == 90)


def test_crops_cover_the_whole_photo(gradient: Image.Image) -> None:
    found = np.array([edges(augmented(Augmentation(0.5), gradient, epoch)) for epoch in range(200)])

    width, height = found[:, 2] - found[:, 0], found[:, 3] - found[:, 1]
    area = width * height
    assert 0.49 < area.min() < 0.55  # a byte is 0.4% of the width
    assert 0.95 < area.max() <= 1.0
    # Positions are uniform, so the mean offset is half of the free space.
    free = (1 - width) > 0.1
    assert 0.4 < (found[free, 0] / (1 - width[free])).mean() < 0.6
    assert (width > height).mean() == pytest.approx(0.5, abs=0.12)


def test_colours_equal_torchvisions(gradient: Image.Image) -> None:
    """Brightness, then contrast, then saturation, by the sampled factors."""
    rng = random.Random("variation 0 3 1")
    factors = [rng.uniform(0.6, 1.4) for _ in range(3)]
    expected = functional.adjust_brightness(gradient, factors[0])
    expected = functional.adjust_contrast(expected, factors[1])
    expected = functional.adjust_saturation(expected, factors[2])

    found = augmented(Augmentation(color_jitter=0.4), gradient, epoch=3)

    assert found.tobytes() == expected.tobytes() != gradient.tobytes()


def test_augmentation_depends_only_on_seed_epoch_and_photo(gradient: Image.Image) -> None:
    augmentation = Augmentation(0.5, 0.3)
    settings = [(seed, epoch, photo) for seed in (0, 1) for epoch in (0, 1) for photo in (1, 2)]

    results = [
        augmentation.augmented(gradient, seed=s, epoch=e, key=str(i)).tobytes()
        for s, e, i in settings * 2
    ]

    assert results[:8] == results[8:]
    assert len(set(results)) == 8
