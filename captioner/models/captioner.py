"""Encoder and decoder together: no files, no search.

``CaptionModel`` is what training optimises and what a model folder stores.

Notation: B photos, R captions a photo, T steps, L regions, D feature size.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from captioner.config import DecoderConfig
from captioner.data.preprocessing import Preprocessing
from captioner.models.decoder import build_decoder
from captioner.models.encoder import Encoder
from captioner.models.losses import Losses, Weights, caption_losses


class CaptionModel(nn.Module):
    """A photo's pixels to features, features and words to logits."""

    def __init__(
        self,
        encoder: Encoder,
        config: DecoderConfig,
        preprocessing: Preprocessing,
        vocabulary_size: int,
        styles: int = 0,
    ) -> None:
        super().__init__()
        self.preprocessing = preprocessing
        self.encoder = encoder
        self.feature_dim, self.grid = encoder.measure(preprocessing.image_size)
        regions = self.grid[0] * self.grid[1]
        self.decoder = build_decoder(config, self.feature_dim, vocabulary_size, regions, styles)
        self.features_stage: str | None = None
        """Stage of the encoder whose input cached features are; None: they are its output."""

    def encode(self, pixels: Tensor) -> Tensor:
        """Encode photos, each once.

        Args:
            pixels: (B, H, W, 3) bytes, from ``Preprocessing.pixels``.

        Returns:
            (B, L, D).
        """
        images = self.preprocessing.normalize(pixels)
        dtype = next(self.encoder.parameters()).dtype
        features: Tensor = self.encoder(images.to(dtype))[0]
        return features

    def see(self, images: Tensor) -> Tensor:
        """Features (B, L, D), of pixels (B, H, W, 3), or as they were kept in a cache.

        A cache's half precision is widened to what the decoder works in.
        """
        if images.dtype == torch.uint8:
            return self.encode(images)
        kind = images.device.type
        features = images.to(
            torch.get_autocast_dtype(kind)
            if torch.is_autocast_enabled(kind)
            else next(self.decoder.parameters()).dtype
        )
        return self.finish(features)

    def finish(self, features: Tensor) -> Tensor:
        """Cached features (B, L', D') to the encoder's output (B, L, D)."""
        if self.features_stage is None or features.shape[-1] == self.feature_dim:
            return features  # the output already; no stage's input is as wide
        return self.encoder.run_from(features, self.features_stage)[0]

    def forward(
        self,
        images: Tensor,
        tokens: Tensor,
        label_smoothing: float = 0.0,
        *,
        inputs: Tensor | None = None,
        weights: Weights | None = None,
    ) -> Losses:
        """Losses of teacher-forced captions.

        Args:
            images: Pixels (B, H, W, 3), bytes, or features (B, L, D).
            tokens: (B, R, T + 1); for these and what follows see ``caption_losses``.
            label_smoothing: Share of the target spread evenly over the vocabulary.
            inputs: What the decoder is told in the place of the true words, (B, R, T).
            weights: Of the captions.
        """
        features = self.see(images)
        return self.losses(features, tokens, label_smoothing, inputs=inputs, weights=weights)

    def losses(
        self,
        features: Tensor,
        tokens: Tensor,
        label_smoothing: float = 0.0,
        *,
        inputs: Tensor | None = None,
        weights: Weights | None = None,
    ) -> Losses:
        """The same from features, (B, L, D)."""
        memory = self.decoder.memory(features)
        return caption_losses(
            self.decoder, memory, tokens, label_smoothing, inputs=inputs, weights=weights
        )
