"""Requests that wait are captioned together.

One thread owns the model. While it works on a batch, requests gather; when it is free it takes the
one that has waited longest, with those behind it that ask the same (search options, alternatives),
and leaves the others where they stand: first come, first served. It never waits for a batch to
fill: an idle server answers at once, and a busy one has full batches because it is busy.

What a request gets does not depend on whom it shared a batch with; neither does an error.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

from captioner.api import Captioner
from captioner.caption import Caption
from captioner.config import SearchOptions
from captioner.inference import Prepared


class ClosedError(Exception):
    """The batcher takes no more, or stopped before this photo's turn."""


@dataclass(frozen=True)
class Ask:
    """What is asked of the model about a photo."""

    options: SearchOptions | None
    """How to search; None: own words are explained."""
    words: tuple[str, ...] = ()
    """Own words, as the vocabulary spells them."""
    alternatives: int = 0

    @property
    def key(self) -> tuple[SearchOptions | None, int]:
        """Requests of one key go together."""
        return self.options, self.alternatives

    @property
    def steps(self) -> int:
        """The words that a search looks at for one photo, at most; own words: 1, they are few."""
        if self.options is None:
            return 1
        options = self.options
        drawn = options.num_captions if options.temperature else options.beam_size
        return drawn * (1 + len(options.forced_words)) * options.max_length


@dataclass(eq=False)
class _Job:
    photo: Prepared
    ask: Ask
    future: Future[list[Caption]] = field(default_factory=Future)


class Batcher:
    """A queue of photos and the thread that captions them."""

    def __init__(
        self, model: Captioner, batch_size: int, on_batch: Callable[[int], None] = lambda _: None
    ) -> None:
        """Put a model behind a queue; nothing runs before ``start``.

        Args:
            model: The model; from now on this one's alone.
            batch_size: Photos captioned together with the model's own search options. A request
                for a wider or longer search shares its batch with fewer, so that a batch never
                takes more memory than this many photos do.
            on_batch: Told how many photos each batch holds.
        """
        self._model = model
        self._batch_size = batch_size
        self._steps = batch_size * Ask(model.options()).steps
        self._on_batch = on_batch
        self._changed = threading.Condition()
        self._waiting: dict[_Job, None] = {}  # in order
        self._closed = False
        self._thread = threading.Thread(target=self._work, name="captioner-model", daemon=True)

    def start(self) -> None:
        """Begin to work."""
        self._thread.start()

    @property
    def alive(self) -> bool:
        """Whether photos are captioned."""
        return self._thread.is_alive() and not self._closed

    @property
    def waiting(self) -> int:
        """Photos that wait for the model."""
        return len(self._waiting)

    def submit(self, photo: Prepared, ask: Ask) -> Future[list[Caption]]:
        """Queue a photo.

        Returns:
            Its captions to be, best first (one of own words). Cancelled before its turn, it is
            never run.

        Raises:
            ClosedError: No more are taken.
        """
        job = _Job(photo, ask)
        with self._changed:
            if self._closed:
                raise ClosedError
            self._waiting[job] = None
            self._changed.notify()
        job.future.add_done_callback(lambda _: self._forget(job))
        return job.future

    def close(self) -> None:
        """Take no more; finish the batch that runs, fail those that wait with ``ClosedError``."""
        with self._changed:
            self._closed = True
            left = list(self._waiting)
            self._waiting.clear()
            self._changed.notify()
        for job in left:
            if job.future.set_running_or_notify_cancel():
                job.future.set_exception(ClosedError())

    def join(self) -> None:
        """Wait until the last batch is finished; after ``close``."""
        if self._thread.ident is not None:
            self._thread.join()

    def _forget(self, job: _Job) -> None:
        with self._changed:
            self._waiting.pop(job, None)

    def _work(self) -> None:
        jobs: list[_Job] = []
        try:
            while jobs := self._take():
                self._run(jobs)
        finally:  # whatever ended it: nobody waits for a thread that is gone
            self.close()
            for job in jobs:
                if not job.future.done():
                    job.future.set_exception(ClosedError())

    def _take(self) -> list[_Job]:
        """The next batch; empty when closed."""
        while True:
            with self._changed:
                while not self._waiting and not self._closed:
                    self._changed.wait()
                if not self._waiting:
                    return []
                first = next(iter(self._waiting))
                same = [job for job in self._waiting if job.ask.key == first.ask.key]
                jobs = same[: self._room(first.ask)]
                for job in jobs:
                    del self._waiting[job]
            if jobs := [job for job in jobs if job.future.set_running_or_notify_cancel()]:
                return jobs

    def _room(self, ask: Ask) -> int:
        """Photos of this kind that go together."""
        return max(1, min(self._batch_size, self._steps // ask.steps))

    def _run(self, jobs: Sequence[_Job]) -> None:
        try:
            answers = self._ask(jobs)
            answered = list(zip(jobs, answers, strict=True))
        except Exception as error:  # one photo's error must not reach the others
            if len(jobs) == 1:
                jobs[0].future.set_exception(error)
                return
            for job in jobs:
                self._run([job])
            return
        self._on_batch(len(jobs))
        for job, captions in answered:
            job.future.set_result(captions)

    def _ask(self, jobs: Sequence[_Job]) -> list[list[Caption]]:
        photos = [job.photo for job in jobs]
        options, alternatives = jobs[0].ask.key
        if options is None:
            sentences = [job.ask.words for job in jobs]
            told = self._model.explain_batch(photos, sentences, alternatives=alternatives)
            return [[caption] for caption in told]
        return self._model.caption_batch(photos, options, alternatives=alternatives)
