"""Ctrl-C and termination as a request that a run sees when it can."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from tqdm import tqdm


class Stop:
    """Whether someone has asked the run to stop."""

    requested = False


@contextmanager
def stop_signals() -> Iterator[Stop]:
    """Turns Ctrl-C and termination into a request that the loop sees between two steps."""
    stop = Stop()

    def request(number: int, frame: object) -> None:
        del frame
        # Asked twice: at once. Only by hand: launchers send their SIGTERM on to everyone, twice.
        if stop.requested and number == signal.SIGINT:
            raise KeyboardInterrupt
        stop.requested = True
        tqdm.write("stopping when the state is saved; Ctrl-C once more: at once", file=sys.stderr)

    try:
        old = {s: signal.signal(s, request) for s in (signal.SIGINT, signal.SIGTERM)}
    except ValueError:  # not in the main thread: nobody sends signals here
        yield stop
        return
    try:
        yield stop
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)
