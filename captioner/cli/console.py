"""Messages of commands on standard error: problems, one line each, and hints on how to continue."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from captioner.errors import CaptionerError, ProgramError
from captioner.messages import printable


def warn(message: str) -> None:
    """Print one line to standard error."""
    from tqdm import tqdm

    tqdm.write(f"captioner: {printable(message, lines=True)}", file=sys.stderr)


def warn_and_count(errors: list[CaptionerError], error: CaptionerError) -> None:
    """Print the error of a single photo or metric, and append it to ``errors``."""
    errors.append(error)
    program = isinstance(error, ProgramError)
    warn(f"{error}; continuing with the other metrics" if program else str(error))


@contextmanager
def hint(
    finished: Callable[[], str], change: str = "", error: type[Exception] = OSError
) -> Iterator[None]:
    """Print how to continue if Ctrl-C, a full disk or an error interrupts the block.

    Args:
        finished: Function that describes the finished work. If it returns an empty string, nothing
            is printed.
        change: How the command must be changed to continue the work, such as ``with --resume``.
        error: An exception type to handle in addition to KeyboardInterrupt and OSError.
    """
    try:
        yield
    except (KeyboardInterrupt, OSError, error):
        if message := finished():
            warn(f"{message}; to continue, run the same command {change}".rstrip())
        raise
