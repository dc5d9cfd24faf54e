"""Files and folders that are written whole or not at all.

A file: a temporary beside it is filled, fsynced and renamed over it, which the system does in one
step.

A folder cannot be replaced in one step once it holds anything, so `atomic_folder` dances:

    1. fill        .NAME.tmp-TOKEN
    2. rename it   .NAME.new-TOKEN        this name says: complete, and on disk
    3. rename      NAME -> .NAME.old-TOKEN
    4. rename      .NAME.new-TOKEN -> NAME
    5. remove      .NAME.old-TOKEN        renamed to tmp first: new and old are always complete

At every moment NAME, or else a ``new`` or ``old`` sibling, is complete. Only a death between 3 and
4 leaves no NAME: `complete_folder` then finds the sibling for a reader (it changes nothing), and
the next write puts it back first. Whatever a dead run left behind goes at the next write; what a
living process still fills holds a lock (flock; without it, as on Windows, leftovers stay) and is
left alone. Two processes may write one file at a time, the last one wins; a folder wants one
writer at a time.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import shutil
import stat
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import IO, Any, Literal, overload

from captioner.errors import DataError

if sys.platform != "win32":
    import fcntl


def atomic_write(path: str | Path, data: bytes | str) -> None:
    """Write a file so that a reader sees the old content or the new, never a part.

    Missing parent folders are made. The file keeps its permissions, a link to a file keeps being a
    link, and what is no file at all (``/dev/stdout``, a pipe) is simply written to.

    Args:
        path: The file to write or replace.
        data: Its whole content; text is stored as UTF-8, line ends as they are.

    Raises:
        OSError: It cannot be written (a full disk, no permission, a folder of that name); the old
            file stays as it was and nothing is left beside it.
    """
    with atomic_open(path, "wb") as file:
        file.write(data.encode() if isinstance(data, str) else data)


@overload
def atomic_open(path: str | Path) -> AbstractContextManager[IO[str]]: ...


@overload
def atomic_open(path: str | Path, mode: Literal["wb"]) -> AbstractContextManager[IO[bytes]]: ...


@contextmanager
def atomic_open(path: str | Path, mode: Literal["w", "wb"] = "w") -> Iterator[IO[Any]]:
    """A file to be written bit by bit that takes its place only when it is complete.

    Args:
        path: The file to write or replace; see `atomic_write`.
        mode: ``w`` for UTF-8 text, ``wb`` for bytes.

    Yields:
        The open file.

    Raises:
        OSError: It cannot be written. As after any error in the block, the old file stays as it
            was and the temporary is removed.
    """
    text: dict[str, Any] = (
        {} if mode == "wb" else {"encoding": "utf-8", "errors": "backslashreplace"}
    )
    if Path(path).exists() and not Path(path).is_file():
        with _named_after(path, others=True), Path(path).open(mode, **text) as special:
            yield special  # never rename over a device
        return
    with _named_after(path):
        target = Path(path).resolve()
        target.parent.mkdir(parents=True, exist_ok=True)
        _remove_leftovers(target)
        temporary, lock = _claim(target, lambda new: new.touch(exist_ok=False))
    with _released(lock):
        try:
            with _named_after(path):
                file = temporary.open(mode, **text)
            with _named_after(path, others=True), file:
                with _named_after(path):
                    if (permissions := _mode_of(target)) is not None:
                        temporary.chmod(permissions)  # once it is open: they may forbid writing
                yield file
                file.flush()
                os.fsync(file.fileno())
            with _named_after(path):
                temporary.replace(target)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
    _fsync_folder(target.parent)


@contextmanager
def atomic_folder(path: str | Path) -> Iterator[Path]:
    """Fill a folder that takes its place only when it is complete.

    Missing parent folders are made. The dance and what a death leaves: see the module's head.

    Args:
        path: The folder to make or replace, with everything in it.

    Yields:
        An empty temporary folder beside it, to be filled.

    Raises:
        OSError: It cannot be written. As after any error in the block, the old folder stays as it
            was and the temporary is removed.
    """
    with _named_after(path):
        target = Path(path).resolve()
        if target.exists() and not target.is_dir():
            raise NotADirectoryError(20, "Not a folder", str(path))
        target.parent.mkdir(parents=True, exist_ok=True)
        _put_back(target)
        _remove_leftovers(target)
        temporary, lock = _claim(target, Path.mkdir)
    with _released(lock):
        try:
            yield temporary
            with _named_after(path):
                _fsync_tree(temporary)
                _swap_in(temporary, target)
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise


def complete_folder(path: str | Path) -> Path:
    """Where a folder's complete content is now, even after a death in the middle of a swap.

    Args:
        path: A folder that `atomic_folder` writes.

    Returns:
        ``path`` itself, or the complete sibling when only that is there.
    """
    path = Path(path)
    if path.exists():
        return path
    target = path.resolve()
    if not target.parent.is_dir():
        return path
    for kind in ("new", "old"):
        if found := sorted(_siblings(target, kind), key=lambda sibling: sibling.stat().st_mtime_ns):
            return found[-1]
    return path


@contextmanager
def folder_lock(folder: str | Path) -> Iterator[None]:
    """Hold the exclusive lock of a folder that is written in place.

    The system releases the lock when the process ends, however it ends. Windows has no such lock;
    there, nothing is locked.

    Args:
        folder: An existing folder.

    Raises:
        DataError: Another process holds the lock.
    """
    try:
        lock = _flock(Path(folder))
    except BlockingIOError as error:
        raise DataError(
            f"another process is writing to {folder}; wait for it, or choose another folder"
        ) from error
    with _released(lock):
        yield


def _swap_in(temporary: Path, target: Path) -> None:
    """Steps 2 to 5 of the dance; an error on the way brings the old folder back."""
    if not target.exists():
        temporary.rename(target)
        _fsync_folder(target.parent)
        return
    token = temporary.name.rpartition("-")[2]
    new, old = _sibling(target, "new", token), _sibling(target, "old", token)
    try:
        temporary.rename(new)
        target.rename(old)
        new.rename(target)
        _fsync_folder(target.parent)
    except BaseException:
        if old.exists() and not target.exists():
            old.rename(target)
        _discard(new, target)
        raise
    _discard(old, target)


def _put_back(target: Path) -> None:
    """Finish the swap of a run that died between steps 3 and 4."""
    survivor = complete_folder(target)
    if survivor != target:
        survivor.rename(target)


def _remove_leftovers(target: Path) -> None:
    """Remove what dead runs left beside the target."""
    for kind in ("tmp", "new", "old"):
        for leftover in _siblings(target, kind):
            lock = _lock(leftover)
            if lock is None:  # another process is filling it, or has just moved it into place
                continue
            with suppress(OSError):
                if leftover.is_dir():
                    _discard(leftover, target)
                else:
                    leftover.unlink()
            os.close(lock)


def _discard(folder: Path, target: Path) -> None:
    """Remove a sibling folder, renamed first: half removed it must not pass for complete."""
    trash = _sibling(target, "tmp")
    with suppress(OSError):  # what cannot go now goes at the next write
        folder.rename(trash)
        shutil.rmtree(trash)


def _claim(target: Path, make: Callable[[Path], None]) -> tuple[Path, int | None]:
    """A new temporary beside the target, and its lock; None where there are no locks.

    Between its making and its locking another writer may have taken it for a dead run's, so that
    a new one is made.
    """
    for last in (False, False, True):
        temporary = _sibling(target, "tmp")
        make(temporary)
        lock = _lock(temporary)
        if last or (lock is not None and temporary.exists()):
            break
        if lock is not None:
            os.close(lock)
        with suppress(OSError):
            temporary.rmdir() if temporary.is_dir() else temporary.unlink()
    return temporary, lock


def _prefix(target: Path, kind: str) -> str:
    """How the names of such siblings begin; a name near the system's limit is told by its hash."""
    long = len(os.fsencode(target.name)) > 200
    name = hashlib.sha256(os.fsencode(target.name)).hexdigest() if long else target.name
    return f".{name}.{kind}-"


