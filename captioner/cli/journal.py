"""The journal of an output file, which lets ``captioner caption --resume`` continue it.

While ``captioner caption -o FILE`` runs, finished captions go to ``FILE.resume`` (JSON Lines). The
first line contains the settings. Each further line contains a photo's path from the folder of FILE,
its size and modification time, and its row. The last line of a photo counts. A line with the path
"" is added each time FILE itself is written:

    ["a.jpg", [81234, 1700000000000000000], {"image": "a.jpg", "captions": [...]}]
    ["", [7123, 1700000001000000000], {}]

The size (bytes) and the modification time (ns) show whether a photo or FILE has changed. An
incomplete last line, left by a killed process, is ignored. If the user has corrected FILE, its rows
are kept unchanged (see `cli.caption_formats`), and the journal stores their captions as {"text":
...}.

Each run locks its journal, so that two runs cannot write FILE at the same time. The journal of a
killed run is not locked.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TextIO

from captioner.cli.caption_formats import CaptionFormat, read_rows
from captioner.cli.console import hint, warn
from captioner.cli.rows import Name, Row
from captioner.data.photo_metadata import find_inside
from captioner.errors import ConfigError
from captioner.files import check_same, named_after, remove_temporary, write_lock
from captioner.messages import counted, first_of


def journal_path(target: Path) -> Path:
    """Return the path of an output file's journal."""
    return target.with_name(f"{target.name}.resume")


@contextmanager
def continued(
    target: Path,
    names: Mapping[Path, Name],
    captioned: Callable[[Sequence[Path]], Iterator[Row]],
    settings: dict[str, Any],
    *,
    kind: CaptionFormat,
    resume: bool,
    force: bool,
) -> Iterator[Iterator[Row]]:
    """Store the rows of an output file in its journal while the block writes the file.

    If the user has changed the file since the earlier run, its rows come first, followed by the
    rows of other photos. The journal is deleted at the end of the block, unless ``resume`` is true.
    After an exception, the journal is deleted only if no photo is finished.

    Args:
        target: The output file.
        names: The photos, with their names in the file.
        captioned: Function that captions the photos it receives.
        settings: All settings that affect the captions, by option.
        kind: The format of the file.
        resume: Keep the photos that an earlier run has finished.
        force: Start over, and overwrite the file even if the user has corrected it.

    Yields:
        The rows of the photos, kept or new, in the order of the photos. They follow the kept rows
        of photos that are not among the inputs.

    Raises:
        ConfigError: An earlier run finished some photos, and neither ``resume`` nor ``force`` is
            true, or the earlier run had different settings.
        DataError: Another process is writing the file.
    """
    path, settings = journal_path(target), json.loads(json.dumps(settings))
    stamps = {photo: _stamp(photo) for photo in names}  # before they are read
    finished = 0
    with (
        named_after(path),
        write_lock(path, create=True, name=target),
        path.open("r+", encoding="utf-8") as journal,
    ):
        remove_temporary(target)
        known, last, corrected = _read(journal, target, settings, resume=resume, force=force)

        def all_rows() -> Iterator[Row]:
            """Yield the rows of the file, and add the rows of new photos to the journal."""
            nonlocal finished
            yield from rows or others
            new = captioned([photo for photo in names if photo not in kept])
            for photo, name in names.items():
                if name in in_rows:
                    continue
                one = kept.get(photo)
                if one is None:
                    one = next(new)
                    _append(journal, _key(photo, target), stamps[photo], one)
                    finished += "captions" in one
                yield one | {"image": name}  # --annotations may have changed the name
            for _ in new:  # no rows are left, but only this completes the progress bar
                pass

        def progress() -> str:
            """Return how many photos are finished, or an empty string if none is."""
            done = f"{finished} of {len(names)} photos are finished and kept in {path}"
            return done if finished else ""

        try:
            rows = read_rows(target, kind, names.values()) if corrected else []
            texts = {row["image"]: row["text"] for row in reversed(rows)}
            kept, edited = _unchanged(target, names, stamps, known, texts)
            again = {name for photo, name in names.items() if photo not in kept}
            rows = [row for row in rows if row["image"] not in again]
            in_rows = {row["image"] for row in rows}
            finished = len(kept)
            others, deleted = ([], []) if corrected else _others(target, names, known)
            if rows or known:
                in_file = len(in_rows - {*names.values()})
                warn(f"{target}: {_kept(finished, in_file or len(others), len(deleted))}")
            state = {"corrected": True} if rows else {}
            if last != (last[0], state):
                _append(journal, "", last[0], state)
            for name, (stamp, one) in edited.items():
                _append(journal, name, stamp, one)
            for name in deleted:  # so that the row does not return if the folder disappears later
                _append(journal, name, [], {})
            with hint(progress, "with --resume"):
                yield all_rows()
        except BaseException:
            if not (known or finished):
                path.unlink()
            raise
        _append(journal, "", _stamp(target), state)
        if not resume:
            path.unlink()


def _append(journal: TextIO, name: str, stamp: list[int], row: Row) -> None:
    """Add a line to the journal."""
    with named_after(journal.name):
        print(json.dumps([name, stamp, row]), file=journal, flush=True)


def _key(photo: Path, target: Path) -> str:
    """Return the name of a photo in the journal: its path from the folder of the output file.

    It is the same wherever the command runs, and after both folders were moved together.
    """
    return os.path.relpath(photo, target.parent)


