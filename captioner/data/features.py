"""Cached features of a frozen encoder, computed once and read in every epoch.

    FOLDER/features.json   the header, written first: describes how the rows were computed
    FOLDER/features.bin    rows of (L, D): the photos, then flipped versions of the first photos
    FOLDER/features.index  a `RECORD` for each photo with rows on disk, appended block by block

A row contains the features of one photo. A block contains the rows of several consecutive photos.
A folder is complete when the index contains all photos. An interrupted run loses at most one block.

Notation: N rows, B photos, L = Gh x Gw regions, D feature size.
"""

from __future__ import annotations

import hashlib
import json
import os
import zlib
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import asdict
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from captioner.data.example import Example
from captioner.data.images import open_image
from captioner.data.reading import read_batches, reader_threads
from captioner.errors import ConfigError, DataError, ImageError
from captioner.files import atomic_write, write_lock
from captioner.model.encoder import Encoder
from captioner.model.preprocessing import Preprocessing

VERSION = 2
"""Version of the files' format. Folders of other versions count as empty."""

ROWS, HEADER, INDEX = "features.bin", "features.json", "features.index"
DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}
COMMAND = "captioner prepare features CONFIG.yaml"

RECORD = np.dtype(
    [
        ("size", "<i8"),  # size of the photo's file (bytes), or -1 without a file
        ("readable", "?"),  # False if the photo could not be read and has no rows
        ("crc", "<u4"),  # CRC-32 of the row
        ("flipped_crc", "<u4"),  # CRC-32 of the flipped row
    ]
)
"""The index entry of a photo."""


def feature_fingerprint(
    encoder: Encoder, preprocessing: Preprocessing, stage: str | None = None, **storage: str
) -> dict[str, str]:
    """Return a fingerprint of the settings that the features of photos depend on.

    Cached features can be used only if this fingerprint is the same as when they were computed.

    Args:
        encoder: The encoder. The fingerprint contains its name and the SHA-256 of its weights, or
            only of the weights before ``stage``.
        preprocessing: The encoder's preprocessing. Every field is part of the fingerprint.
        stage: Encoder stage for which the input is cached. None means that the encoder's output is
            cached.
        **storage: ``dtype`` of the rows and ``precision`` of the encoder. A value that is left out
            matches any value.
    """
    weights = hashlib.sha256()
    state = encoder.state_dict() if stage is None else encoder.state_until(stage)
    for name, tensor in state.items():
        weights.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        flat = tensor.detach().cpu().contiguous().reshape(-1) + 0  # + 0: -0.0 becomes 0.0
        weights.update(flat.view(torch.uint8).numpy().data)
    fingerprint = {"encoder": encoder.name, "weights": weights.hexdigest()}
    for name, value in asdict(preprocessing).items():
        fingerprint[name] = value if isinstance(value, str) else json.dumps(value)
    return fingerprint | storage | ({} if stage is None else {"stage": stage})


