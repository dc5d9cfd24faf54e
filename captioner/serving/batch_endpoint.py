"""The endpoint ``/v1/batch``, which captions many photos per request.

The results have the order of the photos, and each result has its own status.

    reading    one photo at a time; a photo is decoded before the next photo is read
    captions   in batches of the model, together with photos of other requests; all requests to
               this endpoint together may queue at most one such batch, so a single photo never
               waits for thousands
    results    one JSON document, or one line per photo as soon as it is captioned (NDJSON)

Memory use does not depend on the number of photos. A request keeps one encoded photo in memory, and
stops reading photos until its client has read the earlier results. If the client disconnects, the
remaining photos are cancelled.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from functools import partial
from typing import Any, NoReturn

from fastapi import Request
from fastapi.responses import Response
from pydantic import BaseModel
from starlette.types import Message, Receive, Scope, Send

from captioner.serving.json_body import Upload
from captioner.serving.openapi import json_line
from captioner.serving.request_errors import RequestError, error_body, request_error
from captioner.serving.requests import check_headers, read_body, with_fields
from captioner.serving.service import Service, disconnected, within

NDJSON = "application/x-ndjson"
MAX_RESULTS = 16 << 20  # bytes of a JSON response, or of results held back; NDJSON has no limit
HOLD = "x-hold-results"  # set by proxies that stop sending a request once its response begins


class BulkResponse(Response):
    """A response that reads the photos of its request while it sends their results."""

    def __init__(
        self, service: Service, request: Request, query: BaseModel, render: Callable[..., bytes]
    ) -> None:
        """Check the request's headers. The body is read later, while the response is sent.

        Args:
            service: The service.
            request: The request.
            query: The options in the query. Options in the body are added later.
            render: A `Render` that also accepts additional fields for the JSON.
        """
        super().__init__()
        self._render = render
        self._memory = check_headers(request, service.options, several=True)
        self._service, self._query = service, query
        self._by: str = request.state.client
        self._lines = "ndjson" in request.headers.get("accept", "").lower()
        self._hold = HOLD in request.headers
        self._options: Any = None  # options of the query and the body
        self._started = False
        self._received = received = asyncio.Event()  # set after the whole body

        async def receive() -> Message:
            message = await request.receive()
            if not message.get("more_body", False):
                received.set()
            return message

        # `receive` must not refer to this object, because the cycle of references would keep the
        # connection of a rejected client open.
        self._request = Request(request.scope, receive)
        self._client = request

    async def _client_left(self) -> NoReturn:
        """Raise an error if the client disconnects after it has sent the whole body."""
        await self._received.wait()
        await disconnected(self._client)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the results. The status shows only errors that concern the whole request."""
        work = self._send_lines(send) if self._lines else self._send_document(scope, receive, send)
        try:
            await within(None, TimeoutError, work, self._client_left())
        except RequestError:
            if not self._started:  # after the start, the client has disconnected
                raise

    async def _send_document(self, scope: Scope, receive: Receive, send: Send) -> None:
        found, size = [], 0
        async with aclosing(self._results()) as results:
            async for line in results:
                found.append(line)
                size += len(line)
                if size > MAX_RESULTS:
                    raise _too_many(f"{MAX_RESULTS:,} bytes")
        self._started = True
        body = b'{"results":[' + b",".join(found) + b"]}"
        await Response(body, media_type="application/json")(scope, receive, send)

    async def _send_lines(self, send: Send) -> None:
        held: list[bytes] = []
        size = 0

        async def send_held(*, more: bool = True) -> None:
            if not self._started:  # until now, an error could still set the status
                headers = [(b"content-type", NDJSON.encode())]
                await send({"type": "http.response.start", "status": 200, "headers": headers})
                self._started = True
            body = b"".join(line + b"\n" for line in held)
            held.clear()
            await send({"type": "http.response.body", "body": body, "more_body": more})

        try:
            async with aclosing(self._results()) as results:
                async for line in results:
                    held.append(line)
                    size += len(line)
                    if not self._hold or self._received.is_set() or size > MAX_RESULTS:
                        await send_held()
        except RequestError as error:
            if not (self._started or held):
                raise
            held.append(self._failed({}, error))
        await send_held(more=False)

    async def _results(self) -> AsyncGenerator[bytes, None]:
        """Yield the JSON of each photo's result, in order."""
        waiting: _Waiting = asyncio.Queue(self._service.options.batch_size)
        tasks: set[asyncio.Task[bytes]] = set()
        with self._service.slots(self._memory, self._by):
            reading = asyncio.create_task(self._read(waiting, tasks))
            try:
                while (item := await waiting.get()) is not None:
                    if isinstance(item, Exception):
                        raise item
                    yield await item
            finally:
                for task in (ends := [reading, *tasks]):
                    task.cancel()
                await asyncio.gather(*ends, return_exceptions=True)

    async def _read(self, waiting: _Waiting, tasks: set[asyncio.Task[bytes]]) -> None:
        """Read the photos, start captioning each of them, and queue the results."""
        service = self._service
        fields: dict[str, Any] = {}
        number = 0
        try:
            body = read_body(self._request, service.options, fields, several=True)
            async with aclosing(body):
                while upload := await service.received(anext(body, None), "the next photo"):
                    if not self._lines and upload.number > service.options.max_batch:
                        raise _too_many(f"{service.options.max_batch} photos")
                    if number == 0:
                        self._options = with_fields(self._query, fields)
                        self._wanted = service.wanted(self._options)
                    decoded = asyncio.Event()
                    task = asyncio.create_task(self._caption(number, upload, decoded))
                    tasks.add(task)
                    task.add_done_callback(tasks.discard)
                    await waiting.put(task)
                    await decoded.wait()
                    number += 1
        except Exception as error:
            await waiting.put(error)
        else:
            await waiting.put(None)

    async def _caption(self, number: int, upload: Upload, decoded: asyncio.Event) -> bytes:
        """Return the result of a photo as a line of JSON.

        Set the event ``decoded`` as soon as the photo is decoded and may queue for the model.
        """
        service, wanted = self._service, self._wanted
        head: dict[str, Any] = {"index": number} | ({"name": upload.name} if upload.name else {})
        try:
            if number:  # the request itself was counted as the first photo
                self._request.state.count_photo()
            if upload.error:
                raise upload.error
            photo = await service.decode(self._by, upload)
            async with service.bulk_slots[service.lane(wanted)]:
                decoded.set()
                found = service.caption_photo(self._by, photo, wanted)
                captions = await service.captioned(found, wanted.cost)
            render = partial(self._render, **head, status=200)
            return await asyncio.to_thread(render, photo, captions, self._options)
        except Exception as error:  # it affects only this photo
            return self._failed(head, error)
        finally:
            decoded.set()

    def _failed(self, head: dict[str, Any], error: Exception) -> bytes:
        found = request_error(error, self._request.scope)
        return json_line({**head, "status": found.status, **error_body("/v1/batch", found)})


def _too_many(limit: str) -> RequestError:
    message = f"a JSON response can have at most {limit}"
    hint = f"send Accept: {NDJSON} to get one line per photo, without a limit"
    return RequestError(413, "batch", f"{message}; {hint}")


_Waiting = asyncio.Queue[asyncio.Task[bytes] | Exception | None]
