"""Augmentation, sampled captions and batches: they depend only on seed, epoch and photo."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor
from torchvision.transforms.v2 import functional

from captioner.data.batches import Augmentation, PhotoReader, collate
from captioner.data.example import Example
from captioner.data.sources import epoch_batches
from captioner.model.kernels.packing import pack
from captioner.model.preprocessing import Preprocessing
from captioner.text.vocabulary import END, PAD, START


def reader(max_captions: int = 5, flip: bool = False, seed: int = 0) -> PhotoReader:
    return PhotoReader(Preprocessing(32), max_captions, flip, seed=seed)


def test_captions_are_sampled_by_seed_and_epoch(photos: list[Example]):
    photo = photos[1]  # of three captions

    def sampled(seed: int = 0) -> list[tuple[list[int], ...]]:
        return [reader(2, seed=seed)[epoch, photo][0].tokens for epoch in range(20)]

    chosen = sampled()
    assert all(len(captions) == 2 for captions in chosen)
    assert all(captions[0] != captions[1] for captions in chosen)
    assert {tuple(words) for captions in chosen for words in captions} == {
        *map(tuple, photo.tokens)
    }
    assert sampled() == chosen
    assert sampled(seed=1) != chosen
    few = reader(2)[0, photos[2]][0].tokens
    assert few == photos[2].tokens  # fewer than max_captions: all of them


def test_half_of_the_photos_are_flipped(photos: list[Example]):
    def flips(seed: int) -> list[bool]:
        """Of photos that are darker on the left."""
        read = [reader(flip=True, seed=seed)[epoch, p] for epoch in (0, 1, 2) for p in photos]
        return [bool(pixels[0, 0, 0] > pixels[0, -1, 0]) for _, pixels in read]

    found = flips(0)
    assert 20 < sum(found) < 49
    assert flips(0) == found != flips(1)
    turned = photos[found.index(True)]
    plain, flipped = (reader(flip=flip)[0, turned][1] for flip in (False, True))
    assert torch.equal(flipped, plain.flip(1))


def square(value: int) -> Tensor:
    return torch.full((2, 2, 3), value, dtype=torch.uint8)


def encoded(image_id: int, *tokens: list[int]) -> tuple[Example, Tensor]:
    """A photo with these captions, and its pixels, which are ``image_id + 6``."""
    return Example(image_id, Path("x"), (), tokens=tokens), square(image_id + 6)


def test_known_batch():
    photos = [
        encoded(1),
        encoded(2, [4, END], [5, 4, END], [END]),
        encoded(3, [4, 5, 6, END]),
    ]
    batch = collate(photos)
    nothing = [PAD] * 5
    assert batch.tokens.tolist() == [  # the longest captions, and the photos with them, first
        [[START, 4, 5, 6, END], nothing, nothing],
        [[START, 5, 4, END, PAD], [START, 4, END, PAD, PAD], [START, END, PAD, PAD, PAD]],
        [nothing] * 3,
    ]
    assert batch.tokens.dtype == torch.long
    assert batch.image_ids == (3, 2, 1)
    assert batch.images.shape == (3, 2, 2, 3)
    assert batch.images.dtype == torch.uint8
    assert batch.images[:, 0, 0, 0].tolist() == [9, 8, 7]
    assert batch.words == 4 + 3 + 2 + 1
    assert photos[1][0].tokens == ([4, END], [5, 4, END], [END])  # unchanged


@pytest.mark.parametrize("size", [0, 2, 99])
def test_parts_make_up_the_whole_batch(size: int):
    whole = collate([encoded(n, *[[4] * (6 - n)] * (1 + n % 2)) for n in range(5)])
    parts = whole.parts(size)
    assert len(parts) == (1 if size == 0 else -(-5 // size))
    assert all(len(part.images) <= (size or 5) for part in parts)
    assert torch.equal(torch.cat([part.images for part in parts]), whole.images)
    assert torch.equal(torch.cat([part.tokens for part in parts]), whole.tokens)
    assert sum((part.image_ids for part in parts), ()) == whole.image_ids
    assert sum(part.words for part in parts) == whole.words


@pytest.mark.parametrize("bucket", [1, 3, 99])
def test_the_order_depends_on_seed_and_epoch(bucket: int):
    settings = [(seed, epoch) for seed in (0, 1) for epoch in (0, 1)]
    lengths = [[6 + n % 7] * (1 + n % 5) for n in range(50)]
    orders = [
        epoch_batches(lengths, 8, seed=seed, epoch=epoch, bucket=bucket)
        for seed, epoch in settings * 2
    ]
    assert orders[:4] == orders[4:]
    assert all(orders[:4].count(order) == 1 != (order == sorted(order)) for order in orders[:4])
    if bucket < 99:  # so do the batches' members, unless one bucket holds all photos
        sets = [{frozenset(batch) for batch in order} for order in orders[:4]]
        assert all(sets.count(batches) == 1 for batches in sets)


def padding_fraction(lengths: list[list[int]], bucket: int) -> float:
    """Fraction of the decoder's positions that are padding."""
    run, real = 0, 0
    for batch in epoch_batches(lengths, 8, seed=0, epoch=0, bucket=bucket):
        captions = [[[4] * words + [END] for words in lengths[n]] for n in batch]
        tokens = collate([encoded(0, *of_photo) for of_photo in captions]).tokens
        run += len(pack(tokens[..., 1:] != PAD)[2])
        real += int((tokens[..., 1:] != PAD).sum())
    return 1 - real / run


def test_buckets_reduce_padding():
    lengths = np.random.default_rng(1).integers(6, 20, size=(400, 5)).tolist()
    shares = [padding_fraction(lengths, bucket) for bucket in (1, 8, 50)]
    assert shares == sorted(shares, reverse=True)
    assert shares[1] < 0.75 * shares[0]
    assert shares[2] < 0.5 * shares[0]


# --- Augmentation ---------------------------------------------------------------------------------

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
