"""Streaming from shards: each photo once per epoch, resuming, worker processes and errors."""

from __future__ import annotations

import logging
import multiprocessing
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from toy_shards import PER_SHARD, PHOTOS, copied

from captioner.data.batches import EncodedImage, Item, PhotoReader, collate
from captioner.data.coco import CaptionedImage
from captioner.data.shard_stream import ShardStream
from captioner.data.shards import Manifest, read_manifest, write_shards
from captioner.errors import ConfigError, DataError
from captioner.model.preprocessing import Preprocessing


def encoded(images: list[CaptionedImage]) -> dict[int, EncodedImage]:
    """Captions of two tokens: the photo's, then the caption's."""
    return {
        one.image_id: EncodedImage(
            one, tuple([one.image_id, 4 + r] for r in range(len(one.captions)))
        )
        for one in images
    }


Make = Callable[..., ShardStream]


@pytest.fixture
def make(images: list[CaptionedImage], folder: Path) -> Make:
    def build(manifest: Manifest | None = None, **settings: Any) -> ShardStream:
        epoch, start = settings.pop("epoch", 0), settings.pop("start", 0)
        ours = ("max_captions", "horizontal_flip", "augmentation", "seed")
        reading = {"max_captions": 5} | {k: settings.pop(k) for k in ours if k in settings}
        stream = ShardStream(
            manifest or read_manifest(folder),
            encoded(images),
            PhotoReader(Preprocessing(8, resize="squash"), **reading),
            **{"batch_size": 4, "buffer": 5} | settings,
        )
        stream.epoch, stream.start = epoch, start
        return stream

    return build


def photos(batch: list[Item]) -> list[int]:
    """Image ids of a batch, from the captions; fillers have none."""
    return [captions[0][0] for _, _, captions, _ in batch if captions]


# --- Every photo once ---


SPLITS = [
    (world, workers, batch_size)
    for world in (1, 2, 3)
    for workers in (0, 1, 2)
    for batch_size in (3, 50)
]


@pytest.mark.parametrize(("world", "workers", "batch_size"), SPLITS)
def test_an_epoch_has_every_photo_once(make: Make, world: int, workers: int, batch_size: int):
    for epoch in (0, 1):
        ranks = [
            make(rank=r, world=world, workers=workers, batch_size=batch_size, epoch=epoch)
            for r in range(world)
        ]
        batches = [list(stream) for stream in ranks]
        seen = [photo for rank in batches for batch in rank for photo in photos(batch)]
        assert sorted(seen) == list(range(100, 100 + PHOTOS))
        # All processes take the same number of steps, which is known in advance.
        assert {len(rank) for rank in batches} == {ranks[0].batches_in(epoch)}
        for step in zip(*batches, strict=True):
            assert all(len(batch) >= 1 for batch in step)
            assert sum(map(len, step)) <= max(batch_size, world)
            assert any(photos(batch) for batch in step)


def test_a_process_that_runs_out_yields_fillers(make: Make):
    """Eight shards for three processes: one has two shards, the others three."""
    ranks = [list(make(rank=rank, world=3, batch_size=3)) for rank in range(3)]
    empty = [batch for rank in ranks for batch in rank if not photos(batch)]
    assert empty
    for [(_, pixels, captions, _)] in empty:
        assert (pixels.shape, pixels.dtype) == ((8, 8, 3), torch.uint8)
        assert not pixels.any()
        assert captions == []


# --- Resuming ---


def equal(ones: list[list[Item]], others: list[list[Item]]) -> bool:
    return len(ones) == len(others) and all(
        len(a) == len(b)
        and all(
            torch.equal(one.image, other.image) and one.captions == other.captions
            for one, other in zip(a, b, strict=True)
        )
        for a, b in zip(ones, others, strict=True)
    )


