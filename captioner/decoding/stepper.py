"""Shows a decoder to the search as a step function."""

from __future__ import annotations

import torch
from torch import Tensor

from captioner.decoding.search import Advance
from captioner.models.attention import widen
from captioner.models.decoder import AttentionDecoder, State
from captioner.vocabulary import END, PAD, START, UNKNOWN


class DecoderStepper:
    """Steps a decoder over the beams of a batch of photos.

    Features and their projection are held once a photo, however wide the beam.
    """

    start_token = START
    end_token = END

    def __init__(self, decoder: AttentionDecoder, features: Tensor) -> None:
        """Start one beam a photo.

        Args:
            decoder: In eval mode.
            features: (B, L, D).
        """
        self.decoder = decoder
        self.memory = decoder.memory(features)
        self.state = decoder.start(self.memory)
        self.device = features.device

    @property
    def batch_size(self) -> int:
        """Photos that are still searched."""
        return self.memory.features.shape[0]

    def advance(self, tokens: Tensor) -> Advance:
        """Score the next word of every beam; never the unknown word, padding or a second start."""
        embedded = self.decoder.embed(tokens)  # (B, K, E)
        step = self.decoder.step(self.decoder.word_gates(embedded), self.state, self.memory)
        self.state = step.state
        logits = self.decoder.readout(embedded, step.state.hidden, step.context)
        log_probs = widen(logits).log_softmax(dim=-1)
        log_probs[..., [PAD, START, UNKNOWN]] = -torch.inf
        return Advance(log_probs, step.alphas, step.gate.squeeze(-1))

    def reorder(self, parents: Tensor) -> None:
        """Beam k of each photo continues beam ``parents[b, k]``."""
        photos = torch.arange(len(parents), device=parents.device).unsqueeze(1)
        self.state = State(*(part[photos, parents] for part in self.state))

    def keep(self, rows: Tensor) -> None:
        """Go on with these photos only."""
        self.memory = self.memory.select(rows)
        self.state = State(*(part[rows] for part in self.state))
