"""The journal of an output file, which lets ``captioner caption --resume`` continue it.

While ``captioner caption -o FILE`` runs, finished captions go to ``FILE.resume`` (JSON Lines). The
first line contains the settings. Each further line contains a photo's path, its size and
modification time, and its row. A line with the path "" is added each time FILE itself is written:

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
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from captioner.cli.caption_formats import CaptionFormat, read_rows
from captioner.cli.console import hint, warn
from captioner.cli.rows import Name, Row
from captioner.errors import ConfigError
from captioner.files import (
    atomic_write,
    check_same,
    named_after,
    remove_temporary,
    write_lock,
)
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
        The rows of the photos, kept or new, in the order of the photos.

    Raises:
        ConfigError: An earlier run finished some photos, and neither ``resume`` nor ``force`` is
            true, or the earlier run had different settings.
        DataError: Another process is writing the file.
    """
    path = journal_path(target)
    with write_lock(path, create=True, name=target):
        for left in (target, path):
            remove_temporary(left)
        try:
            with _continued(
                target, names, captioned, settings, kind=kind, resume=resume, force=force
            ) as rows:
                yield rows
        except BaseException:
            with suppress(FileNotFoundError):
                if not path.stat().st_size:  # it was only created to be locked
                    path.unlink()
            raise


@contextmanager
def _continued(
    target: Path,
    names: Mapping[Path, Name],
    captioned: Callable[[Sequence[Path]], Iterator[Row]],
    settings: dict[str, Any],
    *,
    kind: CaptionFormat,
    resume: bool,
    force: bool,
) -> Iterator[Iterator[Row]]:
    """Do the work of `continued` while the journal is locked."""
    path, settings = journal_path(target), json.loads(json.dumps(settings))
    known, written, corrected = _read(target, settings, resume=resume, force=force)
    stamps = {photo: _stamp(photo) for photo in names}  # before they are read
    rows = []
    if corrected:
        rows = read_rows(target, kind, names.values())
    kept = _unchanged(names, stamps, known, {row["image"]: row["text"] for row in reversed(rows)})
    again = {name for photo, name in names.items() if photo not in kept}
    rows = [row for row in rows if row["image"] not in again]
    in_rows = {row["image"] for row in rows}
    finished = len(kept)

    def append(name: str, stamp: list[int], one: Row) -> None:
        with named_after(path):
            print(json.dumps([name, stamp, one]), file=file, flush=True)

    def all_rows() -> Iterator[Row]:
        nonlocal finished
        yield from rows
        new = captioned([photo for photo in names if photo not in kept])
        for photo, name in names.items():
            if name in in_rows:
                continue
            one = kept.get(photo)
            if one is None:
                one = next(new)
                append(str(photo), stamps[photo], one)
                finished += "captions" in one
            yield one | {"image": name}  # --annotations may have changed the name
        for _ in new:  # no rows are left, but only this completes the progress bar
            pass

    def progress() -> str:
        done = f"{finished} of {len(names)} photos are finished and kept in {path}"
        return done if finished else ""

    if rows:
        warn(f"{target}: the existing captions of {counted(finished, 'photo')} are kept")
    elif known:
        gone = len(known.keys() - set(map(str, names)))
        left = f", {counted(gone, 'photo')} of an earlier run left out" if gone else ""
        warn(f"{target}: {counted(finished, 'finished photo')} kept{left}")
    state = {"corrected": True} if rows else {}
    lines = [settings, ["", written, state], *([name, *found] for name, found in known.items())]
    atomic_write(path, "".join(json.dumps(line) + "\n" for line in lines))
    # The write has replaced the locked file, so the new file is locked too.
    with (
        named_after(path),
        write_lock(path, create=True, name=target),
        path.open("a", encoding="utf-8") as file,
    ):
        try:
            with hint(progress, "with --resume"):
                yield all_rows()
        except BaseException:
            if not (known or finished):
                path.unlink()
            raise
        append("", _stamp(target), state)
        if not resume:
            path.unlink()


def _unchanged(
    names: Mapping[Path, Name],
    stamps: Mapping[Path, list[int]],
    known: dict[str, tuple[list[int], Row]],
    of_file: Mapping[Name | None, str],
) -> dict[Path, Row]:
    """Return the rows of the photos that keep their captions, and update ``known``.

    These are the photos with a row in the file, and finished photos that have not changed. If a
    photo has changed, its row is kept only if the user may have edited the caption.

    Args:
        names: The photos, with their names in the file.
        stamps: Size and modification time of each photo.
        known: Stamp and row of each photo that the earlier run has finished, by path.
        of_file: Captions in the file as the user may have edited them, by photo name.
    """
    kept: dict[Path, Row] = {}
    changed = []
    for photo, stamp in stamps.items():
        before, one = known.get(str(photo), ([], {}))
        same = before == stamp
        if (text := of_file.get(names[photo])) is not None:
            captions = one.get("captions")
            if before and not same and captions and text.startswith(captions[0]["text"]):
                continue
            if before and not same:
                changed.append(photo)
            kept[photo] = one
            known[str(photo)] = stamp, one or {"text": text}
        elif "captions" in one and same:  # an error is tried again
            kept[photo] = one
    if changed:
        warn(
            f"{first_of(changed)} has changed, but its caption may be edited and is kept; to "
            "caption the photo again, remove its row"
        )
    return kept


def _read(
    target: Path, settings: dict[str, Any], *, resume: bool, force: bool
) -> tuple[dict[str, tuple[list[int], Row]], list[int], bool]:
    """Read the journal of an earlier run.

    Returns:
        The entries by photo, the size and modification time of the file that the run wrote, and
        whether to keep the file's rows. The rows are kept if the file was written without
        ``--resume`` or has changed since.
    """
    path, before = journal_path(target), None
    known: dict[str, tuple[list[int], Row]] = {}
    with suppress(FileNotFoundError, ValueError, TypeError), path.open(encoding="utf-8") as file:
        before = json.loads(next(file, ""))
        for line in file:
            name, stamp, one = json.loads(line)
            known[name] = stamp, one
    written, state = known.pop("", ([], {}))
    done = sum("captions" in one or "text" in one for _, one in known.values())
    if not done or (force and not (resume and before == settings)):
        known, written, state = {}, [], {}
    elif not resume:
        raise ConfigError(
            f"{path} contains {counted(done, 'photo')} from an earlier run; add --resume to "
            "keep them, or --force to start over"
        )
    else:
        check_same(path, before or {}, settings)
    changed = target.exists() and (_stamp(target) != written or "corrected" in state)
    return known, written, changed and not force


def _stamp(path: Path) -> list[int]:
    """Return the size and modification time of a file, or an empty list if it does not exist."""
    try:
        found = path.stat()
    except OSError:
        return []
    return [found.st_size, found.st_mtime_ns]
