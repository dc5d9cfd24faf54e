"""Files in folders on a disk or in object storage (``s3://``, ``gs://``, ...), by fsspec.

Credentials and endpoints come from the environment, as for the cloud's own tools.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from captioner.errors import DataError, first_line

BLOCK = 8 << 20
"""Bytes that are requested from object storage at a time."""


def is_local(name: str) -> bool:
    """Whether a name is a path, not a URL."""
    return "://" not in name


def join(folder: str | Path, name: str) -> str:
    """A file of a folder."""
    return str(Path(folder, name)) if is_local(str(folder)) else f"{str(folder).rstrip('/')}/{name}"


def sizes(folder: str | Path) -> dict[str, int]:
    """Sizes of a folder's files (bytes) by name; empty if there is no folder.

    Raises:
        DataError: A URL cannot be read.
    """
    if is_local(str(folder)):
        found = Path(folder).iterdir() if Path(folder).is_dir() else ()
        return {path.name: path.stat().st_size for path in found if path.is_file()}
    try:
        fs, path = _file_system(str(folder))
        listed: list[dict[str, Any]] = fs.ls(path, detail=True)
    except FileNotFoundError:
        return {}
    except Exception as error:  # each protocol has its own
        raise unreadable(folder, error) from error
    return {str(one["name"]).rpartition("/")[2]: int(one["size"] or 0) for one in listed}


@contextmanager
def open_to_read(name: str | Path) -> Iterator[IO[bytes]]:
    """Open a file, to be read from its start; errors are those of the protocol's library."""
    if is_local(str(name)):
        with Path(name).open("rb") as file:
            yield file
        return
    fs, path = _file_system(str(name))
    with fs.open(path, "rb", block_size=BLOCK, cache_type="readahead") as remote:
        yield remote


def _file_system(name: str) -> tuple[Any, str]:
    from fsspec.core import url_to_fs

    fs, path = url_to_fs(name, use_listings_cache=False)
    return fs, str(path)


def unreadable(name: str | Path, error: Exception) -> DataError:
    """The error of a file or folder that cannot be read."""
    reason = (error.strerror if isinstance(error, OSError) else None) or first_line(error)
    return DataError(f"{name}: cannot be read ({reason}); check the name and your access to it")
