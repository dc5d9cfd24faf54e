"""Attention over text: a text encoder for the same decoders, whose regions are source words.

Notation: B texts, R targets per text, L source words, D feature size.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from captioner.model.attention import Memory
from captioner.model.decoder import build_decoder
from captioner.model.losses import Losses, caption_losses
from captioner.options import DecoderConfig
from captioner.text.vocabulary import PAD


class EncodedText(NamedTuple):
    """A batch of encoded texts."""

    features: Tensor
    """(B, L, D), one annotation per word; 0 at padding."""
    mask: Tensor
    """(B, L), True at words."""
    summary: Tensor
    """(B, 1, D), the final states of both directions."""


class TextEncoder(nn.Module):
    """A bidirectional LSTM.

        a_i = [forward h_i; backward h_i],   summary = [forward h_L; backward h_1]

    Source: Bahdanau et al. 2015 (arXiv:1409.0473), section 3.2. Deviation: LSTMs instead of GRUs.
    """

    def __init__(self, vocabulary_size: int, embed_dim: int, hidden_dim: int) -> None:
        """Create the layers.

        Args:
            vocabulary_size: Number of source words.
            embed_dim: Embedding size.
            hidden_dim: Hidden size of each direction; D is twice this.
        """
        super().__init__()
        self.feature_dim = 2 * hidden_dim
        self.embedding = nn.Embedding(vocabulary_size, embed_dim)
        self.lstm = nn.LSTM(embed_dim, hidden_dim, batch_first=True, bidirectional=True)

    def forward(self, tokens: Tensor) -> EncodedText:
        """Encode texts.

        Args:
            tokens: Words, then padding, (B, L); at least one word each.
        """
        mask = tokens != PAD
        packed = pack_padded_sequence(
            self.embedding(tokens), mask.sum(dim=1).cpu(), batch_first=True, enforce_sorted=False
        )
        states, (last, _) = self.lstm(packed)
        features, _ = pad_packed_sequence(states, batch_first=True, total_length=tokens.shape[1])
        summary = torch.cat([last[0], last[1]], dim=-1).unsqueeze(1)
        return EncodedText(features, mask, summary)


class TextModel(nn.Module):
    """An encoder-decoder from source words to target words."""

    def __init__(
        self,
        encoder: TextEncoder,
        config: DecoderConfig,
        vocabulary_size: int,
        max_words: int,
    ) -> None:
        """Create the decoder.

        Args:
            encoder: Encodes the source.
            config: The decoder; with attention ``fixed`` it sees the summary only.
            vocabulary_size: Number of target words.
            max_words: Maximum source length (L), which sizes ``location`` attention.
        """
        super().__init__()
        self.encoder = encoder
        self.decoder = build_decoder(config, encoder.feature_dim, vocabulary_size, max_words)

    def memory(self, source: Tensor) -> Memory:
        """Encode sources (B, L) for the decoder."""
        text: EncodedText = self.encoder(source)
        return self.decoder.memory(text.features, text.mask, text.summary)

    def forward(self, source: Tensor, target: Tensor, label_smoothing: float = 0.0) -> Losses:
        """Losses of teacher-forced targets.

        Args:
            source: Words, then padding, (B, L).
            target: (B, R, T + 1), see ``caption_losses``.
            label_smoothing: See ``caption_losses``.
        """
        return caption_losses(self.decoder, self.memory(source), target, label_smoothing)
