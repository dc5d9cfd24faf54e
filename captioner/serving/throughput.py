"""How long a request takes while the server is busy, to predict when a queue slot is free."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable
from itertools import pairwise

_WINDOW = 128
"""Number of completed requests that are measured."""

_FIRST_GUESS = 1.0
"""Seconds per request before any has been completed."""

_SPACING = 0.75
"""Fraction of the time per request between the clients that are asked to return: a little less
than 1 keeps the queue filled, and with it the batches, which is when the server is fastest."""

MAX_WAIT = 300
"""Maximum value of Retry-After (seconds)."""


class Throughput:
    """Predicts when a refused client should try again.

    Completed requests free slots at a measured rate. Each refused client is given a time of its
    own, one slot after the previous one's, so that clients that wait as long as they are asked to
    do not compete for the same slot. Requests are completed in batches, so the longest recent gap
    between two completions is added.

    Only time with a request in flight counts: an idle server measures nothing.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._in_flight = 0
        self._idle = 0.0
        """Seconds without a request in flight."""
        self._idle_since = clock()
        self._ends: deque[float] = deque(maxlen=_WINDOW + 1)
        """When requests were completed, on a clock that stops while the server is idle."""
        self._promised = -math.inf
        """When the last refused client is expected back."""

    def start(self) -> None:
        """Count a request as in flight."""
        if self._in_flight == 0:
            self._idle += self._clock() - self._idle_since
            if not self._ends:
                self._ends.append(self._busy())
        self._in_flight += 1

    def end(self) -> None:
        """Count a request as completed."""
        self._ends.append(self._busy())
        self._in_flight -= 1
        if self._in_flight == 0:
            self._idle_since = self._clock()

    def retry_after(self) -> int:
        """Whole seconds after which a client that is refused now should try again."""
        now = self._clock()
        spacing = _SPACING * self._seconds_per_request()
        self._promised = max(self._promised, now) + spacing
        wait = self._promised - now
        if wait > MAX_WAIT:
            self._promised, wait = now, MAX_WAIT  # clients that do not wait: start over
        return max(1, math.ceil(min(MAX_WAIT, wait + self._longest_gap())))

    def next_slot(self) -> int:
        """Whole seconds until a slot is free, for a client that nothing is promised to."""
        return max(1, math.ceil(self._seconds_per_request() + self._longest_gap()))

    def _busy(self) -> float:
        return self._clock() - self._idle

    def _seconds_per_request(self) -> float:
        if len(self._ends) < 2:
            return _FIRST_GUESS
        return (self._ends[-1] - self._ends[0]) / (len(self._ends) - 1)

    def _longest_gap(self) -> float:
        return max((b - a for a, b in pairwise(self._ends)), default=0.0)
