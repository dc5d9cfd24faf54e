"""Work in turns: queues of jobs, and the threads that work on them.

A free thread takes a job of the client that was served longest ago, so that nobody waits for more
than one job of each of the others, however many those have sent. Captions are made in batches: the
job takes others with it that can be captioned together, of any client. A lane never waits for a
batch to fill up: an idle server responds at once, and batches fill under load.

Errors do not depend on the rest of the batch, nor do captions in fp32. In bf16 the rest can change
the log-probabilities slightly.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

KNOWN_CLIENTS = 1000  # whose last turn is remembered


class ClosedError(Exception):
    """The lane was closed before the job's turn."""


class AbandonedError(Exception):
    """Nobody waits for the result of a job."""


@dataclass(eq=False)
class Job:
    """What a client waits for."""

    client: str
    item: Any
    arrived: float = field(default_factory=time.monotonic)
    future: asyncio.Future[Any] = field(default_factory=asyncio.Future)

    def check(self) -> None:
        """Raise AbandonedError if nobody waits for the result; long work calls it in between."""
        if self.future.done():
            raise AbandonedError


def call(jobs: Sequence[Job]) -> list[Any]:
    """Work on jobs that are functions."""
    return [job.item() for job in jobs]


class Lane:
    """A queue of jobs with threads of its own; used in the thread of the event loop."""

    def __init__(
        self,
        name: str,
        work: Callable[[Sequence[Job]], list[Any]] = call,
        *,
        threads: int = 1,
        together: Callable[[Job, Iterable[Job]], list[Job]] = lambda first, _: [first],
    ) -> None:
        """Create an empty queue.

        Args:
            name: Name of the threads.
            work: Returns the results of jobs.
            threads: How many work at the same time.
            together: The first job, and those of the waiting ones that a thread takes with it.
        """
        self.closed = False
        self._work, self._together = work, together
        self._waiting: dict[Job, None] = {}  # an ordered set
        self._served: dict[str, float] = {}  # when each client had its last turn, the oldest first
        self._idle = threads
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix=f"captioner-{name}")

    @property
    def waiting(self) -> int:
        """Number of jobs that wait for a thread."""
        return len(self._waiting)

    def submit(self, client: str, item: Any) -> asyncio.Future[Any]:
        """Queue a job; cancelling its result removes it from the queue."""
        if self.closed:
            raise ClosedError
        job = Job(client, item)
        self._waiting[job] = None
        job.future.add_done_callback(lambda _: self._waiting.pop(job, None))
        self._start()
        return job.future

    def close(self) -> None:
        """Fail the waiting jobs with ``ClosedError``; those that are worked on are finished."""
        self.closed = True
        for job in list(self._waiting):
            if not job.future.done():
                job.future.set_exception(ClosedError())
        self._waiting.clear()
        self._threads.shutdown(wait=False)

    def _start(self) -> None:
        loop = asyncio.get_running_loop()
        while self._idle and (waiting := [job for job in self._waiting if not job.future.done()]):
            first = min(waiting, key=lambda job: self._served.get(job.client, job.arrived))
            self._served.pop(first.client, None)
            self._served[first.client] = time.monotonic()
            if len(self._served) > KNOWN_CLIENTS:
                del self._served[next(iter(self._served))]
            jobs = self._together(first, waiting)
            for job in jobs:
                del self._waiting[job]
            self._idle -= 1
            running = loop.run_in_executor(self._threads, self._run, jobs)
            running.add_done_callback(lambda done: self._finish(done.result()))

    def _run(self, jobs: Sequence[Job]) -> list[tuple[Job, Any, BaseException | None]]:
        """In a thread: the jobs with their results or errors."""
        try:
            return [(job, result, None) for job, result in zip(jobs, self._work(jobs), strict=True)]
        except BaseException as error:  # an error of one job must not fail the others
            if len(jobs) == 1:
                return [(jobs[0], None, error)]
            return [found for job in jobs for found in self._run([job])]

    def _finish(self, found: list[tuple[Job, Any, BaseException | None]]) -> None:
        self._idle += 1
        self._start()
        for job, result, error in found:
            if job.future.done():
                continue
            if error is None:
                job.future.set_result(result)
            else:
                job.future.set_exception(error)
