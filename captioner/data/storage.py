"""Files in folders on a disk or in object storage (``s3://``, ``gs://``, ...), by fsspec.

Credentials and endpoints come from the environment, as for the cloud's own tools.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
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
    return f"{str(folder).rstrip('/')}/{name}"


def sizes(folder: str | Path) -> dict[str, int]:
    """Sizes of a folder's files (bytes) by name; empty if there is no folder.

    Raises:
        DataError: It cannot be read.
    """
    try:
        fs, path = _file_system(folder)
        listed: list[dict[str, Any]] = fs.ls(path, detail=True)
    except FileNotFoundError:
        return {}
    except Exception as error:  # each protocol has its own
        raise unreadable(folder, error) from error
    return {str(one["name"]).rpartition("/")[2]: int(one["size"] or 0) for one in listed}


def open_to_read(name: str | Path) -> AbstractContextManager[IO[bytes]]:
    """Open a file, to be read from its start; errors are those of the protocol's library."""
    fs, path = _file_system(name)
    opened: AbstractContextManager[IO[bytes]] = fs.open(
        path, "rb", block_size=BLOCK, cache_type="readahead"
    )
    return opened


def _file_system(name: str | Path) -> tuple[Any, str]:
    from fsspec.core import url_to_fs

    fs, path = url_to_fs(str(name), use_listings_cache=False)
    return fs, str(path)


def unreadable(name: str | Path, error: Exception) -> DataError:
    """The error of a file or folder that cannot be read."""
    reason = (error.strerror if isinstance(error, OSError) else None) or first_line(error)
    return DataError(f"{name}: cannot be read ({reason}); check the name and your access to it")
