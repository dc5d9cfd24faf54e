"""True captions as numbers, and which of their n-grams a caption holds.

Words are numbers here, and so are n-grams: the references' are sorted once, those of any captions
are looked up all together. Sums run in the order of the words, so that the company in which a
caption is scored does not change a digit. The formula stands in `captioner.evaluation.cider`.

Shapes: C captions, R references of all images, P n-grams of the captions, M of them in references.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from captioner.errors import DataError
from captioner.frequencies import ORDERS, DocumentFrequencies, Ngram

SIGMA = 6.0

END_WORD = ""
"""The end of a sentence where it counts as a word: no word of a caption is empty."""

_Integers = NDArray[np.int64]
_Floats = NDArray[np.float64]

# By the difference of two lengths; from the last on, 64 bits know only 0.
_PENALTIES: _Floats = np.exp(-(np.arange(256.0) ** 2) / (2 * SIGMA**2))
_BITS = 32
_LAST_KEY = np.iinfo(np.int64).max


class Sentences:
    """Numbered words of many sentences, one after another."""

    def __init__(self, sentences: Sequence[Sequence[int]]) -> None:
        """Lay them end to end.

        Args:
            sentences: Numbers of the words of each; a number is 0 or more.
        """
        self.lengths: _Integers = np.fromiter(map(len, sentences), np.int64, len(sentences))
        ends = np.cumsum(self.lengths)
        self.words: _Integers = np.fromiter(
            chain.from_iterable(sentences), np.int64, int(self.lengths.sum())
        )
        self.starts: _Integers = ends - self.lengths
        self.owners: _Integers = np.repeat(np.arange(len(sentences), dtype=np.int64), self.lengths)
        """Number of the sentence of each word."""
        self.left: _Integers = ends[self.owners] - np.arange(len(self.words))
        """How many words are left from each word on, itself among them."""


class Matches(NamedTuple):
    """The captions' n-grams of one length, and the references of their images that hold them."""

    caption: _Integers
    """Whose n-gram it is, (P,); each stands once a caption."""
    gram: _Integers
    """Its number, (P,); what no reference holds has one for this call alone."""
    often: _Integers
    """How many times the caption holds it, (P,)."""
    place: _Integers
    """Which of the P a reference holds, (M,), ascending."""
    reference: _Integers
    """The reference, (M,)."""
    most: _Integers
    """How many times the reference holds it, (M,)."""


class _Order(NamedTuple):
    """The references' n-grams of one length.

    There are G different ones, U if each counts once an image, Q if once a reference. ``table`` and
    ``keys`` end with `_LAST_KEY`, so that a search always ends at a place.
    """

    table: _Integers
    """Number of the first n - 1 words and the last word, packed: (G + 1,), ascending. An n-gram's
    number is its place."""
    frequencies: NDArray[np.int32]
    """Images that hold it, (G + 1,); the last, 0, is for all that no reference holds."""
    keys: _Integers
    """Image and n-gram, packed: (U + 1,), ascending."""
    starts: NDArray[np.int32]
    """Where among the Q the references of each key start: (U + 2,)."""
    references: NDArray[np.unsignedinteger]
    """Which reference of its image holds it, (Q,)."""
    counts: NDArray[np.unsignedinteger]
    """How often, (Q,)."""
    norms: _Floats
    """Length of each reference's vector, (R,)."""