@pytest.mark.parametrize(("world", "workers"), [(1, 0), (1, 3), (1, 8), (2, 0), (3, 2)])
def test_an_epoch_can_start_at_any_batch(make: Make, world: int, workers: int):
    for rank in range(world):
        settings = {"rank": rank, "world": world, "workers": workers, "horizontal_flip": True}
        settings |= {"batch_size": 2 * world, "max_captions": 2, "epoch": 1}
        whole = list(make(**settings))
        for start in range(len(whole) + 2):
            assert equal(list(make(**settings, start=start)), whole[start:])


def loaded(stream: ShardStream) -> list[tuple[list[Any], list[Any]]]:
    return [
        (batch.images.tolist(), batch.tokens.tolist())
        for batch in stream.batches(stream.epoch, stream.start)
    ]


def single_process(make: Make, **settings: Any) -> list[tuple[list[Any], list[Any]]]:
    """The same batches, read in this process."""
    batches = [collate(batch) for batch in make(**settings)]
    return [(batch.images.tolist(), batch.tokens.tolist()) for batch in batches]


@pytest.mark.parametrize(("workers", "start"), [(1, 2), (2, 0), (2, 3)])
def test_worker_processes_yield_the_same_batches(make: Make, workers: int, start: int):
    """Workers take turns until they are exhausted, at different times as shards differ in size."""
    settings = {"workers": workers, "batch_size": 1, "buffer": 3, "start": start}
    assert loaded(make(**settings)) == single_process(make, **settings)


# --- Items ---


def test_a_damaged_photo_is_logged_and_skipped(
    images: list[CaptionedImage], tmp_path: Path, make: Make, caplog: pytest.LogCaptureFixture
):
    broken = replace(images[4], path=tmp_path / images[4].path.name)
    broken.path.write_bytes(images[4].path.read_bytes()[:60])
    write_shards([*images[:4], broken, *images[5:]], tmp_path / "out", photos_per_shard=PER_SHARD)
    with caplog.at_level(logging.WARNING, logger="captioner"):
        batches = list(make(read_manifest(tmp_path / "out"), horizontal_flip=True))
    assert sorted(photo for batch in batches for photo in photos(batch)) == [
        one.image_id for one in images if one is not images[4]
    ]
    assert sum(map(len, batches)) == PHOTOS
    [record] = caplog.records
    expected = rf"shard-00000.\.tar: {re.escape(broken.path.name)}: .*continues without it"
    assert re.search(expected, record.message)


# --- Bad shards ---


def test_a_changed_byte_is_found(make: Make, folder: Path, tmp_path: Path):
    out = copied(folder, tmp_path / "out")
    manifest = read_manifest(out)
    content = bytearray((out / "shard-000003.tar").read_bytes())
    content[-1] ^= 1  # after the last photo, so only the checksum covers it
    (out / "shard-000003.tar").write_bytes(content)
    with pytest.raises(DataError, match=r"shard-000003\.tar is damaged: its SHA-256"):
        list(make(manifest))


def test_a_workers_error_is_one_line_and_ends_all_workers(make: Make, folder: Path, tmp_path: Path):
    out = copied(folder, tmp_path / "out")
    manifest = read_manifest(out)
    (out / "shard-000003.tar").write_bytes(b"no tar")
    with pytest.raises(DataError, match=r"^\S*shard-000003\.tar is truncated or damaged") as caught:
        list(make(manifest, workers=1).batches(0, 0))
    assert "\n" not in str(caught.value)
    assert multiprocessing.active_children() == []  # leftover workers would keep the program alive


def test_photos_without_training_captions(make: Make, images: list[CaptionedImage]):
    stream = make()
    stream.items = {n: item for n, item in encoded(images).items() if n != 100}
    with pytest.raises(DataError, match="image id 100, is not in the training captions"):
        list(stream)


# --- Settings ---


def test_too_few_shards(make: Make):
    with pytest.raises(ConfigError, match=r"8 shards .* too few for 3 processes with 3 workers"):
        make(world=3, workers=3, batch_size=20)
