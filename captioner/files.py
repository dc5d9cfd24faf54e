"""Atomic writes of files and folders, a lock for files that are written in place, and valid JSON.

A new file is written next to the old file, synced to disk and renamed over it, which is atomic. A
folder cannot be replaced by a single rename. Instead, the new folder is written next to the old
folder. Then the old folder is renamed, the new folder takes its name, and the old folder is
removed. Several processes may write the same file at once: the last process to finish wins. Only
one process at a time may write a folder.
"""

from __future__ import annotations

import errno
import fcntl
import glob
import json
import os
import secrets
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any, Literal

from captioner.errors import ConfigError, DataError
from captioner.messages import first_line


def atomic_write(path: str | Path, data: bytes | str) -> None:
    """Write a file atomically, so that readers see either the old content or the new.

    Missing parent folders are created. Owner, permissions and extended attributes are kept, and
    symbolic links are followed. Devices and pipes such as ``/dev/stdout`` are written to directly.
    Text is encoded as UTF-8 without changing line ends.
    """
    with atomic_open(path, "wb") as file:
        file.write(data.encode() if isinstance(data, str) else data)


def json_values(data: Any) -> Any:
    """Convert data to JSON values: tuples become lists, and NaN and infinity become None.

    Python writes NaN and infinity as words that JSON does not have, so most programs reject them.
    """
    return json.loads(json.dumps(data), parse_constant=lambda _: None)


def remove_temporary(path: Path) -> None:
    """Remove the temporary files that killed processes left when they wrote a file.

    Temporary files that a process is still writing are locked, so they are kept. Nothing is removed
    on file systems that do not support locks.
    """
    target = path.resolve()
    for temporary in target.parent.glob(glob.escape(_temporary(target)) + 8 * "[0-9a-f]"):
        with suppress(OSError), temporary.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            temporary.unlink()


def _temporary(target: Path) -> str:
    """Return how the names of a file's temporary files begin. Hexadecimal digits follow."""
    return (
        f".{target.name[:60]}.tmp-"  # at most 60 characters, so that a name has at most 255 bytes
    )


@contextmanager
def atomic_open(path: str | Path, mode: Literal["w", "wb"] = "w") -> Iterator[IO[Any]]:
    """Open a new file that replaces the old file when the block ends.

    Text is encoded as UTF-8. For owners, links and devices see `atomic_write`. After an error in
    the block, such as an OSError, the old file is unchanged and the temporary file is removed.
    """
    text: Any = {} if mode == "wb" else {"encoding": "utf-8", "errors": "backslashreplace"}
    with named_after(path):
        if Path(path).exists() and not Path(path).is_file():
            with Path(path).open(mode, **text) as special:
                yield special  # a device or pipe must not be replaced by a file
            return
        target = Path(path).resolve()
        target.parent.mkdir(parents=True, exist_ok=True)
        temporary = target.with_name(f"{_temporary(target)}{secrets.token_hex(4)}")
        try:
            with temporary.open(mode.replace("w", "x"), **text) as file:
                with suppress(OSError):  # see remove_temporary
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if target.exists():
                    shutil.copystat(target, temporary)  # writing then updates the time
                    with suppress(OSError):  # only root may change the owner
                        os.chown(temporary, target.stat().st_uid, target.stat().st_gid)
                yield file
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(target)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
        _fsync_folder(target.parent)


@contextmanager
def atomic_folder(path: str | Path) -> Iterator[Path]:
    """Create a folder that replaces the old folder when the block ends.

    Missing parent folders are created. After an error in the block, such as an OSError, the old
    folder is unchanged and the temporary folder is removed.

    Yields:
        An empty temporary folder to write to.
    """
    with named_after(path):
        target = Path(path).resolve()
        if target.exists() and not target.is_dir():
            raise NotADirectoryError(20, "Not a folder", str(path))
        new, old = (target.with_name(f".{target.name}.{kind}") for kind in ("tmp", "old"))
        shutil.rmtree(new, ignore_errors=True)  # left by a killed process
        new.mkdir(parents=True)
        try:
            yield new
            for parent, _, names in os.walk(new):
                for name in names:
                    with Path(parent, name).open("rb") as opened:
                        os.fsync(opened.fileno())
                _fsync_folder(Path(parent))
            if target.exists():
                shutil.rmtree(old, ignore_errors=True)
                target.rename(old)
            new.rename(target)
        except BaseException:
            shutil.rmtree(new, ignore_errors=True)
            raise
        _fsync_folder(target.parent)
        shutil.rmtree(old, ignore_errors=True)


