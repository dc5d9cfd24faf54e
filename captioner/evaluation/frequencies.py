"""Document frequencies: in how many photos' captions each phrase occurs.

CIDEr gives rare phrases more weight. Counted over the photos being scored, the weights depend on
which photos are scored together, and CIDEr of a single photo is always 0. Frequencies that are
counted once and kept in a file make scores comparable for one photo, a subset and training.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import zlib
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from json.encoder import encode_basestring
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from captioner.errors import DataError
from captioner.files import FREQUENCIES, atomic_write, read_input
from captioner.text.tokenizer import caption_tokens

GZIP = b"\x1f\x8b"
"""First bytes of a frequencies file; a captions file does not start with them."""

FORMAT_VERSION = 1

ORDERS = 4
"""Maximum length of the phrases that are counted, in words."""

Ngram = tuple[str, ...]
Integers = NDArray[np.signedinteger[Any]]


def split_tokens(tokens: Iterable[str]) -> list[str]:
    """Words of tokens.

    A space inside a token (the non-breaking one of ``1 1/2``) splits it, as in pycocoevalcap.
    """
    return " ".join(tokens).split()


BITS = 32
LOW = 2**BITS - 1


def pack(high: Integers, low: Integers) -> Integers:
    """Pack two numbers into one that sorts by the first."""
    return (high.astype(np.int64) << BITS) | low


def words_left(lengths: Integers) -> Integers:
    """Words from each word of the sentences to the end of its sentence, itself included."""
    ends = np.cumsum(lengths, dtype=np.int32)
    left: Integers = np.repeat(ends, lengths)
    left -= np.arange(len(left), dtype=np.int32)
    return left


def number_ngrams(
    words: Integers, lengths: Integers
) -> Iterator[tuple[Integers, Integers, Integers]]:
    """Number the n-grams of sentences, for n = 1 to 4.

    Args:
        words: Word numbers of all sentences, concatenated.
        lengths: Length of each sentence.

    Yields:
        ``places``: Where each n-gram starts, (P,). ``table``: Number of the first n - 1 words
        packed with the last word, ascending, (G,); the number of an n-gram is its index here.
        ``grams``: The number of each n-gram, (P,).
    """
    # In 32 bits where possible, without np.unique: there are millions of n-grams.
    left = words_left(lengths)
    numbers = np.zeros(len(words), np.int32)
    for shift in range(ORDERS):
        places = np.flatnonzero(left > shift).astype(np.int32)
        keys = pack(numbers[places], words[places + shift])
        order = np.argsort(keys)
        keys = keys[order]
        new = np.diff(keys, prepend=-1) > 0
        numbers[places[order]] = np.cumsum(new, dtype=np.int32) - 1
        del order
        table = keys[new]
        del keys
        yield places, table, numbers[places]


def spell(tables: Sequence[Integers], grams: Integers, words: Sequence[str]) -> Iterable[Ngram]:
    """The words of n-grams.

    Args:
        tables: Tables of `number_ngrams` up to that of the n-grams.
        grams: Their numbers.
        words: The words by number.
    """
    columns: list[list[str]] = []
    for table in reversed(tables):
        keys = table[grams]
        columns.append([words[number] for number in (keys & LOW).tolist()])
        grams = keys >> BITS
    return zip(*reversed(columns), strict=True)


@dataclass(frozen=True)
class DocumentFrequencies:
    """Number of images whose references contain each n-gram."""

    documents: int
    """Number of images that were counted."""
    counts: Mapping[Ngram, int]
    """Images per n-gram, 2 or more. N-grams of one image are left out: the formula uses the
    logarithm of max(1, count), so this changes no score and saves most of the space."""

    @classmethod
    def from_references(cls, references: Mapping[int, Sequence[str]]) -> DocumentFrequencies:
        """Count over captions by image id that are not yet tokenized; see `from_tokens`."""
        return cls._count(map(caption_tokens, captions) for captions in references.values())

    @classmethod
    def from_tokens(cls, references: Mapping[int, Sequence[Sequence[str]]]) -> DocumentFrequencies:
        """Count over tokenized captions by image id; images without captions are ignored.

        Raises:
            DataError: No image has a caption.
        """
        return cls._count(references.values())

    @classmethod
    def _count(cls, images: Iterable[Iterable[Iterable[str]]]) -> DocumentFrequencies:
        """Count over the tokens of the captions of each image, in arrays.

        A dictionary of all n-grams of a large data set would take gigabytes, most of them for
        n-grams of a single image.
        """
        numbers: dict[str, int] = {}
        words, lengths, owners, documents = array("i"), array("i"), array("i"), 0
        for captions in images:
            before = len(lengths)
            for tokens in captions:
                parts = split_tokens(tokens)
                words.extend([numbers.setdefault(word, len(numbers)) for word in parts])
                lengths.append(len(parts))
            owners.extend([documents] * (len(lengths) - before))
            documents += len(lengths) > before
        if not documents:
            raise DataError(
                "no image has a reference caption to count; give annotations with captions"
            )
        counts: dict[Ngram, int] = {}
        names, tables = list(numbers), []
        image = np.repeat(np.asarray(owners), np.asarray(lengths))
        for places, table, grams in number_ngrams(np.asarray(words), np.asarray(lengths)):
            tables.append(table)
            pairs = pack(image[places], grams)
            pairs.sort()
            once = pairs[np.diff(pairs, prepend=-1) > 0] & LOW  # each n-gram once per image
            del pairs
            found = np.bincount(once, minlength=len(table))
            often = np.flatnonzero(found > 1)
            counts.update(zip(spell(tables, often, names), found[often].tolist(), strict=True))
        return cls(documents, counts)

    def save(self, path: str | Path) -> None:
        """Write a ``.json.gz`` file.

        Raises:
            OSError: The file cannot be written.
        """
        atomic_write(path, self.to_bytes())

    def to_bytes(self) -> bytes:
        """Content of the file; the same frequencies give the same bytes."""
        # As json.dumps would write it, without a second dictionary of all n-grams.
        counts = ",".join(
            f"{encode_basestring(' '.join(gram))}:{self.counts[gram]}"
            for gram in sorted(self.counts)
        )
        text = (
            f'{{"format_version":{FORMAT_VERSION},"documents":{self.documents},'
            f'"counts":{{{counts}}}}}'
        )
        # A token may hold a lone surrogate, which strict UTF-8 cannot encode.
        return gzip.compress(text.encode("utf-8", "surrogatepass"), mtime=0)

    def digest(self) -> str:
        """12 hex digits that identify these frequencies."""
        return hashlib.sha256(self.to_bytes()).hexdigest()[:12]

    @classmethod
    def load(cls, path: str | Path) -> DocumentFrequencies:
        """Read a file written by `save`.

        Raises:
            DataError: The file is missing, truncated, of another version or another kind.
        """
        return cls.from_bytes(read_input(path, "a document frequencies file"), str(path))

    @classmethod
    def from_bytes(cls, data: bytes, path: str = FREQUENCIES) -> DocumentFrequencies:
        """Read the content of a file.

        Args:
            data: Content of the file.
            path: File name for error messages.

        Raises:
            DataError: The content is truncated, of another version or another kind.
        """
        content = _unpack(data, path)
        version = content.get("format_version")
        if version != FORMAT_VERSION:
            raise DataError(
                f"{path} has format_version {version!r}; this release reads {FORMAT_VERSION}: "
                "count the frequencies again"
            )
        documents, counts = content.get("documents"), content.get("counts")
        if not (type(documents) is int and documents > 0 and isinstance(counts, dict)):
            raise DataError(f"{path} is not a document frequencies file; count them again")
        for text, count in counts.items():
            if not (type(count) is int and 1 <= count <= documents):
                raise DataError(
                    f"{path}: invalid count {count!r} for {text!r}, must be 1 to {documents}; "
                    "count the frequencies again"
                )
        return cls(documents, {tuple(text.split()): count for text, count in counts.items()})


def _unpack(data: bytes, path: str) -> dict[str, Any]:
    try:
        content = json.loads(gzip.decompress(data).decode("utf-8", "surrogatepass"))
    except (EOFError, zlib.error) as error:
        raise DataError(f"{path} is truncated or damaged; count the frequencies again") from error
    except (gzip.BadGzipFile, ValueError, RecursionError):
        content = None
    if not isinstance(content, dict):
        raise DataError(f"{path} is not a document frequencies file; give one written by captioner")
    return content
