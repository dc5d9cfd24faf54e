"""Batches of photos and captions for training.

Photos may be augmented. The random choices for a photo (captions, crop, flip) depend only on seed,
epoch and photo, not on the process that reads the photo. A resumed run therefore continues exactly
where it stopped.
"""

from __future__ import annotations

import logging
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from PIL import Image, ImageEnhance
from torch import Tensor
from torch.utils.data import Dataset

from captioner.data.example import Example
from captioner.data.images import open_image
from captioner.errors import ImageError
from captioner.model.preprocessing import Preprocessing
from captioner.text.vocabulary import PAD, START


@dataclass(frozen=True)
class Batch:
    """A batch of photos or cached features, with captions.

    The class is not a tuple, because DistributedDataParallel moves tensors in tuples to the GPU.
    Every step would then wait until the tokens are copied back.
    """

    images: Tensor
    """Pixels of the photos, (B, H, W, 3) bytes, or features of the photos, (B, L, D)."""
    tokens: Tensor
    """Token ids of the captions, (B, R, T + 1). Each row contains the start token, the words, the
    end token (see ``Example.tokens``) and padding. A photo with fewer than R captions has rows of
    padding. Photos and their captions are sorted by length, longest first, so that the decoder
    processes little padding."""
    image_ids: tuple[int, ...]
    """Ids of the photos, (B,)."""
    step: int = 0
    """Index of the batch in the run, from 0. Captions that the model samples during training depend
    on this index."""

    @property
    def words(self) -> int:
        """The number of words that the model learns to predict, including end tokens."""
        return int((self.tokens[..., 1:] != PAD).sum())

    def parts(self, size: int) -> list[Batch]:
        """Split the batch into parts of at most ``size`` photos. Size 0 keeps it as one part."""
        size = size or len(self.images)
        parts = []
        for start in range(0, len(self.images), size):
            span = slice(start, start + size)
            images, tokens, image_ids = self.images[span], self.tokens[span], self.image_ids[span]
            parts.append(Batch(images, tokens, image_ids, self.step))
        return parts

    def pin_memory(self) -> Batch:
        """Return the batch with its images in pinned memory. ``DataLoader`` calls this method."""
        return replace(self, images=self.images.pin_memory())


FILLER = -1
"""Epoch number that marks a filler. A filler is a black photo without captions, and it adds nothing
to the loss."""


_ASPECT = math.log(5 / 4)  # logarithm of the largest change of the aspect ratio by a crop


@dataclass(frozen=True)
class Augmentation:
    """Strength of the random changes to training photos. The default changes nothing.

        crop     random crop, resized to the photo's size (Szegedy et al. 2015, arXiv:1409.4842)
        colour   brightness, contrast and saturation, each by a random factor (Howard 2013,
                 arXiv:1312.5402)

    Deviation: a caption describes the whole photo. Crops should therefore keep at least 75% of the
    area, compared with 8% in classification. The hue is kept, because "a red shirt" must not turn
    green.
    """

    min_crop: float = 1.0
    """Smallest crop, as a fraction of the photo's area. 1 turns cropping off."""
    color_jitter: float = 0.0
    """Largest change of brightness, contrast and saturation, as a fraction. 0 turns it off."""

    def augmented(self, image: Image.Image, *, seed: int, epoch: int, key: str) -> Image.Image:
        """Return an RGB photo of the same size with random changes.

        The changes depend only on the seed, the epoch and the photo's key, a text that identifies
        the photo (``Example.key``).
        """
        rng = random.Random(f"variation {seed} {epoch} {key}")
        if self.min_crop < 1:
            box = self._crop(image.size, rng)
            image = image.resize(image.size, Image.Resampling.BICUBIC, box=box)
        if self.color_jitter > 0:
            low, high = 1 - self.color_jitter, 1 + self.color_jitter
            for enhancer in (ImageEnhance.Brightness, ImageEnhance.Contrast, ImageEnhance.Color):
                image = enhancer(image).enhance(rng.uniform(low, high))
        return image

    def _crop(self, size: tuple[int, int], rng: random.Random) -> tuple[float, float, float, float]:
        """Return the left, upper, right and lower edges of a random crop (pixels)."""
        area = rng.uniform(self.min_crop, 1.0)
        # No side may be longer than the photo's side. Cutting the side would reduce the sampled
        # area, so the aspect ratio is limited instead.
        limit = min(_ASPECT, -math.log(area))
        aspect = math.exp(rng.uniform(-limit, limit))
        width = math.sqrt(area * aspect) * size[0]
        height = math.sqrt(area / aspect) * size[1]
        left = rng.uniform(0, size[0] - width)
        upper = rng.uniform(0, size[1] - height)
        # Rounding must not move an edge outside the photo.
        return left, upper, min(left + width, size[0]), min(upper + height, size[1])


