"""Encoder and decoder together: no files, no search.

``CaptionModel`` is what training optimises and what a model folder stores.

Notation: B photos, R captions a photo, T steps, L regions, D feature size, V vocabulary.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor, nn

from captioner.config import DecoderConfig
from captioner.data.preprocessing import Preprocessing
from captioner.models.attention import widen
from captioner.models.decoder import AttentionDecoder
from captioner.models.encoder import Encoder
from captioner.vocabulary import PAD


class Losses(NamedTuple):
    """Sums over a batch, so that processes with unequal words can be weighted right."""

    cross_entropy: Tensor
    """Sum over words, nats."""
    attention_penalty: Tensor
    """Sum over captions."""
    words: Tensor
    """Number of words, the end tokens included."""


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
        self.decoder = AttentionDecoder(config, feature_dim, vocabulary_size)

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
            tokens: (B, R, T + 1), start token, words, end token, then padding; a row of padding
                alone stands for a caption that the photo does not have.
            label_smoothing: Share of the target spread evenly over the vocabulary.
        """
        return self.losses(self.encode(pixels), tokens, label_smoothing)

    def losses(self, features: Tensor, tokens: Tensor, label_smoothing: float = 0.0) -> Losses:
        """The same from features, (B, L, D)."""
        inputs, targets = tokens[..., :-1], tokens[..., 1:]  # (B, R, T)
        mask = targets != PAD
        embedded, hidden, context, alphas = self.decoder(features, inputs)
        # Readout and cross-entropy over the real words only, rounded up to a multiple of 128: with
        # another number of rows at every step oneDNN would keep a kernel for each of them.
        rows = mask.flatten().nonzero().squeeze(1)  # (words,)
        rows = nn.functional.pad(rows, (0, -len(rows) % 128))
        wanted = targets.flatten()[rows].clone()
        wanted[int(mask.sum()) :] = PAD
        logits = self.decoder.readout(*(p.flatten(0, 2)[rows] for p in (embedded, hidden, context)))
        cross_entropy = nn.functional.cross_entropy(
            widen(logits),
            wanted,
            reduction="sum",
            ignore_index=PAD,
            label_smoothing=label_smoothing,
        )
        return Losses(cross_entropy, attention_penalty(alphas, mask), mask.sum())


def attention_penalty(alphas: Tensor, mask: Tensor) -> Tensor:
    """Doubly stochastic penalty: every region should be looked at about equally over a sentence.

        sum over captions, sum over regions i of (T / L - sum_t alpha_ti) ** 2

    Source: Xu et al. 2015 (arXiv:1502.03044), equation 14, lambda left to the caller.
    Deviation: the paper's target is 1, which T words cannot reach on more than T regions. T / L is
    what they can reach; as the alphas of a sentence sum to T the two differ by a constant and the
    gradient is the paper's.

    Args:
        alphas: (B, R, T, L).
        mask: (B, R, T), True at real words.

    Returns:
        The sum.
    """
    alphas = widen(alphas) * mask.unsqueeze(-1)
    looked = alphas.sum(dim=2)  # (B, R, L)
    target = mask.sum(dim=2, keepdim=True) / alphas.shape[-1]  # (B, R, 1)
    return (target - looked).square().sum()
