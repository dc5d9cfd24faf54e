"""The output folder of a bulk job: numbered parts, each written completely or not at all.

    FOLDER/_job.json         written first: settings, and a digest of the inputs and their parts
    FOLDER/part-00000.jsonl  one row per photo of part 0, with captions or an error
    FOLDER/_done.json        written last: number of photos, and of those that failed

Readers of a folder of Parquet files skip names that begin with an underscore.

A part is renamed into place on a disk, and put in one request into object storage; both are atomic.
What a part holds is fixed by ``_job.json``, so a part that exists is finished, and one that is
computed twice, after a worker or the driver was killed, replaces itself. The result has each photo
exactly once.

Two drivers: on a disk the second one is refused (a lock). In object storage only one can create
``_job.json``; if both resume the same job, they do the same work twice, with the same result. A
worker writes only while ``_job.json`` is its own, so one left over from a job that was started over
(``--force``) writes nothing.
"""

from __future__ import annotations

import io
import json
import re
import secrets
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple

from fsspec.core import url_to_fs
from fsspec.implementations.local import LocalFileSystem

from captioner.bulk.inputs import Part, digest
from captioner.errors import ConfigError, DataError, counted, first_of
from captioner.files import atomic_write, write_lock

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

    def file_system(self) -> tuple[Any, str]:
        """What reads and writes, and the folder's name there."""
        fs, folder = url_to_fs(self.url, use_listings_cache=False)
        return fs, str(folder)

    def local_folder(self) -> Path | None:
        """The folder's path; None for object storage."""
        fs, folder = self.file_system()
        return Path(folder) if isinstance(fs, LocalFileSystem) else None

    def read(self, name: str) -> bytes | None:
        """Content of a file; None if it does not exist."""
        fs, folder = self.file_system()
        try:
            data: bytes = fs.cat_file(f"{folder}/{name}")
        except FileNotFoundError:
            return None
        return data

    def write(self, name: str, data: bytes, *, new: bool = False) -> None:
        """Write a file atomically.

        Args:
            name: File name.
            data: Its content.
            new: In object storage, where nothing is locked, fail if it exists.

        Raises:
            FileExistsError: It exists.
        """
        fs, folder = self.file_system()
        if isinstance(fs, LocalFileSystem):
            atomic_write(Path(folder, name), data)
        else:
            fs.pipe_file(f"{folder}/{name}", data, mode="create" if new else "overwrite")

    def names(self) -> list[str]:
        """Names of the files; empty if there is no folder."""
        fs, folder = self.file_system()
        try:
            listed = fs.ls(folder, detail=False)
        except FileNotFoundError:
            return []
        return [str(one).rstrip("/").rpartition("/")[2] for one in listed]

    def finished(self) -> set[int]:
        """Numbers of the finished parts."""
        found = (_PART.fullmatch(name) for name in self.names())
        return {int(match[1]) for match in found if match}

    def clear(self) -> None:
        """Remove a job; ``_job.json`` last, so that an interruption leaves what can be resumed."""
        fs, folder = self.file_system()
        names = [name for name in self.names() if name in (JOB, DONE) or _PART.fullmatch(name)]
        for name in sorted(names, key=lambda name: (name == JOB, name != DONE)):
            fs.rm_file(f"{folder}/{name}")


class Job(NamedTuple):
    """A job that this process may work on."""

    output: Output
    id: str
    """Changes when a job is started over."""
    parts: Sequence[Part]

    def missing(self) -> list[Part]:
        """Parts that are not finished."""
        done = self.output.finished()
        return [part for part in self.parts if part.number not in done]

    def name_missing(self) -> str:
        """The parts that are not finished, for messages."""
        names = [self.output.part_name(part.number) for part in self.missing()]
        return f"missing: {first_of(names or ['nothing'])}"

    def finish(self, counts: Mapping[int, tuple[int, int]]) -> dict[str, int]:
        """Write ``_done.json`` once all parts exist; return what it holds.

        Args:
            counts: For the parts of this run, the number of photos and of those that failed;
                other parts are read.

        Raises:
            DataError: Parts are missing.
        """
        output = self.output
        if self.missing():
            raise DataError(f"{output.url}: {self.name_missing()}; give --resume to continue")
        totals = {"parts": len(self.parts), "photos": 0, "failed": 0}
        for part in self.parts:
            photos, failed = counts.get(part.number) or self._count(part.number)
            totals["photos"] += photos
            totals["failed"] += failed
        output.write(DONE, json.dumps(totals).encode() + b"\n")
        return totals

    def _count(self, number: int) -> tuple[int, int]:
        data = self.output.read(self.output.part_name(number)) or b""
        rows = decode_rows(data, self.output.format)
        return len(rows), sum(row.get("error") is not None for row in rows)


