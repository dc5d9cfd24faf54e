"""Training batches: a photo and its captions are one item.

An item (which captions, flipped or not) depends only on seed, epoch and photo, not on the process
that reads it, so that a resumed run continues exactly where it stopped.
"""

from __future__ import annotations

import logging
import random
import signal
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from io import BytesIO
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from captioner.data.augmentation import Augmentation
from captioner.data.coco import CaptionedImage
from captioner.data.images import open_image
from captioner.errors import DataError, ImageError
from captioner.model.preprocessing import Preprocessing
from captioner.text.vocabulary import PAD, START


class Batch(NamedTuple):
    """Photos, or their features, and their captions."""

    images: Tensor
    """(B, H, W, 3) bytes, or features (B, L, D)."""
    tokens: Tensor
    """(B, R, T + 1) start token, words, end token (see ``EncodedImage``), padding; a photo with
    fewer than R captions has rows of padding. The longest captions, and the photos with the longest
    captions, come first, which minimizes the padding that a decoder processes."""
    image_ids: tuple[int, ...]
    """(B,)."""

    @property
    def words(self) -> int:
        """Number of target words, end tokens included."""
        return int((self.tokens[..., 1:] != PAD).sum())

    def parts(self, size: int) -> list[Batch]:
        """Split the batch into parts of at most ``size`` photos; 0: one part."""
        size = size or len(self.images)
        spans = [slice(start, start + size) for start in range(0, len(self.images), size)]
        return [Batch(self.images[span], self.tokens[span], self.image_ids[span]) for span in spans]


class Item(NamedTuple):
    """One photo in a batch."""

    image_id: int
    image: Tensor
    """(H, W, 3) bytes, or features (L, D)."""
    captions: list[list[int]]
    """See ``EncodedImage``; empty: the photo is a filler and adds nothing to the loss."""
    start: int = START
    """Start token of the captions."""


@dataclass(frozen=True)
class EncodedImage:
    """A photo and its captions as token ids."""

    image: CaptionedImage
    tokens: tuple[list[int], ...]
    """Word ids of each caption, then the end token; truncated captions have no end token, so that
    truncation is not learned as an ending."""
    start: int = START
    """Start token of the photo's style."""
    repeat: int = 0
    """Which of the photo's uses in an epoch this is, from 0 (see ``data.repeats``)."""

    @property
    def key(self) -> str:
        """What its random choices depend on: they differ between the uses in an epoch."""
        return f"{self.image.image_id} {self.repeat}" if self.repeat else str(self.image.image_id)


class PhotoReader(Dataset[Item]):
    """Makes items of photos; captions, flip and augmentation vary by epoch.

    Every choice depends only on seed, epoch and photo. The reader holds no photos: the loader sends
    each to a worker when it is needed. A worker that is spawned would otherwise start with a copy
    of all photos' captions, every epoch.
    """

    def __init__(
        self,
        preprocessing: Preprocessing,
        *,
        max_captions: int,
        horizontal_flip: bool = False,
        augmentation: Augmentation = Augmentation(),  # noqa: B008 (immutable)
        seed: int = 0,
    ) -> None:
        self.preprocessing, self.max_captions = preprocessing, max_captions
        self.horizontal_flip, self.augmentation, self.seed = horizontal_flip, augmentation, seed

    def sample(self, photo: EncodedImage, epoch: int) -> tuple[list[list[int]], bool]:
        """A photo's captions in an epoch, at most ``max_captions``, and whether to flip it."""
        rng = random.Random(f"{self.seed} {epoch} {photo.key}")
        captions = list(photo.tokens)
        if len(captions) > self.max_captions:
            captions = rng.sample(captions, self.max_captions)
        return captions, self.horizontal_flip and rng.random() < 0.5

    def __getitem__(self, epoch_and_photo: tuple[int, EncodedImage]) -> Item:
        """A photo's item of an epoch; epoch -1: without captions."""
        epoch, photo = epoch_and_photo
        return self.item(photo, epoch, photo.image.path) or self.filler(photo.image.image_id)

    def item(
        self, photo: EncodedImage, epoch: int, source: Path | BytesIO, name: str | None = None
    ) -> Item | None:
        """The item of a photo, read from ``source``; None, with a warning, if that is damaged."""
        captions, flipped = self.sample(photo, epoch)
        try:
            image = open_image(source, name=name)
        except ImageError as error:  # one of thousands should not stop training
            warn_skipped(error)
            return None
        image = self.augmentation.augmented(image, seed=self.seed, epoch=epoch, key=photo.key)
        pixels = photo_tensor(self.preprocessing, image, flipped)
        return Item(photo.image.image_id, pixels, captions if epoch >= 0 else [], photo.start)

    def filler(self, image_id: int = -1) -> Item:
        """A black photo without captions, which adds nothing to the loss."""
        black = Image.new("RGB", (32, 32))
        return Item(image_id, photo_tensor(self.preprocessing, black, False), [])


def without_text(photo: EncodedImage) -> EncodedImage:
    """The photo without the text of its captions, which workers do not need."""
    return replace(photo, image=replace(photo.image, captions=()))


def photo_tensor(preprocessing: Preprocessing, image: Image.Image, flipped: bool) -> Tensor:
    """A preprocessed photo, (H, W, 3) bytes."""
    pixels = preprocessing.pixels(image)
    return torch.from_numpy(np.array(pixels[:, ::-1] if flipped else pixels))


