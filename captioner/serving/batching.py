"""Dynamic batching: requests that wait for the model are captioned together.

One thread owns the model. When it is free, it takes the request that has waited longest, together
with later requests for the same search options, number of alternatives and method; the others keep
their position in the queue. It never waits for a batch to fill up: an idle server responds at once,
and batches fill under load.

Errors do not depend on the rest of the batch, nor do captions in fp32. In bf16 the rest can change
the log-probabilities slightly.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

from captioner.caption import Caption
from captioner.inference.captioner import Captioner
from captioner.inference.engine import Prepared
from captioner.serving.schema import CaptionRequest


class ClosedError(Exception):
    """The batcher was closed before the photo could be captioned."""


@dataclass(eq=False)
class _Job:
    photo: Prepared
    request: CaptionRequest
    future: Future[list[Caption]] = field(default_factory=Future)


class Batcher:
    """A queue of photos and the thread that captions them."""

    def __init__(
        self,
        model: Captioner,
        batch_size: int,
        on_batch: Callable[[int], None] = lambda _: None,
    ) -> None:
        """Initialize the queue; ``start`` starts the thread.

        A batch has at most ``batch_size`` photos with the model's default options; requests for a
        wider or longer search get smaller ones, which bounds memory. ``on_batch`` is called with
        the number of photos of each.
        """
        self._model = model
        self._batch_size = batch_size
        self._max_cost = batch_size * CaptionRequest(model.options()).cost
        self._on_batch = on_batch
        self._changed = threading.Condition()
        self._waiting: dict[_Job, None] = {}  # an ordered set
        self._closed = False
        self._thread = threading.Thread(target=self._work, name="captioner-model", daemon=True)

    def start(self) -> None:
        """Start the thread, which owns the model from now on."""
        self._thread.start()

    @property
    def alive(self) -> bool:
        """Whether photos are being captioned."""
        return self._thread.is_alive() and not self._closed

    @property
    def waiting(self) -> int:
        """Number of photos waiting for the model."""
        return len(self._waiting)

    def submit(self, photo: Prepared, request: CaptionRequest) -> Future[list[Caption]]:
        """Queue a photo; returns a future of its captions, best first.

        Cancelling it while it waits removes the photo from the queue.
        """
        job = _Job(photo, request)
        with self._changed:
            if self._closed:
                raise ClosedError
            self._waiting[job] = None
            self._changed.notify()
        job.future.add_done_callback(lambda _: self._remove(job))
        return job.future

    def close(self) -> None:
        """Finish the running batch and fail all waiting photos with ``ClosedError``."""
        with self._changed:
            self._closed = True
            waiting = list(self._waiting)
            self._waiting.clear()
            self._changed.notify()
        for job in waiting:
            if job.future.set_running_or_notify_cancel():
                job.future.set_exception(ClosedError())

    def join(self) -> None:
        """Wait for the running batch to finish; call ``close`` first."""
        if self._thread.ident is not None:
            self._thread.join()

    def _remove(self, job: _Job) -> None:
        with self._changed:
            self._waiting.pop(job, None)

    def _work(self) -> None:
        jobs: list[_Job] = []
        try:
            while jobs := self._next_batch():
                self._run(jobs)
        finally:  # also if the thread dies: no request may wait forever
            self.close()
            for job in jobs:
                if not job.future.done():
                    job.future.set_exception(ClosedError())

    def _next_batch(self) -> list[_Job]:
        """Wait for the next batch; empty when the batcher is closed."""
        while True:
            with self._changed:
                while not self._waiting and not self._closed:
                    self._changed.wait()
                if not self._waiting:
                    return []
                first = next(iter(self._waiting)).request
                same = [job for job in self._waiting if job.request.key == first.key]
                jobs = same[: max(1, min(self._batch_size, self._max_cost // first.cost))]
                for job in jobs:
                    del self._waiting[job]
            if jobs := [job for job in jobs if job.future.set_running_or_notify_cancel()]:
                return jobs

    def _run(self, jobs: Sequence[_Job]) -> None:
        try:
            results = list(zip(jobs, self._caption(jobs), strict=True))
        except Exception as error:  # an error of one photo must not fail the others
            if len(jobs) == 1:
                jobs[0].future.set_exception(error)
                return
            for job in jobs:
                self._run([job])
            return
        self._on_batch(len(jobs))
        for job, captions in results:
            job.future.set_result(captions)

    def _caption(self, jobs: Sequence[_Job]) -> list[list[Caption]]:
        photos = [job.photo for job in jobs]
        options, alternatives, style, method = jobs[0].request.key
        if options is None:
            sentences = [job.request.words for job in jobs]
            captions = self._model.explain_batch(
                photos, sentences, alternatives=alternatives, method=method, style=style
            )
            return [[caption] for caption in captions]
        return self._model.caption_batch(photos, options, alternatives=alternatives, method=method)