class FeatureCache:
    """Cached features of photos, memory-mapped from a complete folder. Threads may share it."""

    def __init__(self, folder: str | Path, fingerprint: Mapping[str, str]) -> None:
        """Open a folder that ``captioner prepare features`` has written.

        Args:
            folder: Folder of the features.
            fingerprint: Expected result of `feature_fingerprint`. A value that is left out matches
                any value.

        Raises:
            DataError: The folder has no features, is incomplete or damaged, or has a different
                fingerprint.
        """
        self.folder, header = Path(folder), read_header(folder)
        if not header:
            raise DataError(f"{folder} has no features; create them with: {COMMAND} -o {folder}")
        self.fingerprint: dict[str, str] = header["key"]
        if other := difference(self.fingerprint, fingerprint):
            raise DataError(f"{folder} was made with {other}; {self._recreate}")
        self.dtype = DTYPES[self.fingerprint["dtype"]]
        self.stage = self.fingerprint.get("stage")
        """Encoder stage for which the input is cached, or None if the encoder's output is
        cached."""
        self.shape: tuple[int, int, int] = tuple(header["shape"])
        """Number of rows N, number of regions L and feature size D."""
        self.grid: tuple[int, int] = tuple(header["grid"])
        """Height and width of the grid, Gh and Gw."""
        self.flipped: int = header["flipped"]
        """Number of photos, from the first, that also have a flipped row."""
        rows, regions, feature_dim = self.shape
        shape = rows, regions * feature_dim * self.dtype.itemsize
        try:
            self.records = np.fromfile(self.folder / INDEX, RECORD)
            if len(self.records) < len(header["photos"]):
                raise DataError(f"{folder} is incomplete; continue with: {COMMAND} -o {folder}")
            self._rows = np.memmap(self.folder / ROWS, np.uint8, "r", shape=shape)
        except (OSError, ValueError) as error:
            raise DataError(f"{folder} is damaged ({error}); {self._recreate}") from error
        self._names: list[str] = [name for _, name in header["photos"]]
        self._index = {image_id: row for row, (image_id, _) in enumerate(header["photos"])}
        self._verified = np.zeros(rows, dtype=bool)

    @property
    def _recreate(self) -> str:
        """The remedy for unusable features, for error messages."""
        return f"recreate the features with: {COMMAND} -o {self.folder} --force"

    def has(self, image_id: int) -> bool:
        """Return whether the cache contains the features of a photo.

        The cache may list a photo without features, because the photo could not be read.
        """
        row = self._index.get(image_id)
        return row is not None and bool(self.records[row]["readable"])

    def check(self, images: Sequence[Example], *, flipped: bool = False) -> None:
        """Check that the cache contains these photos and that their files have not changed.

        A file with the same name and size counts as unchanged. It is not an error if a file is
        missing, or if the cache lists a photo without features (see `has`).

        Args:
            images: The photos.
            flipped: Also check the flipped rows.

        Raises:
            DataError: Photos are not in the cache, or their files have changed.
        """

        def problem(image: Example) -> str:
            """Return the problem with a photo for an error message, or an empty text.

            The problem is followed by the folder of the features: "are not in FOLDER".
            """
            row = self._index.get(image.image_id)
            if row is None or self._names[row] != image.path.name:
                return "are not in"
            if flipped and row >= self.flipped:
                return "have no flipped version (data.horizontal_flip) in"
            changed = _size(image.path) not in (-1, self.records[row]["size"])
            return "have changed since they were encoded for" if changed else ""

        with ThreadPoolExecutor(reader_threads()) as pool:
            problems = list(pool.map(problem, images))
        if wrong := [n for n, found in enumerate(problems) if found]:
            raise DataError(
                f"{len(wrong)} of {len(images)} photos {problems[wrong[0]]} {self.folder} "
                f"(first: {images[wrong[0]].path}); {self._recreate}"
            )

    def read(self, photos: Sequence[tuple[int, bool]]) -> Tensor:
        """Return the features of photos.

        Args:
            photos: Pairs of an image id and a Boolean. True selects the flipped photo.

        Returns:
            Features, (B, L, D), in the cache's dtype, in pinned memory if a GPU is available. They
            are 0 for a photo that could not be read (see `has`).

        Raises:
            DataError: A row is damaged. Checksums are verified when a row is first read.
        """
        shape, pin = (len(photos), *self.shape[1:]), torch.cuda.is_available()
        features = torch.empty(shape, dtype=self.dtype, pin_memory=pin)
        target = features.view(torch.uint8).numpy().reshape(len(photos), self._rows.shape[1])
        for number, (image_id, flipped) in enumerate(photos):
            photo = self._index[image_id]
            row, record = photo + flipped * len(self.records), self.records[photo]
            target[number] = self._rows[row] if record["readable"] else 0
            if not self._verified[row] and record["readable"]:
                if zlib.crc32(target[number].data) != record["flipped_crc" if flipped else "crc"]:
                    raise DataError(
                        f"{self.folder / ROWS}: the features of {self._names[photo]} are damaged; "
                        f"{self._recreate}"
                    )
                self._verified[row] = True
        return features


# --- Writing --------------------------------------------------------------------------------------


class FeatureEncoder(NamedTuple):
    """A frozen encoder, with the preprocessing of its photos and the shape of its features."""

    encode: Callable[[Tensor], Tensor]
    """Function that turns pixels, (B, H, W, 3) bytes, into features, (B, L, D), on any device."""
    preprocessing: Preprocessing
    """Preprocessing that turns a photo into pixels, (H, W, 3) bytes."""
    grid: tuple[int, int]
    """Height and width of the grid, Gh and Gw."""
    feature_dim: int
    """Size D of a feature vector."""
    fingerprint: dict[str, str]
    """Result of `feature_fingerprint`, with dtype and precision."""

    @property
    def row_bytes(self) -> int:
        """The size of a row (bytes)."""
        dtype = DTYPES[self.fingerprint["dtype"]]
        return self.grid[0] * self.grid[1] * self.feature_dim * dtype.itemsize


