"""Sources of a run's batches: photos, a cache of their features, or shards of photos.

All three give the same items and can start at any batch of an epoch: a photo's captions and flip
depend only on seed, epoch and photo. Photos and features come in the same order; shards have their
own. Neither depends on the number of workers, which only decode.
"""

from __future__ import annotations

import random
import signal
import traceback
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch.utils.data import DataLoader

from captioner.data.batches import (
    Augmentation,
    Batch,
    EncodedImage,
    Item,
    PhotoReader,
    Request,
    collate,
)
from captioner.data.features import FeatureCache
from captioner.data.reading import read_ahead
from captioner.data.shards import Manifest, Shard, ShardPhoto, read_manifest, read_shard
from captioner.errors import ConfigError, DataError
from captioner.model.preprocessing import Preprocessing
from captioner.options import TrainConfig

READ_AHEAD = 3
"""Shards that are read at a time, and held in memory."""


@dataclass
class PhotoSource:
    """Photos from their files, or their features from a cache, which a thread reads ahead.

    Each process takes its share of each batch, so a batch holds the same photos for any number of
    processes.
    """

    reader: PhotoReader
    photos: Sequence[EncodedImage]
    batch_size: int
    """Photos per step over all processes."""
    bucket: int = 1
    """See `epoch_batches`."""
    rank: int = 0
    world: int = 1
    workers: int = 0
    cache: FeatureCache | None = None

    def batches_in(self, epoch: int) -> int:
        """Number of batches in an epoch, the same for all processes."""
        del epoch
        return -(-len(self.photos) // self.batch_size)

    def batches(self, epoch: int, start: int) -> Iterator[Batch]:
        """An epoch's batches from batch ``start``."""
        requests = self._requests(epoch, start)
        if self.cache is None:
            yield from _load(self.reader, requests, self.workers)
        else:
            yield from read_ahead(partial(self._features, self.cache), requests, ahead=2)

    def _requests(self, epoch: int, start: int) -> Iterator[list[Request]]:
        lengths = [[len(words) for words in photo.tokens] for photo in self.photos]
        batches = epoch_batches(
            lengths, self.batch_size, seed=self.reader.seed, epoch=epoch, bucket=self.bucket
        )
        for batch in batches[start:]:
            share = [Request(epoch, self.photos[n]) for n in batch[self.rank :: self.world]]
            # If the last batch has fewer photos than processes, a filler keeps this one in step.
            yield share or [Request(-1, self.photos[batch[0]])]

    def _features(self, cache: FeatureCache, requests: list[Request]) -> Batch:
        """A batch of features; collated before reading, so that they are copied once."""
        items = []
        for epoch, photo, *_ in requests:
            captions, flipped = self.reader.sample(photo, epoch)
            items.append(Item(photo.image.image_id, torch.tensor(flipped), captions, photo.start))
        batch = collate(items)
        rows = list(zip(batch.image_ids, batch.images.tolist(), strict=True))
        return batch._replace(images=cache.read(rows))


def epoch_batches(
    lengths: Sequence[Sequence[int]], batch_size: int, *, seed: int, epoch: int, bucket: int = 1
) -> list[list[int]]:
    """Batches of the photos' indices, over all processes, shuffled by seed and epoch.

    With ``bucket`` above 1, photos with the same number of captions of similar ``lengths`` (words)
    share a batch: the photos of ``bucket`` consecutive batches in shuffled order are sorted by
    number of captions, then by their lengths in ascending order, and cut into batches. The order of
    the batches is shuffled again. The last batch may have fewer photos than ``batch_size``.
    """
    size = len(lengths)
    generator = torch.Generator().manual_seed(seed * 1_000_003 + epoch)
    order = torch.randperm(size, generator=generator).tolist()
    if bucket > 1:
        keys, window = [(len(one), *sorted(one)) for one in lengths], bucket * batch_size
        windows = [order[start : start + window] for start in range(0, size, window)]
        order = [n for one in windows for n in sorted(one, key=keys.__getitem__)]
    batches = [order[i : i + batch_size] for i in range(0, size, batch_size)]
    if bucket > 1:
        shuffled = torch.randperm(len(batches), generator=generator).tolist()
        batches = [batches[i] for i in shuffled]
    return batches


@dataclass
class ShardSource:
    """Photos from shards, which threads read ahead.

    The shards of an epoch, shuffled by seed and epoch, are divided among the processes: process
    ``rank`` reads the shards ``rank``, ``rank + world``, ... through a shuffle buffer. All
    processes get the same number of batches: one that runs out gets fillers.
    """

    reader: PhotoReader
    manifest: Manifest
    photos: Mapping[int, EncodedImage]
    """The captions by image id; those in the shards are not used."""
    batch_size: int
    """Photos per step over all processes."""
    rank: int = 0
    world: int = 1
    workers: int = 0
    buffer: int = 1000
    """Undecoded photos that are shuffled."""

    def __post_init__(self) -> None:
        if min(len(self.manifest.shards), self.batch_size) < self.world:
            raise ConfigError(
                f"{len(self.manifest.shards)} shards and training.batch_size {self.batch_size} are "
                f"too few for {self.world} processes; make smaller shards with captioner prepare "
                f"shards --photos-per-shard {max(1, self.manifest.photos // self.world)}"
            )

    def batches_in(self, epoch: int) -> int:
        """Number of batches in an epoch; differs slightly if shards have unequal sizes."""
        photos = (sum(s.photos for s in self._shards(epoch, rank)) for rank in range(self.world))
        return max(-(-count // self._share(rank)) for rank, count in enumerate(photos))

    def batches(self, epoch: int, start: int) -> Iterator[Batch]:
        """An epoch's batches from batch ``start``; those before are not decoded."""
        read, shards = partial(read_shard, self.manifest.folder), self._shards(epoch, self.rank)
        with closing(read_ahead(read, shards, ahead=READ_AHEAD, threads=READ_AHEAD)) as found:
            photos = map(partial(self._request, epoch), chain.from_iterable(found))
            yield from _load(self.reader, self._requests(photos, epoch, start), self.workers)

    def _requests(
        self, photos: Iterator[Request], epoch: int, start: int
    ) -> Iterator[list[Request]]:
        rng = random.Random(f"{self.reader.seed} {epoch} {self.rank}")
        photos = _shuffled(photos, self.buffer, rng)
        for number in range(self.batches_in(epoch)):
            batch = list(islice(photos, self._share(self.rank)))
            if number >= start:
                yield batch or [Request(-1, next(iter(self.photos.values())))]

    def _shards(self, epoch: int, rank: int) -> list[Shard]:
        """The shards of a process."""
        order = list(self.manifest.shards)
        random.Random(f"{self.reader.seed} {epoch} shards").shuffle(order)
        return order[rank :: self.world]

    def _share(self, rank: int) -> int:
        """Photos of a process per batch."""
        return len(range(rank, self.batch_size, self.world))

    def _request(self, epoch: int, found: ShardPhoto) -> Request:
        known = self.photos.get(found.image_id)
        if known is None or known.image.path.name != Path(found.file_name).name:
            raise DataError(
                f"{found.name}, image id {found.image_id}, is not in the training captions; give "
                "the captions that the shards were made from"
            )
        return Request(epoch, known, found.data, found.name)


Source: TypeAlias = PhotoSource | ShardSource
"""Batches of one process."""


def open_source(
    config: TrainConfig,
    photos: Sequence[EncodedImage],
    preprocessing: Preprocessing,
    cache: FeatureCache | None,
    *,
    rank: int = 0,
    world: int = 1,
) -> Source:
    """Open the source of process ``rank`` of ``world``; with a cache, it gives features."""
    data, batch_size = config.data, config.training.batch_size
    reader = PhotoReader(
        preprocessing,
        data.max_captions,
        data.horizontal_flip,
        Augmentation(data.min_crop, data.color_jitter),
        config.training.seed,
    )
    if data.shards:
        by_id = {photo.image.image_id: photo for photo in photos}
        manifest = read_manifest(data.shards)
        return ShardSource(reader, manifest, by_id, batch_size, rank, world, data.workers)
    # At most a quarter of the epoch: a bucket over all of it gives the same batches every epoch.
    bucket = max(1, min(data.bucket_batches, len(photos) // (4 * batch_size)))
    return PhotoSource(reader, photos, batch_size, bucket, rank, world, data.workers, cache)


def _load(reader: PhotoReader, requests: Iterable[list[Request]], workers: int) -> Iterator[Batch]:
    """Batches, decoded ahead by ``workers`` processes, which end with the iteration; 0: this one.

    Workers ignore SIGTERM, so a leaked worker would keep the program from exiting. An error keeps
    the loader's frames alive through its traceback, and with them the workers; the frames are
    therefore cleared.
    """
    loader: DataLoader[Any] = DataLoader(
        reader,
        batch_sampler=map(without_text, requests),
        collate_fn=collate,
        num_workers=workers,
        worker_init_fn=_leave_signals_to_parent,
        generator=torch.Generator().manual_seed(0),  # keeps the global generator unchanged
        pin_memory=torch.cuda.is_available(),
    )
    try:
        yield from loader
    except Exception as error:
        traceback.clear_frames(error.__traceback__)
        raise


def without_text(batch: list[Request]) -> list[Request]:
    """Requests without the text of captions, which workers do not need."""
    photos = (replace(r.photo, image=replace(r.photo.image, captions=())) for r in batch)
    return [r._replace(photo=photo) for r, photo in zip(batch, photos, strict=True)]


def _leave_signals_to_parent(_: int) -> None:
    """Ignore Ctrl-C and SIGTERM, which reach the whole process group: the parent handles them."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)


def _shuffled(photos: Iterator[Request], buffer: int, rng: random.Random) -> Iterator[Request]:
    held: list[Request] = []
    for photo in photos:
        if len(held) < buffer:
            held.append(photo)
            continue
        index = rng.randrange(buffer)
        yield held[index]
        held[index] = photo
    rng.shuffle(held)
    yield from held
