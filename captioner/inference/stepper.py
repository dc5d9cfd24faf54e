"""The step function of a decoder, for the search."""

from __future__ import annotations

from typing import Any

import array_api_compat.torch
import torch
from torch import Tensor

from captioner.model.attention import Memory, widen
from captioner.model.decoder import Decoder
from captioner.search.search import Advance
from captioner.text.vocabulary import END, NEVER_GENERATED, START


class DecoderStepper:
    """Steps a decoder over the beams of a batch of photos.

    Features and their projection are stored once per photo, not per beam. Nothing is recorded for
    gradients.
    """

    xp: Any = array_api_compat.torch
    end_token = END

    def __init__(self, decoder: Decoder, memory: Memory, start_token: int | Tensor = START) -> None:
        """Start with one beam per photo; the start token is one for all, or one per photo, (B,)."""
        self.start_token = start_token
        self.decoder = decoder
        self.memory = memory
        with torch.no_grad():
            self.state = decoder.start(memory)
        self.device = memory.summary.device

    @property
    def batch_size(self) -> int:
        """Number of photos still searched."""
        return self.memory.summary.shape[0]

    @torch.no_grad()
    def advance(self, tokens: Tensor) -> Advance:
        """Score the next word of every beam; tokens of ``NEVER_GENERATED`` get -inf."""
        embedded, word_gates = self.decoder.embed_with_gates(tokens)  # (B, K, E), (B, K, 4N)
        step = self.decoder.step(word_gates, self.state, self.memory)
        self.state = step.state
        logits = self.decoder.readout(embedded, *step.outputs)
        log_probs = widen(logits).log_softmax(dim=-1)
        for token in NEVER_GENERATED:
            log_probs[..., token].fill_(-torch.inf)
        return Advance(log_probs, step.alphas, step.gate.squeeze(-1))

    def reorder(self, parents: Tensor) -> None:
        """See ``Stepper.reorder``."""
        photos = torch.arange(len(parents), device=parents.device).unsqueeze(1)
        self.state = self.state.select((photos, parents))

    def keep(self, rows: Tensor) -> None:
        """See ``Stepper.keep``."""
        self.memory = self.memory.select(rows)
        self.state = self.state.select(rows)