class EncodedPhoto(NamedTuple):
    """A photo's features in bytes, or the reason why it could not be read."""

    size: int
    """Size of the photo's file (bytes), or -1 if the file did not exist."""
    row: bytes
    """Features of the photo, (L, D), as bytes. Empty if the photo could not be read."""
    flipped: bytes
    """Features of the flipped photo, in the same form. Empty if it is not encoded."""
    error: str
    """The reason why the photo could not be read, in one line. Empty if it was read."""


Blocks = Generator[list[EncodedPhoto], None, None]
"""A generator of blocks. Each block is a list of encoded photos, in the order of the photos."""

Progress = Iterator[tuple[int, list[str]]]
"""The number of photos in each written block, with one error for each unreadable photo."""


class FeatureWriter:
    """A writer that fills a folder with the features of photos.

    If a run is interrupted and resumed, the files have the same bytes as without the interruption.
    """

    def __init__(
        self,
        folder: str | Path,
        encoder: FeatureEncoder,
        images: Sequence[Example],
        flipped: int = 0,
        *,
        force: bool = False,
    ) -> None:
        """Inspect the folder, which must be new, empty or partly filled with the same features.

        Nothing is written yet.

        Args:
            folder: Folder of the features, created if it is missing.
            encoder: Encoder that computes the features.
            images: The photos, in the order of their rows.
            flipped: Number of photos, from the first, that are also encoded flipped.
            force: Replace different or complete features. Unrelated files are kept.

        Raises:
            ConfigError: Two photos share an id, or the folder contains something else.
        """
        self.folder, self.encoder, self.images = Path(folder), encoder, images
        self.flipped = flipped
        self.bytes = (len(images) + flipped) * encoder.row_bytes
        """Size of all rows (bytes)."""
        self.done = 0
        """Number of photos with rows on disk."""
        by_id: dict[int, Example] = {}
        for image in images:
            if (other := by_id.setdefault(image.image_id, image)) is not image:
                raise ConfigError(
                    f"{other.path} and {image.path} share the image id {image.image_id}; use a "
                    "different id for each photo"
                )
        held, index = read_header(folder), self.folder / INDEX
        if self.folder.exists() and not self.folder.is_dir():
            raise ConfigError(f"{folder} is a file; choose a folder")
        if held == self._header:
            if index.exists():
                self.done = index.stat().st_size // RECORD.itemsize
            self.done = 0 if force and self.complete else self.done
        elif others := sorted(p.name for p in self.folder.glob("*") if not force):
            differs = difference(held.get("key", {}), encoder.fingerprint)
            problem = (
                f"was made with {differs}" if differs else "contains features of different photos"
            )
            problem = problem if held else f"contains unrelated files (first: {others[0]})"
            raise ConfigError(
                f"{folder} {problem}; choose a different folder, or add --force to use this folder"
            )

    @property
    def complete(self) -> bool:
        """True if the features of all photos are written."""
        return self.done == len(self.images)

    @property
    def missing_bytes(self) -> int:
        """The disk space that the missing features need (bytes)."""
        rows = self.folder / ROWS
        return max(0, self.bytes - (512 * rows.stat().st_blocks if rows.exists() else 0))

    def fill(self, batch_size: int = 32) -> Progress:
        """Encode the missing photos and write their features, while threads read photos ahead.

        Each batch is one block. Resume a run with the same batch size, because a different size may
        change the last bits of the features.
        """
        paths = [image.path for image in self.images]
        return self.write(
            lambda start: encode_photos(
                paths[start:], self.encoder, batch_size, max(0, self.flipped - start)
            )
        )

    def write(self, blocks: Callable[[int], Blocks]) -> Progress:
        """Write the features of the missing photos.

        Args:
            blocks: Function that receives the index of the first missing photo, and yields this
                photo and all photos after it in blocks.

        Yields:
            The progress after each block (see `Progress`).

        Raises:
            DataError: Another process is filling the folder, or features overflow the dtype.
            OSError: The disk is full, or the folder cannot be written.
        """
        row_bytes, files = self.encoder.row_bytes, (self.folder / ROWS, self.folder / INDEX)
        self.folder.mkdir(parents=True, exist_ok=True)
        with write_lock(self.folder), ExitStack() as stack:
            if self.complete:
                return
            if not self.done:
                for path in files:  # not truncated: a training run may be reading the rows
                    path.unlink(missing_ok=True)
                atomic_write(self.folder / HEADER, json.dumps(self._header))
            for path in files:
                path.touch()
            rows, index = (stack.enter_context(path.open("r+b")) for path in files)
            with closing(blocks(self.done)) as found:
                rows.truncate(self.bytes)
                index.seek(self.done * RECORD.itemsize)  # overwrites an incomplete record
                for block in found:
                    records = np.zeros(len(block), RECORD)
                    for n, photo in enumerate(block):
                        crcs = zlib.crc32(photo.row), zlib.crc32(photo.flipped)
                        records[n] = (photo.size, bool(photo.row), *crcs)
                        for first, row in ((0, photo.row), (len(self.images), photo.flipped)):
                            if row:
                                rows.seek((first + self.done + n) * row_bytes)
                                rows.write(row)
                    for file, written in ((rows, b""), (index, records.tobytes())):
                        file.write(written)
                        file.flush()
                        os.fsync(file.fileno())
                    self.done += len(block)
                    yield len(block), [photo.error for photo in block if photo.error]

    @property
    def _header(self) -> dict[str, Any]:
        """The content of features.json."""
        rows, (height, width) = len(self.images) + self.flipped, self.encoder.grid
        return {
            "version": VERSION,
            "key": self.encoder.fingerprint,
            "shape": [rows, height * width, self.encoder.feature_dim],
            "grid": [height, width],
            "flipped": self.flipped,
            "photos": [[image.image_id, image.path.name] for image in self.images],
        }


