"""The processing of a request, from the bytes of a photo to its captions.

    admission   take a place in the queue, or reject the request before its body is read
    body        read it into memory, within limits on bytes and seconds; see `requests`
    decoding    in a few threads; only the encoder's input is kept
    captions    in a batch with other requests
    response    rendered from the captions, as JSON or a picture

Decoding, captioning and drawing each have `lanes`, in which clients take turns. Large photos and
costly searches have their own lanes, so that other requests do not wait for them. A client that
disconnects frees its place in the queue at once. Nothing is written to disk.
"""

from __future__ import annotations

import asyncio
import gc
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, NamedTuple, NoReturn, TypeVar

from fastapi import Request
from PIL.Image import Image
from pydantic import BaseModel

from captioner.caption_types import Caption
from captioner.data.images import USUAL_FORMATS, header_work, open_image, reduced_side
from captioner.data.pixels import fit_photo
from captioner.errors import ImageError, LargeImageError, NotAnImageError
from captioner.inference.captioner import Captioner
from captioner.inference.engine import Prepared
from captioner.memory import release_freed_memory
from captioner.serving.json_body import Upload
from captioner.serving.lanes import Job, Lane
from captioner.serving.observe import Metrics
from captioner.serving.options import ServeOptions
from captioner.serving.request_errors import RequestError, client_closed, closing
from captioner.serving.requests import (
    CaptionRequest,
    caption_request,
    check_headers,
    read_photo,
    read_query,
    with_fields,
)

T = TypeVar("T")

DECODERS = 2  # photos decoded in parallel, in addition to a large one
LARGE_PIXELS = 24_000_000  # larger photos are decoded one at a time: 27 bytes per pixel at most
LARGE_BYTES = 8 << 20  # size of a file after which freed memory is returned to the system
RELEASE_SECONDS = 1.0  # delay before the memory is returned


class Decoded(NamedTuple):
    """A decoded photo: its size, the encoder's input, and its picture if the response shows it."""

    size: tuple[int, int]
    prepared: Prepared
    picture: Image | None = None


Render = Callable[[Decoded, Sequence[Caption], Any], bytes]
"""A function that makes the body of a response from a photo, its captions and the request's
options. If the response is a picture, the option ``panel_size`` is the largest side of the drawn
photo."""


