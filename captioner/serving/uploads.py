"""Photos and options in request bodies, and the refusals that all kinds of bodies share."""

from __future__ import annotations

import io
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any, NamedTuple

from fastapi import Request

from captioner.serving.limits import Limits
from captioner.serving.responses import CLIENT_CLOSED, RequestError

Receive = Callable[[], Awaitable[Any]]

FORM, JSON = "multipart/form-data", "application/json"

NAMES = ("image", "images")
"""Names of the fields that hold photos; the second one for several photos only."""

JSON_PHOTOS = 8
"""A JSON list may be as long as this many of the largest photos; forms have no such limit."""

OVERHEAD = 64 << 10
"""Maximum number of bytes of a body beside its photos."""

SEVERAL = "send several photos to POST /v1/batch"
"""What to do with photos that are too many for an endpoint."""


class Field(NamedTuple):
    """An option in a body."""

    name: str
    value: Any


class Upload(NamedTuple):
    """A photo in a body."""

    data: io.BytesIO
    name: str = ""
    """File name as sent by the client."""
    error: RequestError | None = None
    """Why the photo was not read."""
    alone: bool = False
    """Whether the photo's bytes are the whole body."""


def content_type(request: Request) -> str:
    """The request's content type in lower case, without parameters."""
    return request.headers.get("content-type", "").partition(";")[0].strip().lower()


def add_field(fields: dict[str, Any], field: Field) -> None:
    """Add an option; values of repeated fields become a list."""
    if field.name not in fields:
        fields[field.name] = field.value
    elif isinstance(fields[field.name], list):
        fields[field.name].append(field.value)
    else:
        fields[field.name] = [fields[field.name], field.value]


async def chunks(receive: Receive) -> AsyncGenerator[bytes, None]:
    """The parts of a body; RequestError if the client disconnects."""
    more = True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise client_closed()
        if message.get("body"):
            yield message["body"]
        more = message.get("more_body", False)


def client_closed() -> RequestError:
    """The client disconnected."""
    return RequestError(CLIENT_CLOSED, "left", "the client disconnected")


def most_bytes(kind: str, limits: Limits, several: bool) -> int:
    """Maximum size of a body that is read as a whole."""
    if kind == JSON:
        return limits.max_bytes * 4 // 3 * (JSON_PHOTOS if several else 1) + OVERHEAD
    return limits.max_bytes + (OVERHEAD if kind == FORM else 0)


def too_many_bytes(
    given: str, limits: Limits, kind: str = "", several: bool = False
) -> RequestError:
    """A photo or body is too large; ``given`` is its size in words."""
    if several and kind == JSON:
        most = most_bytes(kind, limits, several)
        message = f"the JSON has {given}; the limit is {most:,}; send a form (curl -F images=@...)"
        return RequestError(413, "bytes", f"{message}, which has no limit on the number of photos")
    what = {JSON: "the JSON", FORM: "the form"}.get(kind, "the photo")
    limit = f"the limit is {limits.max_bytes:,}" + (" for a photo" if kind else "")
    return RequestError(413, "bytes", f"{what} has {given}; {limit}; send a smaller file")


def empty(what: str) -> RequestError:
    """There is no photo in what was sent."""
    return RequestError(415, "empty", f"{what} is empty (0 bytes); send a photo")
