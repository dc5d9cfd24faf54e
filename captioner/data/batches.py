"""Training batches: a photo and its captions are one item.

An item (which captions, flipped or not) depends only on seed, epoch and photo, not on the process
that reads it, so that a resumed run continues exactly where it stopped.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Sequence
from dataclasses import dataclass
from io import BytesIO
from typing import NamedTuple

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import Dataset

from captioner.data.augmentation import Augmentation
from captioner.data.coco import CaptionedImage
from captioner.data.images import open_image
from captioner.errors import ImageError
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


class Request(NamedTuple):
    """What a worker makes an item of."""

    epoch: int
    """-1: of a filler, a black photo without captions, which adds nothing to the loss."""
    photo: EncodedImage
    data: bytes | None = None
    """The photo's file; None: it is read from its path."""
    name: str | None = None
    """Of the photo in messages; None: its path."""


@dataclass(eq=False)
class PhotoReader(Dataset[Item]):
    """Makes items of photos; captions, flip and augmentation vary by epoch.

    Every choice depends only on seed, epoch and photo. The reader holds no photos: the loader sends
    each to a worker when it is needed. A worker that is spawned would otherwise start with a copy
    of all photos' captions, every epoch.
    """

    preprocessing: Preprocessing
    max_captions: int
    horizontal_flip: bool = False
    augmentation: Augmentation = Augmentation()  # noqa: RUF009 (immutable)
    seed: int = 0

    def sample(self, photo: EncodedImage, epoch: int) -> tuple[list[list[int]], bool]:
        """A photo's captions in an epoch, at most ``max_captions``, and whether to flip it."""
        if epoch < 0:
            return [], False
        rng = random.Random(f"{self.seed} {epoch} {photo.key}")
        captions = list(photo.tokens)
        if len(captions) > self.max_captions:
            captions = rng.sample(captions, self.max_captions)
        return captions, self.horizontal_flip and rng.random() < 0.5

    def __getitem__(self, request: Request) -> Item:
        """The item of a photo; if that is damaged, a filler, with a warning."""
        epoch, photo, data, name = request
        captions, flipped = self.sample(photo, epoch)
        image = Image.new("RGB", (32, 32))
        if epoch >= 0:
            try:
                image = open_image(photo.image.path if data is None else BytesIO(data), name=name)
            except ImageError as error:  # one of thousands should not stop training
                warn_skipped(error)
                captions = []
        image = self.augmentation.augmented(image, seed=self.seed, epoch=epoch, key=photo.key)
        pixels = self.preprocessing.pixels(image)
        tensor = torch.from_numpy(np.array(pixels[:, ::-1] if flipped else pixels))
        return Item(photo.image.image_id, tensor, captions, photo.start)


def warn_skipped(error: ImageError) -> None:
    """Log a photo that cannot be read."""
    logging.getLogger(__name__).warning("%s; training continues without it", error)


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