def encode_photos(
    paths: Sequence[Path], encoder: FeatureEncoder, batch_size: int, flipped: int
) -> Blocks:
    """Encode photos and yield a block for each batch, while threads read photos ahead.

    The first ``flipped`` photos are also encoded as mirror images.

    Raises:
        DataError: Features overflow the dtype.
    """

    def read(path: Path) -> NDArray[np.uint8]:
        """Return the pixels of a photo, (H, W, 3), as the encoder expects them."""
        return encoder.preprocessing.pixels(open_image(path))

    with closing(read_batches(read, paths, batch_size, threads=reader_threads())) as batches:
        for start, batch in zip(count(0, batch_size), batches, strict=False):
            pixels = {n: p for n, (_, p) in enumerate(batch) if not isinstance(p, ImageError)}
            turned = {n: p[:, ::-1] for n, p in pixels.items() if start + n < flipped}
            upright, mirrored = (_encode(p, paths[start:], encoder) for p in (pixels, turned))
            block = []
            for n, (path, found) in enumerate(batch):
                error = "" if n in pixels else str(found)
                rows = upright.get(n, b""), mirrored.get(n, b"")
                block.append(EncodedPhoto(_size(path), *rows, error))
            yield block


def _size(path: Path) -> int:
    """Return the size of a file (bytes), or -1 if the file does not exist."""
    try:
        return path.stat().st_size
    except OSError:
        return -1


def _encode(
    pixels: Mapping[int, NDArray[np.uint8]], paths: Sequence[Path], encoder: FeatureEncoder
) -> dict[int, bytes]:
    """Return the features of photos as bytes, by the index of the photo in its block.

    Args:
        pixels: Pixels of the photos, (H, W, 3), by the same index.
        paths: Paths of the block's photos, for error messages.
        encoder: The encoder.

    Raises:
        DataError: Features overflow the dtype.
    """
    if not pixels:
        return {}
    dtype = encoder.fingerprint["dtype"]
    features = encoder.encode(torch.from_numpy(np.stack(list(pixels.values())))).to(DTYPES[dtype])
    finite = features.isfinite().flatten(1).all(dim=1).tolist()
    if not all(finite):
        bad = paths[list(pixels)[finite.index(False)]]
        raise DataError(
            f"{bad}: the features overflow {dtype}; use --dtype bfloat16 or --dtype float32, or "
            "check the encoder's weights"
        )
    data = features.cpu().contiguous().view(torch.uint8).numpy()
    return {n: row.tobytes() for n, row in zip(pixels, data, strict=True)}


# --- The header -----------------------------------------------------------------------------------


def read_header(folder: str | Path) -> dict[str, Any]:
    """Return the content of ``features.json`` in a folder.

    The result is empty if the file cannot be read or has a different version.
    """
    try:
        header: dict[str, Any] = json.loads(Path(folder, HEADER).read_text(encoding="utf-8"))
        return header if header["version"] == VERSION else {}
    except (OSError, ValueError, KeyError, TypeError):
        return {}


def difference(held: Mapping[str, str], expected: Mapping[str, str]) -> str | None:
    """Describe the first difference between fingerprints, or return None if they match.

    A fingerprint contains the settings that cached features depend on, by name.

    Args:
        held: The fingerprint of existing features.
        expected: The fingerprint that is needed. A value that is left out matches any value.
    """
    for name, value in expected.items():
        if held.get(name) != value:
            if name == "weights":
                return "different encoder weights"
            return f"{name} {held.get(name)}, not {value}"
    return None
