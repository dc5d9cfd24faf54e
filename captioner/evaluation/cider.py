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

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import repeat
from operator import mul
from typing import NamedTuple

from captioner.errors import DataError
from captioner.frequencies import ORDERS, DocumentFrequencies, Ngram, ngrams, tokenized

SIGMA = 6.0

_Posting = tuple[int, int, float]
"""Number of the reference, count of the n-gram in it, and count times squared weight over norm."""


class _Reference(NamedTuple):
    """One true caption and what of it never changes."""

    tokens: tuple[str, ...]
    norms: tuple[float, ...]
    length: int


class CiderD:
    """CIDEr-D of any captions of images whose references are known beforehand.

    What depends on the references alone is computed once: weights, norms and lengths here, their
    n-grams once an image and call; kept, those of a large data set would fill gigabytes.
    """

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
            DataError: An image has no references.
        """
        lacking = [image_id for image_id, captions in references.items() if not captions]
        if lacking:
            raise DataError(
                f"{len(lacking)} of {len(references)} images have no reference captions "
                f"(first: id {lacking[0]}); give captions of every image"
            )
        if frequencies is None:
            frequencies = DocumentFrequencies.from_tokens(references)
        whole = math.log(frequencies.documents)
        # Only squares are needed: every product and norm holds a weight twice.
        self._unseen = whole**2
        self._squares = {
            gram: (whole - math.log(count)) ** 2 for gram, count in frequencies.counts.items()
        }
        self._references = {
            image_id: [self._prepare(tokens) for tokens in captions]
            for image_id, captions in references.items()
        }

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
        unknown = [image_id for image_id in candidates if image_id not in self._references]
        if unknown:
            raise DataError(
                f"{len(unknown)} of {len(candidates)} images have no reference captions "
                f"(first: id {unknown[0]}); score images whose references were given"
            )
        return {i: self._score_image(i, captions) for i, captions in candidates.items()}

    def _score_image(self, image_id: int, captions: Sequence[Sequence[str]]) -> list[float]:
        references = self._references[image_id]
        index = self._index(references)
        return [self._score(tokens, references, index) for tokens in captions]

    def _index(self, references: Sequence[_Reference]) -> dict[Ngram, list[_Posting]]:
        """Which references hold an n-gram, how often, and what one of it adds to a score."""
        index: dict[Ngram, list[_Posting]] = {}
        for number, reference in enumerate(references):
            for counts, norm in zip(ngrams(reference.tokens), reference.norms, strict=True):
                if not norm:  # n-grams of every image weigh nothing
                    continue
                squares = map(self._squares.get, counts, repeat(self._unseen))
                for (gram, count), square in zip(counts.items(), squares, strict=True):
                    index.setdefault(gram, []).append((number, count, count * square / norm))
        return index

    def _score(
        self,
        tokens: Sequence[str],
        references: Sequence[_Reference],
        index: Mapping[Ngram, list[_Posting]],
    ) -> float:
        by_order = ngrams(tokens)
        length = by_order[1].total()
        penalties = [math.exp(-((length - r.length) ** 2) / (2 * SIGMA**2)) for r in references]
        total = 0.0
        for counts, norm in zip(by_order, self._norms(by_order), strict=True):
            product = 0.0
            for gram in counts.keys() & index.keys():
                count = counts[gram]
                for number, most, weight in index[gram]:
                    product += min(count, most) * weight * penalties[number]
            if product:
                total += product / norm
        return 10 * total / (ORDERS * len(references))

    def _prepare(self, tokens: Sequence[str]) -> _Reference:
        by_order = ngrams(tokens)
        return _Reference(tuple(tokens), self._norms(by_order), by_order[1].total())

    def _norms(self, by_order: Iterable[Counter[Ngram]]) -> tuple[float, ...]:
        """Length of the vector of each order."""
        norms = []
        for counts in by_order:
            squares = map(self._squares.get, counts, repeat(self._unseen))
            counted = map(mul, counts.values(), counts.values())
            norms.append(math.sqrt(sum(map(mul, counted, squares))))
        return tuple(norms)