class References:
    """True captions by image, numbered and prepared: what never changes is computed once.

    Nothing is written after that: threads may share one.
    """

    def __init__(
        self,
        references: Mapping[int, Sequence[Sequence[str]]],
        frequencies: DocumentFrequencies | None = None,
        *,
        end: bool = False,
    ) -> None:
        """Number words and n-grams.

        Args:
            references: Tokens of all true captions, by image id.
            frequencies: Frozen frequencies; None counts those of ``references``.
            end: Each reference ends with `END_WORD`.

        Raises:
            DataError: An image has no references, or there is nothing to count.
        """
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
        """Number of each word of the references and of the frequencies."""
        self._images = {image_id: number for number, image_id in enumerate(references)}
        sizes = [len(captions) for captions in references.values()]
        self.sizes: _Integers = np.array(sizes, dtype=np.int64)
        """References of each image, (B,)."""
        self.first: _Integers = np.cumsum(self.sizes) - self.sizes
        """Number of each image's first reference, (B,)."""
        last = (END_WORD,) if end else ()
        captions = [
            self._number((*_parts(tokens), *last))
            for tokens in chain.from_iterable(references.values())
        ]
        counts = {} if frequencies is None else frequencies.counts
        # A frozen phrase is numbered as a sentence of its own, behind the references.
        sentences = Sentences(captions + [self._number(gram) for gram in counts])
        self.lengths: _Integers = sentences.lengths[: len(captions)]
        """Words of each reference, (R,)."""
        frozen = None if frequencies is None else np.fromiter(counts.values(), np.int32)
        self.documents = len(references) if frequencies is None else frequencies.documents
        """Images over which the document frequencies were counted."""
        most = self.documents if frozen is None else max([self.documents, *counts.values()])
        logarithms = np.log(np.maximum(np.arange(most + 1), 1))
        # Only squares are needed: every product and norm holds a weight twice.
        self._squares: _Floats = (logarithms[self.documents] - logarithms) ** 2
        self._orders = self._prepare(sentences, frozen)

    def encode(self, tokens: Iterable[str], unknown: dict[str, int]) -> list[int]:
        """Number the words of tokens; a blank inside a token parts it in two.

        Args:
            tokens: Tokens of one caption.
            unknown: Words that ``numbers`` lacks, and a number beyond those for each; grows.
        """
        known = self.numbers
        return [
            known[word] if word in known else unknown.setdefault(word, len(known) + len(unknown))
            for word in _parts(tokens)
        ]

    def index(self, image_ids: Sequence[int]) -> _Integers:
        """Numbers of images, by their place among the references.

        Raises:
            DataError: One is not among them.
        """
        unknown = [image_id for image_id in image_ids if image_id not in self._images]
        if unknown:
            raise DataError(
                f"{len(unknown)} of {len(image_ids)} images have no reference captions "
                f"(first: id {unknown[0]}); score images whose references were given"
            )
        return np.fromiter(map(self._images.__getitem__, image_ids), np.int64, len(image_ids))

    def match(self, images: _Integers, captions: Sentences) -> list[Matches]:
        """Look up the n-grams of captions in the references of their images.

        Args:
            images: Number of each caption's image, see `index`: (C,).
            captions: C captions. A word that ``numbers`` lacks has any number beyond those.

        Returns:
            The matches of single words, pairs, triples and quadruples.
        """
        found = []
        numbers = np.zeros_like(captions.words)
        for shift, order in enumerate(self._orders):
            places = np.flatnonzero(captions.left > shift)
            keys = _pack(numbers[places], captions.words[places + shift])
            numbers[places] = _find(order.table, keys)
            caption, gram, count = _count(captions.owners[places], numbers[places])
            keys = _pack(images[caption], gram)
            at = np.searchsorted(order.keys, keys)
            after = order.starts[at + 1].astype(np.int64)
            holders = np.where(order.keys[at] == keys, after - order.starts[at], 0)
            place = np.repeat(np.arange(len(keys)), holders)
            held = np.arange(len(place)) + np.repeat(after - np.cumsum(holders), holders)
            reference = self.first[images[caption[place]]] + order.references[held]
            most = order.counts[held].astype(np.int64)
            found.append(Matches(caption, gram, count, place, reference, most))
        return found

    def cider_d(
        self, images: _Integers, captions: Sentences, matches: Sequence[Matches]
    ) -> _Floats:
        """CIDEr-D of captions.

        Args:
            images: Number of each caption's image, (C,).
            captions: The captions.
            matches: What `match` gave for them.

        Returns:
            The scores, 0 to 10: (C,).
        """
        size = len(images)
        total = np.zeros(size)
        for order, found in zip(self._orders, matches, strict=True):
            squares = self._weigh(order.frequencies, found.gram)
            norms = _norms(found.caption, found.often, squares, size)
            caption, norm = found.caption[found.place], order.norms[found.reference]
            apart = np.abs(
                _pairs(captions.lengths)[caption] - _pairs(self.lengths)[found.reference]
            )
            products = np.minimum(found.often[found.place], found.most) * found.most
            values = products * squares[found.place] * _PENALTIES[np.minimum(apart, 255)]
            total += _divide(_sum(caption, _divide(values, norm), size), norms)
        scores: _Floats = 10 * total / (ORDERS * self.sizes[images])
        return scores

    def frequencies(self) -> DocumentFrequencies:
        """The document frequencies by which n-grams weigh; one image counts as none."""
        words = list(self.numbers)
        counts: dict[Ngram, int] = {}
        for shift, order in enumerate(self._orders):
            grams = np.flatnonzero(order.frequencies > 1)
            often, columns = order.frequencies[grams].tolist(), []
            for lower in reversed(self._orders[: shift + 1]):
                keys = lower.table[grams]
                columns.append([words[number] for number in (keys & (2**_BITS - 1)).tolist()])
                grams = keys >> _BITS
            counts.update(zip(zip(*reversed(columns), strict=True), often, strict=True))
        return DocumentFrequencies(self.documents, counts)

    def _number(self, words: Iterable[str]) -> list[int]:
        return [self.numbers.setdefault(word, len(self.numbers)) for word in words]

    def _prepare(self, sentences: Sentences, frozen: NDArray[np.int32] | None) -> list[_Order]:
        orders = []
        size = len(self.lengths)
        words = int(self.lengths.sum())
        numbers = np.zeros_like(sentences.words)
        image_of = np.repeat(np.arange(len(self.sizes), dtype=np.int64), self.sizes)
        for shift in range(ORDERS):
            places = np.flatnonzero(sentences.left > shift)
            keys = _pack(numbers[places], sentences.words[places + shift])
            table, numbers[places] = np.unique(keys, return_inverse=True)
            places = places[places < words]
            reference, gram, count = _count(sentences.owners[places], numbers[places])
            keys = _pack(image_of[reference], gram)
            by_key = np.argsort(keys, kind="stable")  # the references of an image stay in order
            starts = np.flatnonzero(np.diff(keys[by_key], prepend=-1))
            once = by_key[starts]
            frequencies = np.zeros(len(table) + 1, dtype=np.int32)
            if frozen is None:
                frequencies[:-1] = np.bincount(gram[once], minlength=len(table))
            else:
                phrases = np.flatnonzero(sentences.lengths[size:] == shift + 1)
                frequencies[numbers[sentences.starts[size:][phrases]]] = frozen[phrases]
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

    def _weigh(self, frequencies: NDArray[np.int32], gram: _Integers) -> _Floats:
        """Squared weight of each n-gram."""
        return self._squares[frequencies[np.minimum(gram, len(frequencies) - 1)]]


