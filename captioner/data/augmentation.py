"""Training photos that look a little different in every epoch.

    crop     a random part of the photo, its sides and place drawn (Szegedy et al. 2015,
             arXiv:1409.4842), stretched to the photo's own size
    colour   brightness, contrast and saturation, each by its own factor (Howard 2013,
             arXiv:1312.5402)

Deviation: a caption tells of the whole photo, so that crops are large (three quarters, say, where
classification takes 8%), and hue stays: "a red shirt" must not turn green.

What is drawn is a function of seed, epoch and photo alone, so that a run can be taken up anywhere.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

from PIL import Image, ImageEnhance

_ASPECT = math.log(5 / 4)  # a crop is at most so much wider or higher than the photo (log)


@dataclass(frozen=True)
class Augmentation:
    """How much training photos vary; by default not at all."""

    min_crop: float = 1.0
    """Least share of the photo's area that is kept; 1: all."""
    color_jitter: float = 0.0
    """Brightness, contrast and saturation vary by this share either way; 0: not."""

    def augmented(self, image: Image.Image, *, seed: int, epoch: int, image_id: int) -> Image.Image:
        """The photo as it looks in an epoch, of the same size.

        Args:
            image: RGB.
            seed: Of the run.
            epoch: From 0; -1 stands for no epoch, and nothing varies.
            image_id: The photo's.
        """
        if epoch < 0:
            return image
        chance = random.Random(f"variation {seed} {epoch} {image_id}")
        if self.min_crop < 1:
            box = self._crop(image.size, chance)
            image = image.resize(image.size, Image.Resampling.BICUBIC, box=box)
        if self.color_jitter > 0:
            low, high = 1 - self.color_jitter, 1 + self.color_jitter
            for enhancer in (ImageEnhance.Brightness, ImageEnhance.Contrast, ImageEnhance.Color):
                image = enhancer(image).enhance(chance.uniform(low, high))
        return image

    def _crop(
        self, size: tuple[int, int], chance: random.Random
    ) -> tuple[float, float, float, float]:
        """Left, upper, right and lower side in pixels, not rounded."""
        area = chance.uniform(self.min_crop, 1.0)
        # No side can be longer than the photo's; a narrower range keeps the area what was drawn.
        most = min(_ASPECT, -math.log(area))
        aspect = math.exp(chance.uniform(-most, most))
        width = math.sqrt(area * aspect) * size[0]
        height = math.sqrt(area / aspect) * size[1]
        left = chance.uniform(0, size[0] - width)
        upper = chance.uniform(0, size[1] - height)
        # Rounding must not carry a side over the border.
        return left, upper, min(left + width, size[0]), min(upper + height, size[1])
