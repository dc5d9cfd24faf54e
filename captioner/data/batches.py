"""Batches for training: a photo and its captions are one item.

What an item holds in an epoch (which captions, mirrored or not) depends on the seed, the epoch and
the photo alone, never on the process that reads it, so that a run that was stopped goes on as if
it had not been.
"""

from __future__ import annotations

import logging
import random
import signal
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler

from captioner.data.augmentation import Augmentation
from captioner.data.coco import CaptionedImage
from captioner.data.images import open_image
from captioner.data.preprocessing import Preprocessing
from captioner.errors import CaptionerError, ImageError
from captioner.vocabulary import PAD, START


class Batch(NamedTuple):
    """Photos, or their features, and their captions: what reaches furthest comes first."""

    images: Tensor
    """(B, H, W, 3) bytes, or features (B, L, D)."""
    tokens: Tensor
    """(B, R, T + 1) start token, words, end token (see ``EncodedImage``), padding; a photo with
    fewer than R captions has rows of padding alone. Longest captions, and photos with the longest,
    come first, so that little of what a decoder runs on is padding."""
    image_ids: tuple[int, ...]
    """(B,)."""

    @property
    def words(self) -> int:
        """Words to be learned, the end tokens included."""
        return int((self.tokens[..., 1:] != PAD).sum())

    def parts(self, size: int) -> list[Batch]:
        """The same photos in parts of at most so many; 0: in one."""
        starts = range(0, len(self.images), size or len(self.images))
        spans = [slice(start, start + size) if size else slice(None) for start in starts]
        return [Batch(self.images[span], self.tokens[span], self.image_ids[span]) for span in spans]


class Item(NamedTuple):
    """One photo as it goes into a batch."""

    image_id: int
    image: Tensor
    """(H, W, 3) bytes, or features (L, D)."""
    captions: list[list[int]]
    """See ``EncodedImage``; none: the photo only fills a place."""
    start: int = START
    """Start token of its captions."""


@dataclass(frozen=True)
class EncodedImage:
    """A photo and its captions."""

    image: CaptionedImage
    tokens: tuple[list[int], ...]
    """Each caption's words as numbers, then the end token; a caption that was cut has none, so that
    nobody learns to end there."""
    start: int = START
    """Start token of its style."""


def choose(
    photo: EncodedImage, epoch: int, seed: int, *, max_captions: int, horizontal_flip: bool
) -> tuple[list[list[int]], bool]:
    """What a photo brings in an epoch: a function of seed, epoch and photo alone.

    Returns:
        Its captions, at most ``max_captions``, and whether it is mirrored.
    """
    chance = random.Random(f"{seed} {epoch} {photo.image.image_id}")
    captions = list(photo.tokens)
    if len(captions) > max_captions:
        captions = chance.sample(captions, max_captions)
    return captions, horizontal_flip and chance.random() < 0.5


AS_THEY_ARE = Augmentation()


class CaptionDataset(Dataset[Item]):
    """Photos with their captions; ``epoch`` chooses captions, mirroring and augmentation."""

    def __init__(
        self,
        items: Sequence[EncodedImage],
        preprocessing: Preprocessing,
        *,
        max_captions: int,
        horizontal_flip: bool = False,
        augmentation: Augmentation = AS_THEY_ARE,
        seed: int = 0,
    ) -> None:
        self.items = items
        self.preprocessing = preprocessing
        self.max_captions = max_captions
        self.horizontal_flip = horizontal_flip
        self.augmentation = augmentation
        self.seed = seed

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, key: tuple[int, int]) -> Item:
        """Item ``key[1]`` in epoch ``key[0]``; -1: no captions."""
        epoch, index = key
        photo = self.items[index]
        captions, mirrored = choose(
            photo,
            epoch,
            self.seed,
            max_captions=self.max_captions,
            horizontal_flip=self.horizontal_flip,
        )
        try:
            image = open_image(photo.image.path)
        except ImageError as error:  # one broken photo among thousands: named, and left out
            warn_of(error)
            image, captions = Image.new("RGB", (32, 32)), []
        image_id = photo.image.image_id
        image = self.augmentation.augmented(image, seed=self.seed, epoch=epoch, image_id=image_id)
        return Item(
            image_id,
            photo_tensor(self.preprocessing, image, mirrored),
            captions if epoch >= 0 else [],
            photo.start,
        )


def photo_tensor(preprocessing: Preprocessing, image: Image.Image, mirrored: bool) -> Tensor:
    """A photo as the encoder sees it, (H, W, 3) bytes."""
    pixels = preprocessing.pixels(image)
    return torch.from_numpy(np.array(pixels[:, ::-1] if mirrored else pixels))


