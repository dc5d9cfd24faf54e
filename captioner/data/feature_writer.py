"""Writes a folder of features, which `captioner.data.features` reads.

    FOLDER/features.journal  while it is being filled: the header of features.json, then one line
                             per block whose rows are on disk

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
from pathlib import Path
from typing import IO, Any, NamedTuple

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
    file_size,
    read_contents,
    read_file,
)
from captioner.data.images import open_image
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
    def rows(self) -> int:
        """N, photos and flipped photos."""
        return len(self.images) + self.flipped

    @property
    def row_bytes(self) -> int:
        """Size of a row (bytes)."""
        regions = self.grid[0] * self.grid[1]
        return regions * self.feature_dim * DTYPES[self.fingerprint["dtype"]].itemsize

    @property
    def bytes(self) -> int:
        """Size of all rows (bytes)."""
        return self.rows * self.row_bytes

    @property
    def header(self) -> dict[str, Any]:
        """Start of the journal and of features.json."""
        return {
            "version": VERSION,
            "key": dict(self.fingerprint),
            "shape": [self.rows, self.grid[0] * self.grid[1], self.feature_dim],
            "grid": list(self.grid),
            "mirrored": self.flipped,
            "photos": [[image.image_id, image.path.name] for image in self.images],
        }


class FeatureWriter:
    """Fills a folder; resuming an interrupted run gives the same bytes as an uninterrupted one."""

    def __init__(self, folder: str | Path, plan: FeaturePlan, *, force: bool = False) -> None:
        """Inspect the folder; nothing is written yet.

        Args:
            folder: A new or empty folder, or one with part of these features.
            plan: What to write.
            force: Replace other or complete features; other files are kept.

        Raises:
            ConfigError: Two photos share an id, or the folder holds something else.
        """
        self.folder, self.plan, self.force = Path(folder), plan, force
        by_id: dict[int, CaptionedImage] = {}
        for image in plan.images:
            if (other := by_id.setdefault(image.image_id, image)) is not image:
                raise ConfigError(
                    f"image id {image.image_id} is both {other.path} and {image.path}; features "
                    "are looked up by id, so give each photo its own"
                )
        self.complete = False
        """Whether the folder is complete already."""
        self.records: list[Record] = []
        """Records of the photos whose rows are on disk."""
        self._inspect()

    @property
    def missing_bytes(self) -> int:
        """Disk space still needed (bytes)."""
        rows = self.folder / ROWS
        blocks = getattr(rows.stat(), "st_blocks", 0) if rows.exists() else 0  # of 512 bytes
        return max(0, self.plan.bytes - 512 * blocks)

    def fill(self, encode: Encode, preprocessing: Preprocessing, batch_size: int = 32) -> Progress:
        """Encode the missing photos, which threads read ahead, and write their features.

        Args:
            encode: The encoder.
            preprocessing: The encoder's preprocessing.
            batch_size: Photos encoded together and written as one block. A resumed run gives the
                same bytes only with the same batch size.

        Returns:
            See `write`.
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
        self.folder.mkdir(parents=True, exist_ok=True)
        with write_lock(self.folder):
            self._inspect()  # again: another process may have filled it
            if self.complete and not self.force:
                return
            self._begin()
            with (
                (self.folder / ROWS).open("r+b") as rows,
                (self.folder / JOURNAL).open("a", encoding="utf-8") as journal,
                closing(blocks(len(self.records))) as found,
            ):
                for block in found:
                    self._write(rows, block)
                    rows.flush()
                    os.fsync(rows.fileno())
                    journal.write(json.dumps(block.records) + "\n")
                    journal.flush()
                    self.records += block.records
                    yield len(block.records), block.errors
            if len(self.records) != len(self.plan.images):
                raise DataError(
                    f"{self.folder}: features of {len(self.records)} of {len(self.plan.images)} "
                    "photos were computed"
                )
            contents = {**self.plan.header, "records": self.records}
            atomic_write(self.folder / CONTENTS, json.dumps(contents))
            (self.folder / JOURNAL).unlink()
            self.complete = True

    def _inspect(self) -> None:
        """Find out how much is done; refuse a folder that holds something else."""
        folder, header = self.folder, self.plan.header
        if folder.exists() and not folder.is_dir():
            raise ConfigError(f"{folder} is a file; give a folder")
        names = {path.name for path in folder.iterdir()} if folder.exists() else set()
        held, records = _read_journal(folder)
        if CONTENTS in names:
            held, records = read_contents(folder) or {}, []
            held.pop("records", None)
        self.complete = CONTENTS in names and held == header
        resumable = held == header and file_size(folder / ROWS) == self.plan.bytes
        self.records = records if resumable else []
        temporary = (f".{CONTENTS}", f".{JOURNAL}")
        others = sorted(name for name in names if not name.startswith(temporary))
        if self.force or held == header or not others:
            return
        other = difference((held or {}).get("key") or {}, header["key"])
        problem = f"was made with {other}" if other else "holds features of other photos"
        problem = problem if held else f"holds other files (first: {others[0]})"
        raise ConfigError(f"{folder} {problem}; give another folder, or --force to write to it")

    def _begin(self) -> None:
        """Write a row file of the full size and a journal without incomplete lines."""
        header = json.dumps(self.plan.header) + "\n"
        if self.records:
            atomic_write(self.folder / JOURNAL, header + json.dumps(self.records) + "\n")
            return
        # Removed rather than truncated: a training run may be reading the rows. The journal goes
        # last: without it, the rows left by an interruption here would look like someone else's.
        for name in (ROWS, CONTENTS, JOURNAL):
            (self.folder / name).unlink(missing_ok=True)
        atomic_write(self.folder / JOURNAL, header)
        with (self.folder / ROWS).open("xb") as rows:
            rows.truncate(self.plan.bytes)

    def _write(self, rows: IO[bytes], block: Block) -> None:
        """Write a block's rows."""
        start, count, size = len(self.records), len(self.plan.images), self.plan.row_bytes
        readable = [n for n, record in enumerate(block.records, start) if record.crc is not None]
        flipped = [count + n for n in readable if n < self.plan.flipped]
        for number, values in zip([*readable, *flipped], block.rows, strict=True):
            rows.seek(number * size)
            rows.write(values.data)


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
    """Encode photos, which threads read ahead.

    Args:
        paths: The photos.
        encode: The encoder.
        preprocessing: The encoder's preprocessing.
        batch_size: Photos encoded together; a block. Flipped photos are encoded by themselves.
        flipped: Number of photos, from the first, that are also encoded flipped.
        dtype: Storage type of the rows.

    Raises:
        DataError: Features overflow the dtype.
    """
    read, threads = partial(_read_photo, preprocessing), reader_threads()
    with closing(read_batches(read, paths, batch_size, threads=threads)) as batches:
        for number, batch in enumerate(batches):
            photos = [photo for _, photo in batch if not isinstance(photo, ImageError)]
            start = number * batch_size
            names = paths[start : start + batch_size]
            yield _encode_block(photos, names, encode, flipped=flipped - start, dtype=dtype)


