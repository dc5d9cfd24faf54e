"""The whole model as one module: an encoder, a decoder and an optional reading network.

The reading network predicts from the features which content words people would use for the photo
(see ``model.reading``).

Notation: B photos of H x W pixels, L regions, D feature size.
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
    """The network that is trained and saved.

    It has no ``forward``, because the losses and the search call its parts.
    """

    reading: PhotoReading | None
    """The reading network (see ``model.reading``), or None in a model without it."""

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
        """Create the decoder for an encoder.

        Args:
            encoder: The encoder. Its feature size and grid determine the sizes of the decoder.
            config: The settings of the decoder.
            preprocessing: The conversion of photos to inputs of this encoder.
            vocabulary_size: Number of words and special tokens, V.
            styles: Number of caption styles (see `build_decoder`).
            initialize: Whether to set the decoder's initial weights (see `build_decoder`).
        """
        super().__init__()
        self.preprocessing = preprocessing
        self.encoder = encoder
        self.feature_dim, self.grid = encoder.measure(preprocessing.image_size)
        regions = self.grid[0] * self.grid[1]
        sizes = self.feature_dim, vocabulary_size, regions, styles
        self.decoder = build_decoder(config, *sizes, initialize=initialize)
        self.register_module("reading", None)
        self.features_stage: str | None = None
        """The encoder stage that continues from cached features (see `StagedEncoder`). The frozen
        stages before it then need not run again. None if cached features are the output of the
        whole encoder."""

    @cached_property
    def geometry(self) -> Geometry:
        """The positions of the regions in the encoder's input (pixels)."""
        return locate_regions(self.encoder, self.preprocessing.image_size)

    def encode(self, pixels: Tensor) -> Tensor:
        """Encode photos to features, (B, L, D).

        ``pixels`` contains bytes from ``Preprocessing.pixels``, (B, H, W, 3).
        """
        images = self.preprocessing.normalize(pixels)
        dtype = next(self.encoder.parameters(), images).dtype
        features: Tensor = self.encoder(images.to(dtype))[0]
        return features

    def to_features(self, images: Tensor) -> Tensor:
        """Return the features, (B, L, D), of photos or cached features.

        Args:
            images: Bytes of photos, (B, H, W, 3), or cached features. Cached features are the
                output of the encoder, (B, L, D), or the input of ``features_stage``. They may be in
                half precision. They are converted to the type of the decoder or of autocast.
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
            # The features are the output of the whole encoder. Their size shows this, because no
            # stage has as many input channels.
            return features
        return self.encoder.run_from(features, self.features_stage)[0]
