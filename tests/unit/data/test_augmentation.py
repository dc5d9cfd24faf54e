"""Photos that vary: within bounds, by seed, epoch and photo alone."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from PIL import Image
from torchvision.transforms.v2 import functional

from captioner.config import DataConfig
from captioner.data.augmentation import Augmentation
from captioner.errors import ConfigError

WIDTH, HEIGHT = 240, 160


@pytest.fixture(scope="module")
def places() -> Image.Image:
    """Red tells the column, green the row: a crop tells where it was taken."""
    across = np.broadcast_to(np.linspace(0, 255, WIDTH), (HEIGHT, WIDTH))
    down = np.broadcast_to(np.linspace(0, 255, HEIGHT)[:, None], (HEIGHT, WIDTH))
    pixels = np.stack([across, down, np.full_like(across, 90)], axis=2)
    return Image.fromarray(pixels.round().astype(np.uint8))


def augmented(
    augmentation: Augmentation, image: Image.Image, epoch: int = 0, photo: int = 1
) -> Image.Image:
    return augmentation.augmented(image, seed=0, epoch=epoch, image_id=photo)


def sides(image: Image.Image) -> NDArray[np.float64]:
    """Left, upper, right and lower side of a crop of ``places``, as shares of the photo."""
    pixels = np.asarray(image).astype(np.float64) / 255
    middle = pixels[HEIGHT // 2, :, 0], pixels[:, WIDTH // 2, 1]
    return np.array([middle[0][0], middle[1][0], middle[0][-1], middle[1][-1]])


def test_by_default_nothing_varies(places: Image.Image) -> None:
    assert augmented(Augmentation(), places) is places


def test_outside_of_epochs_nothing_varies(places: Image.Image) -> None:
    assert augmented(Augmentation(0.5, 0.5), places, epoch=-1) is places


@given(least=st.floats(0.2, 0.99), epoch=st.integers(0, 10**6), photo=st.integers(0, 10**9))
def test_a_crop_is_a_part_of_the_photo_that_is_large_enough(
    places: Image.Image, least: float, epoch: int, photo: int
) -> None:
    cropped = augmented(Augmentation(min_crop=least), places, epoch, photo)

    left, upper, right, lower = sides(cropped)
    assert cropped.size == places.size
    width, height = right - left, lower - upper
    assert width * height > least - 0.02  # bytes, and centres of pixels
    assert 0.78 < width / height < 1.28
    assert np.all(np.asarray(cropped)[..., 2] == 90)


def test_crops_lie_everywhere(places: Image.Image) -> None:
    found = np.array([sides(augmented(Augmentation(0.5), places, epoch)) for epoch in range(200)])

    width, height = found[:, 2] - found[:, 0], found[:, 3] - found[:, 1]
    area = width * height
    assert 0.49 < area.min() < 0.55  # a byte is 0.4% of the width
    assert 0.95 < area.max() <= 1.0
    # Uniform on what is left over at both sides: half of it on average.
    free = (1 - width) > 0.1
    assert 0.4 < (found[free, 0] / (1 - width[free])).mean() < 0.6
    assert (width > height).mean() == pytest.approx(0.5, abs=0.12)


def test_colours_vary_within_their_share() -> None:
    grey = Image.new("RGB", (4, 4), (100, 100, 100))
    shades = []
    for epoch in range(100):
        pixels = np.asarray(augmented(Augmentation(color_jitter=0.2), grey, epoch))
        assert pixels.std() == 0  # no tint: hue stays
        shades.append(int(pixels[0, 0, 0]))

    assert 80 <= min(shades) < 84
    assert 116 < max(shades) <= 120


def test_contrast_and_saturation_vary_too() -> None:
    half = Image.fromarray(np.array([[[60, 60, 60], [180, 60, 60]]], dtype=np.uint8))
    found = [
        np.asarray(augmented(Augmentation(color_jitter=0.3), half, epoch)).astype(float)
        for epoch in range(60)
    ]

    contrast = [pixels[0, 1].mean() / pixels[0, 0].mean() for pixels in found]
    saturation = [(p[0, 1, 0] - p[0, 1, 1]) / p[0, 1].mean() for p in found]
    assert np.std(contrast) > 0.05
    assert np.std(saturation) > 0.05


def test_colours_are_torchvisions(places: Image.Image) -> None:
    """Brightness, then contrast, then saturation, by the factors that are drawn."""
    chance = random.Random("variation 0 3 1")
    factors = [chance.uniform(0.6, 1.4) for _ in range(3)]
    expected = functional.adjust_brightness(places, factors[0])
    expected = functional.adjust_contrast(expected, factors[1])
    expected = functional.adjust_saturation(expected, factors[2])

    found = augmented(Augmentation(color_jitter=0.4), places, epoch=3)

    assert found.tobytes() == expected.tobytes() != places.tobytes()


def test_it_is_a_function_of_seed_epoch_and_photo(places: Image.Image) -> None:
    augmentation = Augmentation(0.5, 0.3)
    asked = [(seed, epoch, photo) for seed in (0, 1) for epoch in (0, 1) for photo in (1, 2)]

    made = [
        augmentation.augmented(places, seed=s, epoch=e, image_id=i).tobytes()
        for s, e, i in asked * 2
    ]

    assert made[:8] == made[8:]
    assert len(set(made)) == 8


def test_a_tiny_photo_is_a_photo() -> None:
    assert augmented(Augmentation(0.3, 0.3), Image.new("RGB", (1, 1))).size == (1, 1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"min_crop": 0.9, "features": "f"}, r"data\.features .* as they are; leave out"),
        ({"color_jitter": 0.1, "features": "f"}, r"data\.features .* as they are; leave out"),
    ],
)
def test_features_of_photos_as_they_are_are_refused(
    options: dict[str, object], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        DataConfig(**options)  # type: ignore[arg-type]
