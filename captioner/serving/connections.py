"""Connections: how many there are, and how long one may say nothing of use.

uvicorn closes a connection that is silent after an answer. It waits for ever for the rest of a
request's head, for a reader that takes its answer byte by byte, and for the rest of a body that was
refused; and it takes as many connections as the system lets it. Here all four have a bound.

Who is refused while still sending may not see the answer: the system throws it away when a
connection is closed with bytes unread. So what is left of the body is read first, up to a bound,
and thrown away (`Drain`).
"""

from __future__ import annotations

import asyncio
import json
from contextlib import suppress
from typing import Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from captioner.serving.answers import RETRY_SECONDS
from captioner.serving.limits import Limits
from captioner.serving.security import HEADERS

DRAIN_SECONDS = 5.0
"""What is left of a refused body is read for so long before the answer."""

DRAIN_BYTES = 64 << 20
"""And at most so many bytes of it; then the connection ends with the answer."""

SLACK_SECONDS = 30.0
"""For what comes on top of arriving and captioning: the model's turn, the answer's way."""


class Connection(H11Protocol):
    """One client's connection; see ``limited``."""

    limits = Limits()
    _timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        """Take it, or send it away where there are too many."""
        super().connection_made(transport)
        if len(self.connections) > self.limits.max_connections:
            line = f"{self.limits.max_connections} connections are open, which is all; come back"
            transport.write(_plain(503, line, {"Retry-After": str(RETRY_SECONDS)}))
            transport.close()
            return
        self._close_after(self.limits.timeout)

    def connection_lost(self, exc: Exception | None) -> None:
        """No more to wait for."""
        super().connection_lost(exc)
        self._stop()

    def data_received(self, data: bytes) -> None:
        """A whole head is a request that has its own limits; its parts only use up time."""
        was_busy = self._busy()
        super().data_received(data)
        if self._busy() and not was_busy:
            self._close_after(2 * self.limits.timeout + SLACK_SECONDS)

    def on_response_complete(self) -> None:
        """The answer is out: the next head has its time."""
        super().on_response_complete()
        busy = self._busy()  # the next request was here already
        self._close_after(2 * self.limits.timeout + SLACK_SECONDS if busy else self.limits.timeout)

    def send_400_response(self, msg: str) -> None:
        """Refuse what is no HTTP, as everything is refused."""
        self.transport.write(_plain(400, f"this is not HTTP as it should be: {msg}", {}))
        self.transport.close()

    def _busy(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _close_after(self, seconds: float) -> None:
        self._stop()
        self._timer = self.loop.call_later(seconds, self.transport.abort)

    def _stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


class Drain:
    """Middleware: an answer waits for what is left of the body, or ends the connection."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass on; see to it that the body is read."""
        headers = Headers(scope=scope) if scope["type"] == "http" else Headers()
        ended = "transfer-encoding" not in headers and headers.get("content-length", "0") == "0"
        # Who waits to be asked for the body sends none after a refusal.
        waits = headers.get("expect", "").lower() == "100-continue"

        async def watched() -> Message:
            nonlocal ended
            message = await receive()
            ended = ended or not message.get("more_body", False)
            return message

        async def drained() -> None:
            left = DRAIN_BYTES
            while not ended and left > 0:
                left -= len((await watched()).get("body", b""))

        async def after_the_body(message: Message) -> None:
            if message["type"] == "http.response.start" and not ended:
                answer = MutableHeaders(scope=message)
                if "connection" not in answer and not waits:
                    with suppress(TimeoutError, asyncio.TimeoutError):
                        await asyncio.wait_for(drained(), DRAIN_SECONDS)
                if not ended:
                    answer["Connection"] = "close"
            await send(message)

        await self.app(scope, watched, after_the_body)


def limited(limits: Limits) -> type[Connection]:
    """The class of connections within these limits, for ``uvicorn.Config(http=...)``."""
    return type("LimitedConnection", (Connection,), {"limits": limits})


def _plain(status: int, line: str, headers: dict[str, str]) -> bytes:
    """An answer that is written past the application."""
    body = json.dumps({"error": line}).encode()
    phrase = {400: "Bad Request", 503: "Service Unavailable"}[status]
    told = HEADERS | headers
    told |= {"Content-Type": "application/json", "Content-Length": str(len(body))}
    told |= {"Connection": "close"}
    head = [f"HTTP/1.1 {status} {phrase}", *(f"{name}: {value}" for name, value in told.items())]
    return "\r\n".join([*head, "", ""]).encode("latin-1") + body
