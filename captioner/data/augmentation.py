"""Augmentation of training photos.

    crop     random crop, resized to the photo's size (Szegedy et al. 2015, arXiv:1409.4842)
    colour   brightness, contrast and saturation, each by a random factor (Howard 2013,
             arXiv:1312.5402)

Deviation: a caption describes the whole photo, so crops should be large (75% of the area, where
classification uses 8%), and hue is kept: "a red shirt" must not turn green.

The result depends only on seed, epoch and photo, so a run can be resumed anywhere.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

from PIL import Image, ImageEnhance

_ASPECT = math.log(5 / 4)  # log of the largest change of a crop's aspect ratio


@dataclass(frozen=True)
class Augmentation:
    """Strength of the augmentation; by default none."""

    min_crop: float = 1.0
    """Smallest crop, as a share of the photo's area; 1: no crop."""
    color_jitter: float = 0.0
    """Brightness, contrast and saturation change by up to this share; 0: no change."""

    def augmented(self, image: Image.Image, *, seed: int, epoch: int, key: str) -> Image.Image:
        """Augment a photo; the size is kept.

        Args:
            image: RGB.
            seed: The run's seed.
            epoch: From 0; -1: return the photo unchanged.
            key: See ``EncodedImage.key``.
        """
        if epoch < 0:
            return image
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
        """Left, upper, right and lower edge (pixels)."""
        area = rng.uniform(self.min_crop, 1.0)
        # No side may exceed the photo's; limiting the aspect ratio keeps the sampled area.
        limit = min(_ASPECT, -math.log(area))
        aspect = math.exp(rng.uniform(-limit, limit))
        width = math.sqrt(area * aspect) * size[0]
        height = math.sqrt(area / aspect) * size[1]
        left = rng.uniform(0, size[0] - width)
        upper = rng.uniform(0, size[1] - height)
        # Rounding must not move an edge outside the photo.
        return left, upper, min(left + width, size[0]), min(upper + height, size[1])
