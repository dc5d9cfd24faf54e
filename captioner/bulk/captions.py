"""Captioning on a Ray cluster of many machines, or on the cores and GPUs of one machine.

To caption photos in your own Ray pipeline, pass the class `Captions` to ``Dataset.map_batches``:

    photos = ray.data.read_binary_files("s3://bucket/photos", include_paths=True)
    captioned = photos.map_batches(
        captioner.bulk.captions.Captions,
        batch_size=32,
        compute=ray.data.ActorPoolStrategy(size=4),
        num_gpus=0.5,
    )
    captioned.write_parquet("s3://bucket/captions")

The command ``captioner caption --engine ray`` runs the task `WritePart`. Each worker of
`captioner.bulk.cluster` captions one part at a time, and writes it before it starts the next part.
The process that runs the command is called the driver.

The command writes a folder of numbered parts. A part is either complete or does not exist.

    FOLDER/_job.json         the settings; written first
    FOLDER/_parts.jsonl.gz   the photos of each part, or its range of rows in a Parquet file
    FOLDER/part-00000.jsonl  one row per photo of part 0, with captions or an error
    FOLDER/_done.json        the number of photos and of failed photos; written last

The underscore hides a file from programs that read a folder of Parquet files.

On a disk, a part is written under a temporary name and then renamed. In object storage, a part is
written in one request. Both are atomic. ``_parts.jsonl.gz`` fixes the photos of every part, so a
part that exists is finished. If a worker or the driver is killed, a part may be computed twice.
The second result then replaces the first, so the output contains each photo exactly once.

When a job is resumed, new photos become additional parts. On a disk, a lock stops a second driver.
"""

from __future__ import annotations

import gzip
import io
import json
import re
import socket
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import tee
from pathlib import Path
from typing import Any, NamedTuple

from fsspec.core import url_to_fs
from fsspec.implementations.dirfs import DirFileSystem
from fsspec.implementations.local import LocalFileSystem

from captioner.bulk.inputs import Part, RemoteFile, read_part
from captioner.errors import ConfigError, DataError
from captioner.files import atomic_write, check_same, write_lock
from captioner.hardware import Precision
from captioner.inference.captioner import Captioner, Result, load
from captioner.inference.folder import fingerprints
from captioner.messages import counted
from captioner.options import ModelOptions, SearchOptions

JOB, PARTS, DONE = "_job.json", "_parts.jsonl.gz", "_done.json"
_PART = re.compile(r"part-([0-9]{5,})\.(jsonl|parquet)")

Row = dict[str, Any]
"""``{"image": name, "captions": [...]}``. If the photo failed, ``captions`` is empty and there is a
third entry, ``"error": message``."""


class Captions:
    """A callable for ``Dataset.map_batches`` that captions batches of photos.

    It removes the column of photos from a batch, keeps all other columns and adds four columns:

        image     name of the photo, unless the batch already has a column of names
        caption   the best caption, or null if the photo failed
        captions  all captions: text, words, log_prob, log_probs; none if the photo failed
        error     the reason why the photo failed, or null
    """

    def __init__(
        self,
        *folders: str,
        column: str = "bytes",
        names: str = "path",
        device: str = "auto",
        precision: Precision = "auto",
        batch_size: int = 32,
        **search: Any,
    ) -> None:
        """Load the model. Ray does this once for each of its worker processes (actors).

        Args:
            folders: The model folder, or several folders for an ensemble.
            column: Column of the photos: bytes, paths or arrays.
            names: Column of the photos' names. If the column does not exist, photos are numbered.
            device: Device of the model, such as ``cpu`` or ``cuda`` (see ``captioner.load``).
            precision: Precision of the computation (see ``captioner.load``).
            batch_size: Number of photos that are encoded together.
            **search: Fields of ``SearchOptions`` to change.
        """
        self.model = load(*folders, device=device, precision=precision)
        self.column, self.names = column, names
        self.options = {"batch_size": batch_size, **search}
        self.model.options(**search)  # reports wrong options before the first batch

    def __call__(self, batch: dict[str, Any]) -> Any:
        """Caption a batch, and return it with the new columns as a ``pyarrow.Table``.

        ``batch`` maps each column to a NumPy array with one entry per photo.
        """
        import pyarrow as pa

        photos = list(batch[self.column])
        names = [str(one) for one in batch.get(self.names, range(len(photos)))]
        sources: list[Any] = [
            RemoteFile(name, photo) if isinstance(photo, bytes) else photo
            for name, photo in zip(names, photos, strict=True)
        ]
        results = self.model.stream(sources, keep_photos=False, **self.options)
        rows = [row(name, result) for name, result in zip(names, results, strict=True)]
        added = pa.Table.from_pylist(rows, schema=row_schema())
        best = [found["captions"][0]["text"] if found["captions"] else None for found in rows]
        added = added.append_column("caption", pa.array(best, pa.string()))
        if self.names in batch:
            added = added.drop_columns(["image"])
        kept = {name: list(values) for name, values in batch.items() if name != self.column}
        return pa.table(kept | dict(zip(added.column_names, added.columns, strict=True)))


