"""Ctrl-C and termination signals, handled between two steps."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from tqdm import tqdm


class Stop:
    """Whether the run should stop."""

    requested = False


@contextmanager
def stop_signals() -> Iterator[Stop]:
    """Turn SIGINT and SIGTERM into a request that the loop checks between two steps."""
    stop = Stop()

    def request(number: int, frame: object) -> None:
        del frame
        # A second Ctrl-C stops at once. A second SIGTERM does not: launchers forward theirs to
        # processes that the system has already signalled.
        if stop.requested and number == signal.SIGINT:
            raise KeyboardInterrupt
        stop.requested = True
        tqdm.write("stopping after the state is saved; Ctrl-C again to stop now", file=sys.stderr)

    try:
        old = {s: signal.signal(s, request) for s in (signal.SIGINT, signal.SIGTERM)}
    except ValueError:  # not in the main thread, where signals cannot be handled
        yield stop
        return
    try:
        yield stop
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)
