"""The encoder: a CNN or vision transformer that turns a photo into a grid of features.

A classification network from ``backbones`` runs up to its global pooling, so that every feature
keeps its place in the photo. A transformer learns one position embedding per region, so its encoder
is built for one image size. Weights from a different image size are resampled when they are loaded.

Shapes: B photos of H x W pixels, (B, 3, H, W), become features, (B, L, D): D numbers for each of L
regions. The regions form a grid of Gh rows and Gw columns, so L = Gh * Gw. The region at (row,
column) has the index row * Gw + column.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from captioner.errors import ConfigError
from captioner.model.backbones import (
    PACKAGES_MEAN,
    PACKAGES_STD,
    WEIGHT_PACKAGES,
    fill,
    installed_package,
    load_weights,
    open_backbone,
    size_errors,
)
from captioner.model.efficientnet_lite import EfficientNetLite
from captioner.model.stages import StagedEncoder


class Encoder(StagedEncoder):
    """An image network that returns a grid of features instead of classes.

    The network always stays in eval mode, so that the statistics of its batch norms never change.
    """

    def __init__(self, name: str, pretrained: bool = False, image_size: int | None = None) -> None:
        """Build the network.

        Args:
            name: Name of a torchvision classification model, ``timm/NAME`` for a model from timm,
                or the name of a registered encoder.
            pretrained: Load the weights that the library publishes. They are downloaded on first
                use. Without them, the weights are random.
            image_size: Height and width of the photos (pixels). Only transformers need it. Default:
                the size that the model was trained with.
        """
        super().__init__()
        self.name, self.image_size = name, image_size
        opened = open_backbone(name, pretrained, image_size)
        self.backbone, self.run, self.mean, self.std, self.sized = opened
        self.eval()

    def train(self, mode: bool = True) -> Encoder:
        """Stay in eval mode, whatever ``mode`` is."""
        del mode
        super().train(False)
        return self

    def forward(self, images: Tensor) -> tuple[Tensor, tuple[int, int]]:
        """Encode normalized photos, (B, 3, H, W).

        Returns:
            The features, (B, L, D), and the grid, (Gh, Gw).
        """
        return self.as_grid(self.run(self.backbone, images))

    @torch.no_grad()
    def measure(self, image_size: int, stage: str | None = None) -> tuple[int, tuple[int, int]]:
        """Return the feature size D and the grid (Gh, Gw) for photos of this height and width.

        Args:
            image_size: Height and width of the photos (pixels).
            stage: Measure the input of this stage (see `StagedEncoder`) instead of the output of
                the encoder.
        """
        if stage is None and isinstance(self.backbone, EfficientNetLite):
            return self.backbone.output_size(image_size)  # faster than running the network
        device = next(self.parameters(), torch.empty(0)).device
        photo = torch.zeros(1, 3, image_size, image_size, device=device)
        with size_errors(self.name, image_size):
            features, grid = self(photo) if stage is None else self.run_until(photo, stage)
        return features.shape[-1], grid

    def at_size(self, image_size: int) -> Encoder:
        """Return an encoder for photos of this height and width (pixels), with the same weights.

        Only position embeddings are resampled. If the encoder already fits the size, it is returned
        itself.
        """
        if image_size == self.image_size or not self.sized:
            return self
        resized = Encoder(self.name, image_size=image_size)
        resized.mean, resized.std = self.mean, self.std
        fill(resized.backbone, self.backbone.state_dict(), self.name)
        return resized

    def as_grid(self, features: Any) -> tuple[Tensor, tuple[int, int]]:
        """Reshape the output of the network to features (B, L, D), and find their grid.

        Args:
            features: A feature map, (B, D, Gh, Gw), or (B, Gh, Gw, D) from some models of timm. A
                transformer instead returns the tokens of a square grid, (B, prefix + L, D). Prefix
                tokens, such as the class token, are dropped, because they have no place in the
                photo.

        Returns:
            The features, (B, L, D), and the grid, (Gh, Gw).

        Raises:
            ConfigError: The output has a different shape, or its tokens do not form a square.
        """
        if not isinstance(features, Tensor):
            raise self._no_grid(type(features).__name__)
        if features.ndim == 3:  # a transformer's tokens: (B, prefix + L, D)
            features = features[:, getattr(self.backbone, "num_prefix_tokens", 0) :]
            side = math.isqrt(features.shape[1])
            if side**2 != features.shape[1]:
                raise self._no_grid(f"{features.shape[1]} tokens, which do not form a square")
            return features, (side, side)
        if features.ndim != 4:
            raise self._no_grid(f"a tensor of shape {tuple(features.shape)}")
        if getattr(self.backbone, "output_fmt", "NCHW") == "NHWC":
            return features.flatten(1, 2), (features.shape[1], features.shape[2])
        return features.flatten(2).transpose(1, 2), (features.shape[2], features.shape[3])

    def _no_grid(self, found: str) -> ConfigError:
        """Return the error for a network that returns ``found`` instead of a grid."""
        return ConfigError(
            f"encoder {self.name} returns {found}, not a feature grid (B, D, Gh, Gw) or tokens "
            "(B, L, D); use another encoder, such as timm/vit_tiny_patch16_224"
        )


def build_encoder(name: str, weights: str, image_size: int | None = None) -> Encoder:
    """Build an encoder and load its weights.

    Args:
        name: Name of the encoder (see `Encoder`).
        weights: Source of the weights. default: an installed package from ``WEIGHT_PACKAGES`` that
            fits the encoder, or else a download from the library. none: random weights. Otherwise,
            the path of a file, or a name from ``WEIGHT_PACKAGES``.
        image_size: Height and width of the photos (pixels), as in `Encoder`.

    Raises:
        ConfigError: The weights belong to another encoder or do not support the image size.
        ModelError: The weights cannot be read or downloaded, or do not fit.
    """
    if weights == "default":
        weights = installed_package(name) or weights
    if weights in ("default", "none"):
        return Encoder(name, weights == "default", image_size)
    encoder = Encoder(name, image_size=image_size)
    load_weights(encoder.backbone, name, weights)
    if weights in WEIGHT_PACKAGES:
        encoder.mean, encoder.std = PACKAGES_MEAN, PACKAGES_STD
    return encoder
