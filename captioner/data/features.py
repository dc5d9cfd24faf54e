"""Cached features of a frozen encoder: computed once, read in every epoch.

    FOLDER/features.bin      rows of (L, D): the photos, then flipped versions of the first ones
    FOLDER/features.json     written last: what the rows were made from, checksums
    FOLDER/features.journal  only while it is filled: the header of features.json, then one line per
                             block whose rows are on disk

Notation: N rows, B photos, L = Gh x Gw regions, D feature size.
"""

from __future__ import annotations

import hashlib
import json
import os
import zlib
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import get_worker_info

from captioner.data.coco import CaptionedImage
from captioner.data.prefetch import reader_threads
from captioner.errors import DataError
from captioner.model.preprocessing import Preprocessing

VERSION = 1
ROWS, CONTENTS, JOURNAL = "features.bin", "features.json", "features.journal"
DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}
COMMAND = "captioner prepare features CONFIG.yaml"


def feature_fingerprint(
    encoder_name: str,
    state: Mapping[str, Tensor],
    preprocessing: Preprocessing,
    *,
    dtype: str | None = None,
    precision: str | None = None,
    stage: str | None = None,
) -> dict[str, str]:
    """What features depend on besides the photo.

    Args:
        encoder_name: As in the config.
        state: The encoder's ``state_dict()``, of which the SHA-256 is taken.
        preprocessing: The encoder's; every field is included.
        dtype: Storage type of the rows; None: left out, so that any matches.
        precision: Precision of the encoder; None: left out, so that any matches.
        stage: Encoder stage whose input is cached; None: the encoder's output.
    """
    weights = hashlib.sha256()
    for name, tensor in state.items():
        weights.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        flat = tensor.detach().cpu().contiguous().reshape(-1) + 0  # a running average loses -0.0
        weights.update(flat.view(torch.uint8).numpy().data)
    fingerprint = {"encoder": encoder_name, "weights": weights.hexdigest()}
    for name, value in asdict(preprocessing).items():
        fingerprint[name] = value if isinstance(value, str) else json.dumps(value)
    optional = {"dtype": dtype, "precision": precision, "stage": stage}
    return fingerprint | {name: value for name, value in optional.items() if value is not None}


class Record(NamedTuple):
    """A photo's file as it was read, and the checksums of its rows."""

    size: int
    """File size (bytes); -1: the file could not be opened."""
    mtime_ns: int
    """Modification time (nanoseconds)."""
    sha256: str
    """Of the file's bytes."""
    crc: int | None
    """CRC-32 of the row; None: no row, because the photo could not be read."""
    flipped_crc: int | None
    """CRC-32 of the flipped photo's row; None: no such row."""


