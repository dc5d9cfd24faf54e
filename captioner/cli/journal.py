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

from captioner.cli.outputs import refuse_overwrite
from captioner.errors import ConfigError
from captioner.files import write_lock


class Journal:
    """The finished photos of one run, open for appending; see `open_journal`."""

    def __init__(self, file: IO[bytes]):
        """Read the header and find the finished photos; a torn last line ends them."""
        self._file = file
        file.seek(0)
        self.header: Any = json.loads(file.readline())
        self._ends = [file.tell()]
        for line in file:
            if line.endswith(b"\n"):
                self._ends.append(self._ends[-1] + len(line))

    @property
    def finished(self) -> int:
        """Number of finished photos."""
        return len(self._ends) - 1

    @property
    def saved(self) -> int:
        """Number of photos in whole batches, which a resumed run would not caption again."""
        total, size = len(self.header["photos"]), self.header["settings"]["--batch-size"]
        return total if self.finished >= total else self.finished // size * size

    def add(self, entry: dict[str, Any]) -> None:
        """Append a photo; the last one of a batch is synced to disk with the whole batch."""
        self._ends.append(self._ends[-1] + self._file.write(_line(entry)))
        if self.saved == self.finished:
            _sync(self._file)

    def entries(self) -> Iterator[dict[str, Any]]:
        """The finished photos in order."""
        self._file.seek(self._ends[0])
        for _ in range(self.finished):
            yield json.loads(self._file.readline())

    def cut(self) -> None:
        """Drop what follows the last whole batch."""
        del self._ends[self.saved + 1 :]
        self._file.seek(self._ends[-1])
        self._file.truncate()


def journal_path(target: Path) -> Path:
    """Where the finished captions of an output file are kept until it is complete."""
    return target.with_name(f"{target.name}.part")


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
        resume: Continue an interrupted run if there is one; ConfigError if it differs.
        force: Start over; with neither, ConfigError if there is an interrupted run.
    """
    path = journal_path(target)
    sizes = [[str(photo), photo.stat().st_size] for photo in photos]
    header = json.loads(json.dumps({"settings": settings, "photos": sizes}))
    with path.open("ab"):  # "w+b" would empty it before it is locked
        pass
    with write_lock(path), path.open("r+b") as file:
        journal = Journal(file) if file.readline().endswith(b"\n") else None
        if journal and journal.saved and resume:
            _check_same(path, journal.header, header)
        elif journal and journal.saved and not force:
            raise ConfigError(
                f"{path} has {journal.saved} photos of an interrupted run; give --resume to "
                "continue it, or --force to start over"
            )
        else:
            file.seek(0)
            file.truncate()
            file.write(_line(header))
            _sync(file)
            journal = Journal(file)
        journal.cut()
        if journal.finished < len(photos):
            refuse_overwrite(target, force)
        try:
            yield journal
        except BaseException:
            if not journal.saved:
                path.unlink()
            raise
        path.unlink()


def _check_same(path: Path, before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Check that a run with this header would have given the same captions."""
    pairs = [(name, before["settings"].get(name), new) for name, new in now["settings"].items()]
    photos = zip_longest(before["photos"], now["photos"])
    pairs += [(f"photo {number}", *pair) for number, pair in enumerate(photos, 1)]
    for name, old, new in pairs:
        if old != new:
            was, now_ = ("not set" if value in (None, "", []) else value for value in (old, new))
            raise ConfigError(
                f"cannot resume {path}: {name} was {was} and is now {now_}; give the same options "
                "and photos, or start over with --force"
            )


def _line(data: Mapping[str, Any]) -> bytes:
    # ASCII: file names that are not valid Unicode are kept as they are.
    return json.dumps(data).encode() + b"\n"


def _sync(file: IO[bytes]) -> None:
    file.flush()
    os.fsync(file.fileno())
