"""Features of a frozen encoder: computed once, read in every epoch.

    FOLDER/features.bin      rows of (L, D): the photos, then the first of them mirrored
    FOLDER/features.json     written last: what the rows come from, checksums of files and rows
    FOLDER/features.journal  while it is filled: the head of features.json, then a line for every
                             block whose rows are on disk

A run that dies loses the block it was at. The encoder comes in as a function: this room knows no
model.

Notation: N rows, B photos, L = Gh x Gw regions, D feature size.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import sys
import zlib
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import get_worker_info

from captioner.data.coco import CaptionedImage
from captioner.data.images import open_image
from captioner.data.preprocessing import Preprocessing
from captioner.errors import ConfigError, DataError, ImageError
from captioner.files import atomic_write

if sys.platform != "win32":
    import fcntl

VERSION = 1
ROWS, CONTENTS, JOURNAL = "features.bin", "features.json", "features.journal"
DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}
COMMAND = "captioner prepare features CONFIG.yaml"

Encode = Callable[[Tensor], Tensor]
"""Pixels (B, H, W, 3) bytes to features (B, L, D) on any device."""


def feature_key(
    encoder_name: str,
    state: Mapping[str, Tensor],
    preprocessing: Preprocessing,
    *,
    dtype: str | None = None,
    precision: str | None = None,
) -> dict[str, str]:
    """What features depend on besides the photo.

    Args:
        encoder_name: As in the config.
        state: The encoder's ``state_dict()``.
        preprocessing: How the encoder sees a photo; each of its fields is a part of the key.
        dtype: What rows are kept in; None leaves the part out, so that any will do.
        precision: What the encoder computed in, ``fp32`` or ``bf16``; None as above.

    Returns:
        Parts by name; the weights as their SHA-256.
    """
    weights = hashlib.sha256()
    for name, tensor in state.items():
        weights.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        flat = tensor.detach().cpu().contiguous().reshape(-1)
        weights.update(flat.view(torch.uint8).numpy().data)
    seen = {
        name: value if isinstance(value, str) else json.dumps(value)
        for name, value in asdict(preprocessing).items()
    }
    key = {"encoder": encoder_name, "weights": weights.hexdigest(), **seen}
    asked = {"dtype": dtype, "precision": precision}
    return key | {name: value for name, value in asked.items() if value is not None}


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


# --- reading -------------------------------------------------------------------------------------


class FeatureCache:
    """The rows of a finished folder, mapped into memory; threads may share it."""

    def __init__(self, folder: Path, contents: Mapping[str, Any], rows: NDArray[np.uint8]) -> None:
        """From what `open` has checked."""
        self.folder = folder
        self.key: dict[str, str] = contents["key"]
        self.dtype = DTYPES[self.key["dtype"]]
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
        contents = _read_contents(folder)
        if other := _difference(contents["key"], key):
            raise DataError(f"{folder} was made with {other}; {_anew(folder)}")
        count, regions, feature_dim = contents["shape"]
        row_bytes = regions * feature_dim * DTYPES[contents["key"]["dtype"]].itemsize
        if (found := _size(folder / ROWS)) != count * row_bytes:
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
        with ThreadPoolExecutor(_threads()) as readers:
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
        return _read_file(image.path)[0][2] != record.sha256

    def _refuse(
        self, wrong: Sequence[CaptionedImage], images: Sequence[CaptionedImage], problem: str
    ) -> None:
        if wrong:
            raise DataError(
                f"{len(wrong)} of {len(images)} photos {problem} {self.folder} "
                f"(first: {wrong[0].path}); {_anew(self.folder)}"
            )


# --- writing -------------------------------------------------------------------------------------


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
        with _only_one(self.folder):
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
            held, records = _read_json(folder) or {}, []
            held.pop("records", None)
        self.complete = CONTENTS in names and held == head
        self.records = records if held == head and _size(folder / ROWS) == self.plan.bytes else []
        if self.force or held == head:
            return
        ours = names & {ROWS, CONTENTS, JOURNAL}
        others = sorted(
            n for n in names - ours if not n.startswith((f".{CONTENTS}", f".{JOURNAL}"))
        )
        if held and held.get("version") == VERSION:
            other = _difference(held.get("key") or {}, head["key"])
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


def _read_file(path: Path) -> tuple[tuple[int, int, str], bytes | None]:
    try:
        with path.open("rb") as file:
            status, data = os.fstat(file.fileno()), file.read()
    except OSError:
        return (-1, 0, ""), None
    return (status.st_size, status.st_mtime_ns, hashlib.sha256(data).hexdigest()), data


def _read_photo(image: CaptionedImage, preprocessing: Preprocessing) -> _Photo:
    file, data = _read_file(image.path)  # once: what is encoded is what the checksum says
    try:
        photo = open_image(image.path if data is None else io.BytesIO(data), name=str(image.path))
        return _Photo(file, preprocessing.pixels(photo))
    except ImageError as error:
        return _Photo(file, error)


def _threads() -> int:
    return min(16, os.cpu_count() or 2)


def _read_ahead(
    images: Sequence[CaptionedImage], preprocessing: Preprocessing, batch_size: int
) -> Generator[list[_Photo], None, None]:
    """Batches of photos; while one is out, the next is being read."""
    source = iter(images)
    waiting: deque[Future[_Photo]] = deque()
    with ThreadPoolExecutor(_threads()) as readers:
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


# --- what both know ------------------------------------------------------------------------------


def _read_contents(folder: Path) -> dict[str, Any]:
    """A finished folder's contents, of this version and whole."""
    contents = _read_json(folder) or {}
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


def _read_json(folder: Path) -> dict[str, Any] | None:
    """What stands in a finished folder's contents; None: nothing that can be read."""
    try:
        contents = json.loads((folder / CONTENTS).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return contents if isinstance(contents, dict) else None


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


def _difference(held: Mapping[str, str], asked: Mapping[str, str]) -> str | None:
    """The first part of a key that differs, in words."""
    for part, value in asked.items():
        if held.get(part) != value:
            if part == "weights":
                return "other weights of the encoder"
            return f"{part} {held.get(part)}, now it is {value}"
    return None


def _size(path: Path) -> int:
    """Bytes; -1 where there is no file."""
    return path.stat().st_size if path.is_file() else -1


def _anew(folder: Path) -> str:
    return f"make them anew: {COMMAND} -o {folder} --force"


@contextmanager
def _only_one(folder: Path) -> Iterator[None]:
    """Hold the folder's lock; it goes when the process dies. Without locks (Windows): nothing."""
    if sys.platform == "win32":
        yield
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        _lock(descriptor, folder)
        yield
    finally:
        os.close(descriptor)


def _lock(descriptor: int, folder: Path) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise DataError(
            f"another process is filling {folder}; wait for it, or give another folder"
        ) from error
