"""Document frequencies: in how many photos' captions each phrase occurs.

CIDEr gives rare phrases more weight. Counted over the photos being scored, the weights depend on
which photos are scored together, and CIDEr of a single photo is always 0. Frequencies that are
counted once (``references.count_frequencies``) and kept in a file make scores comparable for one
photo, a subset and training.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from captioner.errors import DataError
from captioner.files import FREQUENCIES, read_input

GZIP = b"\x1f\x8b"
"""First bytes of a frequencies file; a captions file does not start with them."""

FORMAT_VERSION = 1

Ngram = tuple[str, ...]


@dataclass(frozen=True)
class DocumentFrequencies:
    """Number of images whose references contain each n-gram."""

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
