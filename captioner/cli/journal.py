"""The captions of ``captioner caption -o FILE`` that are finished: ``FILE.resume``.

A journal (`captioner.data.journal`) of the settings, then of each batch; and of FILE itself, as "",
whenever it was written:

    [["a.jpg", [81234, 1700000000000000000], {"image": "a.jpg", "captions": [...]}], ...]
    [["", [7123, 1700000001000000000], {}]]

Sizes (bytes) and times of change (ns) show whether a photo, or FILE, is still the same.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from captioner.cli.formats import Entry
from captioner.data.journal import check_same, continue_journal, read_journal
from captioner.errors import ConfigError, counted

Stamp = list[int]


class Journal:
    """The photos of an output file, and what is known of them; see `open_journal`."""

    def __init__(
        self,
        photos: Iterable[Path],
        known: dict[str, tuple[Stamp, Entry]],
        append: Callable[[Any], None],
    ) -> None:
        """Look at the photos, before they are read."""
        self._stamps = {photo: stamp(photo) for photo in photos}
        self._known, self._append = known, append
        self.finished = sum(map(self.has, self._stamps))
        """Number of photos that are captioned."""

    def has(self, photo: Path) -> bool:
        """Whether a photo was captioned before and is unchanged; an error is tried again."""
        before, one = self._known.get(str(photo), ([], {}))
        return "captions" in one and before == self._stamps[photo]

    def entries(self, new: Iterator[Entry], batch_size: int) -> Generator[Entry, None, None]:
        """What is known of each photo, or the next of the new entries, which is kept."""
        batch: list[Any] = []
        try:
            for photo, state in self._stamps.items():
                if self.has(photo):
                    yield self._known[str(photo)][1]
                    continue
                one = next(new)
                self.finished += "captions" in one
                batch.append([str(photo), state, one])
                if len(batch) == batch_size:
                    self._append(batch)
                    batch.clear()
                yield one
        finally:
            if batch:
                self._append(batch)

    def wrote(self, target: Path) -> None:
        """Remember the output file as it is now."""
        self._append([["", stamp(target), {}]])

    @property
    def summary(self) -> str:
        """What was known of these photos, in words; empty: nothing."""
        known = {str(photo) for photo in self._stamps} & self._known.keys()
        failed = sum("error" in self._known[name][1] for name in known)
        parts = {
            "new": len(self._stamps) - len(known),
            "changed": len(known) - self.finished - failed,
            "failed before": failed,
            "gone": len(self._known) - len(known),
        }
        others = "".join(f", {count} {what}" for what, count in parts.items() if count)
        return f"{counted(self.finished, 'finished photo')} kept{others}" if self._known else ""


def journal_path(target: Path) -> Path:
    """Where the captions of an output file are kept by photo."""
    return target.with_name(f"{target.name}.resume")


def stamp(path: Path) -> Stamp:
    """What changes when a file does; empty if there is none."""
    try:
        found = path.stat()
    except OSError:
        return []
    return [found.st_size, found.st_mtime_ns]


@contextmanager
def open_journal(
    target: Path, photos: Sequence[Path], settings: Entry, *, resume: bool, force: bool
) -> Iterator[Journal]:
    """Start a journal of the photos of an output file, or continue that of an earlier run.

    ``resume`` keeps finished photos; it is a ConfigError if the settings, by option, differ.
    ``force`` starts over if they do, and overwrites a file that is not from the earlier run; with
    neither, finished photos are a ConfigError. The journal is removed when the block ends, unless
    ``resume`` was given, and after an exception if no photo is finished.
    """
    path, settings = journal_path(target), json.loads(json.dumps(settings))
    before, batches = read_journal(path)
    known = {name: (state, one) for batch in batches for name, state, one in batch}
    written = known.pop("", ([], {}))[0]
    done = sum("captions" in one for _, one in known.values())
    if not done or (force and not (resume and before == settings)):
        known, written = {}, []
    elif not resume:
        raise ConfigError(
            f"{path} has {counted(done, 'photo')} of an earlier run; give --resume to keep them, "
            "or --force to start over"
        )
    else:
        check_same(path, before, settings)
    if not force and target.exists() and stamp(target) != written:
        raise ConfigError(
            f"{target} exists, and is not as a run with --resume left it; give --force to "
            "overwrite it, or another name"
        )
    kept = [[["", written, {}]], *([[name, *found]] for name, found in known.items())]
    with continue_journal(path, settings, kept) as append:
        journal = Journal(photos, known, append)
        try:
            yield journal
        except BaseException:
            if not (known or journal.finished):
                path.unlink()
            raise
    if not resume:
        path.unlink()