# --- rows ----------------------------------------------------------------------------------------


def row(name: str, result: Result) -> Row:
    """Return the captions or the error of a photo as a row of the output."""
    if result.error is not None:
        return {"image": name, "captions": [], "error": str(result.error)}
    return {"image": name, "captions": [caption.to_dict() for caption in result.captions]}


def encode_rows(rows: Sequence[Row], format: str) -> bytes:  # noqa: A002
    """Encode rows as the content of a part's file in the format ``jsonl`` or ``parquet``."""
    if format == "jsonl":
        lines = (json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        # In names that are not valid Unicode, invalid characters become JSON escapes.
        return "".join(lines).encode("utf-8", "backslashreplace")
    import pyarrow as pa
    import pyarrow.parquet as pq

    valid = [row["image"].encode("utf-8", "backslashreplace").decode() for row in rows]
    rows = [{**row, "image": name} for row, name in zip(rows, valid, strict=True)]
    buffer = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(rows, schema=row_schema()), buffer)
    return buffer.getvalue()


def decode_rows(data: bytes, format: str) -> list[Row]:  # noqa: A002
    """Decode rows from the content of a part's file in the format ``jsonl`` or ``parquet``."""
    if format == "jsonl":
        return [json.loads(line) for line in data.split(b"\n") if line]
    import pyarrow.parquet as pq

    rows: list[Row] = pq.read_table(io.BytesIO(data)).to_pylist()
    return rows


def row_schema() -> Any:
    """Return the Arrow schema of a part, with the columns ``image``, ``captions`` and ``error``."""
    import pyarrow as pa

    text, numbers = pa.string(), pa.list_(pa.float64())
    keyword = pa.struct({"word": text, "probability": pa.float64()})
    truth = {
        "truth": numbers,
        "phrases": pa.list_(pa.struct({"text": text, "truth": pa.float64()})),
    }
    left_out = {"text": text, "words": pa.list_(text), "log_probs": numbers, **truth}
    caption = {
        "text": text,
        "words": pa.list_(text),
        "log_prob": pa.float64(),
        "log_probs": numbers,
        "confidence": pa.float64(),
        "doubtful": pa.list_(pa.int64()),
        **truth,
        "left_out": pa.struct(left_out),
        "keywords": pa.list_(keyword),
    }
    return pa.schema({"image": text, "captions": pa.list_(pa.struct(caption)), "error": text})


# --- jobs ----------------------------------------------------------------------------------------


class Output(NamedTuple):
    """The output folder of a job, on a disk or in object storage."""

    url: str
    """Path or URL of the folder."""
    format: str
    """File format of the parts: ``jsonl`` or ``parquet``."""

    def part_name(self, number: int) -> str:
        """Return the file name of a part."""
        return f"part-{number:05d}.{self.format}"

    def _files(self) -> Any:
        """Return a file system of fsspec in which names are relative to the folder."""
        fs, folder = url_to_fs(self.url, use_listings_cache=False)
        return DirFileSystem(folder, fs)

    def local_folder(self) -> Path | None:
        """Return the folder's path, or None for object storage."""
        files = self._files()
        return Path(files.path) if isinstance(files.fs, LocalFileSystem) else None

    def read(self, name: str) -> bytes | None:
        """Return the content of a file, or None if it does not exist."""
        with suppress(FileNotFoundError):
            data: bytes = self._files().cat_file(name)
            return data
        return None

    def write(self, name: str, data: bytes) -> None:
        """Write a file atomically."""
        if folder := self.local_folder():
            atomic_write(folder / name, data)
        else:
            self._files().pipe_file(name, data)

    def parts(self) -> list[str]:
        """Return the file names of the finished parts."""
        with suppress(FileNotFoundError):
            return list(filter(_PART.fullmatch, self._files().ls("", detail=False)))
        return []

    def clear(self) -> None:
        """Remove all files of a job.

        ``_job.json`` is removed last. If this is interrupted, the rest can be removed later.
        """
        for name in [DONE, *self.parts(), PARTS, JOB]:
            self.remove(name)

    def remove(self, name: str) -> None:
        """Remove a file if it exists."""
        with suppress(FileNotFoundError):
            self._files().rm_file(name)


