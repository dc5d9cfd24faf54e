"""Limits on the number of connections and on how long one may stay idle.

uvicorn closes keep-alive connections that are idle, but it waits forever for the rest of the
request headers, for a client that reads its response slowly and for the rest of a refused body,
and it accepts any number of connections. Here all four are limited.

A client that is refused while it is still sending may not see the response: the operating system
discards it when a connection is closed with unread data. `Drain` therefore reads and discards the
rest of the body first, up to a limit.
"""

from __future__ import annotations

import asyncio
import json
from contextlib import suppress
from typing import Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from captioner.serving.limits import Limits
from captioner.serving.responses import RETRY_AFTER
from captioner.serving.security import HEADERS

DRAIN_SECONDS = 5.0
"""Time limit for reading the rest of a refused body."""

DRAIN_BYTES = 64 << 20
"""Maximum number of bytes to read of a refused body before the connection is closed."""

SLACK_SECONDS = 30.0
"""Added to the time limits for receiving and captioning: queueing, sending the response."""


class Connection(H11Protocol):
    """A connection with limits; see ``limited_protocol``."""

    limits = Limits()
    _timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        """Accept the connection, or refuse it if there are too many."""
        super().connection_made(transport)
        if len(self.connections) > self.limits.max_connections:
            message = f"{self.limits.max_connections} connections are open (the limit); try again"
            transport.write(_raw_response(503, message, {"Retry-After": str(RETRY_AFTER)}))
            transport.close()
            return
        self._close_after(self.limits.timeout)

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the timer."""
        super().connection_lost(exc)
        self._cancel_timer()

    def data_received(self, data: bytes) -> None:
        """Restart the timer when the headers are complete; partial headers do not restart it."""
        was_busy = self._busy()
        super().data_received(data)
        if self._busy() and not was_busy:
            self._start_request()

    def on_response_complete(self) -> None:
        """Restart the timer for the next request."""
        super().on_response_complete()
        if self._busy():  # a pipelined request
            self._start_request()
        else:
            self._close_after(self.limits.timeout)

    def send_400_response(self, msg: str) -> None:
        """Refuse malformed HTTP with the same JSON as every other error."""
        self.transport.write(_raw_response(400, f"not valid HTTP: {msg}", {}))
        self.transport.close()

    def _start_request(self) -> None:
        """Start the timer of a request; one with many photos restarts it as it advances."""
        self._close_request_late()
        self.scope["state"]["advance"] = self._close_request_late

    def _close_request_late(self) -> None:
        self._close_after(2 * self.limits.timeout + SLACK_SECONDS)

    def _busy(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _close_after(self, seconds: float) -> None:
        self._cancel_timer()
        self._timer = self.loop.call_later(seconds, self.transport.abort)

    def _cancel_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


class Drain:
    """Middleware that reads the rest of the body before the response, or closes the connection."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on; drain its body before the response."""
        headers = Headers(scope=scope) if scope["type"] == "http" else Headers()
        ended = "transfer-encoding" not in headers and headers.get("content-length", "0") == "0"
        # A client that waits for 100 Continue does not send the body after an error.
        expects = headers.get("expect", "").lower() == "100-continue"

        async def watched() -> Message:
            """The next message; notes the end of the body."""
            nonlocal ended
            message = await receive()
            ended = ended or not message.get("more_body", False)
            return message

        async def drained() -> None:
            """Discard the rest of the body."""
            left = DRAIN_BYTES
            while not ended and left > 0:
                left -= len((await watched()).get("body", b""))

        async def send_after_body(message: Message) -> None:
            """Send a message; a refusal only after the body."""
            # A response with another status is sent while its request is read.
            refused = message["type"] == "http.response.start" and message["status"] >= 400
            if refused and not ended:
                response = MutableHeaders(scope=message)
                if message["status"] != 408 and not expects:
                    with suppress(TimeoutError, asyncio.TimeoutError):
                        await asyncio.wait_for(drained(), DRAIN_SECONDS)
                if not ended:
                    response["Connection"] = "close"
            await send(message)

        await self.app(scope, watched, send_after_body)


def limited_protocol(limits: Limits) -> type[Connection]:
    """A protocol class with these limits, for ``uvicorn.Config(http=...)``."""
    return type("LimitedConnection", (Connection,), {"limits": limits})


def _raw_response(status: int, message: str, headers: dict[str, str]) -> bytes:
    """The bytes of an error response that bypasses the application."""
    body = json.dumps({"error": message}).encode()
    phrase = {400: "Bad Request", 503: "Service Unavailable"}[status]
    headers = HEADERS | headers | {"Content-Type": "application/json"}
    headers |= {"Content-Length": str(len(body)), "Connection": "close"}
    head = [f"HTTP/1.1 {status} {phrase}", *(f"{name}: {value}" for name, value in headers.items())]
    return "\r\n".join([*head, "", ""]).encode("latin-1") + body
