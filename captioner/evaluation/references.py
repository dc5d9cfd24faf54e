"""N-grams of captions and references: CIDEr-D and BLEU of many captions at once.

    CIDEr-D = 10 / (4 R) sum_r exp(-(l - l_r)^2 / (2 sigma^2)) sum_n min(g, g_r) . g_r / |g| |g_r|

g is the vector of count times ln(documents / document frequency) over n-grams, n = 1 to 4, R the
number of references of the photo, l the length in bigrams, and sigma = 6. This is pycocoevalcap's
``Cider``, which computes CIDEr-D despite its name: counts are clipped, and a Gaussian penalizes a
difference in length.

Source: Vedantam et al. 2015 (arXiv:1411.5726).
Deviation: as in pycocoevalcap, the length is the number of bigrams instead of words; the two give
different results for empty captions only.

Words and n-grams are numbered. The n-grams of the references are sorted once; those of any captions
are looked up together. Sums run in word order, so a score does not depend on which captions are
scored together, to the last bit.

Shapes: C captions, R references of all images, P n-grams of the captions, M matches (an n-gram of a
caption and a reference that contains it).
"""

from __future__ import annotations

import gzip
import hashlib
import json
import zlib
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from captioner.errors import DataError
from captioner.files import FREQUENCIES, read_input
from captioner.text.tokenizer import caption_tokens

ORDERS = 4
"""Maximum length of an n-gram, in words."""

SIGMA = 6.0

END_WORD = ""
"""Word for the end of a sentence; no word of a caption is empty."""

GZIP = b"\x1f\x8b"
"""First bytes of a file of document frequencies; a captions file does not start with them."""

FORMAT_VERSION = 1

Ngram = tuple[str, ...]
Integers = NDArray[np.signedinteger[Any]]
_Floats = NDArray[np.float64]

_LAST_KEY = np.iinfo(np.int64).max
_BITS = 32


@dataclass(frozen=True)
class DocumentFrequencies:
    """In how many images' references each n-gram occurs.

    CIDEr gives rare phrases more weight. Counted over the images being scored, the weights depend
    on which images are scored together, and CIDEr of a single image is always 0. Frequencies that
    are counted once and kept in a file make scores comparable for one image, a subset and training.
    """

    documents: int
    """Number of images that were counted."""
    counts: Mapping[Ngram, int]
    """Images per n-gram, 2 or more. N-grams of one image are left out: the formula uses the
    logarithm of max(1, count), so this changes no score and saves most of the space."""

    def to_bytes(self) -> bytes:
        """Content of a ``.json.gz`` file; the same frequencies give the same bytes."""
        content = {
            "format_version": FORMAT_VERSION,
            "documents": self.documents,
            "counts": {" ".join(gram): self.counts[gram] for gram in sorted(self.counts)},
        }
        text = json.dumps(content, ensure_ascii=False, separators=(",", ":"))
        # A token may hold a lone surrogate, which strict UTF-8 cannot encode.
        return gzip.compress(text.encode("utf-8", "surrogatepass"), mtime=0)

    def digest(self) -> str:
        """12 hex digits that identify these frequencies."""
        return hashlib.sha256(self.to_bytes()).hexdigest()[:12]

    @classmethod
    def load(cls, path: str | Path) -> DocumentFrequencies:
        """Read a file.

        Raises:
            DataError: The file is missing, truncated, of another version or another kind.
        """
        return cls.from_bytes(read_input(path, "a document frequencies file"), str(path))

    @classmethod
    def from_bytes(cls, data: bytes, path: str = FREQUENCIES) -> DocumentFrequencies:
        """Read the content of a file; ``path`` is its name for error messages.

        Raises:
            DataError: The content is truncated, of another version or another kind.
        """
        try:
            content = json.loads(gzip.decompress(data).decode("utf-8", "surrogatepass"))
            documents, counts = content["documents"], content["counts"]
            if content["format_version"] != FORMAT_VERSION or not all(
                type(count) is int and 1 <= count <= documents for count in counts.values()
            ):
                raise ValueError("not of this version")
            return cls(documents, {tuple(text.split()): count for text, count in counts.items()})
        except (EOFError, zlib.error, OSError, ValueError, LookupError, TypeError, AttributeError,
                RecursionError) as error:  # fmt: skip
            raise DataError(
                f"{path} is damaged, or no document frequencies file that this release reads; "
                "count the frequencies again"
            ) from error


