"""Process a request, from the bytes of a photo to its captions.

    admission   take a queue slot, or refuse the request before its body is read
    body        read it into memory, within limits on bytes and seconds
    decoding    in a few threads; only the encoder's input is kept
    captions    in a batch with other requests; see `batching`

A client that disconnects frees its queue slot at once. Nothing is written to disk.
"""

from __future__ import annotations

import asyncio
import io
import threading
from collections.abc import Awaitable, Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, nullcontext, suppress
from typing import Any, TypeVar

from fastapi import Request

from captioner.api import Captioner
from captioner.data.images import USUAL_FORMATS, header_size, open_reduced
from captioner.errors import ConfigError, ImageError, LargeImageError, NotAnImageError
from captioner.inference import Prepared
from captioner.serving.batching import Batcher, ClosedError
from captioner.serving.lifecycle import closing
from captioner.serving.limits import Limits
from captioner.serving.requests import CaptionRequest
from captioner.serving.responses import RequestError, captions_json
from captioner.serving.throughput import Throughput

T = TypeVar("T")

DECODERS = 2
"""Number of photos decoded in parallel."""

LARGE_PIXELS = 24_000_000
"""Photos with more pixels are decoded one at a time: each takes up to 25 bytes per pixel."""

REDUCTION = 2
"""Large JPEGs are decoded at a reduced size, at least this many times the model's input size."""

CLIENT_CLOSED = 499
"""Status logged when the client disconnected before the response, as in nginx."""


