"""Shows a decoder to the search as a step function."""

from __future__ import annotations

import torch
from torch import Tensor

from captioner.decoding.search import Advance
from captioner.models.attention import Memory, widen
from captioner.models.decoder import Decoder
from captioner.vocabulary import END, PAD, START, UNKNOWN


class DecoderStepper:
    """Steps a decoder over the beams of a batch of photos.

    Features and their projection are held once a photo, however wide the beam.
    """

    start_token = START
    end_token = END

    def __init__(self, decoder: Decoder, memory: Memory) -> None:
        """Start one beam a photo.

        Args:
            decoder: In eval mode.
            memory: The photos, (B, ...), from ``decoder.memory``.
        """
        self.decoder = decoder
        self.memory = memory
        self.state = decoder.start(memory)
        self.device = memory.summary.device

    @property
    def batch_size(self) -> int:
        """Photos that are still searched."""
        return self.memory.summary.shape[0]

    def advance(self, tokens: Tensor) -> Advance:
        """Score the next word of every beam; never the unknown word, padding or a second start."""
        embedded = self.decoder.embed(tokens)  # (B, K, E)
        step = self.decoder.step(self.decoder.word_gates(embedded), self.state, self.memory)
        self.state = step.state
        logits = self.decoder.readout(embedded, *step.outputs)
        log_probs = widen(logits).log_softmax(dim=-1)
        log_probs[..., [PAD, START, UNKNOWN]] = -torch.inf
        return Advance(log_probs, step.alphas, step.gate.squeeze(-1))

    def reorder(self, parents: Tensor) -> None:
        """Beam k of each photo continues beam ``parents[b, k]``."""
        photos = torch.arange(len(parents), device=parents.device).unsqueeze(1)
        self.state = self.state.map(lambda part: part[photos, parents])

    def keep(self, rows: Tensor) -> None:
        """Go on with these photos only."""
        self.memory = self.memory.select(rows)
        self.state = self.state.map(lambda part: part[rows])
