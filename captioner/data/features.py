"""Features of a frozen encoder: computed once, read in every epoch.

    FOLDER/features.bin      rows of (L, D): the photos, then the first of them mirrored
    FOLDER/features.json     written last: what the rows come from, checksums of files and rows
    FOLDER/features.journal  while it is filled, see `captioner.data.feature_writer`

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
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import get_worker_info

from captioner.data.coco import CaptionedImage
from captioner.data.preprocessing import Preprocessing
from captioner.errors import DataError

VERSION = 1
ROWS, CONTENTS, JOURNAL = "features.bin", "features.json", "features.journal"
DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}
COMMAND = "captioner prepare features CONFIG.yaml"


def feature_key(
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
        state: The encoder's ``state_dict()``.
        preprocessing: How the encoder sees a photo; each of its fields is a part of the key.
        dtype: What rows are kept in; None leaves the part out, so that any will do.
        precision: What the encoder computed in, ``fp32`` or ``bf16``; None as above.
        stage: The encoder's stage whose input is kept; None: the encoder's output.

    Returns:
        Parts by name; the weights as their SHA-256.
    """
    weights = hashlib.sha256()
    for name, tensor in state.items():
        weights.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        flat = tensor.detach().cpu().contiguous().reshape(-1) + 0  # a running average loses -0.0
        weights.update(flat.view(torch.uint8).numpy().data)
    seen = {
        name: value if isinstance(value, str) else json.dumps(value)
        for name, value in asdict(preprocessing).items()
    }
    key = {"encoder": encoder_name, "weights": weights.hexdigest(), **seen}
    asked = {"dtype": dtype, "precision": precision, "stage": stage}
    return key | {name: value for name, value in asked.items() if value is not None}


class Record(NamedTuple):
    """A photo's file as it was read, and the checksums of its rows."""

    size: int
    """Bytes of the file; -1: it could not be opened."""
    mtime_ns: int
    """When it was changed (nanoseconds)."""
    sha256: str
    """Of its bytes."""
    crc: int | None
    """CRC-32 of its row; None: the photo could not be read, there is no row."""
    mirrored_crc: int | None
    """The same of its mirrored row; None: not asked for, or not to be had."""


