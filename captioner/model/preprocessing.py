"""Conversion of photos to encoder inputs.

Resizing and normalization are part of the model, because weights fit only the preprocessing that
they were trained with. A `Preprocessing` is therefore saved in the model folder.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from captioner.caption_types import CropBox
from captioner.errors import ConfigError
from captioner.hardware import upload

if TYPE_CHECKING:
    from torch import Tensor

IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)

LARGEST_IMAGE = 2048
"""Largest height and width of an encoder's input (pixels) in a model folder."""


@dataclass(frozen=True)
class Preprocessing:
    """The settings of resizing and normalization."""

    image_size: int = 224
    """Height and width of the encoder's input (pixels)."""
    resize: Literal["squash", "crop"] = "crop"
    """Method of resizing. crop: resize the shorter side, then crop the centre. squash: resize both
    sides."""
    mean: tuple[float, float, float] = IMAGENET_MEAN
    """Channel means, for pixels in 0..1."""
    std: tuple[float, float, float] = IMAGENET_STD
    """Channel standard deviations, for pixels in 0..1."""
    channel_order: Literal["RGB", "BGR"] = "RGB"
    """Channel order of the encoder's input, and of mean and std."""

    @classmethod
    def from_dict(cls, settings: dict[str, Any]) -> Preprocessing:
        """Build the preprocessing from the JSON of a model folder.

        Raises:
            ConfigError: The image size is larger than ``LARGEST_IMAGE``.
        """
        tuples = {name: tuple(settings[name]) for name in ("mean", "std")}
        found = cls(**settings | tuples)
        if found.image_size > LARGEST_IMAGE:
            raise ConfigError(f"image_size is {found.image_size}; use at most {LARGEST_IMAGE}")
        return found

    def crop_box(self, width: int, height: int) -> CropBox:
        """Return the part that the encoder receives from a photo of this size (pixels)."""
        if self.resize == "squash":
            return CropBox()
        side = min(width, height)
        x, y = side / width / 2, side / height / 2
        return CropBox(0.5 - x, 0.5 - y, 0.5 + x, 0.5 + y)

    def pixels(self, image: Image.Image) -> NDArray[np.uint8]:
        """Resize one RGB photo to (H, W, 3) in the encoder's channel order, H = W = image_size.

        The values are bytes, not floats, so that processes exchange a quarter of the data.
        """
        width, height = image.size
        left, top, right, bottom = self.crop_box(width, height)
        box = (left * width, top * height, right * width, bottom * height)
        size = (self.image_size, self.image_size)
        if image.size != size:
            image = image.resize(size, Image.Resampling.BICUBIC, box=box)
        array = np.asarray(image, dtype=np.uint8)
        return array if self.channel_order == "RGB" else array[:, :, ::-1]

    def normalize(self, pixels: Tensor) -> Tensor:
        """Compute (pixels / 255 - mean) / std, from bytes (B, H, W, 3) to (B, 3, H, W), float32.

        The channels are last in memory.
        """
        import torch  # not at the top, because exported models run without torch

        height, width, channels = pixels.shape[1:]
        # Process whole image rows, because processors are slow on rows of three values.
        mean, std = (
            upload((torch.tensor(part) * 255).repeat(width), pixels.device)
            for part in (self.mean, self.std)
        )
        rows = pixels.flatten(2).to(torch.float32, copy=True)  # (B, H, 3 W)
        return rows.sub_(mean).div_(std).view(-1, height, width, channels).permute(0, 3, 1, 2)
