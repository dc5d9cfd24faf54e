"""CIDEr-D of any captions against fixed references, fast enough to train by.

The formula is that of pycocoevalcap's ``Cider``, which is CIDEr-D whatever its name says: counts
are clipped, and a Gaussian penalises another length. Its length is the number of bigrams.

    CIDEr-D = 10 / (4 R) sum_r exp(-(l - l_r)^2 / (2 sigma^2)) sum_n min(g, g_r) . g_r / |g| |g_r|

with g the vector of count times ln(documents / document frequency) over n-grams, n = 1 to 4, and
sigma = 6.

Source: Vedantam et al. 2015 (arXiv:1411.5726).
Deviation: pycocoevalcap's, kept for equal numbers: a length of words - 1 on both sides, which
differs from words for blank captions only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain

import numpy as np

from captioner.evaluation.references import References, Sentences
from captioner.frequencies import DocumentFrequencies, tokenized


class CiderD:
    """CIDEr-D of any captions of images whose references are known beforehand."""

    def __init__(
        self,
        references: Mapping[int, Sequence[Sequence[str]]],
        frequencies: DocumentFrequencies | None = None,
    ) -> None:
        """Prepare the references.

        Args:
            references: Tokens of all true captions, by image id.
            frequencies: Frozen frequencies; None counts those of ``references``, as pycocoevalcap
                does.

        Raises:
            DataError: An image has no references, or there is nothing to count.
        """
        self._references = References(references, frequencies)

    @classmethod
    def from_references(
        cls,
        references: Mapping[int, Sequence[str]],
        frequencies: DocumentFrequencies | None = None,
    ) -> CiderD:
        """The same from captions as a person writes them."""
        return cls(tokenized(references), frequencies)

    def score(self, candidates: Mapping[int, Sequence[Sequence[str]]]) -> dict[int, list[float]]:
        """Score any number of captions of each image, each by itself.

        Args:
            candidates: Tokens of the captions, by image id.

        Returns:
            CIDEr-D of every caption, 0 to 10, in the order given.

        Raises:
            DataError: An image is not among the references.
        """
        sizes = [len(captions) for captions in candidates.values()]
        images = np.repeat(self._references.index(list(candidates)), sizes)
        unknown: dict[str, int] = {}
        said = chain.from_iterable(candidates.values())
        captions = Sentences([self._references.encode(tokens, unknown) for tokens in said])
        matches = self._references.match(images, captions)
        scores = iter(self._references.cider_d(images, captions, matches).tolist())
        return {i: [next(scores) for _ in texts] for i, texts in candidates.items()}
