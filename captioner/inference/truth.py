"""Truth: the calibrated probability that a content word of a caption is true of the photo.

    truth = sigmoid(scale z + log_prob_weight log p + bias)

z is the log-odds that the photo shows the word's stem, from the model's reading of the photo. p is
the decoder's probability of the word. For a content word without a row in the reading, z is
``unknown``. ``captioner.evaluation.fit_confidence`` fits the numbers to generated captions. There,
a word counts as true if a reference caption has its stem, or if the object that it names is
annotated. The numbers are stored in ``confidence.safetensors``. This module needs no torch.

Notation: T words of a caption, S stems of the reading.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

_Floats = NDArray[np.floating[Any]]
_Rows = NDArray[np.integer[Any]]


@dataclass(frozen=True)
class WordTruth:
    """The fitted numbers of the equation."""

    scale: float
    log_prob_weight: float
    bias: float
    unknown: float
    search_scale: float
    """Replacement for ``scale`` inside the search, where log p is left out."""
    search_bias: float
    search_unknown: float

    def log_odds(self, rows: _Rows, log_probs: _Floats, z: _Floats) -> NDArray[np.float64]:
        """Return the log-odds that each word of a caption is true, (T,), NaN for function words.

        Args:
            rows: The row of each word in the reading, (T,), or one of the constants above.
            log_probs: The decoder's log-probability of each word, (T,).
            z: The reading's log-odds of its stems for the photo, (S,).
        """
        odds: NDArray[np.float64] = (
            self.scale * _with_constants(z, self.unknown)[rows]
            + self.log_prob_weight * np.asarray(log_probs, np.float64)
            + self.bias
        )
        return odds

    def truths(self, rows: _Rows, log_probs: _Floats, z: _Floats) -> NDArray[np.float32]:
        """Return the probability that each word is true, (T,); for arguments see ``log_odds``."""
        return probabilities(self.log_odds(rows, log_probs, z)).astype(np.float32)

    def search_truths(self, z: _Floats) -> NDArray[np.float32]:
        """Return the probability that each stem is true, without the decoder's probability.

        Returns:
            An array that is indexed by rows, (S + 2,). Its last two values belong to the constants
            above.
        """
        z = _with_constants(z, self.search_unknown)
        return probabilities(self.search_scale * z + self.search_bias).astype(np.float32)


def _with_constants(z: _Floats, unknown: float) -> NDArray[np.float64]:
    """Append the values that ``UNKNOWN_WORD`` and ``FUNCTION_WORD`` select as indices."""
    return np.concatenate([np.asarray(z, np.float64), [unknown, np.nan]])


def probabilities(log_odds: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return 1 / (1 + exp(-log_odds)) without overflow. NaN stays NaN."""
    result: NDArray[np.float64] = (1 + np.tanh(log_odds / 2)) / 2
    return result
