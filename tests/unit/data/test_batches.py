"""Batches: an item depends only on seed, epoch and photo."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from captioner.data.batches import (
    EncodedImage,
    EpochSampler,
    Item,
    PhotoReader,
    collate,
    training_loader,
)
from captioner.data.coco import CaptionedImage
from captioner.model.kernels.packing import Layout
from captioner.model.preprocessing import Preprocessing
from captioner.text.vocabulary import END, PAD, START


@pytest.fixture(scope="module")
def items(tmp_path_factory: pytest.TempPathFactory) -> list[EncodedImage]:
    """Seven photos, darker on the left; photo n has n % 3 + 1 captions that start with n."""
    folder = tmp_path_factory.mktemp("photos")
    ramp = np.linspace(0, 200, 40).astype(np.uint8)[None, :, None].repeat(32, 0).repeat(3, 2)
    items = []
    for number in range(7):
        Image.fromarray(ramp + np.uint8(number)).save(folder / f"{number}.png")
        tokens = tuple([number + 10, 4 + r, *[5] * r] for r in range(number % 3 + 1))
        image = CaptionedImage(number, folder / f"{number}.png", ("",) * len(tokens))
        items.append(EncodedImage(image, tokens))
    return items


Make = Callable[..., PhotoReader]


@pytest.fixture
def make() -> Make:
    def build(max_captions: int = 5, flip: bool = False, seed: int = 0) -> PhotoReader:
        return PhotoReader(
            Preprocessing(32),
            max_captions=max_captions,
            horizontal_flip=flip,
            seed=seed,
        )

    return build


def flipped(pixels: Tensor) -> bool:
    return bool(pixels[0, 0, 0] > pixels[0, -1, 0])


# --- Items ---


def test_captions_are_sampled_by_seed_and_epoch(make: Make, items: list[EncodedImage]):
    def sampled(**options: int) -> list[list[list[int]]]:
        reader = make(max_captions=2, **options)
        return [reader[epoch, items[2]].captions for epoch in range(20)]

    chosen = sampled()
    assert all(len(captions) == 2 for captions in chosen)
    assert all(captions[0] != captions[1] for captions in chosen)
    assert {tuple(words) for captions in chosen for words in captions} == {
        (12, 4), (12, 5, 5), (12, 6, 5, 5)
    }  # fmt: skip
    assert sampled() == chosen
    assert sampled(seed=1) != chosen
    few = make(max_captions=2)[0, items[0]].captions
    assert few == [[10, 4]]  # fewer than max_captions: all of them


def test_half_of_the_photos_are_flipped(make: Make, items: list[EncodedImage]):
    def flips(seed: int) -> list[bool]:
        reader = make(flip=True, seed=seed)
        return [flipped(reader[epoch, item].image) for epoch in range(12) for item in items]

    assert 25 < sum(flips(0)) < 60
    assert flips(0) == flips(0)
    assert flips(0) != flips(1)
    plain, turned = make()[0, items[0]].image, None
    for epoch in range(12):
        pixels = make(flip=True)[epoch, items[0]].image
        turned = pixels if flipped(pixels) else turned
    assert turned is not None
    assert torch.equal(turned, plain.flip(1))


# --- Batches ---


def square(value: int) -> Tensor:
    return torch.full((2, 2, 3), value, dtype=torch.uint8)


def test_known_batch():
    items = [
        Item(1, square(7), []),
        Item(2, square(8), [[4, END], [5, 4, END], [END]]),
        Item(3, square(9), [[4, 5, 6, END]]),
    ]
    batch = collate(items)
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
    assert items[1].captions == [[4, END], [5, 4, END], [END]]  # unchanged


@pytest.mark.parametrize("size", [0, 2, 99])
def test_parts_make_up_the_whole_batch(size: int):
    whole = collate([Item(n, square(n), [[4] * (6 - n)] * (1 + n % 2)) for n in range(5)])
    parts = whole.parts(size)
    assert len(parts) == (1 if size == 0 else -(-5 // size))
    assert all(len(part.images) <= (size or 5) for part in parts)
    assert torch.equal(torch.cat([part.images for part in parts]), whole.images)
    assert torch.equal(torch.cat([part.tokens for part in parts]), whole.tokens)
    assert sum((part.image_ids for part in parts), ()) == whole.image_ids
    assert sum(part.words for part in parts) == whole.words


# --- Order ---


def lengths_of(size: int) -> list[list[int]]:
    """One to five captions per photo of 6 to 20 words, of similar lengths within a photo."""
    generator = np.random.default_rng(1)
    middles = generator.integers(8, 18, size)
    return [
        (middle + generator.integers(-2, 3, generator.integers(1, 6))).tolist()
        for middle in middles.tolist()
    ]


def sampler_of(size: int, batch_size: int, *more: int, bucket: int = 1) -> EpochSampler:
    return EpochSampler(lengths_of(size), batch_size, *(more or (0,)), bucket=bucket)


any_bucket = pytest.mark.parametrize("bucket", [1, 3, 99])


def indices(sampler: EpochSampler) -> list[list[int]]:
    batches = list(sampler)
    assert all(epoch == sampler.epoch for batch in batches for epoch, _ in batch)
    return [[index for _, index in batch] for batch in batches]


@any_bucket
@pytest.mark.parametrize(("size", "batch_size"), [(10, 4), (8, 4), (3, 5), (1, 1), (50, 4)])
def test_an_epoch_has_every_photo_once(size: int, batch_size: int, bucket: int):
    sampler = sampler_of(size, batch_size, bucket=bucket)
    batches = indices(sampler)
    assert len(batches) == sampler.batches == -(-size // batch_size)
    full = [batch for batch in batches if len(batch) == batch_size]
    assert len(batches) - len(full) == (size % batch_size > 0)
    assert sorted(index for batch in batches for index in batch) == list(range(size))
    if bucket == 1:  # the incomplete batch comes last
        assert batches[: len(full)] == full


@any_bucket
def test_the_order_depends_on_seed_and_epoch(bucket: int):
    orders = []
    for seed in (0, 1):
        for epoch in (0, 1):
            sampler = sampler_of(50, 8, seed, bucket=bucket)
            sampler.epoch = epoch
            orders.append(indices(sampler))
            assert indices(sampler) == orders[-1]
    assert all(orders.count(order) == 1 for order in orders)
    assert all(order != sorted(order) for order in orders)
    if bucket < 99:  # so do the batches' members, unless one bucket holds all photos
        sets = [{frozenset(batch) for batch in order} for order in orders]
        assert all(sets.count(batches) == 1 for batches in sets)


def padding_fraction(lengths: list[list[int]], bucket: int) -> float:
    """Fraction of the decoder's positions that are padding."""
    run, real = 0, 0
    for batch in indices(EpochSampler(lengths, 8, 0, bucket=bucket)):
        captions = [[[4] * words + [END] for words in lengths[n]] for n in batch]
        tokens = collate([Item(0, square(0), of_photo) for of_photo in captions]).tokens
        run += sum(Layout.of(tokens[..., 1:] != PAD).sizes)
        real += int((tokens[..., 1:] != PAD).sum())
    return 1 - real / run


