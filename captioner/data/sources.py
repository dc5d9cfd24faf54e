"""Sources of training batches: photo files, or a cache of their features.

Both sources yield the same photos in the same order, and can start at any batch of an epoch. A
photo's captions and flip depend only on seed, epoch and photo. Nothing depends on the number of
workers, because workers only decode.
"""

from __future__ import annotations

import signal
import traceback
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch.utils.data import DataLoader

from captioner.data.batches import FILLER, Augmentation, Batch, PhotoReader, collate
from captioner.data.example import Example
from captioner.data.features import FeatureCache
from captioner.data.reading import read_ahead
from captioner.model.preprocessing import Preprocessing
from captioner.options import TrainConfig


@dataclass
class PhotoSource:
    """A source of batches with photos from files, or with features from a cache.

    A thread reads the cached features ahead. In distributed training, each process takes an equal
    part (share) of each batch. A batch therefore contains the same photos for any number of
    processes.
    """

    reader: PhotoReader
    """Reader that decodes the photos and samples their captions."""
    photos: Sequence[Example]
    """All photos of an epoch, with their tokens."""
    batch_size: int
    """Number of photos per step, over all processes."""
    bucket: int = 1
    """Number of batches that are sorted together (see `epoch_batches`)."""
    rank: int = 0
    """Index of this process, from 0."""
    world: int = 1
    """Number of training processes."""
    workers: int = 0
    """Number of worker processes that decode photos. 0: decode in this process."""
    cache: FeatureCache | None = None
    """Cache of the photos' features, or None to read photos from files."""

    def batches_in(self, epoch: int) -> int:
        """Return the number of batches in an epoch, the same for all processes."""
        del epoch
        return -(-len(self.photos) // self.batch_size)

    def batches(self, epoch: int, start: int) -> Iterator[Batch]:
        """Yield the batches of an epoch from batch ``start``."""
        shares = self._shares(epoch, start)
        if self.cache is None:
            batches = _load(self.reader, shares, self.workers)
        else:
            batches = read_ahead(partial(self._features, self.cache), shares, ahead=2)
        first = epoch * self.batches_in(epoch)
        with closing(batches):
            for number, batch in enumerate(batches, start):
                yield replace(batch, step=first + number)

    def _shares(self, epoch: int, start: int) -> Iterator[list[tuple[int, Example]]]:
        """Yield this process's share of every batch from batch ``start`` on.

        A share is the part of a batch that one process trains on. It is a list of pairs of an epoch
        and a photo. The epoch -1 marks a filler, which keeps processes in step.
        """
        lengths = [[len(words) for words in photo.tokens] for photo in self.photos]
        batches = epoch_batches(
            lengths, self.batch_size, seed=self.reader.seed, epoch=epoch, bucket=self.bucket
        )
        for batch in batches[start:]:
            share = [(epoch, self.photos[n]) for n in batch[self.rank :: self.world]]
            # If the last batch has fewer photos than processes, a filler keeps processes in step.
            yield share or [(FILLER, self.photos[batch[0]])]

    def _features(self, cache: FeatureCache, share: list[tuple[int, Example]]) -> Batch:
        """Return a batch with the captions of photos and their features from the cache.

        ``share`` contains pairs of an epoch and a photo: the part of a batch that this process
        trains on. The batch is sorted before the features are read, so that they are copied only
        once.
        """
        sampled = (self.reader.sample(photo, epoch) for epoch, photo in share)
        batch = collate([(photo, torch.tensor(flipped)) for photo, flipped in sampled])
        rows = list(zip(batch.image_ids, batch.images.tolist(), strict=True))
        return replace(batch, images=cache.read(rows))


def epoch_batches(
    lengths: Sequence[Sequence[int]], batch_size: int, *, seed: int, epoch: int, bucket: int = 1
) -> list[list[int]]:
    """Return the batches of an epoch as lists of indices of photos, shuffled by seed and epoch.

    ``lengths`` contains, for each photo, the number of words in each of its captions. With
    ``bucket`` above 1, a batch contains photos with the same number of captions and similar
    lengths. For this, the photos of ``bucket`` consecutive batches in shuffled order are sorted by
    their number of captions, then by their lengths, and cut into batches. The order of these
    batches is shuffled too. The last batch may have fewer photos than ``batch_size``.
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


def open_source(
    config: TrainConfig,
    photos: Sequence[Example],
    preprocessing: Preprocessing,
    cache: FeatureCache | None,
    *,
    rank: int = 0,
    world: int = 1,
) -> PhotoSource:
    """Return the source of batches for process ``rank`` of ``world`` processes.

    With a cache, the batches contain features instead of pixels.
    """
    data, batch_size = config.data, config.training.batch_size
    reader = PhotoReader(
        preprocessing,
        data.max_captions,
        data.horizontal_flip,
        Augmentation(data.min_crop, data.color_jitter),
        config.training.seed,
    )
    # At most a quarter of the epoch. A bucket of the whole epoch would repeat the same batches.
    bucket = max(1, min(data.bucket_batches, len(photos) // (4 * batch_size)))
    return PhotoSource(reader, photos, batch_size, bucket, rank, world, data.workers, cache)


def _load(
    reader: PhotoReader, shares: Iterable[list[tuple[int, Example]]], workers: int
) -> Generator[Batch, None, None]:
    """Yield a batch for each share, with photos that workers read and decode ahead.

    A share is the part of a batch that one process trains on: pairs of an epoch and a photo. The
    workers end with the iteration. With 0 workers, this process decodes the photos.

    Workers ignore SIGTERM, so a leaked worker would keep the program from exiting. The traceback of
    an error keeps the loader's frames alive, and with them the workers. The frames are therefore
    cleared.
    """
    loader: DataLoader[Any] = DataLoader(
        reader,
        batch_sampler=map(without_text, shares),
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


def without_text(share: list[tuple[int, Example]]) -> list[tuple[int, Example]]:
    """Return pairs of an epoch and a photo without the text of the photo's captions.

    Workers need only the token ids, and less data is sent to them.
    """
    return [(epoch, replace(photo, captions=())) for epoch, photo in share]


def _leave_signals_to_parent(_: int) -> None:
    """Ignore Ctrl-C and SIGTERM in a worker.

    These signals reach the whole process group, and the parent process handles them.
    """
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
