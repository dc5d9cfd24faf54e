"""Streams shuffled batches from shards.

The shards of an epoch, shuffled by seed and epoch, are divided among processes and workers:

    stream p of S = processes x workers:  shards p, p + S, p + 2 S, ...
    one stream:                           shards -> shuffle buffer -> batches

with p = rank + processes x worker. The order of the photos depends on the number of processes and
workers, but not on timing.
"""

from __future__ import annotations

import io
import random
from collections import Counter
from collections.abc import Iterator, Mapping
from itertools import islice
from pathlib import Path

from torch.utils.data import IterableDataset, get_worker_info

from captioner.data.batches import Batch, EncodedImage, Item, PhotoReader, collate, load_ahead
from captioner.data.shards import Manifest, Shard, ShardPhoto, read_shard
from captioner.data.storage import join
from captioner.errors import ConfigError, DataError


class ShardStream(IterableDataset[list[Item]]):
    """This process's batches of one epoch, read from shards.

    The first ``start`` batches of ``epoch`` are skipped without decoding their photos. All
    processes yield the same number of batches: one that runs out yields fillers, a black photo
    without captions, which add nothing to the loss. So does a photo that cannot be decoded.
    """

    def __init__(
        self,
        manifest: Manifest,
        items: Mapping[int, EncodedImage],
        reader: PhotoReader,
        *,
        batch_size: int,
        rank: int = 0,
        world: int = 1,
        workers: int = 0,
        buffer: int = 1000,
    ) -> None:
        """Stream for process ``rank`` of ``world``; too few shards are a ConfigError.

        ``items`` are the captions by image id; those in the shards are not used. ``batch_size`` is
        photos per step over all processes, ``buffer`` the undecoded photos that each of the
        ``workers`` shuffles. The reader's seed is that of shuffling too.
        """
        self.streams = world * max(1, workers)
        if len(manifest.shards) < self.streams or batch_size < world:
            raise ConfigError(
                f"{len(manifest.shards)} shards and training.batch_size {batch_size} are too few "
                f"for {world} processes with {max(1, workers)} workers each; give fewer "
                "data.workers, or make smaller shards with captioner prepare shards "
                f"--photos-per-shard {max(1, manifest.photos // self.streams)}"
            )
        self.manifest, self.items, self.reader = manifest, items, reader
        self.batch_size, self.rank, self.world = batch_size, rank, world
        self.workers, self.buffer = workers, buffer
        self.epoch, self.start = 0, 0

    def batches_in(self, epoch: int) -> int:
        """Number of batches in an epoch; differs slightly if shards have unequal sizes."""
        return max(sum(self._counts(epoch, rank)) for rank in range(self.world))

    def batches(self, epoch: int, start: int) -> Iterator[Batch]:
        """An epoch's batches from batch ``start``, prefetched by the workers.

        Raises:
            DataError: A shard is damaged.
        """
        self.epoch, self.start = epoch, start
        yield from load_ahead(self, self.workers, batch_size=None, collate_fn=collate)

    def __iter__(self) -> Iterator[list[Item]]:
        counts = self._counts(self.epoch, self.rank)
        counts[0] += self.batches_in(self.epoch) - sum(counts)
        # The worker of each batch: a loader takes turns and skips workers that are exhausted.
        workers = [
            [worker for worker, count in enumerate(counts) if turn < count]
            for turn in range(max(counts))
        ]
        turns = [worker for turn in workers for worker in turn]
        done, left = Counter(turns[: self.start]), turns[self.start :]
        order = list(dict.fromkeys(left))  # the first worker has the next turn
        streams = {worker: self._batches(worker, counts[worker], done[worker]) for worker in order}
        info = get_worker_info()
        if info is None:
            for worker in left:
                yield next(streams[worker])
        elif info.id < len(order):
            yield from streams[order[info.id]]

    def _shards(self, epoch: int, rank: int, worker: int) -> list[Shard]:
        """The shards that one worker of a process reads."""
        order = list(self.manifest.shards)
        random.Random(f"{self.reader.seed} {epoch} shards").shuffle(order)
        return order[rank + self.world * worker :: self.streams]

    def _counts(self, epoch: int, rank: int) -> list[int]:
        """Number of batches of each worker of a process."""
        share = self._share(rank)
        return [
            -(-sum(shard.photos for shard in self._shards(epoch, rank, worker)) // share)
            for worker in range(max(1, self.workers))
        ]

    def _share(self, rank: int) -> int:
        """Photos of a process per batch."""
        return len(range(rank, self.batch_size, self.world))

    def _batches(self, worker: int, total: int, skip: int) -> Iterator[list[Item]]:
        """One worker's batches from batch ``skip``."""
        position = self.rank + self.world * worker
        rng = random.Random(f"{self.reader.seed} {self.epoch} {position}")
        photos = _shuffled(self._photos(worker), self.buffer, rng)
        made = 0
        while batch := list(islice(photos, self._share(self.rank))):
            made += 1
            if made > skip:
                yield [self._item(photo) for photo in batch]
        for _ in range(max(made, skip), total):
            yield [self.reader.filler()]

    def _photos(self, worker: int) -> Iterator[ShardPhoto]:
        for shard in self._shards(self.epoch, self.rank, worker):
            yield from read_shard(join(self.manifest.folder, shard.name), shard)

    def _item(self, photo: ShardPhoto) -> Item:
        """Decode a photo and sample its captions."""
        known = self.items.get(photo.image_id)
        if known is None or known.image.path.name != Path(photo.file_name).name:
            raise DataError(
                f"{photo.name}, image id {photo.image_id}, is not in the training captions; give "
                "the captions that the shards were made from"
            )
        source = io.BytesIO(photo.data)
        return self.reader.item(known, self.epoch, source, photo.name) or self.reader.filler()


def _shuffled(
    photos: Iterator[ShardPhoto], buffer: int, rng: random.Random
) -> Iterator[ShardPhoto]:
    """Shuffle through a buffer of that many photos."""
    held: list[ShardPhoto] = []
    for photo in photos:
        if len(held) < buffer:
            held.append(photo)
            continue
        index = rng.randrange(buffer)
        yield held[index]
        held[index] = photo
    rng.shuffle(held)
    yield from held
