"""Photos and cached features: each photo once per epoch, from any start, for any process
and any number of workers."""

from __future__ import annotations

import logging
import re
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from grey_photos import PHOTOS
from torch import Tensor

from captioner.data.batches import Batch, PhotoReader
from captioner.data.example import Example
from captioner.data.images import open_image
from captioner.data.sources import PhotoSource
from captioner.model.preprocessing import Preprocessing
from captioner.text.vocabulary import PAD

PREPROCESSING = Preprocessing(image_size=8, resize="squash")


def encode(pixels: Tensor) -> Tensor:
    """(B, 8, 8, 3) to a grid of (B, 4, 48), which differs for a flipped photo."""
    cells = pixels.float().unflatten(1, (2, 4)).unflatten(3, (2, 4))
    return cells.permute(0, 1, 3, 2, 4, 5).flatten(3).flatten(1, 2)


class Cache:
    """Replaces ``FeatureCache``: encodes on reading."""

    def __init__(self, photos: Sequence[Example]) -> None:
        self.paths = {photo.image_id: photo.path for photo in photos}

    def read(self, rows: Sequence[tuple[int, bool]]) -> Tensor:
        found = [PREPROCESSING.pixels(open_image(self.paths[image_id])) for image_id, _ in rows]
        turned = [p[:, ::-1] if flip else p for p, (_, flip) in zip(found, rows, strict=True)]
        return encode(torch.from_numpy(np.stack(turned)))


Make = Callable[..., PhotoSource]


@pytest.fixture
def make(photos: list[Example]) -> Make:
    """``make(kind, **settings)``: a source of these photos."""

    def build(kind: str, **more: Any) -> PhotoSource:
        reader = PhotoReader(PREPROCESSING, max_captions=2, horizontal_flip=True, seed=5)
        more = {"batch_size": 4} | more
        cache: Any = Cache(photos) if kind == "features" else None
        return PhotoSource(reader, photos, cache=cache, **more)

    return build


def same(ones: Sequence[Batch], others: Sequence[Batch]) -> bool:
    return len(ones) == len(others) and all(
        (one.image_ids, one.step) == (other.image_ids, other.step)
        and torch.equal(one.tokens, other.tokens)
        and torch.equal(one.images, other.images)
        for one, other in zip(ones, others, strict=True)
    )


def by_photo(batches: Sequence[Batch]) -> dict[int, tuple[list[list[int]], Tensor]]:
    """Captions and image of each photo; those without captions are fillers."""
    found = {}
    for batch in batches:
        for image, tokens, image_id in zip(
            batch.images, batch.tokens, batch.image_ids, strict=True
        ):
            captions = [[t for t in row if t != PAD] for row in tokens.tolist() if any(row)]
            if captions:
                assert image_id not in found
                assert {row[1] for row in captions} == {image_id}
                found[image_id] = (captions, image)
    return found


each_kind = pytest.mark.parametrize("kind", ["photos", "features"])


@each_kind
@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("batch_size", [3, 5, 50])
def test_processes_together_have_every_photo_once(make, kind, world, batch_size) -> None:
    whole = by_photo(list(make(kind, batch_size=50).batches(1, 0)))
    assert sorted(whole) == list(range(100, 100 + PHOTOS))
    settings = {"batch_size": batch_size, "bucket": batch_size % 3}
    sources = [make(kind, **settings, rank=rank, world=world) for rank in range(world)]

    shares = [list(source.batches(1, 0)) for source in sources]

    # All processes take the same number of steps, which is known in advance.
    assert {len(share) for share in shares} == {source.batches_in(1) for source in sources}
    for step in zip(*shares, strict=True):
        sizes = [len(part.images) for part in step]
        assert min(sizes) >= 1
        assert sum(sizes) <= max(batch_size, world)
        assert any(part.words for part in step)
    found = by_photo([batch for share in shares for batch in share])
    assert found.keys() == whole.keys()
    for image_id, (captions, image) in whole.items():
        assert found[image_id][0] == captions
        assert torch.equal(found[image_id][1], image)
    # And in the same batches, whatever the number of processes.
    for number, batch in enumerate(make(kind, **settings).batches(1, 0)):
        parts = by_photo([share[number] for share in shares])
        assert parts.keys() == set(batch.image_ids)


@pytest.mark.parametrize("bucket", [1, 2])
def test_features_and_photos_give_the_same_batches(make: Make, bucket: int) -> None:
    for epoch in (0, 1):
        live, cached = (
            list(make(kind, bucket=bucket).batches(epoch, 0)) for kind in ("photos", "features")
        )
        assert same([replace(batch, images=encode(batch.images)) for batch in live], cached)


@each_kind
@pytest.mark.parametrize(("world", "batch_size"), [(1, 4), (3, 5)])
def test_an_epoch_can_start_at_any_batch(make, kind, world, batch_size) -> None:
    settings = {"batch_size": batch_size, "bucket": 2, "rank": world - 1, "world": world}
    whole, source = list(make(kind, **settings).batches(1, 0)), make(kind, **settings)
    next(source.batches(0, 0))  # earlier reads have no effect

    for start in range(len(whole), -1, -1):  # nor do earlier starts
        assert same(list(source.batches(1, start)), whole[start:])


def test_batches_do_not_depend_on_the_workers(make: Make) -> None:
    expected = list(make("photos").batches(1, 2))
    for workers in (1, 2):
        torch.manual_seed(workers)  # nor on the global random state
        assert same(list(make("photos", workers=workers).batches(1, 2)), expected)


@each_kind
def test_a_loop_that_ends_early_leaves_no_thread(make: Make, kind: str) -> None:
    before = set(threading.enumerate())
    batches = make(kind).batches(0, 0)
    next(batches)
    started = set(threading.enumerate()) - before
    assert bool(started) == (kind != "photos")
    batches.close()
    assert not any(thread.is_alive() for thread in started)


@pytest.mark.parametrize("workers", [0, 1])
def test_a_damaged_photo_is_a_filler(make, tmp_path, workers, caplog) -> None:
    """With a worker too, where an exception would end the run or hang the process."""
    source = make("photos", workers=workers)
    good = source.photos
    path = tmp_path / good[4].path.name
    path.write_bytes(good[4].path.read_bytes()[:60])
    broken = replace(good[4], path=path)
    source.photos = [*good[:4], broken, *good[5:]]

    with caplog.at_level(logging.WARNING, logger="captioner"):
        batches = list(source.batches(0, 0))

    assert by_photo(batches).keys() == {n for n in range(100, 100 + PHOTOS) if n != 104}
    assert sum(len(batch.images) for batch in batches) == PHOTOS
    if not workers:
        [record] = caplog.records
        assert re.search(rf"/{re.escape(path.name)}: .*continues without it", record.message)