@contextmanager
def open_job(
    output: Output,
    parts: Sequence[Part],
    settings: Mapping[str, Any],
    *,
    resume: bool,
    force: bool,
) -> Iterator[Job]:
    """Start a job, or continue an interrupted one.

    Args:
        output: Where the parts go.
        parts: The inputs.
        settings: All that the captions depend on besides the photos; by option name.
        resume: Continue, if there is something to continue.
        force: Remove what the folder holds of another job.

    Raises:
        ConfigError: The folder has a job and neither was given, or the job had other inputs or
            settings.
        DataError: Another process works on it.
    """
    folder = output.local_folder()
    if folder is not None:
        if folder.exists() and not folder.is_dir():
            raise ConfigError(f"-o {output.url} is a file; give a folder")
        folder.mkdir(parents=True, exist_ok=True)
    now = {
        "settings": json.loads(json.dumps(dict(settings))),
        "inputs": digest(parts),
        "parts": len(parts),
    }
    with nullcontext() if folder is None else write_lock(folder):
        held, done = output.read(JOB), output.finished()
        if held is not None and not force:
            before = json.loads(held)
            if not resume:
                raise ConfigError(
                    f"{output.url} has a job ({len(done)} of {before['parts']} parts are "
                    "finished); give --resume to continue it, --force to start over, or another "
                    "folder"
                )
            _check_same(output.url, before, now)
            yield Job(output, before["id"], parts)
            return
        if force:
            output.clear()
        elif done:
            raise ConfigError(
                f"{output.url} has {counted(len(done), 'part')} but no {JOB}; give another "
                "folder, or --force to replace what is there"
            )
        now["id"] = secrets.token_hex(8)
        try:
            output.write(JOB, json.dumps(now, indent=1).encode() + b"\n", new=True)
        except FileExistsError as error:
            raise ConfigError(
                f"{output.url}: another process has just started a job there; wait for it, or "
                "give another folder"
            ) from error
        yield Job(output, now["id"], parts)


def _check_same(url: str, before: dict[str, Any], now: dict[str, Any]) -> None:
    old, new = before["settings"], now["settings"]
    if changed := [name for name in new if old.get(name) != new[name]]:
        name = changed[0]
        problem = f"{name} was {old.get(name)} and is now {new[name]}; give the same options"
    elif before["inputs"] != now["inputs"]:
        problem = (
            f"the inputs have changed ({counted(before['parts'], 'part')} then, {now['parts']} "
            "now); give the same photos in the same order"
        )
    else:
        return
    raise ConfigError(f"cannot resume {url}: {problem}, or start over with --force")


# --- rows ----------------------------------------------------------------------------------------


def encode_rows(rows: Sequence[Row], format: str) -> bytes:  # noqa: A002
    """The bytes of a part."""
    if format == "jsonl":
        lines = (json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        # Names that are not valid Unicode become JSON's own escapes.
        return "".join(lines).encode("utf-8", "backslashreplace")
    import pyarrow as pa
    import pyarrow.parquet as pq

    rows = [{**row, "image": _valid(row["image"])} for row in rows]
    buffer = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(rows, schema=row_schema()), buffer)
    return buffer.getvalue()


def _valid(name: str) -> str:
    """A name as valid Unicode."""
    return name.encode("utf-8", "backslashreplace").decode()


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

    keyword = pa.struct([("word", pa.string()), ("probability", pa.float64())])
    caption = pa.struct(
        [
            ("text", pa.string()),
            ("words", pa.list_(pa.string())),
            ("log_prob", pa.float64()),
            ("log_probs", pa.list_(pa.float64())),
            ("confidence", pa.float64()),
            ("doubtful", pa.list_(pa.int64())),
            ("keywords", pa.list_(keyword)),
        ]
    )
    return pa.schema(
        [("image", pa.string()), ("captions", pa.list_(caption)), ("error", pa.string())]
    )
