"""Fills a folder of features, which `captioner.data.features` reads.

    FOLDER/features.journal  while it is filled: the head of features.json, then a line for every
                             block whose rows are on disk

A run that dies loses the block it was at. The encoder comes in as a function: this room knows no
model.
"""

from __future__ import annotations

import io
import json
import os
import zlib
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from itertools import islice
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
    threads,
)
from captioner.data.images import open_image
from captioner.data.preprocessing import Preprocessing
from captioner.errors import ConfigError, DataError, ImageError
from captioner.files import atomic_write, folder_lock

Encode = Callable[[Tensor], Tensor]
"""Pixels (B, H, W, 3) bytes to features (B, L, D) on any device."""


@dataclass(frozen=True)
class FeaturePlan:
    """What a cache is to hold."""

    images: Sequence[CaptionedImage]
    """The photos, in the order of their rows."""
    mirrored: int
    """So many of them, from the first on, are there mirrored too."""
    grid: tuple[int, int]
    """Gh, Gw."""
    feature_dim: int
    """D."""
    key: Mapping[str, str]
    """From `feature_key`, with dtype and precision."""

    @property
    def rows(self) -> int:
        """N, photos and mirrored photos."""
        return len(self.images) + self.mirrored

    @property
    def row_bytes(self) -> int:
        """Size of a row (bytes)."""
        regions = self.grid[0] * self.grid[1]
        return regions * self.feature_dim * DTYPES[self.key["dtype"]].itemsize

    @property
    def bytes(self) -> int:
        """Size of all rows (bytes)."""
        return self.rows * self.row_bytes

    @property
    def head(self) -> dict[str, Any]:
        """What stands first in journal and contents."""
        return {
            "version": VERSION,
            "key": dict(self.key),
            "shape": [self.rows, self.grid[0] * self.grid[1], self.feature_dim],
            "grid": list(self.grid),
            "mirrored": self.mirrored,
            "photos": [[image.image_id, image.path.name] for image in self.images],
        }


class FeatureWriter:
    """Fills a folder; one that was begun is gone on with, with the same bytes in the end."""

    def __init__(self, folder: str | Path, plan: FeaturePlan, *, force: bool = False) -> None:
        """Look at the folder; nothing is written yet.

        Args:
            folder: A new or empty folder, or one that these features were begun in.
            plan: What it is to hold.
            force: Replace other features, and finished ones; other files stay as they are.

        Raises:
            ConfigError: Two photos share an id, or the folder holds something else.
        """
        self.folder, self.plan, self.force = Path(folder), plan, force
        by_id: dict[int, CaptionedImage] = {}
        for image in plan.images:
            if (other := by_id.setdefault(image.image_id, image)) is not image:
                raise ConfigError(
                    f"image id {image.image_id} is {other.path} and {image.path}; features are "
                    "found by id, so give every photo its own"
                )
        self.complete = False
        """Whether the folder holds everything already."""
        self.records: list[Record] = []
        """Of the photos whose rows are on disk."""
        self._look()

    @property
    def missing_bytes(self) -> int:
        """What the disk has still to take; what it holds is gone on with or replaced."""
        rows = self.folder / ROWS
        blocks = getattr(rows.stat(), "st_blocks", 0) if rows.exists() else 0  # of 512 bytes
        return max(0, self.plan.bytes - 512 * blocks)

    def fill(
        self, encode: Encode, preprocessing: Preprocessing, batch_size: int = 32
    ) -> Iterator[tuple[int, list[ImageError]]]:
        """Encode what is missing; photos are read ahead by threads.

        The same photos in the same blocks give the same bytes, so go on with the same
        ``batch_size``; another one goes on too, and rounds otherwise.

        Args:
            encode: The encoder.
            preprocessing: What it is fed.
            batch_size: Photos encoded together and written as one block.

        Yields:
            For every block: how many photos it had, and what was wrong with those without a row.

        Raises:
            DataError: Another process fills the folder, or features do not fit the dtype.
            OSError: The disk is full, or the folder cannot be written.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        with folder_lock(self.folder):
            self._look()  # another process may have been at it
            if self.complete and not self.force:
                return
            self._begin()
            left = self.plan.images[len(self.records) :]
            with (
                (self.folder / ROWS).open("r+b") as rows,
                (self.folder / JOURNAL).open("a", encoding="utf-8") as journal,
                closing(_read_ahead(left, preprocessing, batch_size)) as blocks,
            ):
                for block in blocks:
                    records = self._write(rows, block, encode)
                    rows.flush()
                    os.fsync(rows.fileno())
                    journal.write(json.dumps(records) + "\n")
                    journal.flush()
                    self.records += records
                    yield len(block), [p.pixels for p in block if isinstance(p.pixels, ImageError)]
            contents = {**self.plan.head, "records": self.records}
            atomic_write(self.folder / CONTENTS, json.dumps(contents))
            (self.folder / JOURNAL).unlink()
            self.complete = True

    def _look(self) -> None:
        """Find out how far the folder is; refuse what is not this plan's."""
        folder, head = self.folder, self.plan.head
        if folder.exists() and not folder.is_dir():
            raise ConfigError(f"{folder} is a file; give a folder")
        names = {path.name for path in folder.iterdir()} if folder.exists() else set()
        held, records = _read_journal(folder)
        if CONTENTS in names:
            held, records = read_contents(folder) or {}, []
            held.pop("records", None)
        self.complete = CONTENTS in names and held == head
        whole = held == head and file_size(folder / ROWS) == self.plan.bytes
        self.records = records if whole else []
        if self.force or held == head:
            return
        ours = names & {ROWS, CONTENTS, JOURNAL}
        others = sorted(
            n for n in names - ours if not n.startswith((f".{CONTENTS}", f".{JOURNAL}"))
        )
        if held and held.get("version") == VERSION:
            other = difference(held.get("key") or {}, head["key"])
            problem = f"was made with {other}" if other else "holds the features of other photos"
        elif ours:
            problem = "holds features of another version, or damaged ones"
        elif others:
            problem = f"holds other files (first: {others[0]})"
        else:
            return
        way = "replace them" if ours else "put the features beside them"
        raise ConfigError(f"{folder} {problem}; give another folder, or --force to {way}")

    def _begin(self) -> None:
        """Rows of the full size and a journal without a torn line."""
        head = json.dumps(self.plan.head) + "\n"
        if self.records:
            atomic_write(self.folder / JOURNAL, head + json.dumps(self.records) + "\n")
            return
        # The rows are removed, not cut: a training run may read them. The journal goes last: rows
        # beside nothing would pass for another's.
        for name in (ROWS, CONTENTS, JOURNAL):
            (self.folder / name).unlink(missing_ok=True)
        atomic_write(self.folder / JOURNAL, head)
        with (self.folder / ROWS).open("xb") as rows:
            rows.truncate(self.plan.bytes)

    def _write(self, rows: IO[bytes], block: Sequence[_Photo], encode: Encode) -> list[Record]:
        """Encode a block's photos, then the mirrored ones, and write their rows."""
        start = len(self.records)
        read = {
            start + n: p.pixels for n, p in enumerate(block) if not isinstance(p.pixels, ImageError)
        }
        flipped = {n: pixels[:, ::-1] for n, pixels in read.items() if n < self.plan.mirrored}
        crcs = self._store(rows, read, encode)
        count = len(self.plan.images)
        mirrored = self._store(rows, {count + n: p for n, p in flipped.items()}, encode)
        return [
            Record(*photo.file, crcs.get(n), mirrored.get(count + n))
            for n, photo in enumerate(block, start)
        ]

    def _store(
        self, rows: IO[bytes], pixels: Mapping[int, NDArray[np.uint8]], encode: Encode
    ) -> dict[int, int]:
        """Encode pixels by row and write them; the rows' checksums."""
        if not pixels:
            return {}
        dtype = self.plan.key["dtype"]
        features = encode(torch.from_numpy(np.stack(list(pixels.values())))).to(DTYPES[dtype])
        if not bool(features.isfinite().all()):
            bad = next(
                n for n, row in zip(pixels, features, strict=True) if not row.isfinite().all()
            )
            path = self.plan.images[bad % len(self.plan.images)].path
            raise DataError(
                f"{path}: its features do not fit {dtype}; give --dtype bfloat16 or float32, or "
                "check the encoder's weights"
            )
        size = self.plan.row_bytes
        data = features.cpu().contiguous().view(torch.uint8).numpy().reshape(len(pixels), size)
        for row, values in zip(pixels, data, strict=True):
            rows.seek(row * size)
            rows.write(values.data)
        return {row: zlib.crc32(values.data) for row, values in zip(pixels, data, strict=True)}


