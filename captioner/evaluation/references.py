"""N-grams of captions and references: document frequencies, CIDEr-D and BLEU.

    CIDEr-D = 10 / (4 R) sum_r exp(-(l - l_r)^2 / (2 sigma^2)) sum_n min(g, g_r) . g_r / |g| |g_r|

An n-gram is a sequence of n words, and n is 1 to 4. R is the number of references of the photo. The
vector g has an entry for each n-gram: its count in the caption times ln(documents / document
frequency). The document frequency is the number of images with the n-gram in their references. g_r
is the vector of reference r. The lengths l and l_r are counted in bigrams, and sigma = 6. Despite
its name, pycocoevalcap's ``Cider`` computes this CIDEr-D: it clips counts and penalizes a
difference in length with a Gaussian.

Source: Vedantam et al. 2015 (arXiv:1411.5726).
Deviation: as in pycocoevalcap, the length is counted in bigrams instead of words. Only the results
for empty captions change.
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

import numpy as np
from numpy.typing import NDArray

from captioner.errors import DataError
from captioner.files import read_input
from captioner.inference.names import FREQUENCIES
from captioner.text.tokenizer import caption_tokens

ORDERS = 4
"""Maximum length of an n-gram in words."""

SIGMA = 6.0
"""Width of the Gaussian that penalizes a difference in length (bigrams)."""

GZIP = b"\x1f\x8b"
"""First two bytes of a document frequencies file. A captions file has different first bytes."""

FORMAT_VERSION = 1
"""Format version of document frequencies files."""

# Constants that pycocoevalcap adds in BLEU, so that it never divides by 0.
_SMALL, _TINY = 1e-9, 1e-15

Ngrams = Sequence[Counter[str]]
"""The n-grams of a caption: one counter per length, 1 to 4. Keys are words separated by spaces."""


def split(tokens: Iterable[str]) -> list[str]:
    """Split tokens that contain a space, such as ``1 1/2``, into words, as pycocoevalcap does."""
    return " ".join(tokens).split()


def ngrams(words: Sequence[str]) -> Ngrams:
    """Count the n-grams of each length in the words of a caption."""
    return [Counter(_of_size(words, size)) for size in range(1, ORDERS + 1)]


def _of_size(words: Sequence[str], size: int) -> Iterable[str]:
    """Return all n-grams with ``size`` words, as text with spaces between the words."""
    return map(" ".join, zip(*(words[start:] for start in range(size)), strict=False))


@dataclass(frozen=True)
class DocumentFrequencies:
    """The number of images with each n-gram (a phrase of 1 to 4 words) in their references.

    CIDEr uses document frequencies to weight rare phrases more. If they are counted on the scored
    images, a score depends on the other images, and CIDEr of a single image is always 0. If they
    are counted once and stored in a file, scores of different sets of images are comparable.
    """

    documents: int
    """Number of images."""
    counts: Mapping[str, int]
    """Number of images with each n-gram. N-grams that only one image has are left out, which saves
    most of the space. Scores stay the same, because a missing n-gram counts as 1."""

    def weighted(self, grams: Mapping[str, int]) -> dict[str, float]:
        """Return the count of each n-gram times ln(documents / document frequency)."""
        documents, known = self.documents, self.counts
        return {gram: n * math.log(documents / known.get(gram, 1)) for gram, n in grams.items()}

    def to_bytes(self) -> bytes:
        """Return the content of a ``.json.gz`` file. Equal frequencies yield equal bytes."""
        grams = sorted(self.counts, key=lambda gram: gram.split(" "))
        content = {
            "format_version": FORMAT_VERSION,
            "documents": self.documents,
            "counts": {gram: self.counts[gram] for gram in grams},
        }
        text = json.dumps(content, ensure_ascii=False, separators=(",", ":"))
        # A token may contain a lone surrogate, which strict UTF-8 cannot encode.
        return gzip.compress(text.encode("utf-8", "surrogatepass"), mtime=0)

    def digest(self) -> str:
        """Return 12 hex digits that identify these frequencies."""
        return hashlib.sha256(self.to_bytes()).hexdigest()[:12]

    @classmethod
    def load(cls, path: str | Path) -> DocumentFrequencies:
        """Read a document frequencies file.

        Raises:
            DataError: The file is missing or damaged, or its kind or version is not supported.
        """
        return cls.from_bytes(read_input(path, "a document frequencies file"), str(path))

    @classmethod
    def from_bytes(cls, data: bytes, path: str = FREQUENCIES) -> DocumentFrequencies:
        """Read document frequencies from the content of a file.

        Args:
            data: The content of the file.
            path: Name of the file in error messages.

        Raises:
            DataError: The data is damaged, or its kind or version is not supported.
        """
        try:
            content = json.loads(gzip.decompress(data).decode("utf-8", "surrogatepass"))
            documents, counts = content["documents"], content["counts"]
            numbers = {1, *counts.values(), documents}
            possible = (min(numbers), max(numbers)) == (1, documents)
            if content["format_version"] != FORMAT_VERSION or not possible:
                raise ValueError("the file is from a different version")
            return cls(documents, counts)
        except (EOFError, zlib.error, OSError, ValueError, LookupError, TypeError, AttributeError,
                RecursionError) as error:  # fmt: skip
            raise DataError(
                f"{path} is damaged or is not a document frequencies file of this version; create "
                "the file again with captioner prepare frequencies"
            ) from error


def count_frequencies(references: Mapping[int, Sequence[str]]) -> DocumentFrequencies:
    """Count in how many images each n-gram of the reference captions occurs.

    Args:
        references: Reference captions by image id, not tokenized. Images without captions are
            ignored.

    Raises:
        DataError: No image has a caption.
    """
    return count_documents(
        [[split(caption_tokens(text)) for text in texts] for texts in references.values() if texts]
    )


def count_documents(references: Collection[Iterable[Sequence[str]]]) -> DocumentFrequencies:
    """Count in how many images each n-gram of the references occurs.

    Args:
        references: The references of each image. A reference is a list of words.

    Raises:
        DataError: There are no images.
    """
    if not references:
        raise DataError("the annotations contain no captions to count; use a COCO captions file")
    often: dict[str, int] = {}
    for size in range(1, ORDERS + 1):  # one size at a time, to drop rare n-grams early
        counts: Counter[str] = Counter()
        for texts in references:
            counts.update({gram for words in texts for gram in _of_size(words, size)})
        often.update((gram, count) for gram, count in counts.items() if count > 1)
    return DocumentFrequencies(len(references), often)


def words_of(references: Mapping[int, Iterable[Iterable[str]]]) -> dict[int, list[list[str]]]:
    """Split the tokens of all reference captions into words.

    Args:
        references: Tokens of the references, by image id.

    Raises:
        DataError: An image has no references.
    """
    words = {image_id: [*map(split, texts)] for image_id, texts in references.items()}
    if missing := [image_id for image_id, texts in words.items() if not texts]:
        raise DataError(
            f"{len(missing)} of {len(words)} images have no reference captions, such as image "
            f"{missing[0]}; add captions for every image"
        )
    return words


# --- CIDEr-D -------------------------------------------------------------------------------------


def cider_d(
    captions: Iterable[Ngrams], references: Iterable[Ngrams], frequencies: DocumentFrequencies
) -> list[float]:
    """Compute the CIDEr-D, 0 to 10, of each of several captions of one image.

    Args:
        captions: N-grams of the captions.
        references: N-grams of the image's references.
        frequencies: Document frequencies for the weights of the n-grams.
    """
    truth = [_weighted(one, frequencies) for one in references]
    return [
        10 * math.fsum(_similarity(one, other) for other in truth) / (ORDERS * len(truth))
        for one in (_weighted(caption, frequencies) for caption in captions)
    ]


_Vectors = tuple[int, list[tuple[dict[str, float], float]]]
"""A caption's number of bigrams, and for each n the vector of its n-grams and the vector's norm."""


def _weighted(grams: Ngrams, frequencies: DocumentFrequencies) -> _Vectors:
    """Return a caption or reference in the form that CIDEr-D compares.

    The form consists of the length in bigrams, and the n-grams of each length with their norm. The
    count of an n-gram is multiplied by its rarity, ln(documents / document frequency).
    """
    vectors = [*map(frequencies.weighted, grams)]
    norms = [math.sqrt(sum(value * value for value in one.values())) for one in vectors]
    return grams[1].total(), [*zip(vectors, norms, strict=True)]


def _similarity(one: _Vectors, other: _Vectors) -> float:
    """Return the term of CIDEr-D for one reference, 0 to 4, without the factor 10 / (4 R)."""
    total = 0.0
    for (mine, norm), (its, its_norm) in zip(one[1], other[1], strict=True):
        if common := mine.keys() & its.keys():  # exact sum, as sets have no order
            product = math.fsum(min(mine[gram], its[gram]) * its[gram] for gram in common)
            total += product / (norm * its_norm) if product else 0
    return total * math.exp(-((one[0] - other[0]) ** 2) / (2 * SIGMA**2))


# --- BLEU ----------------------------------------------------------------------------------------


def bleu_counts(captions: Iterable[Ngrams], references: Sequence[Ngrams]) -> NDArray[np.float64]:
    """Return the counts from which BLEU is computed, for K captions of one image.

    Args:
        captions: N-grams of the captions.
        references: N-grams of the image's references.

    Returns:
        The counts, (K, 9): the number of n-grams of each length that a reference contains (4), the
        number of all n-grams of each length (4), and the length of one reference (1). It is the
        reference with the length closest to the caption's, and the shorter one of two that are
        equally close.
    """
    of_sizes = [*zip(*references, strict=True)]
    lengths = [one[0].total() for one in references]
    rows = []
    for caption in captions:
        total = [grams.total() for grams in caption]
        correct = [
            sum(
                min(grams[gram], max(one.get(gram, 0) for one in others))
                for gram in grams.keys() & set().union(*others)
            )
            for grams, others in zip(caption, of_sizes, strict=True)
        ]
        closest = min((abs(length - total[0]), length) for length in lengths)[1]
        rows.append([*correct, *total, closest])
    return np.array(rows, np.float64)


def bleu_from_counts(counts: NDArray[np.float64]) -> NDArray[np.float64]:
    """Compute BLEU-1 to BLEU-4 of sets of captions.

    Source: Papineni et al. 2002, with the smoothing constants of pycocoevalcap.

    Args:
        counts: The counts from `bleu_counts`, summed over the captions of each set. For R sets, the
            shape is (R, 9).

    Returns:
        The scores, (R, 4), 0 to 1.
    """
    correct, total, closest = np.split(counts, [ORDERS, 2 * ORDERS], axis=1)
    precisions = np.cumprod((correct + _TINY) / (total + _SMALL), axis=1)
    means = precisions ** (1 / np.arange(1, ORDERS + 1))
    ratio = (total[:, :1] + _TINY) / (closest + _SMALL)
    result: NDArray[np.float64] = means * np.exp(np.minimum(0, 1 - 1 / ratio))
    return result