def warn_skipped(error: ImageError) -> None:
    """Log a photo that cannot be read."""
    logging.getLogger(__name__).warning("%s; training continues without it", error)


class EpochSampler:
    """Batches of (epoch, index), shuffled by seed and epoch; can start at any batch.

    Each process takes its share of each batch, so a batch holds the same photos for any number of
    processes.

    With ``bucket`` above 1, photos with the same number of captions of similar lengths share a
    batch: the photos of ``bucket`` consecutive batches in shuffled order are sorted by number of
    captions, then by their caption lengths in ascending order, and cut into batches. The order of
    the batches is shuffled again.
    """

    def __init__(
        self,
        lengths: Sequence[Sequence[int]],
        batch_size: int,
        seed: int,
        rank: int = 0,
        world: int = 1,
        *,
        bucket: int = 1,
    ) -> None:
        """Sample for process ``rank`` of ``world``.

        ``lengths`` are the caption lengths of each photo (words), ``batch_size`` is the number of
        photos per step over all processes.
        """
        self.batch_size, self.seed = batch_size, seed
        self.lengths = [(len(of_photo), *sorted(of_photo)) for of_photo in lengths]
        self.rank, self.world, self.bucket = rank, world, bucket
        self.epoch, self.start = 0, 0

    @property
    def batches(self) -> int:
        """Number of batches in an epoch."""
        return -(-len(self.lengths) // self.batch_size)

    def __iter__(self) -> Iterator[list[tuple[int, int]]]:
        for batch in self._all_batches()[self.start :]:
            share = batch[self.rank :: self.world]
            # If the last batch has fewer photos than processes, a filler without captions keeps
            # this process in step and adds nothing to the loss.
            yield [(self.epoch, index) for index in share] or [(-1, batch[0])]

    def _all_batches(self) -> list[list[int]]:
        """The epoch's batches over all processes."""
        size = len(self.lengths)
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + self.epoch)
        order = torch.randperm(size, generator=generator).tolist()
        if self.bucket > 1:
            window = self.bucket * self.batch_size
            order = [
                index
                for start in range(0, size, window)
                for index in sorted(order[start : start + window], key=self.lengths.__getitem__)
            ]
        batches = [order[i : i + self.batch_size] for i in range(0, size, self.batch_size)]
        if self.bucket > 1:
            shuffled = torch.randperm(len(batches), generator=generator).tolist()
            batches = [batches[i] for i in shuffled]
        return batches


def collate(items: Sequence[Item]) -> Batch:
    """Stack photos and pad captions, longest first."""
    captions = [sorted(item.captions, key=len, reverse=True) for item in items]
    order = sorted(range(len(items)), key=lambda b: -len(captions[b][0]) if captions[b] else 1)
    return Batch(
        torch.stack([items[b].image for b in order]),
        pad_captions([captions[b] for b in order], [items[b].start for b in order]),
        tuple(items[b].image_id for b in order),
    )


def pad_captions(
    captions: Sequence[Sequence[Sequence[int]]], starts: Sequence[int] | None = None
) -> Tensor:
    """Pad each photo's captions (see ``EncodedImage.tokens``) to ``Batch.tokens``, (B, R, T + 1).

    ``starts`` are the photos' start tokens; None: ``START``.
    """
    longest = max((len(words) for photo in captions for words in photo), default=1)
    tokens = torch.full((len(captions), max(1, *map(len, captions)), 1 + longest), PAD)
    for b, photo in enumerate(captions):
        for r, words in enumerate(photo):
            start = START if starts is None else starts[b]
            tokens[b, r, : 1 + len(words)] = torch.tensor([start, *words])
    return tokens


def training_loader(
    reader: PhotoReader, photos: Sequence[EncodedImage], sampler: EpochSampler, workers: int
) -> Iterator[Batch]:
    """Batches of photos in the sampler's order, prefetched by ``workers`` processes."""
    batches = ([(epoch, without_text(photos[n])) for epoch, n in batch] for batch in sampler)
    return load_ahead(reader, workers, batch_sampler=batches, collate_fn=collate)


def load_ahead(dataset: Dataset[Any], workers: int, **options: Any) -> Iterator[Batch]:
    """Iterate over a ``DataLoader`` whose workers end with the iteration, even after an error.

    Workers ignore SIGTERM, so a leaked worker would keep the program from exiting. An error keeps
    the loader's frames alive through its traceback, and with them the workers; the frames are
    therefore cleared.

    With 0 workers, this process loads; ``options`` are further ones of ``DataLoader``.
    """
    loader: DataLoader[Batch] = DataLoader(
        dataset,
        num_workers=workers,
        worker_init_fn=_leave_signals_to_parent,
        generator=torch.Generator().manual_seed(0),  # keeps the global generator unchanged
        pin_memory=torch.cuda.is_available(),
        **options,
    )
    try:
        yield from loader
    except Exception as error:
        traceback.clear_frames(error.__traceback__)
        if isinstance(error, DataError):  # a worker's traceback comes before its message
            raise DataError(str(error).rpartition("DataError: ")[2].strip()) from None
        raise


def _leave_signals_to_parent(worker: int) -> None:
    """Ignore Ctrl-C and SIGTERM, which reach the whole process group: the parent handles them."""
    del worker
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
