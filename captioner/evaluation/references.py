"""Vectorized n-gram matching of captions against reference captions, for CIDEr-D and BLEU.

Words and n-grams are numbered. The n-grams of the references are sorted once; those of any captions
are looked up together. Sums run in word order, so a score does not depend on which captions are
scored together, to the last bit. `captioner.evaluation.cider` holds the formula.

Shapes: C captions, R references of all images, P n-grams of the captions, M matches (an n-gram of a
caption and a reference that contains it).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from captioner.errors import DataError
from captioner.evaluation.frequencies import (
    ORDERS,
    DocumentFrequencies,
    Integers,
    Ngram,
    number_ngrams,
    pack,
    spell,
    split_tokens,
    words_left,
)

SIGMA = 6.0

END_WORD = ""
"""Word for the end of a sentence; no word of a caption is empty."""

_Floats = NDArray[np.float64]

# Indexed by the difference of two lengths; 0 in double precision from the last on.
_PENALTIES: _Floats = np.exp(-(np.arange(256.0) ** 2) / (2 * SIGMA**2))
_LAST_KEY = np.iinfo(np.int64).max


class Sentences:
    """Numbered words of many sentences, concatenated.

    Args:
        sentences: Word numbers, 0 or more, of each sentence.
    """

    def __init__(self, sentences: Sequence[Sequence[int]]) -> None:
        # In 32 bits, as there may be millions of words.
        self.lengths: Integers = np.fromiter(map(len, sentences), np.int32, len(sentences))
        self.words: Integers = np.fromiter(
            chain.from_iterable(sentences), np.int32, int(self.lengths.sum())
        )
        self.starts: Integers = np.cumsum(self.lengths, dtype=np.int32) - self.lengths
        self.owners: Integers = np.repeat(np.arange(len(sentences), dtype=np.int32), self.lengths)
        """Sentence index of each word."""
        self.left: Integers = words_left(self.lengths)
        """Words left in the sentence from each word on, including itself."""


class Matches(NamedTuple):
    """N-grams of one length in captions, and the references of their images that contain them."""

    caption: Integers
    """Caption of each n-gram, (P,); each n-gram is listed once per caption."""
    gram: Integers
    """Number of the n-gram, (P,); numbers of n-grams that no reference contains are temporary."""
    caption_count: Integers
    """Occurrences in the caption, (P,)."""
    ngram: Integers
    """Index 0 to P - 1 of the n-gram of each match, (M,), ascending."""
    reference: Integers
    """Reference of each match, (M,)."""
    reference_count: Integers
    """Occurrences in the reference, (M,)."""


class _Order(NamedTuple):
    """N-grams of one length in the references.

    G distinct n-grams, U distinct pairs of image and n-gram, Q distinct pairs of reference and
    n-gram. ``table`` and ``keys`` end with the sentinel `_LAST_KEY`, so a search always finds an
    index.
    """

    table: Integers
    """Number of the first n - 1 words packed with the last word: (G + 1,), ascending. The number of
    an n-gram is its index here."""
    frequencies: NDArray[np.int32]
    """Images per n-gram, (G + 1,); the last, 0, is for n-grams that no reference contains."""
    keys: Integers
    """Image packed with n-gram: (U + 1,), ascending."""
    starts: NDArray[np.int32]
    """Index among the Q where the references of each key start: (U + 2,)."""
    references: NDArray[np.unsignedinteger]
    """Index of the reference within its image, (Q,)."""
    counts: NDArray[np.unsignedinteger]
    """Occurrences, (Q,)."""
    norms: _Floats
    """Norm of the vector of each reference, (R,)."""


class References:
    """Reference captions by image, numbered and indexed once. Read-only, so threads may share it.

    Args:
        references: Tokens of all reference captions by image id.
        frequencies: Frozen document frequencies; None counts those of ``references``.
        end: Append `END_WORD` to each reference.

    Raises:
        DataError: An image has no references, or there is nothing to count.
    """

    def __init__(
        self,
        references: Mapping[int, Sequence[Sequence[str]]],
        frequencies: DocumentFrequencies | None = None,
        *,
        end: bool = False,
    ) -> None:
        lacking = [image_id for image_id, captions in references.items() if not captions]
        if lacking:
            raise DataError(
                f"{len(lacking)} of {len(references)} images have no reference captions "
                f"(first: id {lacking[0]}); give captions of every image"
            )
        if not references and frequencies is None:
            raise DataError(
                "no image has a reference caption to count; give annotations with captions"
            )
        self.numbers: dict[str, int] = {}
        """Number of each word of the references and the frequencies."""
        self._images = {image_id: number for number, image_id in enumerate(references)}
        sizes = [len(captions) for captions in references.values()]
        self.sizes: Integers = np.array(sizes, dtype=np.int64)
        """Number of references of each image, (B,)."""
        self.first: Integers = np.cumsum(self.sizes) - self.sizes
        """Index of the first reference of each image, (B,)."""
        last = (END_WORD,) if end else ()
        captions = [
            self._number((*split_tokens(tokens), *last))
            for tokens in chain.from_iterable(references.values())
        ]
        counts = {} if frequencies is None else frequencies.counts
        # Frozen n-grams are numbered as sentences of their own, after the references.
        sentences = Sentences(captions + [self._number(gram) for gram in counts])
        self.lengths: Integers = sentences.lengths[: len(captions)]
        """Length of each reference in words, (R,)."""
        frozen = None if frequencies is None else np.fromiter(counts.values(), np.int32)
        self.documents = len(references) if frequencies is None else frequencies.documents
        """Number of images over which the document frequencies were counted."""
        most = self.documents if frozen is None else max([self.documents, *counts.values()])
        logarithms = np.log(np.maximum(np.arange(most + 1), 1))
        # Only squares are needed: every product and norm contains each weight twice.
        self._squares: _Floats = (logarithms[self.documents] - logarithms) ** 2
        self._orders = self._prepare(sentences, frozen)

    def encode(self, tokens: Iterable[str], unknown: dict[str, int]) -> list[int]:
        """Number the words of a caption; a space inside a token splits it.

        Args:
            tokens: Tokens of one caption.
            unknown: Words missing from ``numbers`` with their temporary numbers; updated in place.
        """
        known = self.numbers
        return [
            known[word] if word in known else unknown.setdefault(word, len(known) + len(unknown))
            for word in split_tokens(tokens)
        ]

    def captions(self, texts: Iterable[Iterable[str]]) -> Sentences:
        """Number the words of captions, given their tokens."""
        unknown: dict[str, int] = {}
        return Sentences([self.encode(tokens, unknown) for tokens in texts])

    def index(self, image_ids: Sequence[int]) -> Integers:
        """Indices of images in the order of the references.

        Raises:
            DataError: An image has no references.
        """
        unknown = [image_id for image_id in image_ids if image_id not in self._images]
        if unknown:
            raise DataError(
                f"{len(unknown)} of {len(image_ids)} images have no reference captions "
                f"(first: id {unknown[0]}); score only images with references"
            )
        return np.fromiter(map(self._images.__getitem__, image_ids), np.int64, len(image_ids))

    def match(self, images: Integers, captions: Sentences) -> list[Matches]:
        """Look up the n-grams of captions in the references of their images.

        Args:
            images: Image of each caption, see `index`: (C,).
            captions: C captions, see `encode`.

        Returns:
            The matches of unigrams, bigrams, trigrams and 4-grams.
        """
        found = []
        numbers = np.zeros_like(captions.words)
        for shift, order in enumerate(self._orders):
            places = np.flatnonzero(captions.left > shift)
            keys = pack(numbers[places], captions.words[places + shift])
            numbers[places] = _find(order.table, keys)
            caption, gram, count = _count(captions.owners[places], numbers[places])
            keys = pack(images[caption], gram)
            at = np.searchsorted(order.keys, keys)
            after = order.starts[at + 1].astype(np.int64)
            sizes = np.where(order.keys[at] == keys, after - order.starts[at], 0)
            ngram = np.repeat(np.arange(len(keys)), sizes)
            hits = np.arange(len(ngram)) + np.repeat(after - np.cumsum(sizes), sizes)
            reference = self.first[images[caption[ngram]]] + order.references[hits]
            reference_count = order.counts[hits].astype(np.int64)
            found.append(Matches(caption, gram, count, ngram, reference, reference_count))
        return found

    def cider_d(self, images: Integers, captions: Sentences, matches: Sequence[Matches]) -> _Floats:
        """CIDEr-D of captions.

        Args:
            images: Image of each caption, (C,).
            captions: The captions.
            matches: Result of `match` for these captions.

        Returns:
            The scores, 0 to 10: (C,).
        """
        size = len(images)
        total = np.zeros(size)
        for order, found in zip(self._orders, matches, strict=True):
            squares = self._weigh(order.frequencies, found.gram)
            norms = _norms(found.caption, found.caption_count, squares, size)
            caption, norm = found.caption[found.ngram], order.norms[found.reference]
            distance = np.abs(
                _bigrams(captions.lengths)[caption] - _bigrams(self.lengths)[found.reference]
            )
            clipped = np.minimum(found.caption_count[found.ngram], found.reference_count)
            products = clipped * found.reference_count
            values = products * squares[found.ngram] * _PENALTIES[np.minimum(distance, 255)]
            total += _divide(_sum(caption, _divide(values, norm), size), norms)
        scores: _Floats = 10 * total / (ORDERS * self.sizes[images])
        return scores

    def frequencies(self) -> DocumentFrequencies:
        """The document frequencies in use, without n-grams of a single image."""
        words = list(self.numbers)
        counts: dict[Ngram, int] = {}
        tables = [order.table for order in self._orders]
        for shift, order in enumerate(self._orders):
            grams = np.flatnonzero(order.frequencies > 1)
            spelled = spell(tables[: shift + 1], grams, words)
            counts.update(zip(spelled, order.frequencies[grams].tolist(), strict=True))
        return DocumentFrequencies(self.documents, counts)

    def _number(self, words: Iterable[str]) -> list[int]:
        return [self.numbers.setdefault(word, len(self.numbers)) for word in words]

    def _prepare(self, sentences: Sentences, frozen: NDArray[np.int32] | None) -> list[_Order]:
        orders = []
        size = len(self.lengths)
        words = int(self.lengths.sum())
        image_of = np.repeat(np.arange(len(self.sizes), dtype=np.int32), self.sizes)
        ngrams = number_ngrams(sentences.words, sentences.lengths)
        for shift, (places, table, grams) in enumerate(ngrams):
            own = places < words  # the others are frozen n-grams
            reference, gram, count = _count(sentences.owners[places[own]], grams[own])
            keys = pack(image_of[reference], gram)
            by_key = np.argsort(
                keys, kind="stable"
            )  # keeps the order of the references of an image
            starts = np.flatnonzero(np.diff(keys[by_key], prepend=-1))
            once = by_key[starts]
            frequencies = np.zeros(len(table) + 1, dtype=np.int32)
            if frozen is None:
                frequencies[:-1] = np.bincount(gram[once], minlength=len(table))
            else:
                phrases = np.flatnonzero(sentences.lengths[size:] == shift + 1)
                starting = np.searchsorted(places, sentences.starts[size:][phrases])
                frequencies[grams[starting]] = frozen[phrases]
            squares = self._weigh(frequencies, gram)
            orders.append(
                _Order(
                    np.append(table, _LAST_KEY),
                    frequencies,
                    np.append(keys[once], _LAST_KEY),
                    np.append(starts, [len(keys)] * 2).astype(np.int32),
                    _small((reference - self.first[image_of[reference]])[by_key]),
                    _small(count[by_key]),
                    _norms(reference, count, squares, size),
                )
            )
        return orders

    def _weigh(self, frequencies: NDArray[np.int32], gram: Integers) -> _Floats:
        """Squared weight of each n-gram."""
        return self._squares[frequencies[np.minimum(gram, len(frequencies) - 1)]]


def _find(table: Integers, keys: Integers) -> Integers:
    """Indices of keys in a table that ends with `_LAST_KEY`.

    Keys that are not in the table get distinct numbers past its end, valid for this call only.
    """
    distinct, inverse = np.unique(keys, return_inverse=True)
    found = np.searchsorted(table, distinct)
    others = np.flatnonzero(table[found] != distinct)
    found[others] = len(table) + others
    return found[inverse]


def _count(owners: Integers, grams: Integers) -> tuple[Integers, Integers, Integers]:
    """Distinct n-grams of each sentence, in order of first occurrence, with their counts."""
    _, first, counts = np.unique(pack(owners, grams), return_index=True, return_counts=True)
    order = np.argsort(first)
    first = first[order]
    return owners[first], grams[first], counts[order]


def _norms(owners: Integers, counts: Integers, squares: _Floats, size: int) -> _Floats:
    """Norm of the vector of each sentence."""
    norms: _Floats = np.sqrt(_sum(owners, counts**2 * squares, size))
    return norms


def _sum(owners: Integers, values: _Floats, size: int) -> _Floats:
    """Sum of the values of each owner, added in order."""
    return np.bincount(owners, values, size).astype(
        np.float64
    )  # bincount of an empty array returns integers


def _bigrams(words: Integers) -> Integers:
    """Number of bigrams in sentences of these lengths."""
    return np.maximum(words - 1, 0)


def _small(numbers: Integers) -> NDArray[np.unsignedinteger]:
    """Convert to the smallest sufficient type; there are millions of these."""
    small: NDArray[np.unsignedinteger] = numbers.astype(np.min_scalar_type(numbers.max(initial=0)))
    return small


def _divide(values: _Floats, norms: _Floats) -> _Floats:
    """Values / norms, 0 where a norm is 0."""
    return np.divide(values, norms, out=np.zeros_like(values), where=norms > 0)
