"""Many photos in one request: results in order, each with its own status.

    reading    one photo at a time; it is decoded before the next one is read
    captions   in batches with other requests; all bulk requests together wait for at most one
               batch, so that a single photo never queues behind thousands
    results    one JSON document, or a line per photo as soon as it is ready (NDJSON)

Memory does not depend on the number of photos: a request holds one encoded photo, and stops reading
while its client does not read the results. A client that disconnects cancels the rest.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Any

from fastapi import Request
from fastapi.responses import Response
from pydantic import BaseModel
from starlette.types import Message, Receive, Scope, Send

from captioner.serving.forms import Field, Items, Upload
from captioner.serving.observe import log_exception
from captioner.serving.photos import Reserve, add_field, check_headers, read_body
from captioner.serving.requests import CaptionRequest, read_request, with_fields
from captioner.serving.responses import (
    RequestError,
    captions_json,
    client_closed,
    internal_error,
    json_line,
)
from captioner.serving.service import Decoded, Service, disconnected, within

NDJSON = "application/x-ndjson"

MAX_RESULTS = 16 << 20
"""Maximum size of the results of a JSON response (bytes); NDJSON has no such limit."""


class BulkResponse(Response):
    """Reads the photos of a request and sends their results."""

    def __init__(self, service: Service, request: Request, query: BaseModel) -> None:
        """Check the request's headers.

        Args:
            service: Captions the photos.
            request: The request; its body is read while the response is sent.
            query: The parsed query; the body may contain further options.

        Raises:
            RequestError: The headers rule the request out.
        """
        check_headers(request, service.limits, several=True)
        super().__init__()
        self._service = service
        self._query = query
        self._lines = "ndjson" in request.headers.get("accept", "").lower()
        self._started = False
        self._body = _Body(request.receive)
        self._request = Request(request.scope, self._body.receive)
        state = request.scope.get("state", {})
        # Counts a photo towards the rate limit; the request itself has counted as the first one.
        self._count: Callable[[], RequestError | None] = state.get("count_photo", lambda: None)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the results; errors of the request as a whole have a status of their own."""
        left = (self._body.client_left(), client_closed())
        work = self._send_lines(send) if self._lines else self._send_document(scope, receive, send)
        try:
            await within(None, work, self._service.too_slow(), [left])
        except RequestError as error:
            if not (self._started and error.reason == client_closed().reason):
                raise

    async def _send_document(self, scope: Scope, receive: Receive, send: Send) -> None:
        most, found, size = self._service.limits.max_batch, [], 0
        async with aclosing(self._results()) as results:
            async for line in results:
                found.append(line)
                size += len(line)
                if len(found) > most or size > MAX_RESULTS:
                    limit = f"{most} photos" if len(found) > most else f"{MAX_RESULTS:,} bytes"
                    raise RequestError(
                        413,
                        "batch",
                        f"the results have more than {limit}, the limit of a JSON response; send "
                        f"Accept: {NDJSON} to get a line per photo, without a limit",
                    )
        self._started = True
        body = b'{"results":[' + b",".join(found) + b"]}"
        await Response(body, media_type="application/json")(scope, receive, send)

    async def _send_lines(self, send: Send) -> None:
        async def send_line(line: bytes) -> None:
            if not self._started:  # until then, an error has its own status
                headers = [(b"content-type", NDJSON.encode())]
                await send({"type": "http.response.start", "status": 200, "headers": headers})
                self._started = True
            await send({"type": "http.response.body", "body": line + b"\n", "more_body": True})

        try:
            async with aclosing(self._results()) as results:
                async for line in results:
                    await send_line(line)
        except RequestError as error:
            if not self._started:
                raise
            await send_line(json_line({"status": error.status, "error": str(error)}))
        await send({"type": "http.response.body", "body": b""})

    async def _results(self) -> AsyncGenerator[bytes, None]:
        """The JSON of each photo's result, in order.

        Raises:
            RequestError: The rest of the request cannot be read.
        """
        waiting: _Waiting = asyncio.Queue(self._service.batch_size)
        tasks: set[asyncio.Task[Any]] = set()
        with self._service.slots(several=True) as reserve:
            tasks.add(asyncio.create_task(self._read(reserve, waiting, tasks)))
            try:
                while (item := await waiting.get()) is not None:
                    if isinstance(item, Exception):
                        raise item
                    yield await item
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)

    async def _read(
        self,
        reserve: Reserve,
        waiting: _Waiting,
        tasks: set[asyncio.Task[Any]],
    ) -> None:
        """Read the photos, start captioning and queue the results."""
        service, body = self._service, None
        fields: dict[str, Any] = {}
        options: Any = None
        try:
            async with aclosing(
                read_body(self._request, service.limits, reserve, several=True)
            ) as body:
                number = 0
                while (item := await self._next(body)) is not None:
                    if isinstance(item, Field) and options is not None:
                        message = f"the option {item.name} comes after a photo"
                        hint = "put options before the photos, or in the query"
                        raise RequestError(422, "options", f"{message}; {hint}")
                    if isinstance(item, Field):
                        add_field(fields, item)
                        continue
                    if options is None:
                        options = with_fields(self._query, fields)
                        wanted = read_request(service.model, options)
                    head = {"index": number} | ({"name": item.name} if item.name else {})
                    if number and (refusal := self._count()):
                        item = item._replace(error=refusal)
                    task = await self._start(item, head, wanted, options.attention)
                    tasks.add(task)
                    task.add_done_callback(tasks.discard)
                    await waiting.put(task)
                    number += 1
        except Exception as error:
            await waiting.put(error)
        else:
            await waiting.put(None)

    async def _next(self, body: Items) -> Field | Upload | None:
        """The next item of the body; None at its end."""

        async def item() -> Field | Upload | None:
            return await anext(body, None)

        return await self._service.received(item(), "the next photo")

    async def _start(
        self, upload: Upload, head: dict[str, Any], wanted: CaptionRequest, attention: bool
    ) -> asyncio.Task[bytes]:
        """Decode a photo, wait until it may queue for the model, and start its captioning."""
        try:
            if upload.error is not None:
                raise upload.error
            photo = await self._service.decode(upload)
        except RequestError as error:
            return asyncio.create_task(_failed(head, error))
        slots = self._service.bulk_slots
        await slots.acquire()
        task = asyncio.create_task(self._result(head, photo, wanted, attention))
        task.add_done_callback(lambda _: slots.release())  # also if it is cancelled before it runs
        return task

    async def _result(
        self, head: dict[str, Any], photo: Decoded, wanted: CaptionRequest, attention: bool
    ) -> bytes:
        """The JSON of one photo's captions, or of its error."""
        service = self._service
        try:
            work = service.caption_photo(photo, wanted)
            captions = await within(service.limits.timeout, work, service.too_slow(), [])
            head = {**head, "status": 200}
            least = wanted.min_confidence
            return await asyncio.to_thread(
                captions_json, photo.size, captions, attention, head, least
            )
        except RequestError as error:
            return await _failed(head, error)
        except Exception as error:  # of this photo alone
            log_exception(error, self._request.scope)
            return await _failed(head, internal_error())


async def _failed(head: dict[str, Any], error: RequestError) -> bytes:
    return json_line({**head, "status": error.status, "error": str(error)})


class _Body:
    """Passes the body on; when it has been read, the client can be watched."""

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._ended = asyncio.Event()

    async def receive(self) -> Message:
        """The next message of the body."""
        message = await self._receive()
        if not message.get("more_body", False):
            self._ended.set()
        return message

    async def client_left(self) -> None:
        """Wait until the client disconnects after sending the body."""
        await self._ended.wait()
        await disconnected(self._receive)


_Waiting = asyncio.Queue[asyncio.Task[bytes] | Exception | None]