@dataclass(eq=False)
class PhotoReader(Dataset[tuple[Example, Tensor]]):
    """A reader of photos that also samples their captions for an epoch.

    The reader does not store the list of photos. ``DataLoader`` sends each ``Example`` to a worker
    when it is needed. Otherwise, each spawned worker would start every epoch with a copy of all
    captions.
    """

    preprocessing: Preprocessing
    """Preprocessing of the photos for the encoder."""
    max_captions: int
    """Maximum number of captions per photo and epoch. They are chosen at random."""
    horizontal_flip: bool = False
    """Mirror each photo with probability 1/2."""
    augmentation: Augmentation = Augmentation()
    """Random changes to the photos."""
    seed: int = 0
    """Seed of all random choices."""

    def sample(self, photo: Example, epoch: int) -> tuple[Example, bool]:
        """Return a photo with the captions for an epoch, and whether to flip the photo.

        At most ``max_captions`` of its captions are kept, chosen at random. For the epoch -1
        (``FILLER``), the photo has no captions, so that it adds nothing to the loss.
        """
        if epoch == FILLER:
            return replace(photo, tokens=()), False
        rng = random.Random(f"{self.seed} {epoch} {photo.key}")
        tokens = photo.tokens
        if len(tokens) > self.max_captions:
            tokens = tuple(rng.sample(tokens, self.max_captions))
        return replace(photo, tokens=tokens), self.horizontal_flip and rng.random() < 0.5

    def __getitem__(self, index: tuple[int, Example]) -> tuple[Example, Tensor]:
        """Return a photo with its captions for an epoch, and its pixels, (H, W, 3) bytes.

        ``index`` is a pair of an epoch and a photo. A damaged photo is replaced by a filler, and a
        warning is logged. A filler is a black photo without captions and adds nothing to the loss.
        """
        epoch, photo = index
        photo, flipped = self.sample(photo, epoch)
        image = Image.new("RGB", (32, 32))
        if epoch != FILLER:
            try:
                image = open_image(photo.path)
            except ImageError as error:  # one bad photo of thousands should not stop training
                warn_skipped(error)
                photo = replace(photo, tokens=())
        image = self.augmentation.augmented(image, seed=self.seed, epoch=epoch, key=photo.key)
        pixels = self.preprocessing.pixels(image)
        return photo, torch.from_numpy(np.array(pixels[:, ::-1] if flipped else pixels))


def warn_skipped(error: ImageError) -> None:
    """Log a warning about a photo that cannot be read."""
    logging.getLogger(__name__).warning("%s; training continues without it", error)


def collate(photos: Sequence[tuple[Example, Tensor]]) -> Batch:
    """Combine photos, each with its pixels or features, into a batch sorted by caption length."""
    captions = [sorted(photo.tokens, key=len, reverse=True) for photo, _ in photos]
    order = sorted(range(len(photos)), key=lambda b: -len(captions[b][0]) if captions[b] else 1)
    return Batch(
        torch.stack([photos[b][1] for b in order]),
        pad_captions([captions[b] for b in order], [photos[b][0].start for b in order]),
        tuple(photos[b][0].image_id for b in order),
    )


def pad_captions(
    captions: Sequence[Sequence[Sequence[int]]], starts: Sequence[int] | None = None
) -> Tensor:
    """Pad the captions of photos to one tensor, (B, R, T + 1), as in ``Batch.tokens``.

    Args:
        captions: For each photo, a list of captions. A caption is a list of token ids (see
            ``Example.tokens``).
        starts: Start token of each photo, (B,). None selects ``START`` for all photos.
    """
    longest = max((len(words) for photo in captions for words in photo), default=1)
    tokens = torch.full((len(captions), max(1, *map(len, captions)), 1 + longest), PAD)
    for b, photo in enumerate(captions):
        for r, words in enumerate(photo):
            start = START if starts is None else starts[b]
            tokens[b, r, : 1 + len(words)] = torch.tensor([start, *words])
    return tokens
