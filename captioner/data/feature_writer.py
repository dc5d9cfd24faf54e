"""Writes a folder of features, which `captioner.data.features` reads.

An interrupted run loses at most one block. The encoder is passed in as a function. `encode_photos`
makes the blocks, in this process or elsewhere, and `FeatureWriter` writes them.
"""

from __future__ import annotations

import io
import json
import os
import zlib
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from captioner.data.coco import CaptionedImage
from captioner.data.features import (
    CONTENTS,
    DTYPES,
    JOURNAL,
    ROWS,
    VERSION,
    Record,
    difference,
    read_contents,
    read_file,
)
from captioner.data.images import open_image
from captioner.data.journal import continue_journal, read_journal
from captioner.data.prefetch import read_batches, reader_threads
from captioner.errors import ConfigError, DataError, ImageError
from captioner.files import atomic_write, write_lock
from captioner.model.preprocessing import Preprocessing

Encode = Callable[[Tensor], Tensor]
"""Pixels (B, H, W, 3) bytes to features (B, L, D) on any device."""

Blocks = Generator["Block", None, None]
"""Blocks of consecutive photos."""

Progress = Iterator[tuple[int, list[str]]]
"""For each block written, the number of photos and the errors of those that could not be read."""


@dataclass(frozen=True)
class FeaturePlan:
    """What a cache will hold."""

    images: Sequence[CaptionedImage]
    """The photos, in the order of their rows."""
    flipped: int
    """Number of photos, from the first, that are also encoded flipped."""
    grid: tuple[int, int]
    """Gh, Gw."""
    feature_dim: int
    """D."""
    fingerprint: Mapping[str, str]
    """From `feature_fingerprint`, with dtype and precision."""

    @property
    def row_bytes(self) -> int:
        """Size of a row (bytes)."""
        regions = self.grid[0] * self.grid[1]
        return regions * self.feature_dim * DTYPES[self.fingerprint["dtype"]].itemsize

    @property
    def bytes(self) -> int:
        """Size of all rows (bytes)."""
        return (len(self.images) + self.flipped) * self.row_bytes

    @property
    def header(self) -> dict[str, Any]:
        """Start of the journal and of features.json."""
        rows = len(self.images) + self.flipped
        return {
            "version": VERSION,
            "key": dict(self.fingerprint),
            "shape": [rows, self.grid[0] * self.grid[1], self.feature_dim],
            "grid": list(self.grid),
            "mirrored": self.flipped,
            "photos": [[image.image_id, image.path.name] for image in self.images],
        }


class FeatureWriter:
    """Fills a folder; resuming an interrupted run gives the same bytes as an uninterrupted one."""

    def __init__(self, folder: str | Path, plan: FeaturePlan, *, force: bool = False) -> None:
        """Inspect the folder, which is new, empty or has part of these features; write nothing yet.

        With ``force``, other or complete features will be replaced, and other files kept.

        Raises:
            ConfigError: Two photos share an id, or the folder holds something else.
        """
        self.folder, self.plan, self.force = Path(folder), plan, force
        self.complete = False
        """Whether the folder is complete already."""
        self.records: list[Record] = []
        """Records of the photos whose rows are on disk."""
        by_id: dict[int, CaptionedImage] = {}
        for image in plan.images:
            if (other := by_id.setdefault(image.image_id, image)) is not image:
                raise ConfigError(
                    f"image id {image.image_id} is both {other.path} and {image.path}; features "
                    "are looked up by id, so give each photo its own"
                )
        self._inspect()

    @property
    def missing_bytes(self) -> int:
        """Disk space still needed (bytes)."""
        rows = self.folder / ROWS
        return max(0, self.plan.bytes - (512 * rows.stat().st_blocks if rows.exists() else 0))

    def fill(self, encode: Encode, preprocessing: Preprocessing, batch_size: int = 32) -> Progress:
        """Encode the missing photos, which threads read ahead, and write their features.

        A resumed run gives the same bytes only with the same batch size, that of a block.
        """

        def blocks(start: int) -> Blocks:
            return encode_photos(
                [image.path for image in self.plan.images[start:]],
                encode,
                preprocessing,
                batch_size=batch_size,
                flipped=max(0, self.plan.flipped - start),
                dtype=self.plan.fingerprint["dtype"],
            )

        return self.write(blocks)

    def write(self, blocks: Callable[[int], Blocks]) -> Progress:
        """Write the blocks of the missing photos.

        Args:
            blocks: Yields them, in order, starting at the photo of this index.

        Raises:
            DataError: Another process is filling the folder, or features overflow the dtype.
            OSError: The disk is full, or the folder cannot be written.
        """
        journal, rows_file = self.folder / JOURNAL, self.folder / ROWS
        self.folder.mkdir(parents=True, exist_ok=True)
        with write_lock(self.folder):
            self._inspect()  # again: another process may have filled it
            if self.complete and not self.force:
                return
            done = [self.records] if self.records else []
            with continue_journal(journal, self.plan.header, done) as append:
                if not self.records:
                    # Removed rather than truncated: a training run may be reading the rows.
                    (self.folder / CONTENTS).unlink(missing_ok=True)
                    rows_file.unlink(missing_ok=True)
                    rows_file.touch()
                with rows_file.open("r+b") as rows, closing(blocks(len(self.records))) as found:
                    rows.truncate(self.plan.bytes)
                    for block in found:
                        for number, row in zip(self._numbers(block), block.rows, strict=True):
                            rows.seek(number * self.plan.row_bytes)
                            rows.write(row.data)
                        rows.flush()
                        os.fsync(rows.fileno())
                        append(block.records)
                        self.records += block.records
                        yield len(block.records), block.errors
            contents = {**self.plan.header, "records": self.records}
            atomic_write(self.folder / CONTENTS, json.dumps(contents))
            journal.unlink()
            self.complete = True

    def _inspect(self) -> None:
        """Find out how much is done; refuse a folder that holds something else."""
        folder, header = self.folder, self.plan.header
        if folder.exists() and not folder.is_dir():
            raise ConfigError(f"{folder} is a file; give a folder")
        held, blocks = read_journal(folder / JOURNAL)
        self.complete = False
        if (folder / CONTENTS).exists():
            held, blocks = read_contents(folder), []
            held.pop("records", None)
            self.complete = held == header
        resumable = held == header and (folder / ROWS).exists()
        self.records = [Record(*one) for block in blocks for one in block] if resumable else []
        others = sorted(path.name for path in folder.iterdir()) if folder.exists() else []
        if self.force or held == header or not others:
            return
        other = difference((held or {}).get("key") or {}, header["key"])
        problem = f"was made with {other}" if other else "holds features of other photos"
        problem = problem if held else f"holds other files (first: {others[0]})"
        raise ConfigError(f"{folder} {problem}; give another folder, or --force to write to it")

    def _numbers(self, block: Block) -> list[int]:
        """The numbers of a block's rows."""
        start = len(self.records)
        readable = [n for n, record in enumerate(block.records, start) if record.crc is not None]
        photos = len(self.plan.images)
        return [*readable, *(photos + n for n in readable if n < self.plan.flipped)]


