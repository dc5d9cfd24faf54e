"""CIDEr-D of captions against fixed references, fast enough for training.

The formula is that of pycocoevalcap's ``Cider``, which computes CIDEr-D despite its name: counts
are clipped, and a Gaussian penalizes a difference in length.

    CIDEr-D = 10 / (4 R) sum_r exp(-(l - l_r)^2 / (2 sigma^2)) sum_n min(g, g_r) . g_r / |g| |g_r|

g is the vector of count times ln(documents / document frequency) over n-grams, n = 1 to 4, R the
number of references, l the length in bigrams, and sigma = 6.

Source: Vedantam et al. 2015 (arXiv:1411.5726).
Deviation: as in pycocoevalcap, the length is the number of bigrams instead of words; the two give
different results for empty captions only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain

import numpy as np

from captioner.evaluation.frequencies import DocumentFrequencies
from captioner.evaluation.references import References


class CiderD:
    """CIDEr-D of captions of images with fixed references.

    Args:
        references: Tokens of all reference captions by image id.
        frequencies: Frozen document frequencies; None counts those of ``references``, as
            pycocoevalcap does.

    Raises:
        DataError: An image has no references, or there is nothing to count.
    """

    def __init__(
        self,
        references: Mapping[int, Sequence[Sequence[str]]],
        frequencies: DocumentFrequencies | None = None,
    ) -> None:
        self._references = References(references, frequencies)

    def score(self, candidates: Mapping[int, Sequence[Sequence[str]]]) -> dict[int, list[float]]:
        """Score any number of captions per image, each by itself.

        Args:
            candidates: Tokens of the captions by image id.

        Returns:
            CIDEr-D of each caption, 0 to 10, in the given order.

        Raises:
            DataError: An image has no references.
        """
        sizes = [len(captions) for captions in candidates.values()]
        images = np.repeat(self._references.index(list(candidates)), sizes)
        sentences = self._references.captions(chain.from_iterable(candidates.values()))
        matches = self._references.match(images, sentences)
        scores = iter(self._references.cider_d(images, sentences, matches).tolist())
        return {i: [next(scores) for _ in texts] for i, texts in candidates.items()}