class Service:
    """Captions the photos of requests, within limits."""

    def __init__(
        self,
        model: Captioner,
        limits: Limits,
        *,
        batch_size: int,
        on_batch: Callable[[int], None] = lambda _: None,
    ) -> None:
        """Initialize the service; ``start`` starts its threads.

        Args:
            model: The model; it must not be used elsewhere from now on.
            limits: Resource limits.
            batch_size: See ``Batcher``.
            on_batch: See ``Batcher``.
        """
        self.model = model
        self.limits = limits
        self.batcher = Batcher(model, batch_size, on_batch)
        self.in_flight = 0
        """Number of requests in flight."""
        self.throughput = Throughput()
        """Measures Retry-After."""
        self._closing = asyncio.Event()
        self._decoders = ThreadPoolExecutor(DECODERS, thread_name_prefix="captioner-decoder")
        self._free_decoders = asyncio.Semaphore(DECODERS)
        self._large = threading.Lock()

    def start(self) -> None:
        """Start captioning."""
        self.batcher.start()

    def close(self) -> None:
        """Refuse new and waiting requests; the batch that the model works on is finished.

        Must be called in the event loop.
        """
        self._closing.set()
        self.batcher.close()

    def join(self) -> None:
        """Wait for the threads to finish; call ``close`` first."""
        self.batcher.join()
        self._decoders.shutdown()

    async def caption(self, request: Request, wanted: CaptionRequest, *, attention: bool) -> bytes:
        """Read the photo of an HTTP request and caption it.

        Args:
            request: The HTTP request.
            wanted: Its parsed query.
            attention: Include attention maps in the response.

        Returns:
            The JSON of the response.

        Raises:
            RequestError: The request cannot be served.
        """
        self._check_headers(request)
        with self._slot():
            seconds = self.limits.timeout
            late = RequestError(
                408, "slow_upload", f"the photo was not received within {seconds:g} s; try again"
            )
            end = (self._closing.wait(), closing())
            body = await _within(seconds, self._read_body(request.receive), late, [end])
            late = RequestError(
                503,
                "time",
                f"captioning took longer than {seconds:g} s; try again later, or reduce beam_size "
                "or num_captions",
                retry_after=self.throughput.next_slot(),
            )
            left = (_disconnected(request.receive), _client_closed())
            return await _within(seconds, self._captions(body, wanted, attention), late, [left])

    def _check_headers(self, request: Request) -> None:
        """Refuse what the headers alone rule out."""
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind.startswith("multipart/"):
            raise RequestError(
                415,
                "multipart",
                f"form uploads ({kind}) are not supported; send the photo's bytes as the body: "
                "curl --data-binary @photo.jpg",
            )
        length = request.headers.get("content-length", "")
        if length.isdecimal() and int(length) > self.limits.max_bytes:
            raise self._too_many_bytes(f"{int(length):,} bytes")

    def _too_many_bytes(self, given: str) -> RequestError:
        message = f"the photo has {given}; the limit is {self.limits.max_bytes:,}"
        return RequestError(413, "bytes", f"{message}; send a smaller file")

    @contextmanager
    def _slot(self) -> Iterator[None]:
        """Hold one of the ``max_queue`` slots."""
        if self.in_flight >= self.limits.max_queue:
            raise RequestError(
                429,
                "queue",
                f"{self.in_flight} requests are in flight (the limit); try again after Retry-After "
                "seconds",
                retry_after=self.throughput.retry_after(),
            )
        self.in_flight += 1
        self.throughput.start()
        try:
            yield
        finally:
            self.in_flight -= 1
            self.throughput.end()

    async def _read_body(self, receive: Callable[[], Awaitable[Any]]) -> io.BytesIO:
        """Read the whole body into memory."""
        body = io.BytesIO()
        more = True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise _client_closed()
            body.write(message.get("body", b""))
            if body.tell() > self.limits.max_bytes:
                raise self._too_many_bytes(f"more than {self.limits.max_bytes:,} bytes")
            more = message.get("more_body", False)
        if body.tell() == 0:
            raise RequestError(
                415,
                "empty",
                "the body is empty; send the bytes of a photo: --data-binary @photo.jpg",
            )
        body.seek(0)
        return body

    async def _captions(self, body: io.BytesIO, wanted: CaptionRequest, attention: bool) -> bytes:
        try:
            size, photo = await self._in_decoder(self._decode, body)
            captions = await asyncio.wrap_future(self.batcher.submit(photo, wanted))
        except ClosedError as error:
            raise closing() from error
        except NotAnImageError as error:
            raise RequestError(415, "no_picture", str(error)) from error
        except LargeImageError as error:
            raise RequestError(413, "pixels", str(error)) from error
        except ImageError as error:
            # curl -d, which people try first, strips line breaks from the file
            hint = "; with curl, use --data-binary instead of -d"
            raise RequestError(422, "broken", f"{error}{hint}") from error
        except ConfigError as error:
            raise RequestError(422, "options", str(error)) from error
        # Serializing many maps takes a while: keep the event loop free.
        return await asyncio.to_thread(captions_json, size, captions, attention)

    def _decode(self, body: io.BytesIO) -> tuple[tuple[int, int], Prepared]:
        """Size (width, height) and pixels of the photo; frees the body."""
        with body, self._large if _is_large(body) else nullcontext():
            image, size = open_reduced(
                body,
                min_side=REDUCTION * self.model.input_size,
                name="the photo",
                max_pixels=self.limits.max_pixels,
                formats=USUAL_FORMATS,
            )
            return size, self.model.prepare(image)

    async def _in_decoder(self, work: Callable[..., T], *args: Any) -> T:
        """Run a function in a decoder thread.

        The thread counts as busy until the function returns, even if its request was cancelled, so
        only photos that are being decoded can outlive their request.
        """
        await self._free_decoders.acquire()
        loop = asyncio.get_running_loop()

        def free(_: Future[T]) -> None:
            with suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(self._free_decoders.release)

        future = self._decoders.submit(work, *args)
        future.add_done_callback(free)
        return await asyncio.wrap_future(future)


def _is_large(body: io.BytesIO) -> bool:
    """Whether a photo has more than ``LARGE_PIXELS``; False if that cannot be read."""
    try:
        width, height = header_size(body, USUAL_FORMATS)
    except ImageError:
        return False  # decoding it returns the error
    return width * height > LARGE_PIXELS


def _client_closed() -> RequestError:
    return RequestError(CLIENT_CLOSED, "left", "the client disconnected")


async def _disconnected(receive: Callable[[], Awaitable[Any]]) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _within(
    seconds: float,
    work: Awaitable[T],
    late: RequestError,
    stops: Sequence[tuple[Awaitable[Any], RequestError]],
) -> T:
    """Await something with a timeout, unless another event comes first.

    Args:
        seconds: Timeout.
        work: The awaitable; cancelled if it does not finish first.
        late: Raised on timeout.
        stops: Events that stop the work, each with the error to raise.
    """
    task = asyncio.ensure_future(work)
    ends = {asyncio.ensure_future(stop): error for stop, error in stops}
    try:
        await asyncio.wait({task, *ends}, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise next((error for end, error in ends.items() if end.done()), late)
    finally:
        for one in (task, *ends):
            one.cancel()
        await asyncio.gather(task, *ends, return_exceptions=True)
