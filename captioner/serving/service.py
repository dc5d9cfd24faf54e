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
import math
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext, suppress
from typing import Any, NamedTuple, TypeVar

from fastapi import Request
from PIL.Image import Image

from captioner.caption import Caption
from captioner.data.images import USUAL_FORMATS, header_size, open_reduced, reduced_side
from captioner.drawing.heatmap import fit_photo
from captioner.errors import ConfigError, ImageError, LargeImageError, NotAnImageError
from captioner.inference.captioner import Captioner
from captioner.inference.engine import Prepared
from captioner.serving import schema
from captioner.serving.batching import Batcher, ClosedError
from captioner.serving.options import Limits
from captioner.serving.photos import Upload, check_headers, read_photo
from captioner.serving.schema import RequestError

T = TypeVar("T")

DECODERS = 2  # photos decoded in parallel
LARGE_PIXELS = 24_000_000  # larger ones are decoded one at a time: 16 bytes per pixel at most
MAX_WAIT = 300  # most seconds of Retry-After


class Decoded(NamedTuple):
    """A photo that was read, its width and height, and its picture if it is drawn."""

    size: tuple[int, int]
    prepared: Prepared
    picture: Image | None = None


class Output(NamedTuple):
    """An endpoint that takes a photo: what it makes of the captions."""

    path: str
    summary: str
    media_type: str
    options: tuple[type, ...]
    """Dataclasses, beside that of the search."""
    render: Callable[[Decoded, Sequence[Caption], Any], bytes]
    """Makes the body of the response from a photo, its captions and the request's options."""
    draws: bool = False
    """Whether it draws the photo, at most at ``panel_size``, an option of the request."""
    policy: Callable[[bytes], str] | None = None
    """Content-Security-Policy of the body, for opening it in a browser."""


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
        """Initialize the service; for the arguments see `Batcher`."""
        self.model, self.limits, self.batch_size = model, limits, batch_size
        self.batcher = Batcher(model, batch_size, on_batch)
        self.bulk_slots = asyncio.Semaphore(batch_size)  # for photos of bulk requests that wait
        self.in_flight = 0  # slots that requests hold; most hold one
        self.draining = False  # new requests are refused, because the server shuts down
        self._seconds = 1.0  # exponential mean of the time between two completed requests
        self._completed = time.monotonic()  # the last request, or a busy time began
        self._closing = asyncio.Event()
        self._decoders = ThreadPoolExecutor(DECODERS, thread_name_prefix="captioner-decoder")
        self._large = threading.Lock()

    def close(self) -> None:
        """Refuse new and waiting requests; the batch that the model works on is finished."""
        self.draining = True
        self._closing.set()
        self.batcher.close()

    def join(self) -> None:
        """Wait for the threads to finish; call ``close`` first."""
        self.batcher.join()
        self._decoders.shutdown()

    async def caption(self, request: Request, query: Any, output: Output) -> bytes:
        """Read the photo of an HTTP request, caption it and render the response.

        The body may contain further options beside those of the query.
        """
        memory = check_headers(request, self.limits, several=False)

        async def respond(upload: Upload, options: Any) -> bytes:
            wanted = schema.read_request(self.model, options)
            photo = await self.decode(upload, options.panel_size if output.draws else None)
            captions = await self.caption_photo(photo, wanted)
            # Drawing takes as much time and memory as decoding, and JSON of many maps a while.
            threads = self._decoders if output.draws else None
            loop = asyncio.get_running_loop()
            return await loop.run_in_executor(threads, output.render, photo, captions, options)

        with self.slots(memory):
            fields: dict[str, Any] = {}
            upload = await self.received(read_photo(request, self.limits, fields), "the photo")
            response = respond(upload, schema.with_fields(query, fields))
            left = (disconnected(request), schema.client_closed())
            return await within(self.limits.timeout, response, self.too_slow(), [left])

    async def decode(self, upload: Upload, side: int | None = None) -> Decoded:
        """Decode a photo and free its bytes, also if the request is cancelled meanwhile.

        ``side`` is the longest side of the picture to keep; None: none.
        """
        loop = asyncio.get_running_loop()
        try:
            with upload.data:
                return await loop.run_in_executor(self._decoders, self._decode, upload.data, side)
        except NotAnImageError as error:
            raise RequestError(415, "no_picture", str(error)) from error
        except LargeImageError as error:
            raise RequestError(413, "pixels", str(error)) from error
        except ImageError as error:
            # curl -d, which people try first, strips line breaks from the file
            hint = "; with curl, use --data-binary instead of -d" if upload.alone else ""
            raise RequestError(422, "broken", f"{error}{hint}") from error

    def _decode(self, data: Any, side: int | None) -> Decoded:
        pixels = 0
        with suppress(ImageError):  # which open_reduced raises again
            pixels = math.prod(header_size(data, USUAL_FORMATS))
        with self._large if pixels > LARGE_PIXELS else nullcontext():
            image, size = open_reduced(
                data,
                min_side=max(reduced_side(self.model.ensemble.image_size), side or 0),
                name="the photo",
                max_pixels=self.limits.max_pixels,
                formats=USUAL_FORMATS,
            )
            picture = None if side is None else fit_photo(image, side)
            return Decoded(size, self.model.prepare(image), picture)

    async def caption_photo(self, photo: Decoded, wanted: schema.CaptionRequest) -> list[Caption]:
        """Caption a photo in a batch with others."""
        try:
            return await asyncio.wrap_future(self.batcher.submit(photo.prepared, wanted))
        except ClosedError as error:
            raise schema.closing() from error
        except ConfigError as error:
            raise RequestError(422, "options", str(error)) from error

    async def received(self, work: Awaitable[T], what: str) -> T:
        """Await a photo of a request, until the server shuts down."""
        seconds = self.limits.timeout
        message = f"{what} was not received within {seconds:g} s; try again"
        late = RequestError(408, "slow_upload", message)
        return await within(seconds, work, late, [(self._closing.wait(), schema.closing())])

    def too_slow(self) -> RequestError:
        """Captioning a photo took too long."""
        message = f"captioning took longer than {self.limits.timeout:g} s; try again later, or "
        message += "reduce beam_size, num_captions or candidates"
        return RequestError(503, "time", message, retry_after=self.retry_after())

    def retry_after(self) -> int:
        """Whole seconds in which the requests in flight should be completed."""
        return min(MAX_WAIT, math.ceil(self._seconds * max(1, self.in_flight)))

    @contextmanager
    def slots(self, count: int, *, several: bool = False) -> Iterator[None]:
        """Hold some of the ``max_queue`` slots, each of which stands for ``max_bytes`` of memory.

        A request that is alone may need more than there are. How long one of several photos takes
        depends on their number, so Retry-After is measured from the others.
        """
        if self.draining:
            raise schema.closing()
        count = min(count, self.limits.max_queue)
        if self.in_flight + count > self.limits.max_queue:
            message = f"{self.in_flight} requests are in flight (the limit is "
            message += f"{self.limits.max_queue}); try again after Retry-After seconds"
            raise RequestError(429, "queue", message, retry_after=self.retry_after())
        if self.in_flight == 0:
            self._completed = time.monotonic()  # idle time is not measured
        self.in_flight += count
        try:
            yield
        finally:
            self.in_flight -= count
            if not several:
                now = time.monotonic()
                self._seconds += 0.1 * (now - self._completed - self._seconds)
                self._completed = now


async def disconnected(request: Request) -> None:
    """Wait until the client disconnects."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def within(
    seconds: float | None,
    work: Awaitable[T],
    late: RequestError,
    stops: Sequence[tuple[Awaitable[Any], RequestError]],
) -> T:
    """Await work with a timeout, unless one of the events comes first, each with its error."""
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
