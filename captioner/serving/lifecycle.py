"""Draining: on shutdown, accepted requests are completed and new ones refused.

    SIGTERM    ``Lifecycle.drain``: readiness turns 503, new requests get 503 with Retry-After
    grace      accepted requests are completed, for ``Limits.grace`` seconds at most
    end        the sockets are closed; requests that are still unfinished get 503

The server keeps listening while it drains: a client gets an answer rather than a refused
connection, and a load balancer sees that readiness has changed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from starlette.types import ASGIApp, Receive, Scope, Send

from captioner.serving.metrics import Metrics
from captioner.serving.paths import PROBES, route_path
from captioner.serving.responses import RequestError, error_response

_POLL_SECONDS = 0.05


class Lifecycle:
    """Whether the server accepts requests, and the number that it has accepted."""

    def __init__(self) -> None:
        self.draining = False
        self.accepted = 0
        """Number of accepted requests that are not completed, uploads in progress included."""

    def drain(self) -> None:
        """Refuse new requests from now on."""
        self.draining = True

    async def drained(self, seconds: float, stop: Callable[[], bool] = lambda: False) -> None:
        """Wait until the accepted requests are completed.

        Args:
            seconds: Time limit.
            stop: Polled; True ends the wait.
        """
        loop = asyncio.get_running_loop()
        end = loop.time() + seconds
        while self.accepted and loop.time() < end and not stop():
            await asyncio.sleep(_POLL_SECONDS)


class Admission:
    """Middleware that counts accepted requests, and refuses new ones while the server drains."""

    def __init__(self, app: ASGIApp, lifecycle: Lifecycle, metrics: Metrics) -> None:
        self.app = app
        self.lifecycle = lifecycle
        self.metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on or refuse it."""
        if scope["type"] != "http" or route_path(scope) in PROBES:
            await self.app(scope, receive, send)
            return
        if self.lifecycle.draining:
            self.metrics.refused.labels("draining").inc()
            await error_response(closing())(scope, receive, send)
            return
        self.lifecycle.accepted += 1
        try:
            await self.app(scope, receive, send)
        finally:
            self.lifecycle.accepted -= 1


def closing() -> RequestError:
    """The refusal of a server that shuts down."""
    return RequestError(503, "closing", "the server is shutting down; try again later")
