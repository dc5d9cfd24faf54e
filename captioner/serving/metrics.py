"""Prometheus metrics and the access log: counts, durations and sizes, never request contents."""

from __future__ import annotations

import logging
import time
import traceback
from collections.abc import Callable, Collection

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from captioner.serving.responses import error_response, internal_error

logger = logging.getLogger("captioner.serving")

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
_PHOTOS = (1, 2, 4, 8, 16, 32, 64, 128)


class Metrics:
    """The metrics of one application, in a registry of their own."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()
        ProcessCollector(registry=registry)
        self.requests = Counter(
            "captioner_requests", "Requests served.", ["route", "status"], registry=registry
        )
        self.seconds = Histogram(
            "captioner_request_seconds",
            "Seconds from the request headers to the end of the response.",
            ["route"],
            buckets=_SECONDS,
            registry=registry,
        )
        self.photos = Counter("captioner_photos_captioned", "Photos captioned.", registry=registry)
        self.batches = Histogram(
            "captioner_batch_photos", "Photos per batch.", buckets=_PHOTOS, registry=registry
        )
        self.refused = Counter(
            "captioner_refused", "Requests refused, by reason.", ["reason"], registry=registry
        )

    def on_batch(self, photos: int) -> None:
        """Count a batch."""
        self.photos.inc(photos)
        self.batches.observe(photos)

    def watch(self, waiting: Callable[[], int], in_flight: Callable[[], int]) -> None:
        """Export the queue lengths: photos waiting for the model and requests in flight."""
        for name, text, value in (
            ("captioner_waiting_photos", "Photos waiting for the model.", waiting),
            ("captioner_held_requests", "Requests in flight.", in_flight),
        ):
            Gauge(name, text, registry=self.registry).set_function(value)


class AccessLog:
    """Middleware that counts and logs requests and turns unexpected exceptions into a plain 500.

    A log line has the method, route, status, milliseconds and bytes received. Nothing else from the
    request is logged: unknown paths are logged as ``other``, and exceptions as their type and
    location without the message, which could quote the request.
    """

    def __init__(self, app: ASGIApp, metrics: Metrics, routes: Collection[str]) -> None:
        self.app = app
        self.metrics = metrics
        self.routes = routes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on; count and log it."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        start, received, status = time.perf_counter(), 0, 0

        async def counted() -> Message:
            nonlocal received
            message = await receive()
            received += len(message.get("body", b""))
            return message

        async def recorded(message: Message) -> None:
            nonlocal status
            status = message.get("status", status)
            await send(message)

        try:
            await self.app(scope, counted, recorded)
        except Exception as error:
            log_exception(error)
            if status:  # the response has already started
                raise
            await error_response(internal_error())(scope, counted, recorded)
        finally:
            route = scope["path"] if scope["path"] in self.routes else "other"
            method = scope["method"] if scope["method"] in ("GET", "HEAD", "POST") else "other"
            seconds = time.perf_counter() - start
            self.metrics.requests.labels(route, str(status)).inc()
            self.metrics.seconds.labels(route).observe(seconds)
            milliseconds = round(seconds * 1000)
            logger.info("%s %s %d %d ms %d bytes", method, route, status, milliseconds, received)


def log_exception(error: BaseException) -> None:
    """Log the type and location of an unexpected exception."""
    logger.error("%s", _location(error))


def _location(error: BaseException) -> str:
    """Type and traceback of an exception in one line, without its message."""
    frames = traceback.extract_tb(error.__traceback__)
    calls = " < ".join(f"{frame.filename}:{frame.lineno}" for frame in reversed(frames[-8:]))
    return f"{type(error).__name__} at {calls}"
