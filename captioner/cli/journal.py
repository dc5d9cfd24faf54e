"""The captions of ``captioner caption -o FILE``, by photo: ``FILE.resume``.

JSON Lines: a header, then a line for each batch, and for each time that FILE was written.

    {"--model": ["0123456789ab"], "--beam-size": 3, ...}
    [["a.jpg", [81234, 1700000000000000000], {"image": "a.jpg", "captions": [...]}], ...]
    {"written": [7123, 1700000001000000000]}

Sizes (bytes) and times of change (ns) tell whether a photo, or FILE, is still the same. Each line
is synced to disk, so that at most the current batch is lost, however the process ends.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from captioner.cli.formats import Entry
from captioner.errors import ConfigError, counted
from captioner.files import named_after, write_lock


class Journal:
    """What is known of the photos of a file; see `open_journal`."""

    def __init__(self, file: IO[bytes]) -> None:
        """Read the file; a torn last line is dropped."""
        self._file = file
        self._lines: dict[str, tuple[list[int], int]] = {}
        """By photo: its stamp, and where the line with its captions begins."""
        self.written: list[int] | None = None
        """The stamp of the output file as it was written last."""
        file.seek(0)
        header = file.readline()
        if header and not header.startswith(b'{"--'):
            raise ConfigError(f"{file.name} is not from captioner; remove it, or give another name")
        self.settings: Entry | None = json.loads(header) if header.endswith(b"\n") else None
        start = end = file.tell()
        for line in file:
            if line.endswith(b"\n"):
                start, end = end, end + len(line)
                self._learn(json.loads(line), start)
        self._cut(end if self.settings else 0)

    def restart(self, settings: Entry) -> None:
        """Forget everything."""
        self._lines, self.written, self.settings = {}, None, settings
        self._cut(0)
        self._append(settings)

    def add(self, batch: Sequence[tuple[Path, Entry]], stamps: Mapping[Path, list[int]]) -> None:
        """Append photos that were captioned, or could not be read; with their stamps before."""
        start = self._file.seek(0, os.SEEK_END)
        line = [[str(photo), stamps[photo], one] for photo, one in batch]
        self._append(line)
        self._learn(line, start)

    def has(self, photo: Path) -> bool:
        """Whether a photo was captioned and is unchanged; one with an error is tried again."""
        return self._lines.get(str(photo), ([], 0))[0] == (stamp(photo) or None)

    def __len__(self) -> int:
        """Number of captioned photos, whether they are still wanted or not."""
        return sum(bool(state) for state, _ in self._lines.values())

    def entries(self, photos: Iterable[Path]) -> Iterator[Entry]:
        """What was found for photos; lines are read one at a time, however many there are."""
        place, batch = -1, {}
        for photo in map(str, photos):
            if self._lines[photo][1] != place:
                place = self._lines[photo][1]
                self._file.seek(place)
                batch = {name: one for name, _, one in json.loads(self._file.readline())}
            yield batch[photo]

    def wrote(self, target: Path) -> None:
        """Remember the output file as it is now."""
        self.written = stamp(target)
        self._append({"written": self.written})

    def counts(self, photos: Sequence[Path]) -> str:
        """What of these photos is known, in words."""
        known = {str(photo) for photo in photos} & self._lines.keys()
        kept = sum(map(self.has, photos))
        failed = sum(not self._lines[name][0] for name in known)
        parts = {
            "new": len(photos) - len(known),
            "changed": len(known) - kept - failed,
            "failed before": failed,
            "gone": len(self._lines) - len(known),
        }
        others = "".join(f", {count} {what}" for what, count in parts.items() if count)
        return f"{counted(kept, 'finished photo')} kept{others}"

    def _learn(self, line: Any, start: int) -> None:
        if isinstance(line, dict):
            self.written = line["written"]
            return
        for photo, state, one in line:
            self._lines[photo] = ([] if "error" in one else state, start)

    def _append(self, line: Any) -> None:
        # ASCII: file names that are not valid Unicode are kept as they are.
        with named_after(self._file.name):
            self._file.seek(0, os.SEEK_END)
            self._file.write(json.dumps(line).encode() + b"\n")
            self._file.flush()
            os.fsync(self._file.fileno())

    def _cut(self, end: int) -> None:
        self._file.seek(end)
        self._file.truncate()


def journal_path(target: Path) -> Path:
    """Where the captions of an output file are kept by photo."""
    return target.with_name(f"{target.name}.resume")


def stamp(path: Path) -> list[int]:
    """What changes when a file does; empty if there is none."""
    try:
        found = path.stat()
    except OSError:
        return []
    return [found.st_size, found.st_mtime_ns]


@contextmanager
def open_journal(target: Path, settings: Entry, *, resume: bool, force: bool) -> Iterator[Journal]:
    """Start a journal, or continue that of an earlier run.

    It is removed when the block ends, unless ``resume`` was given; and after an exception, if no
    photo is finished.

    Args:
        target: The output file.
        settings: What captions depend on, by option; a resumed run must have the same.
        resume: Keep finished photos; ConfigError if the settings differ.
        force: Start over if they do, and overwrite a file that is not from the earlier run; with
            neither, ConfigError if there are finished photos.
    """
    path = journal_path(target)
    settings = json.loads(json.dumps(settings))
    with path.open("ab"):  # "w+b" would empty it before it is locked
        pass
    with write_lock(path), path.open("r+b") as file:
        journal = Journal(file)
        try:
            if (force and not (resume and journal.settings == settings)) or not len(journal):
                journal.restart(settings)
            elif not resume:
                raise ConfigError(
                    f"{path} has {counted(len(journal), 'photo')} of an earlier run; give --resume "
                    "to keep them, or --force to start over"
                )
            else:
                _check_same(path, journal.settings or {}, settings)
            if not force and target.exists() and stamp(target) != journal.written:
                raise ConfigError(
                    f"{target} exists, and is not as a run with --resume left it; give --force to "
                    "overwrite it, or another name"
                )
            yield journal
        except BaseException:
            if not len(journal):
                path.unlink()
            raise
        if not resume:
            path.unlink()


def _check_same(path: Path, before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    for name, new in now.items():
        if (old := before.get(name)) != new:
            was, now_ = ("not set" if value in (None, "", []) else value for value in (old, new))
            raise ConfigError(
                f"cannot resume {path}: {name} was {was} and is now {now_}; give the same options, "
                "or start over with --force"
            )
