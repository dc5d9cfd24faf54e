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
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from captioner.errors import DataError
from captioner.files import FREQUENCIES, atomic_write
from captioner.tokenizer import caption_tokens

GZIP = b"\x1f\x8b"
"""First bytes of a frequencies file; a captions file does not start with them."""

FORMAT_VERSION = 1

ORDERS = 4
"""Maximum length of the phrases that are counted, in words."""

Ngram = tuple[str, ...]


def ngrams(tokens: Iterable[str]) -> list[Counter[Ngram]]:
    """Count the n-grams of a caption.

    Args:
        tokens: Tokens of one caption. A space inside a token (the non-breaking one of ``1 1/2``)
            splits it, as in pycocoevalcap.

    Returns:
        Counts of unigrams, bigrams, trigrams and 4-grams.
    """
    words = " ".join(tokens).split()
    tails = [words[start:] for start in range(ORDERS)]
    return [Counter(zip(*tails[:order], strict=False)) for order in range(1, ORDERS + 1)]


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
        return cls.from_tokens(tokenized(references))

    @classmethod
    def from_tokens(cls, references: Mapping[int, Sequence[Sequence[str]]]) -> DocumentFrequencies:
        """Count over tokenized captions by image id; images without captions are ignored.

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
            OSError: The file cannot be written.
        """
        atomic_write(path, self.to_bytes())

    def to_bytes(self) -> bytes:
        """Content of the file; the same frequencies give the same bytes."""
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
        """Read a file written by `save`.

        Raises:
            DataError: The file is missing, truncated, of another version or another kind.
        """
        try:
            data = Path(path).read_bytes()
        except FileNotFoundError as error:
            raise DataError(f"{path} does not exist; give a document frequencies file") from error
        except IsADirectoryError as error:
            raise DataError(f"{path} is a folder; give a document frequencies file") from error
        except OSError as error:
            raise DataError(f"{path} cannot be read: {error.strerror}") from error
        return cls.from_bytes(data, str(path))

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


def tokenized(references: Mapping[int, Sequence[str]]) -> dict[int, list[list[str]]]:
    """Tokens of captions by image id."""
    return {i: [caption_tokens(text) for text in captions] for i, captions in references.items()}


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
