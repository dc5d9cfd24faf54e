"""Errors in requests, and their conversion from exceptions to responses.

Code that cannot serve a request raises a `RequestError` or another exception of the package.
`request_error` turns every exception into a `RequestError`, and `error_response` turns a
`RequestError` into a response. An unexpected exception becomes a response with status 500. Its
message is left out, because it could quote the request. Its location is logged.
"""

from __future__ import annotations

import logging
import os
import reprlib
import traceback
from functools import partial
from typing import Any, NoReturn

from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.types import Scope

from captioner.errors import ConfigError, ImageError, LargeImageError, ModelError, NotAnImageError

logger = logging.getLogger("captioner.serving")

OPENAI = ("/v1/chat/completions", "/v1/models")  # paths, or their beginnings, of OpenAI's protocol
PHOTOPRISM = "/api/v1/vision/"  # beginning of the paths of PhotoPrism's protocol
CRASHED = 1  # exit code; all other errors of the server, such as a wrong option, have code 2
_STATUSES = {  # statuses and reasons of the package's exceptions; subclasses before their base
    ConfigError: (422, "options"),
    NotAnImageError: (415, "no_picture"),
    LargeImageError: (413, "pixels"),
    ImageError: (422, "broken"),
}
_CODES = {"model": "model_not_found", "key": "invalid_api_key", "rate": "rate_limit_exceeded"}
_HTTP_ERRORS = {
    404: "the path {path} does not exist; for captions, POST to /v1/captions (see /docs)",
    405: "the path {path} does not support {method}; use {allow} (see /docs)",
}


class RequestError(Exception):
    """An error that explains why a request cannot be served.

    The message is one line with the problem, the allowed values and a remedy.
    """

    def __init__(self, status: int, reason: str, message: str, *, retry_after: int = 2) -> None:
        """Create the error.

        Args:
            status: HTTP status of the response.
            reason: Label for the metrics.
            message: The message for the client, in one line.
            retry_after: Seconds after which the client may try again, for 429 and 503.
        """
        super().__init__(message)
        self.status, self.reason, self.retry_after = status, reason, retry_after


# The client disconnected, or the body ended early: the server cannot tell these cases apart. 499 is
# the status that nginx uses.
_LEFT = (
    "the client disconnected, or the body is shorter than declared or invalid; send the "
    "request again"
)
client_closed = partial(RequestError, 499, "left", _LEFT)
closing = partial(RequestError, 503, "closing", "the server is shutting down; try again later")


def request_error(error: Exception, scope: Scope) -> RequestError:
    """Convert an exception to an error for the client. Unexpected exceptions are logged."""
    if isinstance(error, RequestError):
        return error
    for kind, (status, reason) in _STATUSES.items():
        if isinstance(error, kind):
            return RequestError(status, reason, str(error))
    if isinstance(error, HTTPException):  # no such route or method
        status = error.status_code
        shown = {"path": shortened(route_path(scope)), "method": scope["method"]}
        allow = (error.headers or {}).get("Allow", "another method")
        message = _HTTP_ERRORS.get(status, "{detail}").format(
            **shown, allow=allow, detail=error.detail
        )
        return RequestError(status, f"http_{status}", message)
    _log_exception(error, scope)
    return RequestError(
        500,
        "mistake",
        "the server failed unexpectedly; look in its log for the X-Request-Id of this response",
    )


def error_body(path: str, error: RequestError) -> dict[str, Any]:
    """Return the body of an error response in the format that clients expect at this path."""
    if path.startswith(PHOTOPRISM):
        return {"code": error.status, "error": str(error)}
    if path.startswith(OPENAI):
        kind = "invalid_request_error" if error.status < 500 else "server_error"
        code = _CODES.get(error.reason, error.reason)
        return {"error": {"message": str(error), "type": kind, "param": None, "code": code}}
    return {"error": str(error)}


def error_response(error: Exception, scope: Scope) -> JSONResponse:
    """Return the response for an exception, and store its reason in the scope for the metrics."""
    found = request_error(error, scope)
    if found.status != 500:  # the metrics count rejected requests, not errors of the server
        scope["state"]["refused"] = found.reason
    headers = dict(getattr(error, "headers", None) or {})  # such as Allow, of an HTTPException
    if found.status in (429, 503):
        headers["Retry-After"] = str(found.retry_after)
    if found.status in (408, 503):  # the client's next request needs a new connection
        headers["Connection"] = "close"
    if found.status == 401:
        headers["WWW-Authenticate"] = 'Bearer realm="captioner"'
    return JSONResponse(error_body(route_path(scope), found), found.status, headers)


def route_path(scope: Scope) -> str:
    """Return the path of a request without the proxy's prefix."""
    path: str = scope["path"]
    prefix = scope.get("root_path", "")
    return path.removeprefix(prefix) if path.startswith(f"{prefix}/") else path


def shortened(value: object) -> str:
    """Return a value as text that is short enough for an error message."""
    text = value[:61] if isinstance(value, str) else reprlib.repr(value)
    text = text if text.isprintable() else repr(text)
    return text if len(text) <= 60 else f"{text[:60]}…"


def _log_exception(error: BaseException, scope: Scope) -> None:
    """Log the type and locations of an exception in one line, without its message."""
    frames = traceback.extract_tb(error.__traceback__)
    calls = " < ".join(f"{frame.filename}:{frame.lineno}" for frame in reversed(frames[-8:]))
    request_id = scope.get("state", {}).get("request_id", "-")
    logger.error("%s at %s id=%s", type(error).__name__, calls, request_id)
    # ONNX Runtime and torch report missing memory with other types of errors.
    other = isinstance(error, RuntimeError | ModelError) and "allocate memory" in str(error)
    if isinstance(error, MemoryError) or other:
        end("memory has run out")


def end(why: str) -> NoReturn:
    """End the process at once, so that its supervisor starts a new process.

    If an allocation fails in a thread that other threads wait for, the process could otherwise stay
    alive without answering requests or SIGTERM.
    """
    logger.critical("%s; the server ends", why)
    os._exit(CRASHED)
