"""Metrics and the access log. They record counts, durations and sizes, but no content."""

from __future__ import annotations

import ipaddress
import json
import logging
import re
import secrets
import sys
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Literal

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from captioner.serving.request_errors import RequestError, error_response, logger, route_path

REQUEST_ID = "X-Request-Id"  # header of requests and responses
_REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")
_METHODS = frozenset({"GET", "HEAD", "POST", "OPTIONS"})
_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
_PHOTOS = (1, 2, 4, 8, 16, 32, 64, 128)


class Metrics:
    """The Prometheus metrics of one application, in their own registry."""

    def __init__(self, waiting: Callable[[], int], in_flight: Callable[[], int]) -> None:
        self.registry = registry = CollectorRegistry()
        ProcessCollector(registry=registry)
        self.requests = Counter(
            "captioner_requests", "Requests served.", ["route", "status"], registry=registry
        )
        self.refused = Counter(
            "captioner_refused", "Requests rejected, by reason.", ["reason"], registry=registry
        )
        text = "Seconds from the request headers to the end of the response."
        self.seconds = Histogram(
            "captioner_request_seconds", text, ["route"], buckets=_SECONDS, registry=registry
        )
        self.photos = Counter("captioner_photos_captioned", "Photos captioned.", registry=registry)
        self.batches = Histogram(
            "captioner_batch_photos", "Photos per batch.", buckets=_PHOTOS, registry=registry
        )
        held = "Requests in progress. Requests with many photos in JSON count several times."
        for name, text, value in (
            ("captioner_waiting_photos", "Photos waiting for the model.", waiting),
            ("captioner_held_requests", held, in_flight),
        ):
            Gauge(name, text, registry=registry).set_function(value)


@dataclass(frozen=True)
class AccessLog:
    """The outermost middleware, which logs and counts requests, adds headers and hides exceptions.

    A log entry contains the method, route and status of a request, its duration and its size in
    bytes. It also contains the client address, the request id and the name of the API key. Nothing
    else is logged. Unknown paths are logged as ``other``. Request ids that are long or have special
    characters are replaced. An exception becomes a response with status 500. Its type and location
    are logged without its message, because the message could quote the request.
    """

    app: ASGIApp
    metrics: Metrics
    check: Callable[[Scope], RequestError | None]
    """A function that checks a request before the application sees it. It returns an error or None.
    """
    routes: Collection[str]
    """Paths that may be logged."""
    headers: Mapping[str, str]
    """Default headers, added to responses that do not set them."""
    root_path: str
    """Prefix of the paths at the proxy. The proxy may remove the prefix."""
    leaving: Callable[[], bool]
    """A function that returns whether clients must send their next request on a new connection."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request to the application, count it and log it."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        scope["root_path"] = self.root_path
        start, received, status = time.perf_counter(), 0, 0
        given = Headers(scope=scope).get(REQUEST_ID, "")
        request_id = given if _REQUEST_ID.fullmatch(given) else secrets.token_hex(8)
        scope.setdefault("state", {})["request_id"] = request_id

        async def counted() -> Message:
            nonlocal received
            message = await receive()
            received += len(message.get("body", b""))
            return message

        async def recorded(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                headers = MutableHeaders(raw=list(message["headers"]))  # a copy
                headers[REQUEST_ID] = request_id
                for name, value in self.headers.items():
                    headers.setdefault(name, value)
                if self.leaving():
                    headers["Connection"] = "close"
                message = {**message, "headers": headers.raw}
            await send(message)

        app = self.app
        try:
            if refusal := self.check(scope):
                app = error_response(refusal, scope)
            await app(scope, counted, recorded)
        except Exception as error:
            response = error_response(error, scope)
            if status:  # a response has already started
                raise
            await response(scope, counted, recorded)
        finally:
            self._log(scope, status, time.perf_counter() - start, received)

    def _log(self, scope: Scope, status: int, seconds: float, received: int) -> None:
        path = route_path(scope)
        route = path if path in self.routes else "other"
        if reason := scope["state"].get("refused"):
            self.metrics.refused.labels(reason).inc()
        self.metrics.requests.labels(route, str(status)).inc()
        self.metrics.seconds.labels(route).observe(seconds)
        fields = {
            "method": scope["method"] if scope["method"] in _METHODS else "other",
            "route": route,
            "status": status,
            "ms": round(seconds * 1000),
            "bytes": received,
            "client": _client(scope),
            "id": scope["state"]["request_id"],
        }
        line = "{method} {route} {status} {ms} ms {bytes} bytes client={client} id={id}"
        if key := scope["state"].get("api_key"):
            fields["key"] = key
            line += " key={key}"
        logger.info(line.format_map(fields), extra={"fields": fields})


def _client(scope: Scope) -> str:
    """Return the client's IP address, or ``-`` if a proxy sent something that is not an address."""
    try:
        return str(ipaddress.ip_address((scope.get("client") or ("",))[0]))
    except ValueError:
        return "-"


class JsonFormatter(logging.Formatter):
    """A log format with one JSON object per line: time, level, and a message or request fields."""

    def format(self, record: logging.LogRecord) -> str:
        """Return a log record as one line of JSON."""
        time_ = datetime.fromtimestamp(record.created, timezone.utc).isoformat("T", "milliseconds")
        entry: dict[str, object] = {"time": time_, "level": record.levelname.lower()}
        fields = getattr(record, "fields", None)
        return json.dumps(entry | (fields or {"message": record.getMessage()}))


def log_to_stderr(kind: Literal["text", "json"]) -> None:
    """Write the log of the server, and the warnings of its HTTP library, to standard error."""
    handler = logging.StreamHandler()
    text = logging.Formatter("%(asctime)s %(message)s", "%Y-%m-%d %H:%M:%S%z")
    handler.setFormatter(JsonFormatter() if kind == "json" else text)
    for name, level in (("captioner.serving", logging.INFO), ("_granian", logging.ERROR)):
        log = logging.getLogger(name)
        log.setLevel(level)
        log.handlers = [handler]
        log.propagate = False


def tell(message: str, kind: Literal["text", "json"], level: int = logging.INFO) -> None:
    """Print a message for the user, or log the message if the log is JSON."""
    if kind == "json":
        logger.log(level, message)
    else:
        sys.stderr.write(f"captioner: {message}\n")
