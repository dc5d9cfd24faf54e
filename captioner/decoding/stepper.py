"""Step functions for the search: one decoder or an ensemble."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from captioner.decoding.search import Advance
from captioner.models.attention import Memory, widen
from captioner.models.decoder import Decoder
from captioner.vocabulary import END, NEVER_GENERATED, START


class DecoderStepper:
    """Steps a decoder over the beams of a batch of photos.

    Features and their projection are stored once per photo, not per beam.
    """

    end_token = END

    def __init__(self, decoder: Decoder, memory: Memory, start_token: int | Tensor = START) -> None:
        """Start with one beam per photo.

        Args:
            decoder: In eval mode.
            memory: The photos, (B, ...), from ``decoder.memory``.
            start_token: One for all photos, or one per photo, (B,).
        """
        self.start_token = start_token
        self.decoder = decoder
        self.memory = memory
        self.state = decoder.start(memory)
        self.device = memory.summary.device

    @property
    def batch_size(self) -> int:
        """Number of photos still searched."""
        return self.memory.summary.shape[0]

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
        self.state = self.state.map(lambda part: part[photos, parents])

    def keep(self, rows: Tensor) -> None:
        """See ``Stepper.keep``."""
        self.memory = self.memory.select(rows)
        self.state = self.state.map(lambda part: part[rows])


class EnsembleStepper:
    """Several decoders whose word probabilities are averaged.

        p(word) = mean over members of p_m(word)

    Attention and gates are averaged too if all members have the same grid; otherwise they are
    those of the first member.
    """

    end_token = END

    def __init__(self, members: Sequence[DecoderStepper], *, one_grid: bool) -> None:
        """Step all members with the same words.

        Args:
            members: New steppers of the same vocabulary and photos; at least one.
            one_grid: Whether region l is the same part of the photo for every member.
        """
        self.members = list(members)
        self.mapped = self.members if one_grid else self.members[:1]
        self.device = self.members[0].device
        self.start_token = self.members[0].start_token

    @property
    def batch_size(self) -> int:
        """Number of photos still searched."""
        return self.members[0].batch_size

    def advance(self, tokens: Tensor) -> Advance:
        """Average the members' probabilities of the next word of every beam."""
        advances = [member.advance(tokens) for member in self.members]
        mapped = advances[: len(self.mapped)]
        return Advance(
            mean_probability([advance.log_probs for advance in advances]),
            torch.stack([advance.alphas for advance in mapped]).mean(dim=0),
            torch.stack([advance.gates for advance in mapped]).mean(dim=0),
        )

    def reorder(self, parents: Tensor) -> None:
        """See ``Stepper.reorder``."""
        for member in self.members:
            member.reorder(parents)

    def keep(self, rows: Tensor) -> None:
        """See ``Stepper.keep``."""
        for member in self.members:
            member.keep(rows)


def mean_probability(log_probs: Sequence[Tensor]) -> Tensor:
    """Log of the mean probability, from log-probabilities of the same shape."""
    if len(log_probs) == 1:
        return log_probs[0]
    return torch.stack(list(log_probs)).logsumexp(dim=0) - math.log(len(log_probs))
