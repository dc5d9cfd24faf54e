"""A request's way from the bytes of a photo to its captions.

    admission   a place, or "come back": taken before a byte is read, kept until the answer
    body        into memory, within bounds of bytes and seconds
    decoding    by few threads; from here on only the encoder's pixels are kept
    captions    in a batch with others; see `batching`

A client that leaves gives its place up at once, wherever it stands. Nothing is written to disk.
"""

from __future__ import annotations

import asyncio
import io
from collections.abc import Awaitable, Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

from fastapi import Request

from captioner.api import Captioner
from captioner.data.images import USUAL_FORMATS, open_image
from captioner.errors import ConfigError, ImageError, LargeImageError, NotAnImageError
from captioner.inference import Prepared
from captioner.serving.answers import Refusal, captions_json
from captioner.serving.batching import Ask, Batcher, ClosedError
from captioner.serving.limits import Limits

Some = TypeVar("Some")

READERS = 2
"""Photos decoded at once; each may take 25 bytes a pixel while it is (WebP; others 17): 1.25
GB at 50 million."""

LEFT = 499
"""What logs and metrics call the status of a request whose client did not wait (nginx's)."""


class Service:
    """Captions photos within limits."""

    def __init__(
        self,
        model: Captioner,
        limits: Limits,
        *,
        batch_size: int,
        on_batch: Callable[[int], None] = lambda _: None,
    ) -> None:
        """Take a model into service; nothing runs before ``start``.

        Args:
            model: The model; from now on this one's alone.
            limits: What is taken on.
            batch_size: See ``Batcher``.
            on_batch: See ``Batcher``.
        """
        self.model = model
        self.limits = limits
        self.batcher = Batcher(model, batch_size, on_batch)
        self.held = 0
        """Requests on their way."""
        self._closing = asyncio.Event()
        self._readers = ThreadPoolExecutor(READERS, thread_name_prefix="captioner-reader")
        self._reader_free = asyncio.Semaphore(READERS)

    def start(self) -> None:
        """Begin to work."""
        self.batcher.start()

    def close(self) -> None:
        """Refuse what comes and what waits; what the model works on is finished.

        To be called in the event loop.
        """
        self._closing.set()
        self.batcher.close()

    def join(self) -> None:
        """Wait for the threads; after ``close``."""
        self.batcher.join()
        self._readers.shutdown()

    async def answer(self, request: Request, ask: Ask, *, attention: bool) -> bytes:
        """Read a request's photo and caption it.

        Returns:
            The answer as JSON.

        Raises:
            Refusal: The photo or the server's state does not allow it.
        """
        self._check_headers(request)
        with self._place():
            closing = (self._closing.wait(), _closing())
            late = Refusal(
                408,
                "slow_upload",
                f"the photo did not arrive within {self.limits.timeout:g} s; send it again",
            )
            body = await _within(self.limits.timeout, self._body(request.receive), late, [closing])
            left = (_disconnected(request.receive), _left())
            late = Refusal(
                503,
                "time",
                f"the captions were not ready within {self.limits.timeout:g} s; try again later, "
                "or ask for less (beam_size, num_captions)",
            )
            work = self._captions(body, ask, attention)
            return await _within(self.limits.timeout, work, late, [left])

    def _check_headers(self, request: Request) -> None:
        """Refuse what the headers alone forbid."""
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind.startswith("multipart/"):
            raise Refusal(
                415,
                "multipart",
                f"the body is {kind}; send the photo's bytes as the body: "
                "curl --data-binary @photo.jpg",
            )
        length = request.headers.get("content-length", "")
        if length.isdecimal() and int(length) > self.limits.max_bytes:
            raise self._too_many_bytes(f"{int(length):,} bytes")

    def _too_many_bytes(self, given: str) -> Refusal:
        allowed = f"{self.limits.max_bytes:,} are allowed; make the picture smaller"
        return Refusal(413, "bytes", f"the photo has {given}; {allowed}")

    @contextmanager
    def _place(self) -> Iterator[None]:
        """One of the places there are."""
        if self.held >= self.limits.max_queue:
            raise Refusal(
                429,
                "queue",
                f"{self.held} requests are on their way, which is all that are taken at once; "
                "try again after Retry-After seconds",
            )
        self.held += 1
        try:
            yield
        finally:
            self.held -= 1

    async def _body(self, receive: Callable[[], Awaitable[Any]]) -> io.BytesIO:
        """The whole body, in memory."""
        body = io.BytesIO()
        more = True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise _left()
            body.write(message.get("body", b""))
            if body.tell() > self.limits.max_bytes:
                raise self._too_many_bytes(f"more than {self.limits.max_bytes:,} bytes")
            more = message.get("more_body", False)
        if body.tell() == 0:
            raise Refusal(
                415, "empty", "the body is empty; send a photo's bytes: --data-binary @photo.jpg"
            )
        body.seek(0)
        return body

    async def _captions(self, body: io.BytesIO, ask: Ask, attention: bool) -> bytes:
        try:
            size, photo = await self._in_reader(self._read, body)
            captions = await asyncio.wrap_future(self.batcher.submit(photo, ask))
        except ClosedError as error:
            raise _closing() from error
        except NotAnImageError as error:
            raise Refusal(415, "no_picture", str(error)) from error
        except LargeImageError as error:
            raise Refusal(413, "pixels", str(error)) from error
        except ImageError as error:
            # curl -d, which people try first, leaves line breaks out of what it sends
            hint = "; with curl send it by --data-binary, not by -d"
            raise Refusal(422, "broken", f"{error}{hint}") from error
        except ConfigError as error:
            raise Refusal(422, "options", str(error)) from error
        # Many maps are long to write out: the loop serves the others meanwhile.
        return await asyncio.to_thread(captions_json, size, captions, attention)

    def _read(self, body: io.BytesIO) -> tuple[tuple[int, int], Prepared]:
        """Size (width, height) and pixels; the body is given up."""
        with body:
            image = open_image(
                body, name="the photo", max_pixels=self.limits.max_pixels, formats=USUAL_FORMATS
            )
        return image.size, self.model.prepare(image)

    async def _in_reader(self, work: Callable[..., Some], *given: Any) -> Some:
        """Run something in a reader's thread.

        A reader counts as busy until its thread is done, even if nobody waits for it any more: so
        no photo but those being decoded outlives its request.
        """
        await self._reader_free.acquire()
        loop = asyncio.get_running_loop()

        def free(_: Future[Some]) -> None:
            with suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(self._reader_free.release)

        future = self._readers.submit(work, *given)
        future.add_done_callback(free)
        return await asyncio.wrap_future(future)


def _closing() -> Refusal:
    return Refusal(503, "closing", "the server is stopping; try again when it is back")


def _left() -> Refusal:
    return Refusal(LEFT, "left", "the client left")


async def _disconnected(receive: Callable[[], Awaitable[Any]]) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _within(
    seconds: float,
    work: Awaitable[Some],
    late: Refusal,
    stops: Sequence[tuple[Awaitable[Any], Refusal]],
) -> Some:
    """Do something, unless time runs out or something else comes first.

    Args:
        seconds: As long as it may take.
        work: What is done; cancelled when it is too late.
        late: Raised when time runs out.
        stops: What ends it before, and what is raised then.
    """
    task = asyncio.ensure_future(work)
    ends = {asyncio.ensure_future(stop): refusal for stop, refusal in stops}
    try:
        await asyncio.wait({task, *ends}, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise next((refusal for end, refusal in ends.items() if end.done()), late)
    finally:
        for one in (task, *ends):
            one.cancel()
        await asyncio.gather(task, *ends, return_exceptions=True)