def count_frequencies(references: Mapping[int, Sequence[str]]) -> DocumentFrequencies:
    """Document frequencies of captions by image id; images without captions are ignored.

    Raises:
        DataError: No image has a caption.
    """
    tokens = {i: map(caption_tokens, captions) for i, captions in references.items() if captions}
    return References(tokens).frequencies()


# --- n-grams -------------------------------------------------------------------------------------


class Sentences:
    """Numbered words of many sentences, concatenated; in 32 bits, as there may be millions."""

    def __init__(self, sentences: Iterable[Iterable[int]]) -> None:
        words, ends = array("i"), array("i")
        for sentence in sentences:
            words.extend(sentence)
            ends.append(len(words))
        self.words: Integers = np.asarray(words)
        self.lengths: Integers = np.diff(ends, prepend=np.int32(0))
        self.starts: Integers = ends - self.lengths
        self.owners: Integers = np.repeat(np.arange(len(ends), dtype=np.int32), self.lengths)
        """Sentence index of each word."""
        self.left: Integers = np.repeat(ends, self.lengths)
        """Words left in the sentence from each word on, including itself."""
        self.left -= np.arange(len(self.left), dtype=np.int32)


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

    @property
    def clipped(self) -> Integers:
        """Occurrences in the caption, at most those in the reference, (M,)."""
        clipped: Integers = np.minimum(self.caption_count[self.ngram], self.reference_count)
        return clipped


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
        references: Mapping[int, Iterable[Iterable[str]]],
        frequencies: DocumentFrequencies | None = None,
        *,
        end: bool = False,
    ) -> None:
        self.numbers: dict[str, int] = {}
        """Number of each word of the references and the frequencies."""
        self._images = {image_id: number for number, image_id in enumerate(references)}
        last = (END_WORD,) if end else ()
        counts = {} if frequencies is None else frequencies.counts
        sizes: list[int] = []

        def numbered() -> Iterator[list[int]]:
            for texts in references.values():
                sizes.append(0)
                for tokens in texts:
                    sizes[-1] += 1
                    yield self._number((*_split(tokens), *last))
            yield from map(self._number, counts)  # frozen n-grams follow, each as a sentence

        sentences = Sentences(numbered())
        if 0 in sizes:
            raise DataError(
                f"{sizes.count(0)} of {len(sizes)} images have no reference captions (first: id "
                f"{list(references)[sizes.index(0)]}); give captions of every image"
            )
        if not references and frequencies is None:
            raise DataError(
                "no image has a reference caption to count; give annotations with captions"
            )
        self.sizes: Integers = np.array(sizes, dtype=np.int64)
        """Number of references of each image, (B,)."""
        self.first: Integers = np.cumsum(self.sizes) - self.sizes
        """Index of the first reference of each image, (B,)."""
        self.lengths: Integers = sentences.lengths[: sum(sizes)]
        """Length of each reference in words, (R,)."""
        frozen = None if frequencies is None else np.fromiter(counts.values(), np.int32)
        self._documents = len(references) if frequencies is None else frequencies.documents
        most = max([self._documents, *counts.values()])
        logarithms = np.log(np.maximum(np.arange(most + 1), 1))
        # Only squares are needed: every product and norm contains each weight twice.
        self._squares: _Floats = (logarithms[self._documents] - logarithms) ** 2
        self._orders = self._prepare(sentences, frozen)

    def encode(self, tokens: Iterable[str], unknown: dict[str, int]) -> list[int]:
        """Number the words of a caption.

        Args:
            tokens: Tokens of one caption.
            unknown: Words missing from ``numbers`` with their temporary numbers; updated in place.
        """
        known = self.numbers
        return [
            known[word] if word in known else unknown.setdefault(word, len(known) + len(unknown))
            for word in _split(tokens)
        ]

    def captions(self, texts: Iterable[Iterable[str]]) -> Sentences:
        """Number the words of captions, given their tokens."""
        unknown: dict[str, int] = {}
        return Sentences([self.encode(tokens, unknown) for tokens in texts])

    def index(self, image_ids: Sequence[int]) -> Integers:
        """Indices of images in the order of the references."""
        return np.fromiter(map(self._images.__getitem__, image_ids), np.int64, len(image_ids))

    def score(self, candidates: Mapping[int, Sequence[Sequence[str]]]) -> dict[int, list[float]]:
        """CIDEr-D, 0 to 10, of any number of captions per image, given their tokens."""
        sizes = [len(captions) for captions in candidates.values()]
        images = np.repeat(self.index(list(candidates)), sizes)
        sentences = self.captions(chain.from_iterable(candidates.values()))
        scores = iter(self.cider_d(images, sentences, self.match(images, sentences)).tolist())
        return {i: [next(scores) for _ in texts] for i, texts in candidates.items()}

    def match(self, images: Integers, captions: Sentences) -> list[Matches]:
        """Look up the n-grams of C captions in the references of their images, (C,).

        Returns:
            The matches of unigrams, bigrams, trigrams and 4-grams.
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
            sizes = np.where(order.keys[at] == keys, after - order.starts[at], 0)
            ngram = np.repeat(np.arange(len(keys)), sizes)
            hits = np.arange(len(ngram)) + np.repeat(after - np.cumsum(sizes), sizes)
            reference = self.first[images[caption[ngram]]] + order.references[hits]
            reference_count = order.counts[hits].astype(np.int64)
            found.append(Matches(caption, gram, count, ngram, reference, reference_count))
        return found

    def cider_d(self, images: Integers, captions: Sentences, matches: Sequence[Matches]) -> _Floats:
        """CIDEr-D of C captions, 0 to 10, from their matches: (C,)."""
        size = len(images)
        total = np.zeros(size)
        bigrams, of_references = (np.maximum(n - 1, 0) for n in (captions.lengths, self.lengths))
        for order, found in zip(self._orders, matches, strict=True):
            squares = self._weigh(order.frequencies, found.gram)
            norms = _norms(found.caption, found.caption_count, squares, size)
            caption, norm = found.caption[found.ngram], order.norms[found.reference]
            distance = bigrams[caption] - of_references[found.reference]
            penalty = np.exp(-(distance.astype(np.float64) ** 2) / (2 * SIGMA**2))
            values = found.clipped * found.reference_count * squares[found.ngram] * penalty
            total += _divide(_sum(caption, _divide(values, norm), size), norms)
        scores: _Floats = 10 * total / (ORDERS * self.sizes[images])
        return scores

    def bleu_counts(
        self, images: Integers, captions: Sentences, matches: Sequence[Matches]
    ) -> _Floats:
        """Counts for ``metrics.bleu_from_counts`` of C captions, (C, 10).

        The length is compared with the closest of the references; of two equally close ones the
        shorter counts.
        """
        size, lengths = len(images), captions.lengths
        correct, total = [], []
        for order, found in enumerate(matches, 1):
            best = np.zeros(len(found.gram), dtype=np.int64)
            np.maximum.at(best, found.ngram, found.clipped)
            correct.append(np.bincount(found.caption, best, size))
            total.append(np.maximum(lengths - order + 1, 0))
        sizes = self.sizes[images]
        ends = np.cumsum(sizes)
        caption = np.repeat(np.arange(size), sizes)
        number = np.arange(len(caption)) + np.repeat(self.first[images] + sizes - ends, sizes)
        words = self.lengths[number]
        nearest = np.lexsort((words, np.abs(words - lengths[caption]), caption))
        closest = words[nearest[ends - sizes]]
        return np.stack([*correct, *total, lengths, closest], axis=1).astype(np.float64)

    def frequencies(self) -> DocumentFrequencies:
        """The document frequencies in use, without n-grams of a single image."""
        words = list(self.numbers)
        counts: dict[Ngram, int] = {}
        tables = [order.table for order in self._orders]
        for shift, order in enumerate(self._orders):
            often = grams = np.flatnonzero(order.frequencies > 1)
            columns: list[list[str]] = []
            for table in reversed(tables[: shift + 1]):
                keys = table[grams]
                columns.insert(0, [words[number] for number in (keys % 2**_BITS).tolist()])
                grams = keys >> _BITS
            spelled = zip(*columns, strict=True)
            counts.update(zip(spelled, order.frequencies[often].tolist(), strict=True))
        return DocumentFrequencies(self._documents, counts)

    def _number(self, words: Iterable[str]) -> list[int]:
        return [self.numbers.setdefault(word, len(self.numbers)) for word in words]

    def _prepare(self, sentences: Sentences, frozen: NDArray[np.int32] | None) -> list[_Order]:
        orders = []
        size = len(self.lengths)
        words = int(self.lengths.sum())
        image_of = np.repeat(np.arange(len(self.sizes), dtype=np.int32), self.sizes)
        for shift, (places, table, grams) in enumerate(_number_ngrams(sentences)):
            own = places < words  # the others are frozen n-grams
            reference, gram, count = _count(sentences.owners[places[own]], grams[own])
            keys = _pack(image_of[reference], gram)
            by_key = np.argsort(keys, kind="stable")  # keeps the order of an image's references
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


def _split(tokens: Iterable[str]) -> list[str]:
    """Words of tokens; a space in a token, as in ``1 1/2``, splits it, as in pycocoevalcap."""
    return " ".join(tokens).split()


def _number_ngrams(sentences: Sentences) -> Iterator[tuple[Integers, Integers, Integers]]:
    """Number the n-grams of sentences, for n = 1 to 4.

    Yields:
        ``places``: Where each n-gram starts, (P,). ``table``: See ``_Order.table``, (G,).
        ``grams``: The number of each n-gram, (P,).
    """
    # In 32 bits where possible, without np.unique: there are millions of n-grams.
    words = sentences.words
    numbers = np.zeros(len(words), np.int32)
    for shift in range(ORDERS):
        places = np.flatnonzero(sentences.left > shift).astype(np.int32)
        keys = _pack(numbers[places], words[places + shift])
        order = np.argsort(keys)
        keys = keys[order]
        new = np.diff(keys, prepend=-1) > 0
        numbers[places[order]] = np.cumsum(new, dtype=np.int32) - 1
        table = keys[new]
        del keys, order, new
        yield places, table, numbers[places]


def _pack(high: Integers, low: Integers) -> Integers:
    """Pack two numbers into one that sorts by the first."""
    return (high.astype(np.int64) << _BITS) | low


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
    _, first, counts = np.unique(_pack(owners, grams), return_index=True, return_counts=True)
    order = np.argsort(first)
    first = first[order]
    return owners[first], grams[first], counts[order]


def _norms(owners: Integers, counts: Integers, squares: _Floats, size: int) -> _Floats:
    """Norm of the vector of each sentence."""
    norms: _Floats = np.sqrt(_sum(owners, counts**2 * squares, size))
    return norms


def _sum(owners: Integers, values: _Floats, size: int) -> _Floats:
    """Sum of the values of each owner, added in order; bincount of no values has integers."""
    return np.bincount(owners, values, size).astype(np.float64)


def _small(numbers: Integers) -> NDArray[np.unsignedinteger]:
    """Convert to the smallest sufficient type; there are millions of these."""
    small: NDArray[np.unsignedinteger] = numbers.astype(np.min_scalar_type(numbers.max(initial=0)))
    return small


def _divide(values: _Floats, norms: _Floats) -> _Floats:
    """Values / norms, 0 where a norm is 0."""
    return np.divide(values, norms, out=np.zeros_like(values), where=norms > 0)