def _encode_block(
    batch: Sequence[_Photo], paths: Sequence[Path], encode: Encode, *, flipped: int, dtype: str
) -> Block:
    pixels = {n: p.pixels for n, p in enumerate(batch) if not isinstance(p.pixels, ImageError)}
    mirrored = {n: p[:, ::-1] for n, p in pixels.items() if n < flipped}
    rows = {
        (n, is_flipped): row
        for is_flipped, images in ((False, pixels), (True, mirrored))
        for n, row in _encode(images, paths, encode, dtype).items()
    }
    crcs = {key: zlib.crc32(row.data) for key, row in rows.items()}
    return Block(
        [Record(*p.file, crcs.get((n, False)), crcs.get((n, True))) for n, p in enumerate(batch)],
        np.stack(list(rows.values())) if rows else np.empty((0, 0), np.uint8),
        [str(p.pixels) for p in batch if isinstance(p.pixels, ImageError)],
    )


def _encode(
    pixels: Mapping[int, NDArray[np.uint8]], paths: Sequence[Path], encode: Encode, dtype: str
) -> dict[int, NDArray[np.uint8]]:
    """The rows of photos, by their index in the block."""
    if not pixels:
        return {}
    features = encode(torch.from_numpy(np.stack(list(pixels.values())))).to(DTYPES[dtype])
    if not bool(features.isfinite().all()):
        bad = next(n for n, row in zip(pixels, features, strict=True) if not row.isfinite().all())
        raise DataError(
            f"{paths[bad]}: features overflow {dtype}; use --dtype bfloat16 or float32, or check "
            "the encoder's weights"
        )
    data = features.cpu().contiguous().view(torch.uint8).numpy().reshape(len(pixels), -1)
    return dict(zip(pixels, data, strict=True))


class _Photo(NamedTuple):
    """A photo's file and its pixels."""

    file: tuple[int, int, str]
    """Size, time and SHA-256; see `Record`."""
    pixels: NDArray[np.uint8] | ImageError
    """(H, W, 3)."""


def _read_photo(preprocessing: Preprocessing, path: Path) -> _Photo:
    file, data = read_file(path)  # once, so that the checksum is of the bytes decoded
    try:
        photo = open_image(path if data is None else io.BytesIO(data), name=str(path))
        return _Photo(file, preprocessing.pixels(photo))
    except ImageError as error:
        return _Photo(file, error)


def _read_journal(folder: Path) -> tuple[dict[str, Any] | None, list[Record]]:
    """Header and records of an incomplete folder, without a line that was cut short."""
    try:
        text = (folder / JOURNAL).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None, []
    lines: list[Any] = []
    for line in text.splitlines(keepends=True):
        try:
            lines.append(json.loads(line if line.endswith("\n") else ""))
        except ValueError:
            break
    if not lines or not isinstance(lines[0], dict):
        return None, []
    return lines[0], [Record(*record) for block in lines[1:] for record in block]
