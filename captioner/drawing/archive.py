"""Attention maps of many photos as one NumPy archive (.npz), for other programs.

One row per caption, N in all; T is the number of words of the longest one, and shorter captions are
padded with empty words and zeros. Nothing is pickled. The keys are documented in
docs/interoperability.md.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from captioner.caption import Caption
from captioner.data.images import image_size
from captioner.drawing.options import Drawing, check_captions
from captioner.errors import ConfigError

FORMAT_VERSION = 1


class MapArchive(Drawing):
    """Captions and their attention maps, to be saved as ``.npz``."""

    kind, suffixes = "an archive of maps", (".npz",)

    def __init__(self) -> None:
        self._rows: list[tuple[str, tuple[int, int], Caption]] = []

    def __len__(self) -> int:
        return len(self._rows)

    def add(
        self,
        photo: str | Path,
        captions: Caption | Sequence[Caption],
        size: tuple[int, int] | None = None,
    ) -> None:
        """Add the captions of a photo.

        Args:
            photo: Its path, which becomes part of the archive; any name if ``size`` is given.
            captions: One, or several.
            size: Width and height of the upright photo (pixels); None: read from the file.

        Raises:
            ConfigError: A caption's arrays do not match its words, or its grid differs from that of
                the captions before.
            ImageError: The photo cannot be read.
        """
        size = size or image_size(photo)
        for caption in check_captions(captions):
            if self._rows and self._rows[0][2].alphas.shape[1:] != caption.alphas.shape[1:]:
                raise ConfigError(
                    f"{photo} has maps of another grid than the photos before it; write one "
                    "archive per model"
                )
            self._rows.append((str(photo), size, caption))

    def arrays(self) -> dict[str, NDArray[Any]]:
        """The contents of the archive by their keys; ConfigError: there are no captions."""
        if not self._rows:
            raise ConfigError("the archive has no captions; add at least one")
        names, sizes, captions = zip(*self._rows, strict=True)
        lengths = [len(caption.words) for caption in captions]
        rests = [max(lengths) - length for length in lengths]

        def padded(field: str) -> NDArray[np.float32]:
            """An array of the captions, (N, T, ...)."""
            values = [getattr(caption, field) for caption in captions]
            widths = [[(0, rest)] + [(0, 0)] * (values[0].ndim - 1) for rest in rests]
            return np.array(list(map(np.pad, values, widths)), dtype=np.float32)

        words = [[*one.words, *[""] * rest] for one, rest in zip(captions, rests, strict=True)]
        return {
            "format_version": np.array(FORMAT_VERSION),
            "photos": np.array(names),
            "sizes": np.array(sizes, dtype=np.int32)[:, ::-1],
            "captions": np.array([caption.text for caption in captions]),
            "lengths": np.array(lengths, dtype=np.int32),
            "words": np.array(words, dtype=str),
            "alphas": padded("alphas"),
            "gates": padded("gates"),
            "log_probs": padded("log_probs"),
            "log_prob": np.array([caption.log_prob for caption in captions], dtype=np.float32),
            "geometry": np.array([[*caption.regions] for caption in captions], dtype=np.float64),
        }

    def encode(self, suffix: str = ".npz") -> bytes:  # noqa: ARG002 - there is only one format
        """The content of the file, compressed; ConfigError: there are no captions."""
        data = io.BytesIO()
        np.savez_compressed(data, allow_pickle=False, **self.arrays())
        return data.getvalue()
