"""Batches for training: a photo and its captions are one item.

What an item holds in an epoch (which captions, mirrored or not) depends on the seed, the epoch and
the photo alone, never on the process that reads it, so that a run that was stopped goes on as if
it had not been.
"""

from __future__ import annotations

import logging
import random
import signal
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler

from captioner.data.coco import CaptionedImage
from captioner.data.images import open_image
from captioner.data.preprocessing import Preprocessing
from captioner.errors import ImageError
from captioner.vocabulary import END, PAD, START


class Batch(NamedTuple):
    """Photos and their captions."""

    pixels: Tensor
    """(B, H, W, 3) bytes."""
    tokens: Tensor
    """(B, R, T + 1) start token, words, end token, padding; a photo with fewer than R captions
    has rows of padding alone."""


@dataclass(frozen=True)
class EncodedImage:
    """A photo and its captions as numbers, without start and end tokens."""

    image: CaptionedImage
    tokens: tuple[list[int], ...]


class CaptionDataset(Dataset[tuple[torch.Tensor, list[list[int]]]]):
    """Photos with their captions; ``epoch`` chooses captions and mirroring."""

    def __init__(
        self,
        items: Sequence[EncodedImage],
        preprocessing: Preprocessing,
        *,
        max_captions: int,
        horizontal_flip: bool = False,
        seed: int = 0,
    ) -> None:
        self.items = items
        self.preprocessing = preprocessing
        self.max_captions = max_captions
        self.horizontal_flip = horizontal_flip
        self.seed = seed

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, key: tuple[int, int]) -> tuple[Tensor, list[list[int]]]:
        """Pixels (H, W, 3) and captions of item ``key[1]`` in epoch ``key[0]``; -1: no captions."""
        epoch, index = key
        item = self.items[index]
        chance = random.Random(f"{self.seed} {epoch} {index}")
        captions = list(item.tokens) if epoch >= 0 else []
        if len(captions) > self.max_captions:
            captions = chance.sample(captions, self.max_captions)
        try:
            image = open_image(item.image.path)
        except ImageError as error:  # one broken photo among thousands: named, and left out
            logging.getLogger(__name__).warning("%s; training goes on without it", error)
            image, captions = Image.new("RGB", (32, 32)), []
        pixels = self.preprocessing.pixels(image)
        if self.horizontal_flip and chance.random() < 0.5:
            pixels = pixels[:, ::-1]
        return torch.from_numpy(np.array(pixels)), captions


class EpochSampler(Sampler[list[tuple[int, int]]]):
    """Batches of one epoch after another, shuffled by seed and epoch; can start anywhere.

    Every process takes its share of each batch, so that a batch holds the same photos however
    many processes there are.
    """

    def __init__(
        self, size: int, batch_size: int, seed: int, rank: int = 0, world: int = 1
    ) -> None:
        self.size, self.batch_size, self.seed = size, batch_size, seed
        self.rank, self.world = rank, world
        self.epoch, self.start = 0, 0

    @property
    def batches(self) -> int:
        """Batches in a whole epoch."""
        return -(-self.size // self.batch_size)

    def __len__(self) -> int:
        return self.batches - self.start

    def __iter__(self) -> Iterator[list[tuple[int, int]]]:
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + self.epoch)
        order = torch.randperm(self.size, generator=generator).tolist()
        for number in range(self.start, self.batches):
            batch = order[number * self.batch_size : (number + 1) * self.batch_size]
            mine = batch[self.rank :: self.world]
            # A last batch with fewer photos than processes: a photo without captions keeps this
            # process in step and adds nothing to the loss.
            yield [(self.epoch, index) for index in mine] or [(-1, batch[0])]


def collate(items: Sequence[tuple[Tensor, list[list[int]]]]) -> Batch:
    """Stack photos and pad captions."""
    captions = [tokens for _, tokens in items]
    longest = max((len(words) for photo in captions for words in photo), default=0)
    shape = (len(items), max(1, *map(len, captions)), 2 + longest)
    tokens = torch.full(shape, PAD)
    for b, photo in enumerate(captions):
        for r, words in enumerate(photo):
            tokens[b, r, : len(words) + 2] = torch.tensor([START, *words, END])
    return Batch(torch.stack([pixels for pixels, _ in items]), tokens)


def _leave_signals_to_parent(worker: int) -> None:
    """Ctrl-C and termination reach every process of a group; the parent alone decides."""
    del worker
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)


def training_loader(
    dataset: CaptionDataset, sampler: EpochSampler, workers: int
) -> DataLoader[Batch]:
    """Batches in the sampler's order, read ahead by ``workers`` processes."""
    return DataLoader(
        dataset,  # type: ignore[arg-type]
        batch_sampler=sampler,
        collate_fn=collate,
        num_workers=workers,
        worker_init_fn=_leave_signals_to_parent,
        generator=torch.Generator().manual_seed(0),  # the loader draws nothing from the global one
        pin_memory=torch.cuda.is_available(),
    )