class FeatureCache:
    """The rows of a complete folder, memory-mapped; safe to share between threads."""

    def __init__(self, folder: Path, contents: Mapping[str, Any], rows: NDArray[np.uint8]) -> None:
        """Use `open`, which checks the folder."""
        self.folder = folder
        self.fingerprint: dict[str, str] = contents["key"]
        self.dtype = DTYPES[self.fingerprint["dtype"]]
        self.stage = self.fingerprint.get("stage")
        """Encoder stage whose input is cached; None: the encoder's output."""
        self.shape: tuple[int, int, int] = tuple(contents["shape"])
        """N, L, D."""
        self.grid: tuple[int, int] = tuple(contents["grid"])
        """Gh, Gw."""
        self.flipped: int = contents["mirrored"]
        """Number of photos, from the first, that also have a flipped row."""
        self.records = [Record(*record) for record in contents["records"]]
        self._names: list[str] = [name for _, name in contents["photos"]]
        self._index = {image_id: row for row, (image_id, _) in enumerate(contents["photos"])}
        self._rows = rows
        self._verified = np.zeros(self.shape[0], dtype=bool)

    @classmethod
    def open(cls, folder: str | Path, fingerprint: Mapping[str, str]) -> FeatureCache:
        """Open a folder that ``captioner prepare features`` has written.

        Args:
            folder: The folder.
            fingerprint: From `feature_fingerprint`; what it leaves out matches any.

        Raises:
            DataError: The folder has no features, is incomplete or damaged, or was made with
                another fingerprint.
        """
        folder = Path(folder)
        if not (folder / CONTENTS).exists():
            begun = (folder / JOURNAL).exists()
            problem = "is incomplete; continue" if begun else "has no features; create them"
            raise DataError(f"{folder} {problem} with: {COMMAND} -o {folder}")
        contents = read_contents(folder)
        if other := difference(contents.get("key", {}), fingerprint):
            raise DataError(f"{folder} was made with {other}; {_recreate(folder)}")
        try:
            count, regions, feature_dim = contents["shape"]
            row_bytes = regions * feature_dim * DTYPES[contents["key"]["dtype"]].itemsize
            rows = np.memmap(folder / ROWS, np.uint8, "r", shape=(count, row_bytes))
        except (OSError, KeyError, ValueError) as error:
            raise DataError(f"{folder} is damaged ({error}); {_recreate(folder)}") from error
        return cls(folder, contents, rows)

    def __reduce__(self) -> tuple[Any, ...]:  # another process maps the file itself
        return FeatureCache.open, (self.folder, self.fingerprint)

    def has(self, image_id: int) -> bool:
        """Whether the photo has a row; False if it is unknown or could not be read."""
        row = self._index.get(image_id)
        return row is not None and self.records[row].crc is not None

    def check(self, images: Sequence[CaptionedImage], *, flipped: bool = False) -> None:
        """Check that the rows belong to these photos as they are now.

        A file of the same size and time counts as unchanged; if only the time differs (a copied
        data set), its checksum is compared. Missing files are not an error. A photo that could not
        be read counts as known (see `has`).

        Args:
            images: The photos to be read.
            flipped: Whether their flipped rows are needed too.

        Raises:
            DataError: Photos are not in the cache, or their files have changed.
        """
        with ThreadPoolExecutor(reader_threads()) as pool:
            problems = list(pool.map(partial(self._problem, flipped), images))
        if wrong := [n for n, problem in enumerate(problems) if problem]:
            raise DataError(
                f"{len(wrong)} of {len(images)} photos {problems[wrong[0]]} {self.folder} "
                f"(first: {images[wrong[0]].path}); {_recreate(self.folder)}"
            )

    def read(self, photos: Sequence[tuple[int, bool]]) -> Tensor:
        """Gather rows.

        A row's checksum is verified when this process first reads it.

        Args:
            photos: Image ids, each with whether to read the flipped row.

        Returns:
            (B, L, D) in the cache's dtype; zeros for a photo that could not be read (see `has`).
            Pinned if there is a GPU, except in a ``DataLoader`` worker: a forked process cannot
            initialize CUDA.

        Raises:
            DataError: A row is damaged.
        """
        pin = torch.cuda.is_available() and get_worker_info() is None
        shape = (len(photos), *self.shape[1:])
        features = torch.empty(shape, dtype=self.dtype, pin_memory=pin)
        target = features.view(torch.uint8).numpy().reshape(len(photos), self._rows.shape[1])
        for number, (image_id, flipped) in enumerate(photos):
            photo = self._index[image_id]
            row, record = photo + flipped * len(self.records), self.records[photo]
            target[number] = 0 if record.crc is None else self._rows[row]
            if not self._verified[row] and record.crc is not None:
                crc = record.flipped_crc if flipped else record.crc
                if zlib.crc32(target[number].data) != crc:
                    raise DataError(
                        f"{self.folder / ROWS}: the features of {self._names[photo]} are damaged; "
                        f"{_recreate(self.folder)}"
                    )
                self._verified[row] = True
        return features

    def _problem(self, flipped: bool, image: CaptionedImage) -> str:
        """Why the rows are not those of a photo; empty if they are."""
        row = self._index.get(image.image_id)
        if row is None or self._names[row] != image.path.name:
            return "are not in"
        if flipped and row >= self.flipped:
            return "have no flipped row (data.horizontal_flip) in"
        record = self.records[row]
        try:
            status = image.path.stat()
        except OSError:
            return ""
        if (status.st_size, status.st_mtime_ns) == (record.size, record.mtime_ns):
            return ""
        changed = 0 <= record.size != status.st_size
        changed = changed or read_file(image.path)[0][2] != record.sha256
        return "have changed since they were encoded for" if changed else ""


def _recreate(folder: Path) -> str:
    return f"recreate them with: {COMMAND} -o {folder} --force"


# --- Shared with the writer -----------------------------------------------------------------------


def read_contents(folder: Path) -> dict[str, Any]:
    """The content of ``features.json``; empty if it cannot be read or is of another version."""
    try:
        contents: dict[str, Any] = json.loads((folder / CONTENTS).read_text(encoding="utf-8"))
        return contents if contents["version"] == VERSION else {}
    except (OSError, ValueError, KeyError, TypeError):
        return {}


def difference(held: Mapping[str, str], expected: Mapping[str, str]) -> str | None:
    """The first value of a fingerprint that differs, for error messages."""
    for name, value in expected.items():
        if held.get(name) != value:
            if name == "weights":
                return "other encoder weights"
            return f"{name} {held.get(name)}, not {value}"
    return None


def read_file(path: Path) -> tuple[tuple[int, int, str], bytes | None]:
    """Size, time and SHA-256 as in `Record`, and the bytes; None if the file cannot be read."""
    try:
        if path.is_fifo():  # opening it would wait for somebody to write to it
            return (-1, 0, ""), None
        with path.open("rb") as file:
            status, data = os.fstat(file.fileno()), file.read()
    except OSError:
        return (-1, 0, ""), None
    return (status.st_size, status.st_mtime_ns, hashlib.sha256(data).hexdigest()), data
