"""Where a run's batches come from: photos, a cache of their features, or shards of photos.

All three deal out the same thing, epoch after epoch, and can start anywhere in one: which captions
a photo brings and whether it is mirrored is a function of seed, epoch and photo. Photos and
features come in the same order; shards have an order of their own.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice
from typing import Protocol, TypeVar

import torch

from captioner.config import TrainConfig
from captioner.data.augmentation import Augmentation
from captioner.data.batches import (
    Batch,
    CaptionDataset,
    EncodedImage,
    EpochSampler,
    Item,
    choose,
    collate,
    training_loader,
)
from captioner.data.features import FeatureCache
from captioner.data.preprocessing import Preprocessing
from captioner.data.shard_stream import ShardStream, shard_loader
from captioner.data.shards import read_manifest

AHEAD = 2
"""Batches of features that are read while the model works on one."""


class Source(Protocol):
    """Batches of one process."""

    def batches_in(self, epoch: int) -> int:
        """How many the epoch has, the same for all processes."""

    def batches(self, epoch: int, start: int) -> Iterator[Batch]:
        """An epoch's batches without the first ``start``."""


class PhotoSource:
    """Photos from their files."""

    def __init__(self, dataset: CaptionDataset, sampler: EpochSampler, workers: int) -> None:
        self.dataset, self.sampler, self.workers = dataset, sampler, workers

    def batches_in(self, epoch: int) -> int:
        """See ``Source``."""
        del epoch
        return self.sampler.batches

    def batches(self, epoch: int, start: int) -> Iterator[Batch]:
        """See ``Source``."""
        self.sampler.epoch, self.sampler.start = epoch, start
        yield from training_loader(self.dataset, self.sampler, self.workers)


class FeatureSource:
    """Features from a cache; a thread reads ahead."""

    def __init__(
        self,
        cache: FeatureCache,
        photos: Sequence[EncodedImage],
        sampler: EpochSampler,
        *,
        max_captions: int,
        horizontal_flip: bool,
        seed: int,
    ) -> None:
        self.cache, self.photos, self.sampler = cache, photos, sampler
        self.max_captions, self.horizontal_flip, self.seed = max_captions, horizontal_flip, seed

    def batches_in(self, epoch: int) -> int:
        """See ``Source``."""
        del epoch
        return self.sampler.batches

    def batches(self, epoch: int, start: int) -> Iterator[Batch]:
        """See ``Source``."""
        self.sampler.epoch, self.sampler.start = epoch, start
        yield from read_ahead(self._batch, iter(self.sampler))

    def _batch(self, keys: list[tuple[int, int]]) -> Batch:
        """Collated before the features are read, so that these are copied once."""
        items, mirrored = [], {}
        for epoch, index in keys:
            photo = self.photos[index]
            image_id = photo.image.image_id
            captions, mirrored[image_id] = choose(
                photo,
                epoch,
                self.seed,
                max_captions=self.max_captions,
                horizontal_flip=self.horizontal_flip,
            )
            captions = captions if epoch >= 0 else []
            items.append(Item(image_id, torch.empty(0), captions, photo.start))
        batch = collate(items)
        images = self.cache.read([(i, mirrored[i]) for i in batch.image_ids])
        return batch._replace(images=images)


class ShardSource:
    """Photos streamed from shards."""

    def __init__(self, stream: ShardStream) -> None:
        self.stream = stream

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
    """What a config trains on.

    Args:
        config: ``data.shards`` names shards.
        photos: The training photos.
        preprocessing: The model's.
        cache: Their features, if they are to be read instead; checked.
        rank: Number of this process.
        world: Processes that train together.

    Raises:
        DataError: The shards cannot be read.
        ConfigError: They are too few for the processes.
    """
    data, seed, batch_size = config.data, config.training.seed, config.training.batch_size
    augmentation = Augmentation(data.min_crop, data.color_jitter)
    if data.shards:
        return ShardSource(
            ShardStream(
                read_manifest(data.shards),
                {photo.image.image_id: photo for photo in photos},
                preprocessing,
                batch_size=batch_size,
                max_captions=data.max_captions,
                horizontal_flip=data.horizontal_flip,
                augmentation=augmentation,
                seed=seed,
                rank=rank,
                world=world,
                workers=data.workers,
            )
        )
    # At most a quarter of the epoch: sorted whole, it would be cut into the same batches each time.
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
        return FeatureSource(
            cache,
            photos,
            sampler,
            max_captions=data.max_captions,
            horizontal_flip=data.horizontal_flip,
            seed=seed,
        )
    dataset = CaptionDataset(
        photos,
        preprocessing,
        max_captions=data.max_captions,
        horizontal_flip=data.horizontal_flip,
        augmentation=augmentation,
        seed=seed,
    )
    return PhotoSource(dataset, sampler, data.workers)


Given = TypeVar("Given")
Made = TypeVar("Made")


def read_ahead(make: Callable[[Given], Made], source: Iterator[Given]) -> Iterator[Made]:
    """``map``, of which a thread works some results ahead."""
    with ThreadPoolExecutor(1) as reader:
        waiting: deque[Future[Made]] = deque()
        while True:
            waiting.extend(reader.submit(make, one) for one in islice(source, AHEAD - len(waiting)))
            if not waiting:
                return
            yield waiting.popleft().result()
