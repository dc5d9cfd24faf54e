"""The captions that a run of ``captioner caption -o FILE`` has finished so far: ``FILE.part``.

JSON Lines: a header, then one line per photo in order.

    {"settings": {...}, "photos": [["a.jpg", 81234], ...]}
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
from itertools import zip_longest
from pathlib import Path
from typing import IO, Any

from captioner.errors import ConfigError
from captioner.files import write_lock


class Journal:
    """The finished photos of one run, open for appending; see `open_journal`."""

    def __init__(self, file: IO[bytes], start: int, finished: int, header: Mapping[str, Any]):
        """Take a file whose lines from the byte ``start`` on are the finished photos."""
        self._file, self._start, self._header = file, start, header
        self.finished = finished
        """Number of finished photos."""

    def add(self, entry: dict[str, Any]) -> None:
        """Append a photo; the last one of a batch is synced to disk with the whole batch."""
        _write(self._file, entry)
        self.finished += 1
        if self.saved == self.finished:
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
        return _whole_batches(self.finished, self._header)


def journal_path(target: Path) -> Path:
    """Where the finished captions of an output file are kept until it is complete."""
    return target.with_name(f"{target.name}.part")


def unfinished(target: Path) -> int:
    """Number of photos that an interrupted run has finished; 0 if there was none."""
    try:
        with journal_path(target).open("rb") as file:
            header = _parsed(file.readline())
            count = sum(1 for line in file if line.endswith(b"\n"))
    except FileNotFoundError:
        return 0
    return 0 if header is None else _whole_batches(count, header)


@contextmanager
def open_journal(
    target: Path,
    settings: Mapping[str, Any],
    photos: Sequence[Path],
    *,
    resume: bool,
    force: bool,
) -> Iterator[Journal]:
    """Start a journal, or continue that of an interrupted run.

    It is removed when the block ends, unless by an exception after a batch was finished.

    Args:
        target: The output file.
        settings: What captions depend on, by option; a resumed run must have the same.
        photos: What to caption; a resumed run must have the same.
        resume: Continue an interrupted run if there is one.
        force: The output file may be overwritten.

    Raises:
        ConfigError: The interrupted run had other settings or photos, or the output file is not to
            be overwritten.
        DataError: Another process is writing to it.
        OSError: It cannot be written.
    """
    path = journal_path(target)
    sizes = [[str(photo), photo.stat().st_size if photo.exists() else None] for photo in photos]
    header = json.loads(json.dumps({"settings": settings, "photos": sizes}))
    with path.open("ab"):  # "x+b" would fail if it exists, "w+b" empty it before it is locked
        pass
    with write_lock(path):
        try:
            with path.open("r+b") as file:
                before = _parsed(file.readline()) if resume else None
                start, finished = file.tell(), 0
                if before is not None:
                    _check_same(path, before, header)
                    finished = _cut(file, header)
                if target.exists() and not force and finished < len(photos):
                    raise ConfigError(
                        f"{target} exists; give --force to overwrite it, or move it away"
                    )
                if before is None:
                    file.seek(0)
                    file.truncate()
                    _write(file, header)
                    _sync(file)
                    start = file.tell()
                yield Journal(file, start, finished, header)
        except BaseException:
            if not unfinished(target):
                path.unlink()
            raise
        path.unlink()


def _cut(file: IO[bytes], header: Mapping[str, Any]) -> int:
    """Cut the file after its last whole batch; return the number of finished photos."""
    ends = [file.tell()]
    for line in file:
        if _parsed(line) is None:
            break
        ends.append(ends[-1] + len(line))
    finished = _whole_batches(len(ends) - 1, header)
    file.seek(ends[finished])
    file.truncate()
    return finished


def _whole_batches(count: int, header: Mapping[str, Any]) -> int:
    total, size = len(header["photos"]), header["settings"]["--batch-size"]
    return total if count >= total else count // size * size


def _check_same(path: Path, before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Check that a run with this header would have given the same captions."""
    names = {**before["settings"], **now["settings"]}
    pairs = [(name, before["settings"].get(name), now["settings"].get(name)) for name in names]
    photos = zip_longest(before["photos"], now["photos"])
    pairs += [(f"photo {number}", *pair) for number, pair in enumerate(photos, 1)]
    for name, old, new in pairs:
        if old != new:
            raise ConfigError(
                f"cannot resume {path}: {name} was {_shown(old)} and is now {_shown(new)}; give "
                "the same options and photos, or start over with --force"
            )


def _shown(value: Any) -> str:
    return "not set" if value in (None, "", [], ()) else str(value)


def _write(file: IO[bytes], data: Mapping[str, Any]) -> None:
    # ASCII: file names that are not valid Unicode are kept as they are.
    file.write(json.dumps(data).encode() + b"\n")


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
