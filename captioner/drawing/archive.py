"""A NumPy archive (.npz) with the attention maps of many photos, for use in other programs.

The archive has N rows, one for each caption. All arrays are padded to T words, the number of words
in the longest caption. The padding consists of empty words and zeros. In the array ``truth`` (the
probability that a word is true), it consists of NaN. Arrays for left-out words are padded in the
same way to the largest number of left-out words, U. No array is pickled. docs/interoperability.md
lists the keys.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from captioner.caption_types import Caption, LeftOut
from captioner.data.images import image_size
from captioner.drawing.drawing import Drawing, check_captions
from captioner.errors import ConfigError
from captioner.hints import hinted

FORMAT_VERSION = 1
"""Version of the archive's keys and shapes, stored in the archive."""


@hinted
class MapArchive(Drawing):
    """An archive of captions and their attention maps, saved as ``.npz``."""

    kind, suffixes = "an archive of maps", (".npz",)

    def __init__(self) -> None:
        self._rows: list[tuple[str, tuple[int, int], Caption]] = []

    def __len__(self) -> int:
        """Return the number of captions in the archive."""
        return len(self._rows)

    def add(
        self,
        photo: str | Path,
        captions: Caption | Sequence[Caption],
        size: tuple[int, int] | None = None,
    ) -> None:
        """Add the captions of a photo.

        Args:
            photo: The path of the photo, or any name if ``size`` is set. The archive stores it as
                the photo's name.
            captions: One caption or several.
            size: Width and height of the upright photo in pixels, or None to read the file.

        Raises:
            ConfigError: An entry is not a caption, or its grid differs from the grid of earlier
                captions.
            ImageError: The photo cannot be read.
        """
        size = size or image_size(photo)
        for caption in check_captions(captions):
            if self._rows and self._rows[0][2].alphas.shape[1:] != caption.alphas.shape[1:]:
                raise ConfigError(
                    f"the grid of the maps of {photo} differs from the grid of earlier "
                    "photos; write one archive per model"
                )
            self._rows.append((str(photo), size, caption))

    def arrays(self) -> dict[str, NDArray[Any]]:
        """Return the arrays of the archive by their keys.

        Raises:
            ConfigError: The archive is empty.
        """
        if not self._rows:
            raise ConfigError("the archive is empty; add the captions of at least one photo")
        names, sizes, captions = zip(*self._rows, strict=True)
        left_out = [one.left_out or _nothing(one) for one in captions]
        more = {f"left_out_{key}": value for key, value in _padded(left_out).items()}
        return {
            "format_version": np.array(FORMAT_VERSION),
            "photos": np.array(names),
            "sizes": np.array(sizes, dtype=np.int32)[:, ::-1],
            "captions": np.array([caption.text for caption in captions]),
            **_padded(captions),
            "log_prob": np.array([caption.log_prob for caption in captions], dtype=np.float32),
            "geometry": np.array([[*caption.regions] for caption in captions], dtype=np.float64),
            **more,
        }

    def encode(self, suffix: str = ".npz") -> bytes:  # noqa: ARG002 - there is only one format
        """Return the compressed content of the file.

        Raises:
            ConfigError: The archive is empty.
        """
        data = io.BytesIO()
        np.savez_compressed(data, allow_pickle=False, **self.arrays())
        return data.getvalue()


def _nothing(caption: Caption) -> LeftOut:
    """Return an empty ``LeftOut`` for a caption without left-out words."""
    none = np.empty(0, np.float32)
    return LeftOut((), none, caption.alphas[:0], none, none)


def _padded(rows: Sequence[Caption | LeftOut]) -> dict[str, NDArray[Any]]:
    """Return the words and arrays of all rows by their keys, padded to the longest row."""
    lengths = [len(row.words) for row in rows]
    rests = [max(lengths) - length for length in lengths]

    def padded(values: Sequence[NDArray[np.float32]], fill: float = 0.0) -> NDArray[np.float32]:
        """Stack arrays (T, ...) of different T into one array (N, T, ...)."""
        widths = [[(0, rest)] + [(0, 0)] * (values[0].ndim - 1) for rest in rests]
        pairs = zip(values, widths, strict=True)
        return np.array([np.pad(*one, constant_values=fill) for one in pairs], dtype=np.float32)

    unknown = np.full(max(lengths), np.nan, np.float32)
    truth = [unknown[: len(row.words)] if row.truth is None else row.truth for row in rows]
    words = [[*row.words, *[""] * rest] for row, rest in zip(rows, rests, strict=True)]
    return {
        "lengths": np.array(lengths, dtype=np.int32),
        "words": np.array(words, dtype=str),
        "alphas": padded([row.alphas for row in rows]),
        "gates": padded([row.gates for row in rows]),
        "log_probs": padded([row.log_probs for row in rows]),
        "truth": padded(truth, np.nan),
    }