def read_input(path: str | Path, kind: str) -> bytes:
    """Read a file that the user has named.

    Args:
        path: The file.
        kind: The expected kind of file, for the message, such as ``a JSON file``.

    Raises:
        DataError: The file cannot be read.
    """
    try:
        return Path(path).read_bytes()
    except OSError as error:
        usual = {errno.ENOENT: "does not exist", errno.EISDIR: "is a folder"}
        problem = usual.get(error.errno or 0, f"cannot be read ({error.strerror})")
        raise DataError(f"{path} {problem}; use {kind}") from error


def unreadable(name: str | Path, error: Exception) -> DataError:
    """Return the error for an unreadable file or folder, on a disk or in object storage."""
    reason = (error.strerror if isinstance(error, OSError) else None) or first_line(error)
    return DataError(f"{name} cannot be read ({reason}); check the name and your permissions")


def require_space(folder: Path, needed: int) -> int:
    """Return the number of free bytes on the disk of a folder, which may not exist yet.

    Raises:
        DataError: Fewer bytes are free than needed.
    """
    path = folder.absolute()
    free = shutil.disk_usage(next(p for p in (path, *path.parents) if p.exists())).free
    if needed > free:
        raise DataError(
            f"{folder} needs {needed:,} bytes, but only {free:,} are free; free some space, or use "
            "a folder on another disk"
        )
    return free


_NO_LOCKS = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS)
"""Errors of file systems that do not support locks."""


@contextmanager
def write_lock(
    path: str | Path, *, create: bool = False, name: str | Path | None = None
) -> Iterator[None]:
    """Lock a file or folder during the block. Other processes that try to lock it get an error.

    The system releases the lock when the process ends, even if the process is killed. If the file
    system does not support locks, nothing is locked.

    Args:
        path: The file or folder.
        create: Lock a file, and create it if it does not exist.
        name: The name for the error message (default: the path).

    Raises:
        DataError: Another process has locked the file or folder.
    """
    # NFS requires write access for locks, but folders can only be opened for reading.
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT if create else os.O_RDONLY, 0o666)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise DataError(
                f"another process is writing to {name or path}; wait until that process ends, or "
                "choose another name"
            ) from error
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
        yield
    finally:
        os.close(descriptor)


def _fsync_folder(folder: Path) -> None:
    """Sync a folder to disk, so that renames in it are durable, if the file system supports it."""
    with suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


@contextmanager
def named_after(path: str | Path) -> Iterator[None]:
    """Put the caller's path into OSErrors of the block, in place of the temporary file's path."""
    try:
        yield
    except OSError as error:
        if not error.filename or ".tmp" in str(error.filename):
            error.filename, error.filename2 = str(path), None
        raise


def check_same(name: object, before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Raise an error if the settings of a run have changed, so that the run cannot be resumed.

    Args:
        name: The name of the run, for the message.
        before: The settings of the earlier run, by option.
        now: The settings now, by option.

    Raises:
        ConfigError: A setting has changed.
    """
    changed = []
    for option in {**before, **now}:
        values = before.get(option), now.get(option)
        if values[0] != values[1]:
            old, new = ("not set" if value in (None, "", []) else value for value in values)
            changed.append(f"{option} was {old} and is now {new}")
    if changed:
        raise ConfigError(
            f"cannot resume {name}: {'; '.join(changed)}; use the same options and inputs, or "
            "start over with --force, which replaces the earlier results"
        )
