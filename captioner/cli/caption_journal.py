"""The captions that a run of ``captioner caption -o FILE`` has finished so far: ``FILE.part``.

JSON Lines: a header, then one line per photo in order.

    {"journal": 1, "settings": {...}, "force": false, "batch_size": 32, "photos": [[path, bytes]]}
    {"image": "a.jpg", "captions": [...]}
    {"image": "b.jpg", "error": "b.jpg: the image is truncated; ..."}

It is synced to disk after every batch, so that at most the current batch is lost, however the
process ends. ``FILE`` is written from it once all photos are finished. A resumed run drops a torn
last line and an incomplete batch, and continues with whole batches: the captions of a photo may
depend on the others in its batch in the last digits (bf16), and so the result equals that of a run
without interruption.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, NamedTuple

from captioner.errors import ConfigError, first_of
from captioner.files import write_lock

_VERSION = 1


class Plan(NamedTuple):
    """What a run is going to do; a resumed run must do the same."""

    settings: Mapping[str, Any]
    """By option name, as messages spell it."""
    photos: Sequence[Path]
    batch_size: int
    force: bool
    """The output file may be overwritten."""


class Journal:
    """The finished photos of one run, open for appending; see `open_journal`."""

    def __init__(self, file: IO[bytes], start: int, finished: int, plan: Plan) -> None:
        """Take a file whose lines from the byte ``start`` on are the finished photos."""
        self._file, self._start, self._batch_size = file, start, plan.batch_size
        self.finished = finished
        """Number of finished photos."""
        self.total = len(plan.photos)

    def add(self, entry: dict[str, Any]) -> None:
        """Append a photo; the last one of a batch is synced to disk with the whole batch."""
        self._file.write(_line(entry))
        self.finished += 1
        if self.finished % self._batch_size == 0 or self.finished == self.total:
            _sync(self._file)

    def entries(self) -> Iterator[dict[str, Any]]:
        """The finished photos in order."""
        self._file.flush()
        self._file.seek(self._start)
        for _ in range(self.finished):
            yield json.loads(self._file.readline())
        self._file.seek(0, os.SEEK_END)

    @property
    def saved(self) -> int:
        """Number of photos that a resumed run would not caption again."""
        return _whole_batches(self.finished, self._batch_size, self.total)


def journal_path(target: Path) -> Path:
    """Where the finished captions of an output file are kept until it is complete."""
    return target.with_name(f"{target.name}.part")


def unfinished(target: Path) -> int:
    """Number of photos that an interrupted run has finished; 0 if there was none."""
    try:
        with journal_path(target).open("rb") as file:
            header = _header(file)
            if header is None:
                return 0
            count = sum(1 for line in file if line.endswith(b"\n"))
            return _whole_batches(count, header["batch_size"], len(header["photos"]))
    except FileNotFoundError:
        return 0


@contextmanager
def open_journal(target: Path, plan: Plan, *, resume: bool) -> Iterator[Journal]:
    """Start a journal, or continue that of an interrupted run.

    It is removed when the block ends, unless by an exception after a batch was finished.

    Raises:
        ConfigError: The interrupted run had other settings or photos, or the output file is not to
            be overwritten.
        DataError: Another process is writing to it.
        OSError: It cannot be written.
    """
    path = journal_path(target)
    with path.open("ab"):  # "x+b" would fail if it exists, "w+b" empty it before it is locked
        pass
    with write_lock(path):
        try:
            with path.open("r+b") as file:
                yield _opened(file, target, plan, resume=resume)
        except BaseException:
            if not unfinished(target):
                path.unlink()
            raise
        path.unlink()


def _opened(file: IO[bytes], target: Path, plan: Plan, *, resume: bool) -> Journal:
    """Continue the run in a journal file, or start a new one."""
    header = _header(file) if resume else None
    finished = 0
    if header is not None:
        _check_same(Path(file.name), header, plan)
        start = file.tell()
        finished = _cut(file, plan)
    complete = header is not None and finished == len(plan.photos)
    force = plan.force or bool(header and header["force"])
    if resume and target.exists() and not (force or complete):
        raise ConfigError(f"{target} exists; give --force to overwrite it, or move it away")
    if header is None:
        file.seek(0)
        file.truncate()
        file.write(_line(_header_of(plan)))
        _sync(file)
        start = file.tell()
    return Journal(file, start, finished, plan)


def _header_of(plan: Plan) -> dict[str, Any]:
    sizes = [[str(photo), _size(photo)] for photo in plan.photos]
    return {
        "journal": _VERSION,
        "settings": dict(plan.settings),
        "force": plan.force,
        "batch_size": plan.batch_size,
        "photos": sizes,
    }


def _size(photo: Path) -> int | None:
    """Bytes of a file; None if it is not one (standard input)."""
    try:
        return photo.stat().st_size
    except OSError:
        return None


def _header(file: IO[bytes]) -> dict[str, Any] | None:
    """Read the header; None if the process was killed before it was complete."""
    header = _parsed(file.readline())
    if header is None:
        return None
    if header.get("journal") != _VERSION:
        raise ConfigError(
            f"{file.name} is not from this version of captioner; give --force to start over, or "
            "another output name"
        )
    return header


def _cut(file: IO[bytes], plan: Plan) -> int:
    """Cut the file after its last whole batch; return the number of finished photos."""
    ends = [file.tell()]
    for line in file:
        if _parsed(line) is None:
            break
        ends.append(ends[-1] + len(line))
    finished = _whole_batches(
        min(len(ends) - 1, len(plan.photos)), plan.batch_size, len(plan.photos)
    )
    file.seek(ends[finished])
    file.truncate()
    return finished


def _whole_batches(count: int, batch_size: int, total: int) -> int:
    return count if count == total else count // batch_size * batch_size


def _check_same(path: Path, header: dict[str, Any], plan: Plan) -> None:
    """Check that a run with this header would have given the same captions."""
    start_over = "or start over with --force"
    before, now = header["settings"], json.loads(json.dumps(plan.settings))
    for name, value in now.items():
        if before.get(name) != value:
            raise ConfigError(
                f"cannot resume {path}: {name} was {_shown(before.get(name))} and is now "
                f"{_shown(value)}; give the same options, {start_over}"
            )
    old = dict(map(tuple, header["photos"]))
    new = {str(photo): _size(photo) for photo in plan.photos}
    added, gone = [p for p in new if p not in old], [p for p in old if p not in new]
    changed = [photo for photo in new if photo in old and new[photo] != old[photo]]
    for names, problem in ((added, "is new"), (gone, "is gone"), (changed, "has changed")):
        if names:
            raise ConfigError(
                f"cannot resume {path}: {first_of(names)} {problem} since the interrupted run; "
                f"give the same photos, {start_over}"
            )
    if [photo for photo, _ in header["photos"]] != [str(photo) for photo in plan.photos]:
        raise ConfigError(
            f"cannot resume {path}: the photos are in another order than in the interrupted run; "
            f"give them in the same order, {start_over}"
        )


def _shown(value: Any) -> str:
    return "not set" if value in (None, "", [], ()) else str(value)


def _line(data: dict[str, Any]) -> bytes:
    # ASCII: file names that are not valid Unicode are kept as they are.
    return json.dumps(data).encode() + b"\n"


def _parsed(line: bytes) -> dict[str, Any] | None:
    """The data of a line; None if it is torn."""
    try:
        data = json.loads(line) if line.endswith(b"\n") else None
    except ValueError:
        return None
    return data if isinstance(data, dict) else None


def _sync(file: IO[bytes]) -> None:
    file.flush()
    os.fsync(file.fileno())
