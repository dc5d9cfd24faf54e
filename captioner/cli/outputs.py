"""Output files of the commands, and what they print to standard error."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from captioner.errors import ConfigError


def refuse_overwrite(path: Path, force: bool, *, new_folder: bool = False) -> None:
    """Check that an output file can be written.

    Args:
        path: The output file.
        force: Overwrite an existing file.
        new_folder: The file's folder will be created if it does not exist.

    Raises:
        ConfigError: ``path`` exists and ``--force`` was not given, it is a folder, or its parent
            folder does not exist.
    """
    if path.is_dir():
        raise ConfigError(f"{path} is a folder; give a file name")
    if not new_folder:
        require_parent(path)
    if path.exists() and not force:
        raise ConfigError(f"{path} exists; give --force to overwrite it, or another name")


def require_parent(path: Path) -> None:
    """Check that the folder exists in which a file or folder is to be created.

    Raises:
        ConfigError: It does not exist, or one of its parents is a file.
    """
    above = next(parent for parent in path.absolute().parents if parent.exists())
    if not above.is_dir():
        raise ConfigError(f"cannot write {path}: {above} is a file, not a folder")
    if above != path.absolute().parent:
        raise ConfigError(
            f"cannot write {path}: the folder {path.parent} does not exist; create it first "
            f"(mkdir -p {shlex.quote(str(path.parent))}), or give another name"
        )


@contextmanager
def output(path: Path | None) -> Iterator[IO[str]]:
    """Open standard output, or a file that is renamed to ``path`` once it is complete."""
    if path is None:
        yield sys.stdout
        return
    from captioner.files import atomic_open

    with atomic_open(path) as file:
        yield file


def warn(message: str) -> None:
    """Print one line to standard error."""
    from tqdm import tqdm

    tqdm.write(f"captioner: {message}", file=sys.stderr)