def _sibling(target: Path, kind: str, token: str | None = None) -> Path:
    return target.with_name(_prefix(target, kind) + (token or secrets.token_hex(4)))


def _siblings(target: Path, kind: str) -> list[Path]:
    prefix = _prefix(target, kind)
    with os.scandir(target.parent) as entries:
        names = [e.name for e in entries if e.name.startswith(prefix)]
    return [target.with_name(n) for n in names if len(n) == len(prefix) + 8]


def _lock(path: Path) -> int | None:
    """Lock a temporary as in use, until the descriptor is closed.

    Returns:
        The open descriptor, or None if another process holds the lock or there are no locks.
    """
    try:
        return _flock(path)
    except OSError:
        return None


def _flock(path: Path) -> int | None:
    """The descriptor of a file or folder, locked exclusively without waiting; None on Windows."""
    if sys.platform == "win32":
        return None
    descriptor = os.open(path, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


@contextmanager
def _released(lock: int | None) -> Iterator[None]:
    """A temporary is in use in here."""
    try:
        yield
    finally:
        if lock is not None:
            os.close(lock)


def _mode_of(target: Path) -> int | None:
    try:
        return stat.S_IMODE(target.stat().st_mode)
    except FileNotFoundError:
        return None


def _fsync_tree(folder: Path) -> None:
    for parent, _, names in os.walk(folder):
        for name in names:
            file = Path(parent, name)
            if file.is_file():  # "r+b": some systems sync only what is open for writing
                with file.open("r+b" if os.access(file, os.W_OK) else "rb") as opened:
                    os.fsync(opened.fileno())
        _fsync_folder(Path(parent))


def _fsync_folder(folder: Path) -> None:
    """Make renames in a folder survive a power cut, where the system can; some mounts cannot."""
    if sys.platform == "win32":
        return
    with suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


@contextmanager
def _named_after(path: str | Path, *, others: bool = False) -> Iterator[None]:
    """Let an OSError name the path that the caller gave, not a temporary nobody knows.

    Args:
        path: What the caller gave.
        others: An error that names a file is another file's, and keeps its name.
    """
    try:
        yield
    except OSError as error:
        if not (others and error.filename):
            error.filename, error.filename2 = str(path), None
        raise