def warn_of(error: ImageError) -> None:
    """One broken photo among thousands is named, and left out."""
    logging.getLogger(__name__).warning("%s; training goes on without it", error)


class EpochSampler(Sampler[list[tuple[int, int]]]):
    """Batches of one epoch after another, shuffled by seed and epoch; can start anywhere.

    Every process takes its share of each batch, so that a batch holds the same photos however
    many processes there are.

    With ``bucket`` above 1, photos with as many captions of like lengths share a batch: so many
    batches' photos at a time, as they follow each other in the shuffled order, are sorted by their
    number of captions, then by their shortest caption, then the next, and cut into batches, whose
    order is shuffled again.
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
        """Over photos.

        Args:
            lengths: Of every photo's captions, words.
            batch_size: Photos in one step, over all processes.
            seed: Of the order.
            rank: Number of this process.
            world: Processes that train together.
            bucket: See above.
        """
        self.size, self.batch_size, self.seed = len(lengths), batch_size, seed
        self.lengths = [(len(of_photo), *sorted(of_photo)) for of_photo in lengths]
        self.rank, self.world, self.bucket = rank, world, bucket
        self.epoch, self.start = 0, 0

    @property
    def batches(self) -> int:
        """Batches in a whole epoch."""
        return -(-self.size // self.batch_size)

    def __len__(self) -> int:
        return self.batches - self.start

    def __iter__(self) -> Iterator[list[tuple[int, int]]]:
        for batch in self._cut()[self.start :]:
            mine = batch[self.rank :: self.world]
            # A last batch with fewer photos than processes: a photo without captions keeps this
            # process in step and adds nothing to the loss.
            yield [(self.epoch, index) for index in mine] or [(-1, batch[0])]

    def _cut(self) -> list[list[int]]:
        """Every batch of the epoch."""
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + self.epoch)
        order = torch.randperm(self.size, generator=generator).tolist()
        if self.bucket > 1:
            window = self.bucket * self.batch_size
            order = [
                index
                for start in range(0, self.size, window)
                for index in sorted(order[start : start + window], key=self.lengths.__getitem__)
            ]
        cut = [order[i : i + self.batch_size] for i in range(0, self.size, self.batch_size)]
        if self.bucket > 1:
            cut = [cut[i] for i in torch.randperm(len(cut), generator=generator).tolist()]
        return cut


def collate(items: Sequence[Item]) -> Batch:
    """Stack photos and pad captions, the longest first."""
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
    """One tensor of all captions.

    Args:
        captions: Of every photo; see ``EncodedImage.tokens``.
        starts: Start token of every photo; None: of the only style.

    Returns:
        (B, R, T + 1), see ``Batch.tokens``.
    """
    longest = max((len(words) for photo in captions for words in photo), default=1)
    shape = (len(captions), max(1, *map(len, captions)), 1 + longest)
    tokens = torch.full(shape, PAD)
    for b, photo in enumerate(captions):
        for r, words in enumerate(photo):
            start = START if starts is None else starts[b]
            tokens[b, r, : 1 + len(words)] = torch.tensor([start, *words])
    return tokens


def leave_signals_to_parent(worker: int) -> None:
    """Ctrl-C and termination reach every process of a group; the parent alone decides."""
    del worker
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)


def training_loader(
    dataset: CaptionDataset, sampler: EpochSampler, workers: int
) -> Iterator[Batch]:
    """Batches in the sampler's order, read ahead by ``workers`` processes."""
    return load_ahead(dataset, workers, batch_sampler=sampler, collate_fn=collate)


def load_ahead(dataset: Dataset[Any], workers: int, **options: Any) -> Iterator[Batch]:
    """A loader's batches; whatever goes wrong, its workers end with it.

    They ignore SIGTERM (see `leave_signals_to_parent`), so that one that is left keeps the program
    from ever exiting. An error that a worker raises comes out of the loader's own frames; while its
    traceback lives, so do they, and with them the workers.

    Args:
        dataset: What the workers read.
        workers: Processes; 0: this one reads.
        options: Of ``DataLoader``, what makes batches of the data set. An error of ours that comes
            in place of a batch is raised here, as one line.
    """
    loader: DataLoader[Batch | CaptionerError] = DataLoader(
        dataset,
        num_workers=workers,
        worker_init_fn=leave_signals_to_parent,
        generator=torch.Generator().manual_seed(0),  # the loader draws nothing from the global one
        pin_memory=torch.cuda.is_available(),
        **options,
    )
    try:
        for batch in loader:
            if isinstance(batch, CaptionerError):
                raise batch
            yield batch
    except Exception as error:
        traceback.clear_frames(error.__traceback__)
        raise
