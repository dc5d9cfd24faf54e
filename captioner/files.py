"""Atomic writes of files and folders, and a lock for what is written in place.

A file is written to a temporary file beside it, synced to disk and renamed over the old one, which
is atomic.

A non-empty folder cannot be replaced atomically, so `atomic_folder` uses these steps:

    1. write       .NAME.tmp-TOKEN
    2. rename to   .NAME.new-TOKEN        marks it as complete and on disk
    3. rename      NAME -> .NAME.old-TOKEN
    4. rename      .NAME.new-TOKEN -> NAME
    5. remove      .NAME.old-TOKEN        renamed to tmp first: new and old are always complete

At any time NAME, or else a ``new`` or ``old`` sibling, is complete. Only a crash between steps 3
and 4 leaves no NAME: readers then find the sibling with `complete_folder`, and the next write
restores it. The next write also removes the temporaries of crashed processes. Those in use are
locked with flock; without it, as on Windows, leftovers are kept. Several processes may write the
same file at once (the last one wins), but only one may write a folder.
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

FREQUENCIES = "document_frequencies.json.gz"
"""Usual name of a document frequencies file, also in a model folder."""


def atomic_write(path: str | Path, data: bytes | str) -> None:
    """Write a file atomically: readers see either the old content or the new.

    Missing parent folders are created, permissions are kept and symbolic links are followed.
    Devices and pipes such as ``/dev/stdout`` are written to directly.

    Args:
        path: The file to write or replace.
        data: The content; text is encoded as UTF-8 without changing line ends.

    Raises:
        OSError: The file cannot be written; the old file is unchanged.
    """
    with atomic_open(path, "wb") as file:
        file.write(data.encode() if isinstance(data, str) else data)


@overload
def atomic_open(path: str | Path) -> AbstractContextManager[IO[str]]: ...


@overload
def atomic_open(path: str | Path, mode: Literal["wb"]) -> AbstractContextManager[IO[bytes]]: ...


@contextmanager
def atomic_open(path: str | Path, mode: Literal["w", "wb"] = "w") -> Iterator[IO[Any]]:
    """Open a file for writing that replaces the old one when the block ends.

    After an error in the block, the old file is unchanged and the temporary is removed.

    Args:
        path: The file to write or replace; see `atomic_write`.
        mode: ``w`` for UTF-8 text, ``wb`` for bytes.

    Yields:
        The open file.

    Raises:
        OSError: The file cannot be written.
    """
    text: dict[str, Any] = (
        {} if mode == "wb" else {"encoding": "utf-8", "errors": "backslashreplace"}
    )
    if Path(path).exists() and not Path(path).is_file():
        with _named_after(path, others=True), Path(path).open(mode, **text) as special:
            yield special  # must not be replaced by a file
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
                        temporary.chmod(permissions)  # after opening: they may be read-only
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
    """Create a folder that replaces the old one when the block ends; see the module docstring.

    Missing parent folders are created. After an error in the block, the old folder is unchanged
    and the temporary is removed.

    Args:
        path: The folder to create or replace, with everything in it.

    Yields:
        An empty temporary folder to write to.

    Raises:
        OSError: The folder cannot be written.
    """
    with _named_after(path):
        target = Path(path).resolve()
        if target.exists() and not target.is_dir():
            raise NotADirectoryError(20, "Not a folder", str(path))
        target.parent.mkdir(parents=True, exist_ok=True)
        _restore(target)
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
    """Find the complete version of a folder, even after a crash while it was being replaced.

    Args:
        path: A folder written by `atomic_folder`.

    Returns:
        ``path`` itself, or a complete sibling if only that exists.
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


def read_input(path: str | Path, kind: str) -> bytes:
    """Read a file that the user named.

    Args:
        path: The file.
        kind: What it should be, for messages: ``a JSON file``.

    Raises:
        DataError: The file is missing or cannot be read.
    """
    try:
        return Path(path).read_bytes()
    except FileNotFoundError as error:
        raise DataError(f"{path} does not exist; give {kind}") from error
    except IsADirectoryError as error:
        raise DataError(f"{path} is a folder; give {kind}") from error
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from error


def free_space(folder: Path) -> int:
    """Free bytes on the disk of a folder, which need not exist yet."""
    path = folder.absolute()
    return shutil.disk_usage(next(p for p in (path, *path.parents) if p.exists())).free


@contextmanager
def write_lock(path: str | Path) -> Iterator[None]:
    """Hold the exclusive lock of a file or folder that is written in place.

    The system releases the lock when the process ends, however it ends. Windows has no such lock;
    there, nothing is locked.

    Args:
        path: An existing file or folder.

    Raises:
        DataError: Another process holds the lock.
    """
    try:
        lock = _flock(Path(path))
    except BlockingIOError as error:
        raise DataError(
            f"another process is writing to {path}; wait for it, or choose another name"
        ) from error
    with _released(lock):
        yield


def _swap_in(temporary: Path, target: Path) -> None:
    """Steps 2 to 5; an error restores the old folder."""
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


def _restore(target: Path) -> None:
    """Finish the replacement of a process that crashed between steps 3 and 4."""
    survivor = complete_folder(target)
    if survivor != target:
        survivor.rename(target)


def _remove_leftovers(target: Path) -> None:
    """Remove the temporaries of crashed processes."""
    for kind in ("tmp", "new", "old"):
        for leftover in _siblings(target, kind):
            lock = _lock(leftover)
            if lock is None:  # another process is writing it, or has just renamed it
                continue
            with suppress(OSError):
                if leftover.is_dir():
                    _discard(leftover, target)
                else:
                    leftover.unlink()
            os.close(lock)


def _discard(folder: Path, target: Path) -> None:
    """Remove a sibling folder; renamed first, since a partly removed one is not complete."""
    trash = _sibling(target, "tmp")
    with suppress(OSError):  # otherwise removed by the next write
        folder.rename(trash)
        shutil.rmtree(trash)


def _claim(target: Path, make: Callable[[Path], None]) -> tuple[Path, int | None]:
    """Create a temporary beside the target, with its lock (None if there are no locks).

    Another writer may remove the temporary before it is locked; then a new one is created.
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
    """Start of the siblings' names; long names are hashed to stay within the system's limit."""
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
    """Release a lock at the end of the block."""
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
            if file.is_file():  # "r+b": some systems sync only files open for writing
                with file.open("r+b" if os.access(file, os.W_OK) else "rb") as opened:
                    os.fsync(opened.fileno())
        _fsync_folder(Path(parent))


def _fsync_folder(folder: Path) -> None:
    """Make renames in a folder durable, if the file system supports it."""
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
    """Make OSErrors name the caller's path instead of the temporary.

    Args:
        path: The path that the caller gave.
        others: Keep the file name of errors that have one; they belong to another file.
    """
    try:
        yield
    except OSError as error:
        if not (others and error.filename):
            error.filename, error.filename2 = str(path), None
        raise
