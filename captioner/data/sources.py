"""Sources of a run's batches: photos, a cache of their features, or shards of photos.

All three give the same items and can start at any batch of an epoch: a photo's captions and flip
depend only on seed, epoch and photo. Photos and features come in the same order; shards have their
own.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

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
from captioner.data.shard_stream import ShardStream
from captioner.data.shards import read_manifest
from captioner.model.preprocessing import Preprocessing
from captioner.options import TrainConfig


@dataclass
class PhotoSource:
    """Photos from their files, or their features from a cache, which a thread reads ahead."""

    reader: PhotoReader
    photos: Sequence[EncodedImage]
    sampler: EpochSampler
    workers: int = 0
    cache: FeatureCache | None = None

    def batches_in(self, epoch: int) -> int:
        """Number of batches in an epoch, the same for all processes."""
        del epoch
        return self.sampler.batches

    def batches(self, epoch: int, start: int) -> Iterator[Batch]:
        """An epoch's batches from batch ``start``."""
        self.sampler.epoch, self.sampler.start = epoch, start
        if self.cache is None:
            yield from training_loader(self.reader, self.photos, self.sampler, self.workers)
        else:
            yield from read_ahead(partial(self._features, self.cache), self.sampler, ahead=2)

    def _features(self, cache: FeatureCache, indices: list[tuple[int, int]]) -> Batch:
        """A batch of (epoch, index); collated before reading, so that features are copied once."""
        items = []
        for epoch, index in indices:
            photo = self.photos[index]
            captions, flipped = self.reader.sample(photo, epoch)
            captions = captions if epoch >= 0 else []
            items.append(Item(photo.image.image_id, torch.tensor(flipped), captions, photo.start))
        batch = collate(items)
        images = cache.read(list(zip(batch.image_ids, batch.images.tolist(), strict=True)))
        if torch.cuda.is_available():
            images = images.pin_memory()  # here in the thread, as the DataLoader does for photos
        return batch._replace(images=images)


Source: TypeAlias = PhotoSource | ShardStream
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
    """Open the source of process ``rank`` of ``world``; with a cache, it gives features.

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
        return ShardStream(
            read_manifest(data.shards),
            {photo.image.image_id: without_text(photo) for photo in photos},
            reader,
            batch_size=batch_size,
            rank=rank,
            world=world,
            workers=data.workers,
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
    return PhotoSource(reader, photos, sampler, data.workers, cache)
