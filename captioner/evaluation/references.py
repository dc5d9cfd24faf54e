"""N-grams of captions and references: document frequencies, CIDEr-D and the counts of BLEU.

    CIDEr-D = 10 / (4 R) sum_r exp(-(l - l_r)^2 / (2 sigma^2)) sum_n min(g, g_r) . g_r / |g| |g_r|

g is the vector of count times ln(documents / document frequency) over n-grams, n = 1 to 4, R the
number of references of the photo, l the length in bigrams, and sigma = 6. This is pycocoevalcap's
``Cider``, which computes CIDEr-D despite its name: counts are clipped, and a Gaussian penalizes a
difference in length.

Source: Vedantam et al. 2015 (arXiv:1411.5726).
Deviation: as in pycocoevalcap, the length is the number of bigrams instead of words; the two give
different results for empty captions only.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import math
import zlib
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from captioner.errors import DataError
from captioner.files import FREQUENCIES, read_input
from captioner.text.tokenizer import caption_tokens

ORDERS = 4
"""Maximum length of an n-gram, in words."""

SIGMA = 6.0

GZIP = b"\x1f\x8b"
"""First bytes of a file of document frequencies; a captions file does not start with them."""

FORMAT_VERSION = 1


@dataclass(frozen=True)
class DocumentFrequencies:
    """In how many images' references each n-gram occurs.

    CIDEr gives rare phrases more weight. Counted over the images being scored, the weights depend
    on which images are scored together, and CIDEr of a single image is always 0. Frequencies that
    are counted once and kept in a file make scores comparable for one image, a subset and training.
    """

    documents: int
    """Number of images that were counted."""
    counts: Mapping[str, int]
    """Images per n-gram (words and spaces), 2 or more. N-grams of one image are left out: the
    formula uses the logarithm of max(1, count), so this changes no score and saves most of the
    space."""

    def to_bytes(self) -> bytes:
        """Content of a ``.json.gz`` file; the same frequencies give the same bytes."""
        content = {
            "format_version": FORMAT_VERSION,
            "documents": self.documents,
            "counts": {gram: self.counts[gram] for gram in sorted(self.counts, key=_words)},
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
            return cls(documents, counts)
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
    texts = [[split(caption_tokens(text)) for text in some] for some in references.values() if some]
    return count_documents(texts)


def count_documents(references: Collection[Iterable[Sequence[str]]]) -> DocumentFrequencies:
    """Document frequencies of the words of the references of each image.

    Raises:
        DataError: There are no images.
    """
    if not references:
        raise DataError("no image has a reference caption to count; give annotations with captions")
    often: dict[str, int] = {}
    for size in range(1, ORDERS + 1):  # one by one, as most n-grams are of a single image
        counts: Counter[str] = Counter()
        for texts in references:
            counts.update({gram for words in texts for gram in _of_size(words, size)})
        often.update((gram, count) for gram, count in counts.items() if count > 1)
    return DocumentFrequencies(len(references), often)


def _words(gram: str) -> list[str]:
    return gram.split(" ")


def split(tokens: Iterable[str]) -> list[str]:
    """Words of tokens; a space in a token, as in ``1 1/2``, splits it, as in pycocoevalcap."""
    return " ".join(tokens).split()


def words_of(references: Mapping[int, Iterable[Iterable[str]]]) -> dict[int, list[list[str]]]:
    """The words of reference captions, given their tokens, by image id.

    Raises:
        DataError: An image has no references.
    """
    words = {image_id: [*map(split, texts)] for image_id, texts in references.items()}
    if missing := [image_id for image_id, texts in words.items() if not texts]:
        raise DataError(
            f"{len(missing)} of {len(words)} images have no reference captions (first: id "
            f"{missing[0]}); give captions of every image"
        )
    return words


def _of_size(words: Sequence[str], size: int) -> Iterable[str]:
    """The n-grams of a caption, as text."""
    return map(" ".join, zip(*(words[start:] for start in range(size)), strict=False))


class Ngrams(NamedTuple):
    """The n-grams of a caption."""

    counts: Sequence[Mapping[str, int]]
    """How often each occurs; by their length, 1 to 4."""
    length: int
    """Of the caption, in words."""

    @classmethod
    def of(cls, words: Sequence[str]) -> Ngrams:
        """Count the n-grams."""
        return cls([Counter(_of_size(words, n)) for n in range(1, ORDERS + 1)], len(words))


class Cider:
    """CIDEr-D, 0 to 10, under document frequencies."""

    def __init__(self, frequencies: DocumentFrequencies) -> None:
        self._frequencies = frequencies

    def score(self, captions: Iterable[Ngrams], references: Iterable[Ngrams]) -> list[float]:
        """Score captions of one image against its references."""
        truth = [*map(self._vectors, references)]
        return [
            10 * math.fsum(_similarity(one, other) for other in truth) / (ORDERS * len(truth))
            for one in map(self._vectors, captions)
        ]

    def rarity(self, gram: str) -> float:
        """ln(documents / document frequency), as a share of that of an n-gram of one image."""
        documents = self._frequencies.documents
        rarest = math.log(documents)
        return math.log(documents / self._frequencies.counts.get(gram, 1)) / rarest if rarest else 0

    def _vectors(self, grams: Ngrams) -> _Vectors:
        documents, known = self._frequencies.documents, self._frequencies.counts
        vectors = [
            {gram: count * math.log(documents / known.get(gram, 1)) for gram, count in one.items()}
            for one in grams.counts
        ]
        norms = [math.sqrt(sum(value * value for value in one.values())) for one in vectors]
        return _Vectors(vectors, norms, max(grams.length - 1, 0))


class _Vectors(NamedTuple):
    """The weighted n-grams of a caption and their norms, by length, and its number of bigrams."""

    values: Sequence[Mapping[str, float]]
    norms: Sequence[float]
    bigrams: int


def _similarity(one: _Vectors, other: _Vectors) -> float:
    total = 0.0
    for mine, its, norm, its_norm in zip(
        one.values, other.values, one.norms, other.norms, strict=True
    ):
        if common := mine.keys() & its.keys():  # in no order, so with the exact sum
            product = math.fsum(min(mine[gram], its[gram]) * its[gram] for gram in common)
            total += product / (norm * its_norm) if product else 0
    return total * math.exp(-((one.bigrams - other.bigrams) ** 2) / (2 * SIGMA**2))


def bleu_counts(caption: Ngrams, references: Sequence[Ngrams]) -> list[int]:
    """Counts for ``metrics.bleu_from_counts`` of a caption, 10.

    The length is compared with the closest of the references; of two equally close ones the
    shorter counts.
    """
    correct = []
    for shift, counts in enumerate(caption.counts):
        found: Counter[str] = Counter()
        for other in references:
            theirs = other.counts[shift]
            for gram in counts.keys() & theirs.keys():
                found[gram] = max(found[gram], min(counts[gram], theirs[gram]))
        correct.append(found.total())
    total = [max(caption.length - shift, 0) for shift in range(ORDERS)]
    closest = min((abs(other.length - caption.length), other.length) for other in references)
    return [*correct, *total, caption.length, closest[1]]