def _others(
    target: Path, names: Mapping[Path, Name], known: Mapping[str, tuple[list[int], Row]]
) -> tuple[list[Row], list[str]]:
    """Return the rows of finished photos that are not among the inputs, without deleted photos.

    Returns:
        The rows, and the journal's names of the deleted photos.

    Raises:
        ConfigError: A row has the same name as a different photo among the inputs.
    """
    inputs, rows, deleted = {_key(photo, target) for photo in names}, list[Row](), list[str]()
    given = {*names.values()}
    for name, (_, row) in known.items():
        if name in inputs or "captions" not in row:
            continue
        photo, taken = target.parent / name, row["image"] in given
        if _is_deleted(photo) or (taken and not os.path.lexists(photo)):  # taken: it was moved
            deleted.append(name)
        elif taken:
            raise ConfigError(
                f"{target} already has a caption with the name {row['image']!r} for a different "
                f"photo, {photo}; set -o to a different file"
            )
        else:
            rows.append(row)
    return rows, deleted


def _is_deleted(photo: Path) -> bool:
    """Return whether a photo was deleted.

    If its folder is missing, empty or cannot be read, a disk may only be disconnected.
    """
    try:
        photo.stat()
    except FileNotFoundError:
        with suppress(OSError):
            return any(photo.parent.iterdir())
    except OSError:
        pass
    return False


def _kept(finished: int, others: int, gone: int) -> str:
    """Describe the captions of an earlier run.

    Args:
        finished: Number of inputs that keep their captions.
        others: Number of rows of photos that are not among the inputs.
        gone: Number of deleted photos.
    """
    more = f", and {counted(others, 'row')} of other photos" if others else ""
    left = f"; {counted(gone, 'deleted photo')} left out" if gone else ""
    return f"the captions of {counted(finished, 'finished photo')} are kept{more}{left}"


def _unchanged(
    target: Path,
    names: Mapping[Path, Name],
    stamps: Mapping[Path, list[int]],
    known: dict[str, tuple[list[int], Row]],
    of_file: Mapping[Name | None, str],
) -> tuple[dict[Path, Row], dict[str, tuple[list[int], Row]]]:
    """Find the photos that keep their captions.

    These are the photos with a row in the file, and finished photos that have not changed. If a
    photo has changed, its row is kept only if the user may have edited the caption.

    Args:
        target: The output file.
        names: The photos, with their names in the file.
        stamps: Size and modification time of each photo.
        known: Stamp and row of each photo that the earlier run has finished, by `_key`.
        of_file: Captions in the file as the user may have edited them, by photo name.

    Returns:
        The rows of the photos that keep their captions, by photo. Then the journal's entries that
        have to be added, because a stamp or a row has changed.
    """
    kept: dict[Path, Row] = {}
    new: dict[str, tuple[list[int], Row]] = {}
    changed = []
    for photo, stamp in stamps.items():
        before, one = known.get(_key(photo, target), ([], {}))
        same_time = before[1:] == stamp[1:] != []
        if (text := of_file.get(names[photo])) is not None:
            captions = one.get("captions")
            if before and not same_time:
                if captions and text.startswith(captions[0]["text"]):
                    continue
                changed.append(photo)
            kept[photo] = one
            new[_key(photo, target)] = stamp, one or {"text": text}
        # captioner keeps the time when it writes metadata, which changes the size. An error is
        # tried again.
        elif "captions" in one and same_time and (before == stamp or find_inside(photo).digests):
            kept[photo] = one
            new[_key(photo, target)] = stamp, one
    if changed:
        warn(
            f"{first_of(changed)} has changed, but you may have edited its caption, so the caption "
            "is kept; to caption the photo again, remove its row from the output file"
        )
    return kept, {key: entry for key, entry in new.items() if known.get(key) != entry}


def _read(
    journal: TextIO, target: Path, settings: dict[str, Any], *, resume: bool, force: bool
) -> tuple[dict[str, tuple[list[int], Row]], tuple[list[int], Row], bool]:
    """Read the journal of an earlier run, and prepare it so that lines can be added.

    If it has no finished photo, or if ``force`` is set, its content is replaced by the settings.

    Returns:
        The entries by `_key`, the last entry about the file itself, and whether to keep the file's
        rows. The rows are kept if the file was written without ``--resume`` or has changed since.
    """
    known: dict[str, tuple[list[int], Row]] = {}
    before, end = None, 0
    with suppress(ValueError, TypeError):
        before = json.loads(journal.readline())
        end = journal.tell()
        while (line := journal.readline()).endswith("\n"):
            name, stamp, one = json.loads(line)
            known[name] = list(stamp), dict(one)
            end = journal.tell()
    last = known.pop("", ([], {}))
    done = sum("captions" in one or "text" in one for _, one in known.values())
    over = not done or (force and not (resume and before == settings))
    if over:
        known, last = {}, ([], {})
    elif not resume:
        raise ConfigError(
            f"{journal.name} contains {counted(done, 'photo')} from an earlier run; add --resume "
            "to keep them, or --force to start over"
        )
    else:
        check_same(journal.name, before or {}, settings)
    journal.seek(0 if over else end)
    journal.truncate()
    if over:
        print(json.dumps(settings), file=journal, flush=True)
    changed = target.exists() and (_stamp(target) != last[0] or "corrected" in last[1])
    return known, last, changed and not force


def _stamp(path: Path) -> list[int]:
    """Return the size and modification time of a file, or an empty list if it does not exist."""
    try:
        found = path.stat()
    except OSError:
        return []
    return [found.st_size, found.st_mtime_ns]