def _parts(tokens: Iterable[str]) -> list[str]:
    """Words of tokens: a blank inside one parts it, as in `captioner.frequencies.ngrams`."""
    return " ".join(tokens).split()


def _pack(high: _Integers, low: _Integers) -> _Integers:
    """Two numbers as one, sorted by the first."""
    return (high << _BITS) | low


def _find(table: _Integers, keys: _Integers) -> _Integers:
    """Places of keys in a table that ends with `_LAST_KEY`; others get numbers beyond it.

    Those hold for one call: they tell the n-grams of its captions apart.
    """
    distinct, inverse = np.unique(keys, return_inverse=True)
    found = np.searchsorted(table, distinct)
    others = np.flatnonzero(table[found] != distinct)
    found[others] = len(table) + others
    return found[inverse]


def _count(owners: _Integers, grams: _Integers) -> tuple[_Integers, _Integers, _Integers]:
    """Each sentence's n-grams once, in the order in which they first occur, and how often."""
    _, first, counts = np.unique(_pack(owners, grams), return_index=True, return_counts=True)
    order = np.argsort(first)
    first = first[order]
    return owners[first], grams[first], counts[order]


def _norms(owners: _Integers, counts: _Integers, squares: _Floats, size: int) -> _Floats:
    """Length of each sentence's vector."""
    norms: _Floats = np.sqrt(_sum(owners, counts**2 * squares, size))
    return norms


def _sum(owners: _Integers, values: _Floats, size: int) -> _Floats:
    """Sum of each owner's values, added in their order."""
    return np.bincount(owners, values, size).astype(np.float64)  # of none at all, integers


def _pairs(words: _Integers) -> _Integers:
    """How many bigrams so many words make."""
    return np.maximum(words - 1, 0)


def _small(numbers: _Integers) -> NDArray[np.unsignedinteger]:
    """The same in as few bytes as hold them: there are millions."""
    small: NDArray[np.unsignedinteger] = numbers.astype(np.min_scalar_type(numbers.max(initial=0)))
    return small


def _divide(values: _Floats, norms: _Floats) -> _Floats:
    """Shares of a vector; one whose n-grams all weigh nothing has no length, and gives none."""
    return np.divide(values, norms, out=np.zeros_like(values), where=norms > 0)
