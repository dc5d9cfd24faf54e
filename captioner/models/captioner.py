"""Encoder and decoder together: no files, no search.

``CaptionModel`` is what training optimises and what a model folder stores.

Notation: B photos, R captions a photo, T steps, L regions, D feature size.
"""

from __future__ import annotations

from torch import Tensor, nn

from captioner.config import DecoderConfig
from captioner.data.preprocessing import Preprocessing
from captioner.models.decoder import build_decoder
from captioner.models.encoder import Encoder
from captioner.models.losses import Losses, caption_losses


class CaptionModel(nn.Module):
    """A photo's pixels to features, features and words to logits."""

    def __init__(
        self,
        encoder: Encoder,
        config: DecoderConfig,
        preprocessing: Preprocessing,
        vocabulary_size: int,
    ) -> None:
        super().__init__()
        self.preprocessing = preprocessing
        self.encoder = encoder
        feature_dim, self.grid = encoder.measure(preprocessing.image_size)
        regions = self.grid[0] * self.grid[1]
        self.decoder = build_decoder(config, feature_dim, vocabulary_size, regions)

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

    def forward(self, pixels: Tensor, tokens: Tensor, label_smoothing: float = 0.0) -> Losses:
        """Losses of teacher-forced captions.

        Args:
            pixels: (B, H, W, 3) bytes.
            tokens: (B, R, T + 1), see ``caption_losses``.
            label_smoothing: Share of the target spread evenly over the vocabulary.
        """
        return self.losses(self.encode(pixels), tokens, label_smoothing)

    def losses(self, features: Tensor, tokens: Tensor, label_smoothing: float = 0.0) -> Losses:
        """The same from features, (B, L, D)."""
        return caption_losses(self.decoder, self.decoder.memory(features), tokens, label_smoothing)
