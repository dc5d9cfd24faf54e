"""Truth: the calibrated probability that a content word of a caption is true of the photo.

    truth = sigmoid(scale z + log_prob_weight log p + bias)

z is the natural log-odds that the photo shows the word's stem (dog for *dogs*). It comes from the
model's reading of the photo (see ``inference.reading``). For a content word without a stem, z is
the fitted number ``unknown``. p is the decoder's probability of the word.

``captioner.evaluation.fit_confidence`` fits the numbers to generated captions. For this purpose, a
word counts as true if a reference caption contains its stem, or if the object that it names is
annotated. The numbers are stored in ``confidence.safetensors``. This module does not need torch.

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
    """The equation for the probability that a word is true of a photo, with its fitted numbers.

    truth = sigmoid(scale z + log_prob_weight log p + bias)

    z is the log-odds that the photo shows the word, and p is the decoder's probability of it.
    """

    scale: float
    """Factor of z, the log-odds that the photo shows the word's stem (dog for dogs)."""
    log_prob_weight: float
    """Factor of the decoder's log-probability of the word."""
    bias: float
    unknown: float
    """Value of z, the log-odds that the photo shows a word, for content words whose stem the model
    cannot recognize in a photo."""
    search_scale: float
    """Replacement for ``scale`` during the search, which uses the equation without log p."""
    search_bias: float
    """Replacement for ``bias`` during the search."""
    search_unknown: float
    """Replacement for ``unknown`` during the search."""

    def log_odds(self, rows: _Rows, log_probs: _Floats, z: _Floats) -> NDArray[np.float64]:
        """Return the log-odds that each word of a caption is true, (T,). Function words have NaN.

        Args:
            rows: The index of each word's stem, (T,). Content words without a stem have
                ``UNKNOWN_WORD`` (-2), and function words have ``FUNCTION_WORD`` (-1).
            log_probs: The decoder's log-probability of each word, (T,).
            z: Log-odds that the photo shows each stem, (S,).
        """
        odds: NDArray[np.float64] = (
            self.scale * _with_constants(z, self.unknown)[rows]
            + self.log_prob_weight * np.asarray(log_probs, np.float64)
            + self.bias
        )
        return odds

    def truths(self, rows: _Rows, log_probs: _Floats, z: _Floats) -> NDArray[np.float32]:
        """Return the probability that each word of a caption is true of the photo, (T,), float32.

        Function words, such as "the", have NaN. For the arguments see ``log_odds``.
        """
        return probabilities(self.log_odds(rows, log_probs, z)).astype(np.float32)

    def search_truths(self, z: _Floats) -> NDArray[np.float32]:
        """Return the probability that each stem is true of the photo, for use during the search.

        Unlike ``truths``, it does not depend on the decoder's probabilities of the words.

        Args:
            z: Log-odds that the photo shows each stem, (S,).

        Returns:
            The probabilities, (S + 2,). The first S values belong to the stems. The next value is
            for content words without a stem. The last value is NaN, for function words.
        """
        z = _with_constants(z, self.search_unknown)
        return probabilities(self.search_scale * z + self.search_bias).astype(np.float32)


def _with_constants(z: _Floats, unknown: float) -> NDArray[np.float64]:
    """Append values for words without a stem to the log-odds of the stems, and return (S + 2,).

    Args:
        z: Log-odds that the photo shows each word stem, (S,).
        unknown: Log-odds for content words without a stem. They get the index -2.

    The last value is NaN, for function words. They get the index -1.
    """
    return np.concatenate([np.asarray(z, np.float64), [unknown, np.nan]])


def probabilities(log_odds: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return 1 / (1 + exp(-log_odds)) without overflow. NaN stays NaN."""
    result: NDArray[np.float64] = (1 + np.tanh(log_odds / 2)) / 2
    return result
