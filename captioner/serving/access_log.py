"""The access log: one line per request, as text or JSON, never request contents."""

from __future__ import annotations

import ipaddress
import json
import logging
import re
import secrets
import time
import traceback
from collections.abc import Collection
from datetime import datetime, timezone

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from captioner.serving.metrics import Metrics
from captioner.serving.paths import route_path
from captioner.serving.responses import error_response, internal_error

logger = logging.getLogger("captioner.serving")

REQUEST_ID = "X-Request-Id"
"""Header with the identifier of a request, in requests and responses."""

_REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")
_METHODS = frozenset({"GET", "HEAD", "POST", "OPTIONS"})


class AccessLog:
    """Middleware that counts and logs requests and turns unexpected exceptions into a plain 500.

    A log entry has the method, route, status, milliseconds, bytes received, client address, request
    id and the name of the API key. Nothing else from the request is logged: unknown paths are
    logged as ``other``, request ids that are not short and plain are replaced, and exceptions are
    logged as their type and location without the message, which could quote the request.
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
                MutableHeaders(scope=message)[REQUEST_ID] = request_id
            await send(message)

        try:
            await self.app(scope, counted, recorded)
        except Exception as error:
            log_exception(error, scope)
            if status:  # the response has already started
                raise
            await error_response(internal_error())(scope, counted, recorded)
        finally:
            path = route_path(scope)
            route = path if path in self.routes else "other"
            seconds = time.perf_counter() - start
            self.metrics.requests.labels(route, str(status)).inc()
            self.metrics.seconds.labels(route).observe(seconds)
            fields = {
                "method": scope["method"] if scope["method"] in _METHODS else "other",
                "route": route,
                "status": status,
                "ms": round(seconds * 1000),
                "bytes": received,
                "client": _client(scope),
                "id": request_id,
            }
            if key := scope.get("state", {}).get("api_key"):
                fields["key"] = key
            logger.info(_line(fields), extra={"fields": fields})


def _line(fields: dict[str, object]) -> str:
    head = "{method} {route} {status} {ms} ms {bytes} bytes".format_map(fields)
    rest = (f"{name}={fields[name]}" for name in ("client", "id", "key") if name in fields)
    return " ".join([head, *rest])


def _client(scope: Scope) -> str:
    """The client's address; ``-`` for anything else that a proxy's header may contain."""
    try:
        return str(ipaddress.ip_address((scope.get("client") or ("",))[0]))
    except ValueError:
        return "-"


def log_exception(error: BaseException, scope: Scope) -> None:
    """Log the type and location of an unexpected exception, and the id of its request."""
    logger.error("%s id=%s", _location(error), scope.get("state", {}).get("request_id", "-"))


def _location(error: BaseException) -> str:
    """Type and traceback of an exception in one line, without its message."""
    frames = traceback.extract_tb(error.__traceback__)
    calls = " < ".join(f"{frame.filename}:{frame.lineno}" for frame in reversed(frames[-8:]))
    return f"{type(error).__name__} at {calls}"


class JsonFormatter(logging.Formatter):
    """One JSON object per line: ``time``, ``level``, ``message``, and the fields of a request."""

    def format(self, record: logging.LogRecord) -> str:
        """Format a record."""
        time_ = datetime.fromtimestamp(record.created, timezone.utc).isoformat("T", "milliseconds")
        entry: dict[str, object] = {"time": time_, "level": record.levelname.lower()}
        fields = getattr(record, "fields", None)
        return json.dumps(entry | (fields or {"message": record.getMessage()}))
