"""In how many photos' captions a phrase occurs: counted once, kept in a file, the same for all.

CIDEr weighs a phrase by how few photos' captions hold it. Counted over the photos at hand, the same
caption scores differently in another company, and alone always 0; frozen frequencies make a score
mean the same for one photo, for a subset and in training.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import zlib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from captioner.errors import DataError
from captioner.files import atomic_write
from captioner.tokenizer import tokenize

FREQUENCIES = "document_frequencies.json.gz"
"""The file's usual name; a model folder keeps it under this one."""

GZIP = b"\x1f\x8b"
"""What such a file begins with, and a captions file does not."""

FORMAT_VERSION = 1
"""Of the file; another number means that this release cannot read it."""

ORDERS = 4
"""Phrases of one to so many words are counted."""

Ngram = tuple[str, ...]


def ngrams(tokens: Iterable[str]) -> list[Counter[Ngram]]:
    """How often each n-gram occurs.

    Args:
        tokens: Tokens of one caption. A blank inside a token (the non-breaking one of ``1 1/2``)
            parts it in two, as in pycocoevalcap.

    Returns:
        Counts of the single words, the pairs, the triples and the quadruples.
    """
    words = " ".join(tokens).split()
    tails = [words[start:] for start in range(ORDERS)]
    return [Counter(zip(*tails[:order], strict=False)) for order in range(1, ORDERS + 1)]


@dataclass(frozen=True)
class DocumentFrequencies:
    """In how many images' references each n-gram occurs."""

    documents: int
    """Images that were counted."""
    counts: Mapping[Ngram, int]
    """Images that hold the n-gram, 2 or more. One image counts as none: the formula takes the
    logarithm of max(1, count), so to leave these out (most of them) changes no score."""

    @classmethod
    def from_references(cls, references: Mapping[int, Sequence[str]]) -> DocumentFrequencies:
        """Count over captions as a person writes them, by image id; see `from_tokens`."""
        return cls.from_tokens(tokenized(references))

    @classmethod
    def from_tokens(cls, references: Mapping[int, Sequence[Sequence[str]]]) -> DocumentFrequencies:
        """Count over tokenized captions by image id; an image without captions does not count.

        Raises:
            DataError: No image has a caption.
        """
        documents = [captions for captions in references.values() if captions]
        if not documents:
            raise DataError(
                "no image has a reference caption to count; give annotations with captions"
            )
        counts: Counter[Ngram] = Counter()
        for captions in documents:
            counts.update(set(chain.from_iterable(chain.from_iterable(map(ngrams, captions)))))
        return cls(len(documents), {gram: n for gram, n in counts.items() if n > 1})

    def save(self, path: str | Path) -> None:
        """Write a ``.json.gz`` file.

        Raises:
            OSError: It cannot be written.
        """
        atomic_write(path, self.to_bytes())

    def to_bytes(self) -> bytes:
        """The content of such a file; the same frequencies give the same bytes."""
        content = {
            "format_version": FORMAT_VERSION,
            "documents": self.documents,
            "counts": {" ".join(gram): self.counts[gram] for gram in sorted(self.counts)},
        }
        text = json.dumps(content, ensure_ascii=False, separators=(",", ":"))
        # A token may hold half of a surrogate pair, which JSON can say and UTF-8 cannot.
        data = text.encode("utf-8", "surrogatepass")
        return gzip.compress(data, mtime=0)

    def digest(self) -> str:
        """Tells these frequencies from others: 12 signs."""
        return hashlib.sha256(self.to_bytes()).hexdigest()[:12]

    @classmethod
    def load(cls, path: str | Path) -> DocumentFrequencies:
        """Read what `save` wrote.

        Raises:
            DataError: The file is missing, cut, of another version or not one.
        """
        try:
            data = Path(path).read_bytes()
        except FileNotFoundError as error:
            raise DataError(
                f"{path} does not exist; give a file of document frequencies"
            ) from error
        except IsADirectoryError as error:
            raise DataError(f"{path} is a folder; give a file of document frequencies") from error
        except OSError as error:
            raise DataError(f"{path} cannot be read: {error.strerror}") from error
        return cls.from_bytes(data, str(path))

    @classmethod
    def from_bytes(cls, data: bytes, path: str = FREQUENCIES) -> DocumentFrequencies:
        """Read what `to_bytes` gave.

        Args:
            data: The content of the file.
            path: Its name, for the error.

        Raises:
            DataError: It is cut, of another version or not one.
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
            raise DataError(f"{path} is no file of document frequencies; count them again")
        for text, count in counts.items():
            if not (type(count) is int and 1 <= count <= documents):
                raise DataError(
                    f"{path}: {text!r} in {count!r} of {documents} images cannot be; "
                    "count the frequencies again"
                )
        return cls(documents, {tuple(text.split()): count for text, count in counts.items()})


def tokenized(references: Mapping[int, Sequence[str]]) -> dict[int, list[list[str]]]:
    """Tokens of captions as a person writes them, by image id."""
    return {i: [tokenize(text) for text in captions] for i, captions in references.items()}


def _unpack(data: bytes, path: str) -> dict[str, Any]:
    try:
        content = json.loads(gzip.decompress(data).decode("utf-8", "surrogatepass"))
    except (EOFError, zlib.error) as error:
        raise DataError(f"{path} is cut or damaged; count the frequencies again") from error
    except (gzip.BadGzipFile, ValueError, RecursionError) as error:
        raise DataError(
            f"{path} is no file of document frequencies; give one that captioner wrote"
        ) from error
    if not isinstance(content, dict):
        raise DataError(f"{path} is no file of document frequencies; give one that captioner wrote")
    return content
