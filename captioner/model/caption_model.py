"""Encoder, decoder and reading as the one module that is trained and saved in a model folder.

The reading is a small network that tells from the features how probable it is that people say each
content word of the photo (see ``model.reading``).

Notation: B photos, L regions, D feature size.
"""

from __future__ import annotations

from functools import cached_property

import torch
from torch import Tensor, nn

from captioner.geometry import Geometry
from captioner.model.build import build_decoder
from captioner.model.encoder import Encoder
from captioner.model.preprocessing import Preprocessing
from captioner.model.reading import PhotoReading
from captioner.model.regions import locate_regions
from captioner.options import DecoderConfig


class CaptionModel(nn.Module):
    """The whole network. It has no ``forward``: losses and search call its parts."""

    reading: PhotoReading | None
    """The reading of the photo, or None if the model does not have one."""

    def __init__(
        self,
        encoder: Encoder,
        config: DecoderConfig,
        preprocessing: Preprocessing,
        vocabulary_size: int,
        styles: int = 0,
        *,
        initialize: bool = True,
    ) -> None:
        """Create the decoder for an encoder; see `build_decoder`."""
        super().__init__()
        self.preprocessing = preprocessing
        self.encoder = encoder
        self.feature_dim, self.grid = encoder.measure(preprocessing.image_size)
        regions = self.grid[0] * self.grid[1]
        sizes = self.feature_dim, vocabulary_size, regions, styles
        self.decoder = build_decoder(config, *sizes, initialize=initialize)
        self.register_module("reading", None)
        self.features_stage: str | None = None
        """Encoder stage at which training starts, so that the frozen stages before it run once per
        photo and their output is cached; None if the encoder's output is cached."""

    @cached_property
    def geometry(self) -> Geometry:
        """The places of the regions in the encoder's input, in pixels."""
        return locate_regions(self.encoder, self.preprocessing.image_size)

    def encode(self, pixels: Tensor) -> Tensor:
        """Encode pixels (B, H, W, 3), uint8, from ``Preprocessing.pixels`` to (B, L, D)."""
        images = self.preprocessing.normalize(pixels)
        dtype = next(self.encoder.parameters(), images).dtype
        features: Tensor = self.encoder(images.to(dtype))[0]
        return features

    def to_features(self, images: Tensor) -> Tensor:
        """Return features (B, L, D) from pixels (B, H, W, 3) or from cached features.

        Cached half-precision features are converted to the decoder's type.
        """
        if images.dtype == torch.uint8:
            return self.encode(images)
        kind = images.device.type
        features = images.to(
            torch.get_autocast_dtype(kind)
            if torch.is_autocast_enabled(kind)
            else next(self.decoder.parameters()).dtype
        )
        if self.features_stage is None or features.shape[-1] == self.feature_dim:
            return features  # the encoder's output: no stage's input has as many channels
        return self.encoder.run_from(features, self.features_stage)[0]
