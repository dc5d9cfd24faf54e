"""Process a request, from the bytes of a photo to its captions.

    admission   take a queue slot, or refuse the request before its body is read
    body        read it into memory, within limits on bytes and seconds; see `photos`
    decoding    in a few threads; only the encoder's input is kept
    captions    in a batch with other requests; see `batching`
    response    rendered from the captions, as JSON or a picture

A client that disconnects frees its queue slot at once. Nothing is written to disk.
"""

from __future__ import annotations

import asyncio
import io
import math
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import aclosing, contextmanager, nullcontext, suppress
from typing import Any, NamedTuple, TypeVar

from fastapi import Request
from PIL.Image import Image
from pydantic import BaseModel

from captioner.caption import Caption
from captioner.data.images import USUAL_FORMATS, header_size, open_reduced, reduced_side
from captioner.drawing.heatmap import fit_photo
from captioner.errors import ConfigError, ImageError, LargeImageError, NotAnImageError
from captioner.inference.captioner import Captioner
from captioner.inference.engine import Prepared
from captioner.serving.batching import Batcher, ClosedError
from captioner.serving.forms import Receive, Upload
from captioner.serving.options import Limits
from captioner.serving.photos import Reserve, check_headers, has_fields, read_body, read_photo
from captioner.serving.requests import CaptionRequest, read_request, with_fields
from captioner.serving.responses import RequestError, client_closed, closing

T = TypeVar("T")

DECODERS = 2
"""Number of photos decoded in parallel."""

LARGE_PIXELS = 24_000_000
"""Photos with more pixels are decoded one at a time: each takes up to 16 bytes per pixel."""


MAX_WAIT = 300
"""Maximum value of Retry-After (seconds)."""


class Decoded(NamedTuple):
    """A photo that was read."""

    size: tuple[int, int]
    """Width and height."""
    prepared: Prepared
    picture: Image | None = None
    """Reduced to the size at which it is drawn; None if it is not drawn."""


