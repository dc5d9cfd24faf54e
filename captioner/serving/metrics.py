"""What is counted and logged: how many, how long, how large; never what was sent."""

from __future__ import annotations

import logging
import time
import traceback
from collections.abc import Callable, Collection

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from captioner.serving.answers import Refusal, refusal_response

logger = logging.getLogger("captioner.serving")

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
_PHOTOS = (1, 2, 4, 8, 16, 32, 64, 128)


class Metrics:
    """One application's metrics, in a registry of their own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        self.requests = Counter(
            "captioner_requests", "Requests answered.", ["route", "status"], registry=self.registry
        )
        self.seconds = Histogram(
            "captioner_request_seconds",
            "Seconds from a request's head to the end of its answer.",
            ["route"],
            buckets=_SECONDS,
            registry=self.registry,
        )
        self.photos = Counter(
            "captioner_photos_captioned", "Photos captioned.", registry=self.registry
        )
        self.batches = Histogram(
            "captioner_batch_photos",
            "Photos captioned together.",
            buckets=_PHOTOS,
            registry=self.registry,
        )
        self.refused = Counter(
            "captioner_refused", "Requests refused, by reason.", ["reason"], registry=self.registry
        )

    def on_batch(self, photos: int) -> None:
        """Count a batch."""
        self.photos.inc(photos)
        self.batches.observe(photos)

    def watch(self, waiting: Callable[[], int], held: Callable[[], int]) -> None:
        """Show how long the queue is: photos that wait, requests on their way."""
        for name, text, value in (
            ("captioner_waiting_photos", "Photos that wait for the model.", waiting),
            ("captioner_held_requests", "Requests on their way.", held),
        ):
            Gauge(name, text, registry=self.registry).set_function(value)


class Watch:
    """Middleware: counts and logs every request; a mistake inside becomes a bare 500.

    A log line has the method, the route, the status, milliseconds and bytes received, and nothing
    that was sent: a path that is no route of ours is called ``other``. Of an error it has the kind
    and the places in the code, without the message, which may quote what was sent.
    """

    def __init__(self, app: ASGIApp, metrics: Metrics, routes: Collection[str]) -> None:
        self.app = app
        self.metrics = metrics
        self.routes = routes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer, and take note."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        start, received, status = time.perf_counter(), 0, 0

        async def counted() -> Message:
            nonlocal received
            message = await receive()
            received += len(message.get("body", b""))
            return message

        async def noted(message: Message) -> None:
            nonlocal status
            status = message.get("status", status)
            await send(message)

        try:
            await self.app(scope, counted, noted)
        except Exception as error:
            logger.error("%s", _where(error))
            if status:  # it is too late to say so
                raise
            problem = Refusal(500, "mistake", "a mistake of the server's; it is in its log")
            await refusal_response(problem)(scope, counted, noted)
        finally:
            route = scope["path"] if scope["path"] in self.routes else "other"
            method = scope["method"] if scope["method"] in ("GET", "HEAD", "POST") else "other"
            seconds = time.perf_counter() - start
            self.metrics.requests.labels(route, str(status)).inc()
            self.metrics.seconds.labels(route).observe(seconds)
            milliseconds = round(seconds * 1000)
            logger.info("%s %s %d %d ms %d bytes", method, route, status, milliseconds, received)


def _where(error: BaseException) -> str:
    """The kind of an error and where it came from; not its message."""
    frames = traceback.extract_tb(error.__traceback__)
    places = " < ".join(f"{frame.filename}:{frame.lineno}" for frame in reversed(frames[-8:]))
    return f"{type(error).__name__} at {places}"