class _Photo(NamedTuple):
    """A photo that was read."""

    file: tuple[int, int, str]
    """Size, time and SHA-256; see `Record`."""
    pixels: NDArray[np.uint8] | ImageError
    """(H, W, 3)."""


def _read_photo(image: CaptionedImage, preprocessing: Preprocessing) -> _Photo:
    file, data = read_file(image.path)  # once: what is encoded is what the checksum says
    try:
        photo = open_image(image.path if data is None else io.BytesIO(data), name=str(image.path))
        return _Photo(file, preprocessing.pixels(photo))
    except ImageError as error:
        return _Photo(file, error)


def _read_ahead(
    images: Sequence[CaptionedImage], preprocessing: Preprocessing, batch_size: int
) -> Generator[list[_Photo], None, None]:
    """Batches of photos; while one is out, the next is being read."""
    source = iter(images)
    waiting: deque[Future[_Photo]] = deque()
    with ThreadPoolExecutor(threads()) as readers:
        try:
            while True:
                for image in islice(source, 2 * batch_size - len(waiting)):
                    waiting.append(readers.submit(_read_photo, image, preprocessing))
                if not waiting:
                    return
                taken = [waiting.popleft() for _ in range(min(batch_size, len(waiting)))]
                yield [future.result() for future in taken]
        finally:
            readers.shutdown(cancel_futures=True)


def _read_journal(folder: Path) -> tuple[dict[str, Any] | None, list[Record]]:
    """Head and records of an unfinished folder; what a dead process left of a line is left out."""
    try:
        lines = (folder / JOURNAL).read_text(encoding="utf-8", errors="replace").splitlines(True)
        head = json.loads(lines[0])
    except (OSError, ValueError, IndexError):
        return None, []
    if not isinstance(head, dict):
        return None, []
    records: list[Record] = []
    for line in lines[1:]:
        try:
            block = [Record(*record) for record in json.loads(line)]
        except (ValueError, TypeError):
            break
        if line.endswith("\n"):
            records += block
    return head, records