class FeatureCache:
    """The rows of a finished folder, mapped into memory; threads may share it."""

    def __init__(self, folder: Path, contents: Mapping[str, Any], rows: NDArray[np.uint8]) -> None:
        """From what `open` has checked."""
        self.folder = folder
        self.key: dict[str, str] = contents["key"]
        self.dtype = DTYPES[self.key["dtype"]]
        self.stage = self.key.get("stage")
        """The encoder's stage whose input the rows are; None: they are its output."""
        self.shape: tuple[int, int, int] = tuple(contents["shape"])
        """N, L, D."""
        self.grid: tuple[int, int] = tuple(contents["grid"])
        """Gh, Gw."""
        self.mirrored: int = contents["mirrored"]
        """So many photos have a mirrored row; 0: none."""
        self.records = [Record(*record) for record in contents["records"]]
        self._names: list[str] = [name for _, name in contents["photos"]]
        self._index = {image_id: row for row, (image_id, _) in enumerate(contents["photos"])}
        self._rows = rows
        self._verified = np.zeros(self.shape[0], dtype=bool)

    @classmethod
    def open(cls, folder: str | Path, key: Mapping[str, str]) -> FeatureCache:
        """Open a folder for an encoder.

        Args:
            folder: What ``captioner prepare features`` has written.
            key: From `feature_key`; parts that it leaves out may be any.

        Raises:
            DataError: There are no features, they are incomplete or damaged, or were made with
                another key.
        """
        folder = Path(folder)
        if not (folder / CONTENTS).exists():
            begun = (folder / JOURNAL).exists()
            problem = "is incomplete; go on" if begun else "holds no features; make them"
            raise DataError(f"{folder} {problem} with: {COMMAND} -o {folder}")
        contents = _whole_contents(folder)
        if other := difference(contents["key"], key):
            raise DataError(f"{folder} was made with {other}; {_anew(folder)}")
        count, regions, feature_dim = contents["shape"]
        row_bytes = regions * feature_dim * DTYPES[contents["key"]["dtype"]].itemsize
        if (found := file_size(folder / ROWS)) != count * row_bytes:
            raise DataError(
                f"{folder / ROWS} has {max(0, found):,} bytes where {count * row_bytes:,} are "
                f"expected; {_anew(folder)}"
            )
        rows = np.memmap(folder / ROWS, np.uint8, "r", shape=(count, row_bytes))
        return cls(folder, contents, rows)

    def __reduce__(self) -> tuple[Any, ...]:  # another process maps the file itself
        return FeatureCache.open, (self.folder, self.key)

    def has(self, image_id: int) -> bool:
        """Whether there is a row; not for an unknown photo, nor for one that cannot be read."""
        row = self._index.get(image_id)
        return row is not None and self.records[row].crc is not None

    def check(self, images: Sequence[CaptionedImage], *, mirrored: bool = False) -> None:
        """Make sure that the rows are those of these photos as they are now.

        A file of the same size and time is taken for unchanged; where the time differs (a copied
        data set) its bytes are compared by checksum. A file that is not there any more is no
        error: its features are. A photo that could not be read counts as known (see `has`).

        Args:
            images: The photos to be read.
            mirrored: Whether they are to be read mirrored too.

        Raises:
            DataError: Photos are not in the cache, or their files have changed.
        """
        unknown = [image for image in images if not self._knows(image)]
        self._refuse(unknown, images, "are not in")
        if mirrored:
            flat = [image for image in images if self._index[image.image_id] >= self.mirrored]
            self._refuse(flat, images, "have no mirrored row (data.horizontal_flip) in")
        with ThreadPoolExecutor(threads()) as readers:
            changes = list(readers.map(self._changed, images))
        changed = [image for image, other in zip(images, changes, strict=True) if other]
        self._refuse(changed, images, "are no longer what they were for")

    def read(self, photos: Sequence[tuple[int, bool]]) -> Tensor:
        """Gather rows.

        A row's checksum is verified when this process reads it first.

        Args:
            photos: Image ids, each with whether its mirrored row is meant.

        Returns:
            (B, L, D) in the cache's dtype; zeros for a photo that could not be read (see `has`).
            In pinned memory where there is a GPU, except in a worker of a ``DataLoader``: a forked
            process cannot ask for it.

        Raises:
            DataError: There is no such row, or it is damaged.
        """
        pin = torch.cuda.is_available() and get_worker_info() is None
        shape = (len(photos), *self.shape[1:])
        features = torch.empty(shape, dtype=self.dtype, pin_memory=pin)
        target = features.view(torch.uint8).numpy().reshape(len(photos), self._rows.shape[1])
        for number, (image_id, mirrored) in enumerate(photos):
            row, record = self._find(image_id, mirrored)
            target[number] = 0 if record.crc is None else self._rows[row]
            if not self._verified[row] and record.crc is not None:
                crc = record.mirrored_crc if mirrored else record.crc
                if zlib.crc32(target[number].data) != crc:
                    name = self._names[self._index[image_id]]
                    raise DataError(
                        f"{self.folder / ROWS}: the features of {name} are damaged; "
                        f"{_anew(self.folder)}"
                    )
                self._verified[row] = True
        return features

    def _find(self, image_id: int, mirrored: bool) -> tuple[int, Record]:
        """A row's number, and what is known of its photo."""
        photo = self._index.get(image_id)
        if photo is None or (mirrored and photo >= self.mirrored):
            kind = "mirrored photo" if mirrored else "photo"
            raise DataError(f"{self.folder} has no row of {kind} {image_id}; {_anew(self.folder)}")
        return photo + len(self.records) if mirrored else photo, self.records[photo]

    def _knows(self, image: CaptionedImage) -> bool:
        row = self._index.get(image.image_id)
        return row is not None and self._names[row] == image.path.name

    def _changed(self, image: CaptionedImage) -> bool:
        record = self.records[self._index[image.image_id]]
        try:
            status = image.path.stat()
        except OSError:  # not there, or out of sight
            return False
        if (status.st_size, status.st_mtime_ns) == (record.size, record.mtime_ns):
            return False
        if 0 <= record.size != status.st_size:
            return True
        return read_file(image.path)[0][2] != record.sha256

    def _refuse(
        self, wrong: Sequence[CaptionedImage], images: Sequence[CaptionedImage], problem: str
    ) -> None:
        if wrong:
            raise DataError(
                f"{len(wrong)} of {len(images)} photos {problem} {self.folder} "
                f"(first: {wrong[0].path}); {_anew(self.folder)}"
            )


# --- what the writer asks too ---


def read_contents(folder: Path) -> dict[str, Any] | None:
    """What stands in a finished folder's contents; None: nothing that can be read."""
    try:
        contents = json.loads((folder / CONTENTS).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return contents if isinstance(contents, dict) else None


def difference(held: Mapping[str, str], asked: Mapping[str, str]) -> str | None:
    """The first part of a key that differs, in words."""
    for part, value in asked.items():
        if held.get(part) != value:
            if part == "weights":
                return "other weights of the encoder"
            return f"{part} {held.get(part)}, now it is {value}"
    return None


def read_file(path: Path) -> tuple[tuple[int, int, str], bytes | None]:
    """Size, time and SHA-256 of a photo's file as in `Record`, and its bytes; None: no file."""
    try:
        with path.open("rb") as file:
            status, data = os.fstat(file.fileno()), file.read()
    except OSError:
        return (-1, 0, ""), None
    return (status.st_size, status.st_mtime_ns, hashlib.sha256(data).hexdigest()), data


def threads() -> int:
    """How many threads read files at a time."""
    return min(16, os.cpu_count() or 2)


def file_size(path: Path) -> int:
    """Bytes; -1 where there is no file."""
    return path.stat().st_size if path.is_file() else -1


# --- what only the reader asks ---


def _whole_contents(folder: Path) -> dict[str, Any]:
    """A finished folder's contents, of this version and whole."""
    contents = read_contents(folder) or {}
    if contents.get("version", VERSION) != VERSION:
        raise DataError(f"{folder} was made by another version of captioner; {_anew(folder)}")
    try:
        rows, _, _ = contents["shape"]
        photos = rows - contents["mirrored"]
        whole = len(contents["photos"]) == len(contents["records"]) == photos
        whole = whole and contents["key"]["dtype"] in DTYPES
    except (KeyError, TypeError, ValueError):
        whole = False
    if not whole:
        raise DataError(f"{folder / CONTENTS} is damaged; {_anew(folder)}")
    return contents


def _anew(folder: Path) -> str:
    return f"make them anew: {COMMAND} -o {folder} --force"