class Renderer(NamedTuple):
    """How to turn captions into the body of a response."""

    render: Callable[[Decoded, Sequence[Caption], Any], bytes]
    """Gets the photo, its captions and the request's options."""
    draws: bool = False
    """Whether it draws the photo, at most at ``panel_size``, an option of the request."""


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
        self.batch_size = batch_size
        self.batcher = Batcher(model, batch_size, on_batch)
        self.bulk_slots = asyncio.Semaphore(batch_size)
        """For the photos of bulk requests that wait for the model."""
        self.in_flight = 0
        """Number of slots that requests hold; most hold one."""
        self.draining = False
        """Whether new requests are refused, because the server shuts down."""
        self._seconds = 1.0
        """Exponential mean of the time between two completed requests."""
        self._completed = time.monotonic()
        """When the last request was completed, or the first one of a busy time began."""
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
        self.draining = True
        self._closing.set()
        self.batcher.close()

    def join(self) -> None:
        """Wait for the threads to finish; call ``close`` first."""
        self.batcher.join()
        self._decoders.shutdown()

    async def caption(self, request: Request, query: BaseModel, renderer: Renderer) -> bytes:
        """Read the photo of an HTTP request, caption it and render the response.

        Args:
            request: The HTTP request.
            query: Its parsed query; the body may contain further options.
            renderer: Makes the body of the response.

        Raises:
            RequestError: The request cannot be served.
            ConfigError: Its options contradict each other.
        """
        check_headers(request, self.limits, several=False)
        if not has_fields(request):
            read_request(self.model, query)  # refuse what cannot be valid before reading the body
        with self.slots(several=False) as reserve:
            work = self._read(request, query, reserve)
            upload, options = await self.received(work, "the photo")
            left = (disconnected(request.receive), client_closed())
            response = self._respond(upload, options, renderer)
            return await within(self.limits.timeout, response, self.too_slow(), [left])

    async def _read(
        self, request: Request, query: BaseModel, reserve: Reserve
    ) -> tuple[Upload, BaseModel]:
        body = read_body(request, self.limits, reserve, several=False)
        async with aclosing(body):
            upload, fields = await read_photo(body)
        return upload, with_fields(query, fields)

    async def _respond(self, upload: Upload, options: Any, renderer: Renderer) -> bytes:
        wanted = read_request(self.model, options)
        side = options.panel_size if renderer.draws else None
        photo = await self.decode(upload, side)
        captions = await self.caption_photo(photo, wanted)
        if renderer.draws:  # takes as much time and memory as decoding
            return await self._in_decoder(renderer.render, photo, captions, options)
        # Serializing many maps takes a while: keep the event loop free.
        return await asyncio.to_thread(renderer.render, photo, captions, options)

    async def decode(self, upload: Upload, side: int | None = None) -> Decoded:
        """Decode a photo and free its bytes.

        Args:
            upload: The photo.
            side: Longest side of the ``picture`` to keep; None: none.

        Raises:
            RequestError: The photo cannot be read.
        """
        try:
            return await self._in_decoder(self._decode, upload, side)
        except NotAnImageError as error:
            raise RequestError(415, "no_picture", str(error)) from error
        except LargeImageError as error:
            raise RequestError(413, "pixels", str(error)) from error
        except ImageError as error:
            # curl -d, which people try first, strips line breaks from the file
            hint = "; with curl, use --data-binary instead of -d" if upload.alone else ""
            raise RequestError(422, "broken", f"{error}{hint}") from error

    async def caption_photo(self, photo: Decoded, wanted: CaptionRequest) -> list[Caption]:
        """Caption a photo in a batch with others.

        Raises:
            RequestError: The server is shutting down, or no caption satisfies the options.
        """
        try:
            return await asyncio.wrap_future(self.batcher.submit(photo.prepared, wanted))
        except ClosedError as error:
            raise closing() from error
        except ConfigError as error:
            raise RequestError(422, "options", str(error)) from error

    async def received(self, work: Awaitable[T], what: str) -> T:
        """Await a photo of a request.

        Raises:
            RequestError: It was not received in time, or the server is shutting down.
        """
        seconds = self.limits.timeout
        message = f"{what} was not received within {seconds:g} s; try again"
        late = RequestError(408, "slow_upload", message)
        return await within(seconds, work, late, [(self._closing.wait(), closing())])

    def too_slow(self) -> RequestError:
        """Captioning a photo took too long."""
        return RequestError(
            503,
            "time",
            f"captioning took longer than {self.limits.timeout:g} s; try again later, or reduce "
            "beam_size, num_captions or candidates",
            retry_after=self.retry_after(),
        )

    def retry_after(self) -> int:
        """Whole seconds in which the requests in flight should be completed."""
        return min(MAX_WAIT, math.ceil(self._seconds * max(1, self.in_flight)))

    @contextmanager
    def slots(self, *, several: bool) -> Iterator[Reserve]:
        """Hold one of the ``max_queue`` slots.

        Args:
            several: Whether the request may have several photos. How long such a request takes
                depends on their number, so Retry-After is measured from the others.

        Yields:
            A function that takes more of them for a body of that many bytes: each slot stands for
            ``max_bytes`` of memory.
        """
        held = 0

        def hold(count: int) -> None:
            """Hold ``count`` slots in all, or refuse the request."""
            nonlocal held
            more = min(count, self.limits.max_queue) - held
            if more > 0 and self.in_flight + more > self.limits.max_queue:
                message = f"{self.in_flight} requests are in flight (the limit is "
                message += f"{self.limits.max_queue}); try again after Retry-After seconds"
                raise RequestError(429, "queue", message, retry_after=self.retry_after())
            held += max(0, more)
            self.in_flight += max(0, more)

        if self.in_flight == 0:
            self._completed = time.monotonic()  # idle time is not measured
        hold(1)
        try:
            yield lambda size: hold(math.ceil(size / self.limits.max_bytes))
        finally:
            self.in_flight -= held
            if not several:
                now = time.monotonic()
                self._seconds += 0.1 * (now - self._completed - self._seconds)
                self._completed = now

    def _decode(self, upload: Upload, side: int | None) -> Decoded:
        """Decode a photo, large ones in turn; frees its bytes."""
        image_size = self.model.ensemble.image_size
        with upload.data, self._large if _is_large(upload.data) else nullcontext():
            image, size = open_reduced(
                upload.data,
                min_side=max(reduced_side(image_size), side or 0),
                name="the photo",
                max_pixels=self.limits.max_pixels,
                formats=USUAL_FORMATS,
            )
            picture = None if side is None else fit_photo(image, side)
            return Decoded(size, self.model.prepare(image), picture)

    async def _in_decoder(self, work: Callable[..., T], *args: Any) -> T:
        """Run a function in a decoder thread.

        The thread counts as busy until the function returns, even if its request was cancelled, so
        only photos that are being decoded can outlive their request.
        """
        await self._free_decoders.acquire()
        loop = asyncio.get_running_loop()

        def free(_: Future[T]) -> None:
            """Count the thread as free; called in that thread."""
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


async def disconnected(receive: Receive) -> None:
    """Wait until the client disconnects."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def within(
    seconds: float | None,
    work: Awaitable[T],
    late: RequestError,
    stops: Sequence[tuple[Awaitable[Any], RequestError]],
) -> T:
    """Await something with a timeout, unless another event comes first.

    Args:
        seconds: Timeout; None: none.
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