@contextmanager
def open_job(
    output: Output,
    parts: Sequence[Part],
    settings: Mapping[str, Any],
    *,
    size: int,
    resume: bool,
    force: bool,
) -> Iterator[list[Part]]:
    """Start a job, or resume an interrupted or finished job, and lock its folder.

    Args:
        output: Folder of the job.
        parts: The inputs, divided into parts.
        settings: All options that affect the captions, by name.
        size: Number of photos in a part.
        resume: Resume the job in the folder, if it contains a job, and add new photos.
        force: Remove the job in the folder before starting.

    Yields:
        The parts of the job. A resumed job keeps its parts, followed by parts of new photos.

    Raises:
        ConfigError: The folder contains a job, but ``resume`` and ``force`` are both False. Or the
            settings of the job or one of its files have changed.
        DataError: Another process is working on the job.
    """
    folder = output.local_folder()
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
    now = json.loads(json.dumps(settings))
    with nullcontext() if folder is None else write_lock(folder):
        before, done = output.read(JOB), output.parts()
        if force:
            output.clear()
        elif resume and before:
            check_same(output.url, json.loads(before), now)
        elif before or done:
            raise ConfigError(
                f"{output.url} contains {counted(len(done), 'finished part')} of a job; add "
                "--resume to continue the job or --force to start over, or choose another folder"
            )
        known = output.read(PARTS) if resume and before and not force else None
        old = [] if known is None else _decode_parts(known)
        job = grown(old, parts, size) if old else [*parts]
        output.write(JOB, json.dumps(now, indent=1).encode() + b"\n")
        if len(job) > len(old):
            output.remove(DONE)
            output.write(PARTS, _encode_parts(job))
        yield job


def grown(old: Sequence[Part], inputs: Iterable[Part], size: int) -> list[Part]:
    """Return the parts of a job, followed by additional parts for new inputs.

    Args:
        old: The parts of the job.
        inputs: All inputs, divided into parts.
        size: Number of photos in a part.

    Raises:
        ConfigError: The size of a Parquet or tar file of the job has changed.
    """
    photos = {name for part in old if part.kind == "photos" for name in part.names}
    files = {part.names[0]: part.bytes for part in old if part.kind != "photos"}
    parts, names = [*old], list[str]()
    for part in inputs:
        name = part.names[0]
        if part.kind == "photos":
            names += [one for one in part.names if one not in photos]
        elif name not in files:
            parts.append(replace(part, number=len(parts)))
        elif files[name] != part.bytes:
            raise ConfigError(
                f"{name} had {files[name]:,} bytes when the job began and now has {part.bytes:,}; "
                "restore the file and put new photos into another file, or add --force to start "
                "over"
            )
    for start in range(0, len(names), size):
        parts.append(Part(len(parts), "photos", tuple(names[start : start + size])))
    return parts


def _encode_parts(parts: Iterable[Part]) -> bytes:
    """Return the content of ``_parts.jsonl.gz``, which lists the photos of each part of a job."""
    return gzip.compress("".join(json.dumps(vars(part)) + "\n" for part in parts).encode(), 5)


def _decode_parts(data: bytes) -> list[Part]:
    """Return the parts in the content of ``_parts.jsonl.gz``."""
    rows = map(json.loads, gzip.decompress(data).splitlines())
    return [Part(**row | {"names": tuple(row["names"])}) for row in rows]


class Finished(NamedTuple):
    """The result of a finished part."""

    part: int
    """Number of the part."""
    photos: int
    """Number of photos in the part."""
    failed: int
    """Number of these photos that failed."""
    error: str
    """The error message of the first failed photo, or an empty text if no photo failed."""


@dataclass
class WritePart:
    """The task that captions one part of a job (a numbered group of photos) and writes its file.

    A batch contains photos of one part only. The last batch of a part may be smaller.
    """

    output: Output
    """Folder of the job."""
    model: ModelOptions
    """The models that each worker loads: folders that all machines can read, or names on the
    hub."""
    fingerprints: list[str]
    """Fingerprints of the models on the machine that starts the job."""
    search: SearchOptions
    """Search options for all photos."""

    def __call__(self, part: Part) -> Finished:
        """Caption a part of the job and write its file, and return the numbers of its photos.

        For a part that is already finished, only the photos in its file are counted.
        """
        name, output = self.output.part_name(part.number), self.output
        held = output.read(name)
        rows = self._rows(part) if held is None else decode_rows(held, output.format)
        if held is None:
            output.write(name, encode_rows(rows, output.format))
        errors = [one["error"] for one in rows if one.get("error") is not None]
        return Finished(part.number, len(rows), len(errors), next(iter(errors), ""))

    def _rows(self, part: Part) -> list[Row]:
        """Return the rows of a part, in the order of its photos."""
        named, photos = tee(read_part(part))
        options = {"batch_size": self.model.batch_size, "keep_photos": False, **vars(self.search)}
        results = self.captioner.stream((source for _, source in photos), **options)
        return [row(name, result) for (name, _), result in zip(named, results, strict=True)]

    @cached_property
    def captioner(self) -> Captioner:
        """The model. It is loaded on first use and compared with the driver's model.

        Raises:
            DataError: The model on this machine differs from the driver's model.
        """
        model = self.model
        if fingerprints(model.model) != self.fingerprints:
            raise DataError(
                f"{socket.gethostname()} has a different model from the machine that started the "
                "job; install the same captioner version on both, and put the model into a folder "
                "that both can read"
            )
        return load(*model.model, device=model.device, precision=model.precision)
