"""Output files of the commands, and what they print to standard error."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from captioner.errors import ConfigError, printable


def refuse_overwrite(path: Path, force: bool) -> None:
    """Raise ConfigError if an output file exists and ``--force`` was not given."""
    if path.is_dir():
        raise ConfigError(f"{path} is a folder; give a file name")
    if path.exists() and not force:
        raise ConfigError(f"{path} exists; give --force to overwrite it, or another name")


def require_parent(path: Path) -> None:
    """Raise ConfigError unless the folder exists in which a file or folder is to be created."""
    if not path.parent.is_dir():
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

    tqdm.write(f"captioner: {printable(message, lines=True)}", file=sys.stderr)


def to_continue(finished: str, argv: Sequence[str], option: str) -> str:
    """What is finished, and the command that continues: with one more option, unless given."""
    again = shlex.join(["captioner", "caption", *argv, *([] if option in argv else [option])])
    return f"{finished}; to continue, run:\n  {again}"


@contextmanager
def hint(finished: Callable[[], str], *errors: type[Exception]) -> Iterator[None]:
    """If the block is interrupted, print what is finished, if anything, and how to continue.

    By Ctrl-C, an OSError or one of these errors.
    """
    ends: tuple[type[BaseException], ...] = (KeyboardInterrupt, OSError, *errors)
    try:
        yield
    except ends:
        if message := finished():
            warn(message)
        raise
