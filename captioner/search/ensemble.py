"""The step function of an ensemble: the average of its members'."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from captioner.search.arrays import Array, namespace
from captioner.search.search import Advance, Stepper
from captioner.text.vocabulary import END


class EnsembleStepper:
    """Several decoders whose word probabilities are averaged.

        p(word) = mean over members of p_m(word)

    Attention and gates are averaged too if all members have the same grid; otherwise they are
    those of the first member.
    """

    end_token = END

    def __init__(self, members: Sequence[Stepper], *, one_grid: bool) -> None:
        """Step new steppers of the same vocabulary and photos with the same words.

        ``one_grid``: region l is the same part of the photo for every member.
        """
        self.members = list(members)
        self.mapped = self.members if one_grid else self.members[:1]
        self.xp, self.device = self.members[0].xp, self.members[0].device
        self.start_token = self.members[0].start_token

    @property
    def batch_size(self) -> int:
        """Number of photos still searched."""
        return self.members[0].batch_size

    def advance(self, tokens: Array) -> Advance:
        """Average the members' probabilities of the next word of every beam."""
        advances = [member.advance(tokens) for member in self.members]
        mapped = advances[: len(self.mapped)]
        return Advance(
            mean_probability([advance.log_probs for advance in advances]),
            mean([advance.alphas for advance in mapped]),
            mean([advance.gates for advance in mapped]),
        )

    def reorder(self, parents: Array) -> None:
        """See ``Stepper.reorder``."""
        for member in self.members:
            member.reorder(parents)

    def keep(self, rows: Array) -> None:
        """See ``Stepper.keep``."""
        for member in self.members:
            member.keep(rows)


def mean(arrays: Sequence[Array]) -> Array:
    """Mean of arrays of the same shape."""
    xp = namespace(*arrays)
    return xp.mean(xp.stack(list(arrays)), axis=0)


def mean_probability(log_probs: Sequence[Array]) -> Array:
    """Log of the mean probability, from log-probabilities of the same shape."""
    if len(log_probs) == 1:
        return log_probs[0]
    xp = namespace(*log_probs)
    stacked = xp.stack(list(log_probs))
    largest = xp.max(stacked, axis=0)
    largest = xp.where(largest == -xp.inf, 0.0, largest)  # -inf - -inf is not a number
    with np.errstate(divide="ignore"):  # log(0) is -inf
        return xp.log(xp.sum(xp.exp(stacked - largest), axis=0)) + largest - math.log(len(stacked))
