"""Keywords: words for things in a photo, each with a calibrated probability and a map.

The log-odds of word k are linear in the mean of the features a_i of the L regions, so they are
exactly the mean of what each region contributes, its map:

    log-odds_k = w_k . (1/L sum_i a_i) + b_k = 1/L sum_i m_ki,    m_ki = w_k . a_i + b_k

scripts/fit_keywords.py writes the weights into the model folder. This module needs no torch.

Source: class activation maps, Zhou et al. 2016 (arXiv:1512.04150).
Deviation: each word has a probability of its own, in place of a softmax over classes.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save

from captioner.caption import Keyword
from captioner.inference.confidence import read_arrays, sigmoid
from captioner.inference.folder import KEYWORDS
from captioner.search.words import NEUTRAL_WORDS

FORMAT_VERSION = 1

MIN_PROBABILITY = 0.3
"""Words that are less probable are no keywords."""


@dataclass(frozen=True)
class KeywordReader:
    """Reads keywords from the features of a photo: K rows, features of size D."""

    words: tuple[str, ...]
    """Of the first rows."""
    neutral_words: tuple[str, ...]
    """Of the last rows, for ``neutral``: a person is whom people called person, man or woman."""
    weights: NDArray[np.float32]
    """(K, D)."""
    biases: NDArray[np.float32]
    """(K,)."""

    def rows(self, *, neutral: bool) -> dict[str, int]:
        """The row of each word in ``weights``; with ``neutral``, of those without sex or age."""
        rows = {word: row for row, word in enumerate(self.words)}
        if neutral:
            rows |= {word: row for row, word in enumerate(self.neutral_words, len(rows))}
            rows = {word: row for word, row in rows.items() if word not in NEUTRAL_WORDS}
        return rows

    def read(
        self,
        photo: NDArray[np.float32],
        regions: NDArray[np.float32] | None,
        count: int,
        *,
        neutral: bool = False,
        familiarity: float = 1.0,
    ) -> tuple[Keyword, ...]:
        """The most probable words of a photo, at most ``count``, best first.

        Args:
            photo: Mean of the features of its regions, (D,).
            regions: Their features, (Gh, Gw, D); None: keywords without maps.
            count: Maximum number.
            neutral: See ``SearchOptions.neutral``.
            familiarity: Factor of the probabilities, see ``Calibrator.familiarity``.
        """
        rows = self.rows(neutral=neutral)
        odds = self.weights @ photo + self.biases
        found = []
        for word in sorted(rows, key=lambda word: -odds[rows[word]])[:count]:
            row = rows[word]
            probability = sigmoid(float(odds[row])) * familiarity
            if probability < MIN_PROBABILITY:
                break
            of_regions = None if regions is None else regions @ self.weights[row] + self.biases[row]
            found.append(Keyword(word, probability, of_regions))
        return tuple(found)

    def to_bytes(self) -> bytes:
        """Content of the file: arrays, and the rest as JSON in its header."""
        names = {"words": self.words, "neutral_words": self.neutral_words}
        header = {"format_version": FORMAT_VERSION, **names}
        weights: NDArray[Any] = self.weights.astype(np.float16)
        arrays = {"weights": weights, "biases": self.biases}
        return save(arrays, metadata={"keywords": json.dumps(header)})


def read_keywords(folder: Path) -> KeywordReader | None:
    """Read the keywords of a model folder, if it has some; for errors see `read_arrays`."""
    path = folder / KEYWORDS
    if not path.is_file():
        return None
    advice = "run scripts/fit_keywords.py again"
    with read_arrays(path, FORMAT_VERSION, advice) as (header, arrays):
        words, neutral = tuple(header["words"]), tuple(header["neutral_words"])
        weights, biases = arrays["weights"], arrays["biases"]
        if weights.shape[:1] != biases.shape or len(biases) != len(words + neutral):
            raise ValueError("it does not have a row of weights for each word")
        return KeywordReader(words, neutral, weights.astype(np.float32), biases)
