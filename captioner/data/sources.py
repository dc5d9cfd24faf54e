"""Sources of a run's batches: photos, a cache of their features, or shards of photos.

All three give the same items and can start at any batch of an epoch: a photo's captions and flip
depend only on seed, epoch and photo. Photos and features come in the same order; shards have their
own.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from captioner.data.augmentation import Augmentation
from captioner.data.batches import (
    Batch,
    EncodedImage,
    EpochSampler,
    Item,
    PhotoReader,
    collate,
    training_loader,
    without_text,
)
from captioner.data.features import FeatureCache
from captioner.data.prefetch import read_ahead
from captioner.data.shard_stream import ShardStream, shard_loader
from captioner.data.shards import read_manifest
from captioner.model.preprocessing import Preprocessing
from captioner.options import TrainConfig


class Source(Protocol):
    """Batches of one process."""

    def batches_in(self, epoch: int) -> int:
        """Number of batches in an epoch, the same for all processes."""

    def batches(self, epoch: int, start: int) -> Iterator[Batch]:
        """An epoch's batches from batch ``start``."""


@dataclass
class PhotoSource:
    """Photos from their files."""

    reader: PhotoReader
    photos: Sequence[EncodedImage]
    sampler: EpochSampler
    workers: int = 0

    def batches_in(self, epoch: int) -> int:
        """See ``Source``."""
        del epoch
        return self.sampler.batches

    def batches(self, epoch: int, start: int) -> Iterator[Batch]:
        """See ``Source``."""
        self.sampler.epoch, self.sampler.start = epoch, start
        yield from self._read()

    def _read(self) -> Iterator[Batch]:
        return training_loader(self.reader, self.photos, self.sampler, self.workers)


@dataclass(kw_only=True)
class FeatureSource(PhotoSource):
    """Features of the photos from a cache, which a thread reads ahead."""

    cache: FeatureCache

    def _read(self) -> Iterator[Batch]:
        return read_ahead(self._batch, self.sampler, ahead=2)

    def _batch(self, indices: list[tuple[int, int]]) -> Batch:
        """A batch of (epoch, index); collated before reading, so that features are copied once."""
        items = []
        for epoch, index in indices:
            photo = self.photos[index]
            captions, flipped = self.reader.sample(photo, epoch)
            captions = captions if epoch >= 0 else []
            items.append(Item(photo.image.image_id, torch.tensor(flipped), captions, photo.start))
        batch = collate(items)
        images = self.cache.read(list(zip(batch.image_ids, batch.images.tolist(), strict=True)))
        if torch.cuda.is_available():
            images = images.pin_memory()  # here in the thread, as the DataLoader does for photos
        return batch._replace(images=images)


@dataclass
class ShardSource:
    """Photos streamed from shards."""

    stream: ShardStream

    def batches_in(self, epoch: int) -> int:
        """See ``Source``."""
        return self.stream.batches_in(epoch)

    def batches(self, epoch: int, start: int) -> Iterator[Batch]:
        """See ``Source``."""
        self.stream.epoch, self.stream.start = epoch, start
        yield from shard_loader(self.stream)


def open_source(
    config: TrainConfig,
    photos: Sequence[EncodedImage],
    preprocessing: Preprocessing,
    cache: FeatureCache | None,
    *,
    rank: int = 0,
    world: int = 1,
) -> Source:
    """Open the source of a training run's process ``rank`` of ``world``.

    Args:
        config: The run's config.
        photos: The training photos.
        preprocessing: The model's preprocessing.
        cache: The photos' features, to read instead of the photos.
        rank: Index of this process.
        world: Number of processes.

    Raises:
        CaptionerError: The shards cannot be read, or are too few for the processes.
    """
    data, seed, batch_size = config.data, config.training.seed, config.training.batch_size
    reader = PhotoReader(
        preprocessing,
        max_captions=data.max_captions,
        horizontal_flip=data.horizontal_flip,
        augmentation=Augmentation(data.min_crop, data.color_jitter),
        seed=seed,
    )
    if data.shards:
        return ShardSource(
            ShardStream(
                read_manifest(data.shards),
                {photo.image.image_id: without_text(photo) for photo in photos},
                reader,
                batch_size=batch_size,
                rank=rank,
                world=world,
                workers=data.workers,
            )
        )
    # At most a quarter of the epoch: a bucket over all of it gives the same batches every epoch.
    quarter = len(photos) // (4 * batch_size)
    sampler = EpochSampler(
        [[len(words) for words in photo.tokens] for photo in photos],
        batch_size,
        seed,
        rank,
        world,
        bucket=max(1, min(data.bucket_batches, quarter)),
    )
    if cache is not None:
        return FeatureSource(reader, photos, sampler, cache=cache)
    return PhotoSource(reader, photos, sampler, data.workers)
