"""The output folder of a bulk job: numbered parts, each written completely or not at all.

    FOLDER/_job.json         written first: settings, and a digest of the inputs and their parts
    FOLDER/part-00000.jsonl  one row per photo of part 0, with captions or an error
    FOLDER/_done.json        written last: number of photos, and of those that failed

Readers of a folder of Parquet files skip names that begin with an underscore.

A part is renamed into place on a disk, and put in one request into object storage; both are atomic.
What a part holds is fixed by ``_job.json``, so a part that exists is finished, and one that is
computed twice, after a worker or the driver was killed, replaces itself. The result has each photo
exactly once. On a disk, a second driver is refused.
"""

from __future__ import annotations

import hashlib
import io
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

from fsspec.core import url_to_fs
from fsspec.implementations.dirfs import DirFileSystem
from fsspec.implementations.local import LocalFileSystem

from captioner.bulk.inputs import Part
from captioner.errors import ConfigError, counted
from captioner.files import atomic_write, check_same, write_lock

JOB, DONE = "_job.json", "_done.json"
_PART = re.compile(r"part-([0-9]{5,})\.(jsonl|parquet)")

Row = dict[str, Any]
"""``{"image": name, "captions": [...]}`` or ``{"image": name, "error": message}``."""


class Output(NamedTuple):
    """A folder on a disk or in object storage."""

    url: str
    format: str
    """Of the parts: ``jsonl`` or ``parquet``."""

    def part_name(self, number: int) -> str:
        """File name of a part."""
        return f"part-{number:05d}.{self.format}"

    def _files(self) -> Any:
        fs, folder = url_to_fs(self.url, use_listings_cache=False)
        return DirFileSystem(folder, fs)

    def local_folder(self) -> Path | None:
        """The folder's path; None for object storage."""
        files = self._files()
        return Path(files.path) if isinstance(files.fs, LocalFileSystem) else None

    def read(self, name: str) -> bytes | None:
        """Content of a file; None if it does not exist."""
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
        """Names of the finished parts."""
        with suppress(FileNotFoundError):
            return list(filter(_PART.fullmatch, self._files().ls("", detail=False)))
        return []

    def clear(self) -> None:
        """Remove a job; ``_job.json`` last, so that an interruption leaves what can be resumed."""
        for name in [DONE, *self.parts(), JOB]:
            with suppress(FileNotFoundError):
                self._files().rm_file(name)


@contextmanager
def open_job(
    output: Output,
    parts: Sequence[Part],
    settings: Mapping[str, Any],
    *,
    resume: bool,
    force: bool,
) -> Iterator[None]:
    """Start a job, or continue an interrupted one.

    ``settings`` are all that the captions depend on besides the photos, by option.

    Raises:
        ConfigError: The folder has a job, and neither ``resume`` nor ``force`` (to remove it) was
            given, or the job had other inputs or settings.
        DataError: Another process works on it.
    """
    folder = output.local_folder()
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
    digest = hashlib.sha256()
    for part in parts:
        digest.update(json.dumps(asdict(part)).encode() + b"\n")
    inputs = {"number of parts": len(parts), "digest of the inputs": digest.hexdigest()[:16]}
    now = json.loads(json.dumps({**settings, **inputs}))
    with nullcontext() if folder is None else write_lock(folder):
        before, done = output.read(JOB), output.parts()
        if force:
            output.clear()
        elif resume and before:
            check_same(output.url, json.loads(before), now)
        elif before or done:
            raise ConfigError(
                f"{output.url} has {counted(len(done), 'finished part')} of a job; give --resume "
                "to continue it, --force to start over, or another folder"
            )
        output.write(JOB, json.dumps(now, indent=1).encode() + b"\n")
        yield


# --- rows ----------------------------------------------------------------------------------------


def encode_rows(rows: Sequence[Row], format: str) -> bytes:  # noqa: A002
    """The bytes of a part."""
    if format == "jsonl":
        lines = (json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        # Names that are not valid Unicode become JSON's own escapes.
        return "".join(lines).encode("utf-8", "backslashreplace")
    import pyarrow as pa
    import pyarrow.parquet as pq

    valid = [row["image"].encode("utf-8", "backslashreplace").decode() for row in rows]
    rows = [{**row, "image": name} for row, name in zip(rows, valid, strict=True)]
    buffer = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(rows, schema=row_schema()), buffer)
    return buffer.getvalue()


def decode_rows(data: bytes, format: str) -> list[Row]:  # noqa: A002
    """The rows of a part."""
    if format == "jsonl":
        return [json.loads(line) for line in data.split(b"\n") if line]
    import pyarrow.parquet as pq

    rows: list[Row] = pq.read_table(io.BytesIO(data)).to_pylist()
    return rows


def row_schema() -> Any:
    """The columns of a Parquet part: ``image``, ``captions``, ``error``."""
    import pyarrow as pa

    text, numbers = pa.string(), pa.list_(pa.float64())
    keyword = pa.struct({"word": text, "probability": pa.float64()})
    caption = {
        "text": text,
        "words": pa.list_(text),
        "log_prob": pa.float64(),
        "log_probs": numbers,
        "confidence": pa.float64(),
        "doubtful": pa.list_(pa.int64()),
        "keywords": pa.list_(keyword),
    }
    return pa.schema({"image": text, "captions": pa.list_(pa.struct(caption)), "error": text})