class Block(NamedTuple):
    """Features of consecutive photos."""

    records: list[Record]
    """One per photo."""
    rows: NDArray[np.uint8]
    """(B', bytes): the rows of the photos that could be read, then those of the flipped photos."""
    errors: list[str]
    """Of the photos that could not be read."""


def encode_photos(
    paths: Sequence[Path],
    encode: Encode,
    preprocessing: Preprocessing,
    *,
    batch_size: int,
    flipped: int,
    dtype: str,
) -> Blocks:
    """Encode photos, which threads read ahead; features that overflow the dtype are a DataError.

    ``batch_size`` photos are encoded together and make a block; the first ``flipped`` photos are
    also encoded flipped, by themselves.
    """
    read, threads = partial(_read_photo, preprocessing), reader_threads()
    with closing(read_batches(read, paths, batch_size, threads=threads)) as batches:
        for start, batch in zip(count(0, batch_size), batches, strict=False):
            photos = [photo for _, photo in batch if not isinstance(photo, ImageError)]
            pixels = {n: p for n, (_, p) in enumerate(photos) if not isinstance(p, ImageError)}
            turned = {n: p[:, ::-1] for n, p in pixels.items() if start + n < flipped}
            upright, mirrored = (_encode(p, paths[start:], encode, dtype) for p in (pixels, turned))
            records = [
                Record(*file, _crc(upright.get(n)), _crc(mirrored.get(n)))
                for n, (file, _) in enumerate(photos)
            ]
            rows = [*upright.values(), *mirrored.values()]
            errors = [str(p) for _, p in photos if isinstance(p, ImageError)]
            yield Block(records, np.stack(rows) if rows else np.empty((0, 0), np.uint8), errors)


def _crc(row: NDArray[np.uint8] | None) -> int | None:
    return None if row is None else zlib.crc32(row.data)


def _encode(
    pixels: Mapping[int, NDArray[np.uint8]], paths: Sequence[Path], encode: Encode, dtype: str
) -> dict[int, NDArray[np.uint8]]:
    """The rows of photos, by their index in the block."""
    if not pixels:
        return {}
    features = encode(torch.from_numpy(np.stack(list(pixels.values())))).to(DTYPES[dtype])
    finite = features.isfinite().flatten(1).all(dim=1).tolist()
    if not all(finite):
        bad = paths[list(pixels)[finite.index(False)]]
        raise DataError(
            f"{bad}: features overflow {dtype}; use --dtype bfloat16 or float32, or check "
            "the encoder's weights"
        )
    data = features.cpu().contiguous().view(torch.uint8).numpy().reshape(len(pixels), -1)
    return dict(zip(pixels, data, strict=True))


def _read_photo(
    preprocessing: Preprocessing, path: Path
) -> tuple[tuple[int, int, str], NDArray[np.uint8] | ImageError]:
    """A photo's size, time and SHA-256 (see `Record`), and its pixels (H, W, 3)."""
    file, data = read_file(path)  # once, so that the checksum is of the bytes decoded
    try:
        photo = open_image(path if data is None else io.BytesIO(data), name=str(path))
        return file, preprocessing.pixels(photo)
    except ImageError as error:
        return file, error
