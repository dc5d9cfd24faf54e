"""Queues of jobs in which clients take turns, and the threads that work on the jobs.

A free thread takes a job of the client that was served longest ago. A client that has used a lot of
time waits longer for its next turn. A client with few jobs therefore waits for little more than the
jobs in progress, even if other clients have sent many jobs.

Captions are made in batches. A thread takes a job together with waiting jobs that can share its
batch. It takes one job from each client before it takes a second job from any client. A lane never
waits for a batch to fill, so an idle server responds at once. Under load, batches fill up.

Errors do not depend on the other jobs in the batch, and neither do captions in fp32. In bf16, other
jobs can change the log-probabilities slightly.
"""

from __future__ import annotations

import asyncio
import os
import sys
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from operator import itemgetter
from typing import Any

from captioner.serving.request_errors import closing

KNOWN_CLIENTS = 1000  # the next turn is remembered for this many clients, the last ones served
SHARE = 10  # after a job of t seconds, other clients come first for SHARE * t seconds


class AbandonedError(Exception):
    """An error for a job whose client has disconnected, or whose deadline has passed."""


@dataclass(eq=False)
class Job:
    """A piece of work whose result a client waits for."""

    client: str
    item: Any
    arrived: float = field(default_factory=time.monotonic)
    future: asyncio.Future[Any] = field(default_factory=asyncio.Future)

    def check(self) -> None:
        """Stop long work if its result is no longer needed.

        Raises:
            AbandonedError: The client has disconnected, or the deadline has passed.
        """
        if self.future.done():
            raise AbandonedError


_Found = list[tuple[Job, Any]]  # jobs, each with its result or an exception


def call(jobs: Sequence[Job]) -> list[Any]:
    """Run jobs that consist of functions, and return their results."""
    return [job.item() for job in jobs]


def _yield() -> None:
    """Lower the priority of this thread, which Linux treats like a process."""
    thread = threading.get_native_id()
    with suppress(OSError):  # a sandbox may forbid it, and an error would end the threads for good
        os.setpriority(os.PRIO_PROCESS, thread, min(19, os.getpriority(os.PRIO_PROCESS, 0) + 10))


class Lane:
    """A queue of jobs with its own threads. Call its methods in the event loop's thread."""

    def __init__(
        self,
        name: str,
        work: Callable[[Sequence[Job]], list[Any]] = call,
        *,
        threads: int = 1,
        yielding: bool = False,
        together: Callable[[Job, Iterable[Job]], list[Job]] = lambda first, _: [first],
        after: Callable[[], None] = lambda: None,
    ) -> None:
        """Create an empty queue.

        Args:
            name: Name of the threads.
            work: Function that runs jobs and returns their results.
            threads: Number of threads that work at the same time.
            yielding: Run the threads at a lower priority than those of other lanes (on Linux).
            together: Function that selects the jobs a thread takes at once. It gets the first job
                and all waiting jobs.
            after: Function to call in the event loop's thread when jobs are done.
        """
        self.closed = False
        self._work, self._together, self._after = work, together, after
        self._waiting: dict[Job, None] = {}  # an ordered set
        # Time of each client's next turn; the client that was served longest ago comes first.
        self._turns: dict[str, float] = {}
        self._idle = threads
        start = _yield if yielding and sys.platform == "linux" else None
        self._threads = ThreadPoolExecutor(threads, f"captioner-{name}", start)

    @property
    def waiting(self) -> int:
        """Number of jobs that wait for a thread."""
        return len(self._waiting)

    def submit(self, client: str, item: Any) -> asyncio.Future[Any]:
        """Queue a job, and return a future of its result.

        Cancelling the future removes the job from the queue.
        """
        if self.closed:
            raise closing()
        job = Job(client, item)
        self._waiting[job] = None
        job.future.add_done_callback(lambda _: self._waiting.pop(job, None))
        self._start()
        return job.future

    def close(self) -> None:
        """Reject the waiting jobs, and finish the jobs in progress."""
        self.closed = True
        for job in list(self._waiting):
            if not job.future.done():
                job.future.set_exception(closing())
        self._waiting.clear()
        self._threads.shutdown(wait=False)

    def _start(self) -> None:
        loop = asyncio.get_running_loop()
        while self._idle and (waiting := self._in_turn()):
            self._serve(waiting[0].client, time.monotonic())
            jobs = self._together(waiting[0], waiting)
            for job in jobs:
                del self._waiting[job]
            self._idle -= 1
            running = loop.run_in_executor(self._threads, self._run, jobs)
            running.add_done_callback(partial(self._finish, time.monotonic()))

    def _in_turn(self) -> list[Job]:
        """Return the waiting jobs: the first job of each client, then second jobs, and so on."""
        waiting = [job for job in self._waiting if not job.future.done()]
        waiting.sort(key=lambda job: self._turns.get(job.client, job.arrived))
        ranks: defaultdict[str, count[int]] = defaultdict(count)
        ranked = [(next(ranks[job.client]), job) for job in waiting]
        return [job for _, job in sorted(ranked, key=itemgetter(0))]

    def _serve(self, client: str, until: float) -> None:
        """Let other clients go first until the time ``until``, or a later time set earlier."""
        self._turns[client] = max(until, self._turns.pop(client, until))
        if len(self._turns) > KNOWN_CLIENTS:
            del self._turns[next(iter(self._turns))]

    def _run(self, jobs: Sequence[Job]) -> _Found:
        """Run jobs in a thread, and return them with their results or errors."""
        try:
            return [*zip(jobs, self._work(jobs), strict=True)]
        except BaseException as error:  # an error of one job must not fail the others
            if len(jobs) == 1:
                return [(jobs[0], error)]
            return [found for job in jobs for found in self._run([job])]

    def _finish(self, start: float, running: asyncio.Future[_Found]) -> None:
        found, now = running.result(), time.monotonic()
        for client, jobs in Counter(job.client for job, _ in found).items():
            self._serve(client, now + SHARE * (now - start) * jobs / len(found))
        self._idle += 1
        self._start()
        self._after()
        for job, result in found:
            if job.future.done():
                continue
            if isinstance(result, BaseException):
                job.future.set_exception(result)
            else:
                job.future.set_result(result)
