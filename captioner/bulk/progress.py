"""A log of the progress of a bulk job, for output that cannot show a progress bar."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from datetime import timedelta
from threading import Event, Thread

from captioner.messages import counted

EVERY = 60.0
"""Seconds between two reports."""


class Log:
    """A context manager that reports the progress of a job once a minute.

    It reports from its own thread, because one part of the job may take longer than a minute. If
    standard error is a terminal, it does not report anything, because a progress bar is shown
    instead.
    """

    def __init__(self, parts: int, finished: int, say: Callable[[str], None]) -> None:
        """Create a log for a job.

        Args:
            parts: Number of parts of the job.
            finished: Number of parts that an earlier run has finished.
            say: Function that prints a report.
        """
        self.parts, self._earlier, self._say = parts, finished, say
        self.done = self.photos = self.failed = 0
        self._new = self._new_photos = 0
        self._started, self._ended = time.monotonic(), Event()
        self._thread = Thread(target=self._run, daemon=True)

    def add(self, photos: int, failed: int, *, new: bool) -> None:
        """Count a finished part.

        Args:
            photos: Number of photos in the part.
            failed: Number of these photos that failed.
            new: True if this run captioned the part, False if an earlier run did.
        """
        self.done += 1
        self.photos += photos
        self.failed += failed
        if new:
            self._new += 1
            self._new_photos += photos

    def line(self) -> str:
        """Return a report in one line: parts, photos per second, failures and the time left."""
        seconds = max(time.monotonic() - self._started, 1e-9)
        rate = self._new_photos / seconds
        left = "unknown"
        if self._new:
            remaining = self.parts - self._earlier - self._new
            left = str(timedelta(seconds=round(seconds / self._new * remaining)))
        return (
            f"{self.done:,} of {counted(self.parts, 'part')} finished, "
            f"{counted(self.photos, 'photo')} ({rate:.1f} photos/s), {self.failed:,} failed, "
            f"time left {left}"
        )

    def _run(self) -> None:
        """Report every `EVERY` seconds until the job ends."""
        while not self._ended.wait(EVERY):
            self._say(self.line())

    def __enter__(self) -> Log:
        if not sys.stderr.isatty():
            self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._ended.set()
        if self._thread.ident is not None:
            self._thread.join()