def test_buckets_reduce_padding():
    lengths = np.random.default_rng(1).integers(6, 20, size=(400, 5)).tolist()
    shares = [padding_fraction(lengths, bucket) for bucket in (1, 8, 50)]
    assert shares == sorted(shares, reverse=True)
    assert shares[1] < 0.75 * shares[0]
    assert shares[2] < 0.5 * shares[0]


# --- Loading ---


def test_batches_do_not_depend_on_the_workers(make: Make, items: list[EncodedImage]):
    def batches(workers: int) -> list[tuple[Tensor, Tensor]]:
        sampler = sampler_of(7, 3)
        sampler.epoch = 1
        torch.manual_seed(workers)  # nor do they depend on the global random state
        return [b[:2] for b in training_loader(make(2, True), items, sampler, workers)]

    alone = batches(0)
    assert len(alone) == 3
    for workers in (1, 2):
        others = batches(workers)
        assert len(others) == 3
        for one, other in zip(alone, others, strict=True):
            assert torch.equal(one[0], other[0])
            assert torch.equal(one[1], other[1])


@pytest.mark.parametrize("workers", [0, 1])
def test_an_unreadable_photo_is_skipped(
    items: list[EncodedImage], make: Make, tmp_path: Path, workers: int
):
    """With a worker too, where an exception would end the run or hang the process."""
    broken = CaptionedImage(99, tmp_path / "gone.jpg", ("a photo",))
    photos = [*items, EncodedImage(broken, ([4],))]
    [batch] = training_loader(make(), photos, sampler_of(8, 8), workers)
    assert len(batch.images) == 8
    captions = (batch.tokens != PAD).any(dim=2).sum(dim=1)
    assert sorted(captions.tolist()) == [0, *sorted(len(item.tokens) for item in items)]
