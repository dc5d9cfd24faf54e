"""Connections: how many there are, and how long one may say nothing of use.

uvicorn closes a connection that is silent after an answer. It waits for ever for the rest of a
request's head, for a reader that takes its answer byte by byte, and for the rest of a body that was
refused; and it takes as many connections as the system lets it. Here all four have a bound.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from captioner.serving.answers import RETRY_SECONDS
from captioner.serving.limits import Limits
from captioner.serving.security import HEADERS

DRAIN_SECONDS = 2.0
"""A refused body is read, and thrown away, for so long: who is still sending would else lose the
answer with the connection."""

DRAIN_BYTES = 1 << 20
"""And at most so many bytes of it."""

SLACK_SECONDS = 30.0
"""For what comes on top of arriving and captioning: the model's turn, the answer's way."""


class Connection(H11Protocol):
    """One client's connection; see ``limited``."""

    limits = Limits()
    _timer: asyncio.TimerHandle | None = None
    _drained = 0

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
        refused = self._refused()
        was_busy = self._busy()
        super().data_received(data)
        if refused:
            self._drained += len(data)
            if self._drained > DRAIN_BYTES:
                self.transport.close()
        elif self._busy() and not was_busy:
            self._close_after(2 * self.limits.timeout + SLACK_SECONDS)

    def on_response_complete(self) -> None:
        """The answer is out: the next head has its time, what is left of a body has less."""
        super().on_response_complete()
        if self._busy():  # the next request was here already
            self._close_after(2 * self.limits.timeout + SLACK_SECONDS)
        else:
            self._close_after(DRAIN_SECONDS if self._refused() else self.limits.timeout)

    def send_400_response(self, msg: str) -> None:
        """Refuse what is no HTTP, as everything is refused."""
        self.transport.write(_plain(400, f"this is not HTTP as it should be: {msg}", {}))
        self.transport.close()

    def _busy(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _refused(self) -> bool:
        """Whether the answer was given before the body had ended."""
        answered = self.cycle is not None and self.cycle.response_complete
        return answered and self.conn.their_state is h11.SEND_BODY

    def _close_after(self, seconds: float) -> None:
        self._stop()
        self._timer = self.loop.call_later(seconds, self.transport.abort)

    def _stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


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
