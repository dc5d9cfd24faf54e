"""Conversion of photos to inputs of an encoder: resizing and normalization.

The weights of a model fit only the preprocessing that they were trained with. The model folder
therefore contains the settings of a `Preprocessing`.
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
"""Largest height and width of an encoder's input (pixels) that a model folder may set. Without this
limit, a faulty folder could fill the memory."""


@dataclass(frozen=True)
class Preprocessing:
    """The settings of resizing and normalization."""

    image_size: int = 224
    """Height and width of the encoder's input (pixels)."""
    resize: Literal["squash", "crop"] = "crop"
    """Method of resizing to a square. crop: keep the aspect ratio and the central square. squash:
    keep the whole photo and change its aspect ratio."""
    mean: tuple[float, float, float] = IMAGENET_MEAN
    """Number to subtract from each channel, for pixel values from 0 to 1."""
    std: tuple[float, float, float] = IMAGENET_STD
    """Number to divide each channel by afterwards, for pixel values from 0 to 1."""
    channel_order: Literal["RGB", "BGR"] = "RGB"
    """Channel order of the encoder's input, and of mean and std."""

    @classmethod
    def from_dict(cls, settings: dict[str, Any]) -> Preprocessing:
        """Build the preprocessing from its settings in the config.json of a model folder.

        Raises:
            ConfigError: The image size is larger than ``LARGEST_IMAGE``.
        """
        tuples = {name: tuple(settings[name]) for name in ("mean", "std")}
        found = cls(**settings | tuples)
        if found.image_size > LARGEST_IMAGE:
            raise ConfigError(f"image_size is {found.image_size}; use at most {LARGEST_IMAGE}")
        return found

    def crop_box(self, width: int, height: int) -> CropBox:
        """Return the part of a photo that the encoder sees, in fractions of the photo.

        ``width`` and ``height`` are the size of the photo (pixels).
        """
        if self.resize == "squash":
            return CropBox()
        side = min(width, height)
        x, y = side / width / 2, side / height / 2
        return CropBox(0.5 - x, 0.5 - y, 0.5 + x, 0.5 + y)

    def pixels(self, image: Image.Image) -> NDArray[np.uint8]:
        """Resize an RGB photo to the size of the encoder's input.

        Returns:
            The pixels in the encoder's channel order, (H, W, 3), with H = W = ``image_size``. They
            are bytes, because processes that load photos then send a quarter of the data that
            floats would take.
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
        """Return (pixels / 255 - mean) / std.

        Args:
            pixels: Bytes from ``pixels``, (B, H, W, 3).

        Returns:
            The input of the encoder, (B, 3, H, W), float32. In memory, the channels of a pixel are
            next to each other (torch's channels_last).
        """
        import torch  # not at the top, because exported models run without torch

        height, width, channels = pixels.shape[1:]
        # Repeat mean and std for a whole image row, because operations on rows of three values are
        # slow.
        mean, std = (
            upload((torch.tensor(part) * 255).repeat(width), pixels.device)
            for part in (self.mean, self.std)
        )
        rows = pixels.flatten(2).to(torch.float32, copy=True)  # (B, H, 3 W)
        return rows.sub_(mean).div_(std).view(-1, height, width, channels).permute(0, 3, 1, 2)
