"""Items and batches: an item depends only on seed, epoch and photo."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from captioner.data.batches import EncodedImage, Item, PhotoReader, Request, collate
from captioner.data.sources import epoch_batches
from captioner.model.kernels.packing import pack
from captioner.model.preprocessing import Preprocessing
from captioner.text.vocabulary import END, PAD, START


def reader(max_captions: int = 5, flip: bool = False, seed: int = 0) -> PhotoReader:
    return PhotoReader(Preprocessing(32), max_captions, flip, seed=seed)


def test_captions_are_sampled_by_seed_and_epoch(photos: list[EncodedImage]):
    photo = photos[1]  # of three captions

    def sampled(seed: int = 0) -> list[list[list[int]]]:
        return [reader(2, seed=seed)[Request(epoch, photo)].captions for epoch in range(20)]

    chosen = sampled()
    assert all(len(captions) == 2 for captions in chosen)
    assert all(captions[0] != captions[1] for captions in chosen)
    assert {tuple(words) for captions in chosen for words in captions} == {
        *map(tuple, photo.tokens)
    }
    assert sampled() == chosen
    assert sampled(seed=1) != chosen
    few = reader(2)[Request(0, photos[2])].captions
    assert few == [*photos[2].tokens]  # fewer than max_captions: all of them


def test_half_of_the_photos_are_flipped(photos: list[EncodedImage]):
    def flips(seed: int) -> list[bool]:
        """Of photos that are darker on the left."""
        items = [
            reader(flip=True, seed=seed)[Request(epoch, p)] for epoch in (0, 1, 2) for p in photos
        ]
        return [bool(item.image[0, 0, 0] > item.image[0, -1, 0]) for item in items]

    found = flips(0)
    assert 20 < sum(found) < 49
    assert flips(0) == found != flips(1)
    turned = photos[found.index(True)]
    plain, flipped = (reader(flip=flip)[Request(0, turned)].image for flip in (False, True))
    assert torch.equal(flipped, plain.flip(1))


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
        tokens = collate([Item(0, square(0), of_photo) for of_photo in captions]).tokens
        run += len(pack(tokens[..., 1:] != PAD)[2])
        real += int((tokens[..., 1:] != PAD).sum())
    return 1 - real / run


def test_buckets_reduce_padding():
    lengths = np.random.default_rng(1).integers(6, 20, size=(400, 5)).tolist()
    shares = [padding_fraction(lengths, bucket) for bucket in (1, 8, 50)]
    assert shares == sorted(shares, reverse=True)
    assert shares[1] < 0.75 * shares[0]
    assert shares[2] < 0.5 * shares[0]