class Service:
    """A service that reads, captions and answers the requests of a server.

    It limits the number, size and duration of the requests (see `ServeOptions`). Each kind of work
    has its own queue, called a lane, in which clients take turns.
    """

    def __init__(self, model: Captioner, options: ServeOptions) -> None:
        """Create the queues for decoding, captioning and drawing (lanes), with their threads."""
        self.model, self.options = model, options
        self.metrics = Metrics(lambda: self.captions.waiting, lambda: self.in_flight)
        self.in_flight = 0  # slots that requests hold; most hold one
        self.leaving = False  # not ready, because the server shuts down
        self.draining = False  # new requests are rejected, because the server shuts down
        self._releasing: asyncio.TimerHandle | None = None
        # Cost of a full batch. A search with more beams or steps gets smaller batches to limit
        # memory.
        self._batch_cost = options.batch_size * CaptionRequest(model.options()).cost
        self._held: Counter[str] = Counter()  # slots by client
        self._several_held = 0  # slots of requests that hold more than one
        half = max(1, options.max_queue // 2) if options.has_keys else options.max_queue
        self._most_held = options.max_per_client or half
        self._closing = asyncio.Event()
        self.captions = Lane("captions", self._caption, together=self._batch)
        memory: Any = {"yielding": True, "after": self._release}
        self._costly = Lane("costly", self._caption, **memory)
        self._decoders = Lane("decoder", threads=DECODERS)
        self._large = Lane("large", **memory)
        self._painters = Lane("painter", threads=DECODERS, **memory)
        # Number of photos from /v1/batch that may wait in each lane.
        self.bulk_slots = {
            self.captions: asyncio.Semaphore(options.batch_size),
            self._costly: asyncio.Semaphore(DECODERS),
        }
        self._lanes = self.captions, self._costly, self._decoders, self._large, self._painters

    def close(self) -> None:
        """Reject new and waiting requests, and finish the jobs in progress."""
        self.leaving = self.draining = True
        self._closing.set()
        for lane in self._lanes:
            lane.close()

    def _release(self) -> None:
        """Return freed memory to the system soon, at most once per second.

        Otherwise, the process would keep its peak memory: 1.2 GB after an explanation. Returning
        memory after each request would slow down the next request, because that request would have
        to allocate the memory again.
        """

        def release() -> None:
            self._releasing = None
            loop.run_in_executor(None, _release_memory)

        if self._releasing is None:
            loop = asyncio.get_running_loop()
            self._releasing = loop.call_later(RELEASE_SECONDS, release)

    async def caption(self, request: Request, model: type[BaseModel], render: Render) -> bytes:
        """Read the photo of an HTTP request, caption it and render the response.

        Args:
            request: The request, with options in its query and in its body.
            model: A pydantic model of the options that the request may set.
            render: Function that makes the body of the response from the photo, its captions and
                the options.
        """
        query = read_query(request.query_params, model)
        memory = check_headers(request, self.options, several=False)
        client: str = request.state.client

        async def respond(upload: Upload, options: Any, wanted: CaptionRequest) -> bytes:
            side = getattr(options, "panel_size", None)
            photo = await self.decode(client, upload, side)
            captions = await self.caption_photo(client, photo, wanted)
            work = partial(render, photo, captions, options)
            # JSON with many maps takes long to render, so it is also rendered in a thread.
            drawn = None if side is None else self._painters.submit(client, work)
            return await (drawn or asyncio.to_thread(work))

        with self.slots(memory, client):
            fields: dict[str, Any] = {}
            upload = await self.received(read_photo(request, self.options, fields), "the photo")
            options = with_fields(query, fields)
            wanted = self.wanted(options)
            response = respond(upload, options, wanted)
            return await self.captioned(response, wanted.cost, request)

    async def decode(self, client: str, upload: Upload, side: int | None = None) -> Decoded:
        """Decode a photo and free its bytes, even if the request is cancelled meanwhile.

        ``client`` is the name for which the job waits its turn. ``side`` is the longest side
        (pixels) of the picture to keep, or None to keep no picture.
        """
        try:
            with upload.data:
                if upload.data.getbuffer().nbytes > LARGE_BYTES:
                    self._release()
                work = partial(self._decode, upload.data, side)
                found: Decoded | None = await self._decoders.submit(client, work)
                return found or await self._large.submit(client, partial(work, large=True))
        except (NotAnImageError, LargeImageError):
            raise
        except ImageError as error:
            if not upload.alone:
                raise
            # People often try curl -d first, which strips line breaks from the file.
            message = f"{error}; with curl, use --data-binary instead of -d"
            raise ImageError(message) from error

    def _decode(self, data: Any, side: int | None, *, large: bool = False) -> Decoded | None:
        """Decode a photo for the model, or return None if the photo is large and must wait.

        Large photos are decoded only if ``large`` is true, in a separate queue. ``side`` is the
        longest side (pixels) of the picture to keep, or None to keep no picture.
        """
        with suppress(ImageError):  # open_image raises it again
            if not large and header_work(data, USUAL_FORMATS) > LARGE_PIXELS:
                return None
        image = open_image(
            data,
            min_side=max(reduced_side(self.model.ensemble.image_size), side or 0),
            name="the photo",
            max_pixels=self.options.max_pixels,
            formats=USUAL_FORMATS,
        )
        picture = None if side is None else fit_photo(image, side)
        return Decoded(image.info["size"], self.model.prepare(image), picture)

    def wanted(self, options: Any) -> CaptionRequest:
        """Return the checked options of a request, as a `CaptionRequest`.

        Raises:
            ConfigError: The options contradict each other, or the request costs too much.
        """
        return caption_request(self.model, options, self.options.max_cost)

    def lane(self, wanted: CaptionRequest) -> Lane:
        """Return the queue (lane) in which a request waits for the model.

        Requests that cost more than a full batch have a separate lane.
        """
        return self._costly if wanted.cost > self._batch_cost else self.captions

    def caption_photo(
        self, client: str, photo: Decoded, wanted: CaptionRequest
    ) -> asyncio.Future[list[Caption]]:
        """Queue a photo for the model, and return a future of its captions, best first.

        The photo is captioned in a batch with other photos, or alone if the request is costly.
        ``client`` is the name for which the job waits its turn.
        """
        return self.lane(wanted).submit(client, (photo.prepared, wanted))

    def _batch(self, first: Job, waiting: Iterable[Job]) -> list[Job]:
        """Return the jobs to caption in one batch, which all have the same options."""
        request = first.item[1]
        others = [job for job in waiting if job is not first and job.item[1].key == request.key]
        most = max(1, min(self.options.batch_size, self._batch_cost // request.cost))
        return [first, *others[: most - 1]]

    def _caption(self, jobs: Sequence[Job]) -> list[list[Caption]]:
        """Caption the photos of jobs that share a batch, and return the captions of each job."""
        photos, requests = zip(*(job.item for job in jobs), strict=True)
        options, alternatives, style, method = requests[0].key

        def check() -> None:
            if len(jobs) == 1:
                jobs[0].check()

        if options is None:
            words = [request.words for request in requests]
            explained = self.model.explain_batch(
                photos, words, alternatives=alternatives, method=method, style=style
            )
            found = [[caption] for caption in explained]
        else:
            found = self.model.caption_batch(
                photos, options, alternatives=alternatives, method=method, check=check
            )
        self.metrics.photos.inc(len(jobs))
        self.metrics.batches.observe(len(jobs))
        return found

    async def received(self, work: Awaitable[T], what: str) -> T:
        """Wait for the upload of a photo, until the time limit or the server's shutdown.

        ``what`` names the upload in the error message.

        Raises:
            RequestError: The upload is late, or the server shuts down.
        """
        seconds = self.options.timeout

        def late() -> RequestError:
            message = f"{what} was not received within {seconds:g} s; try again"
            return RequestError(408, "slow_upload", message)

        return await within(seconds, late, work, self._closed())

    async def captioned(
        self, work: Awaitable[T], cost: int, request: Request | None = None, photos: int = 1
    ) -> T:
        """Wait for the captions of a request, and return them.

        Args:
            work: Awaitable that returns the captions or the response.
            cost: Decoder steps per photo, for the error message.
            request: The request, to stop if its client disconnects. None: do not check.
            photos: Number of photos. The time limit is multiplied by this number.

        Raises:
            RequestError: The captions are late, the client has disconnected, or the server shuts
                down.
        """
        seconds = self.options.timeout

        def late() -> RequestError:
            problem = f"the request took longer than {seconds:g} s"
            why = f"the server is busy or the request is costly ({cost:,} steps of the decoder)"
            hint = "send fewer requests at once, above all for figures"
            options = "a smaller beam_size, num_captions or max_length, or method=attention"
            message = f"{problem}, because {why}; {hint}, use {options}, or try again"
            return RequestError(503, "time", message)

        left = [] if request is None else [disconnected(request)]
        return await within(photos * seconds, late, work, self._closed(), *left)

    async def _closed(self) -> NoReturn:
        await self._closing.wait()
        raise closing()

    @contextmanager
    def slots(self, count: int, client: str) -> Iterator[None]:
        """Reserve ``count`` of the ``max_queue`` slots for a client during the block.

        Each slot stands for ``max_bytes`` of memory. Requests that need several slots share a
        quarter of all slots. If the server is otherwise idle, a request may need more slots than
        exist.
        """
        if self.draining:
            raise closing()
        count = min(count, self.options.max_queue)
        several = count if count > 1 else 0
        quarter = max(1, self.options.max_queue // 4)
        for needed, held, most, whose in (
            (count, self._held[client], self._most_held, "of yours "),
            (several, self._several_held, quarter, "with many photos in JSON "),
            (count, self.in_flight, self.options.max_queue, ""),
        ):
            if held + min(needed, most) > most:
                message = (
                    f"{held} requests {whose}are in progress (the limit is {most}); wait as long "
                )
                raise RequestError(
                    429, "queue", f"{message}as the header Retry-After says, then try again"
                )
        self.in_flight += count
        self._several_held += several
        self._held[client] += count
        try:
            yield
        finally:
            self.in_flight -= count
            self._several_held -= several
            if several:
                self._release()
            self._held[client] -= count
            self._held += Counter()  # removes clients without slots


def _release_memory() -> None:
    # Figures of Matplotlib refer to themselves. Without a collection, they would stay in memory for
    # a long time: 250 MB after 24 figures. A collection takes 0.1 s.
    gc.collect()
    release_freed_memory()


async def disconnected(request: Request) -> NoReturn:
    """Wait until the client disconnects, then raise an error that ends the request."""
    while (await request.receive())["type"] != "http.disconnect":
        pass
    raise client_closed()


async def within(
    seconds: float | None,
    late: Callable[[], Exception],
    work: Awaitable[T],
    *ends: Awaitable[NoReturn],
) -> T:
    """Wait for work, and cancel it after a time limit, or as soon as one of ``ends`` raises.

    Args:
        seconds: Time limit, or None for no limit.
        late: Function that returns the exception to raise after the time limit.
        work: Awaitable that returns the result.
        ends: Awaitables that never return, but raise an exception when the result is no longer
            needed.
    """
    tasks = [asyncio.ensure_future(one) for one in (work, *ends)]
    try:
        await asyncio.wait(tasks, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        for task in tasks:
            if task.done():
                return task.result()
        raise late()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
