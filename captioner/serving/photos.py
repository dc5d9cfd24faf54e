"""Read the photos and options of a request body, by its content type.

    multipart/form-data  files named image (curl -F image=@photo.jpg); other fields are options
    application/json     {"image": "<base64>", ...options}; several photos: {"images": [...], ...}
    anything else        the bytes of one photo; the format is detected from them

Photos come one by one, in memory and within the size limits. Nothing is written to disk.
"""

from __future__ import annotations

import asyncio
import base64
import io
from collections.abc import Callable
from typing import Any

from fastapi import Request
from pydantic_core import from_json

from captioner.serving.forms import (
    NAMES,
    SEVERAL,
    Field,
    Items,
    Upload,
    boundary,
    chunks,
    empty,
    read_form,
    too_many_bytes,
)
from captioner.serving.options import Limits
from captioner.serving.responses import RequestError, shortened

Reserve = Callable[[int], None]
"""Called with the memory that a body takes (bytes), as it grows; may raise `RequestError`."""

FORM, JSON = "multipart/form-data", "application/json"

JSON_PHOTOS = 8
"""A JSON list may be as long as this many of the largest photos; forms have no such limit."""

_OVERHEAD = 64 << 10
"""Maximum number of bytes of a body beside its photos."""
_URL_SAFE = bytes.maketrans(b"-_", b"+/")


def has_fields(request: Request) -> bool:
    """Whether the body may contain options."""
    return _content_type(request) in (FORM, JSON)


def check_headers(request: Request, limits: Limits, *, several: bool) -> None:
    """Refuse what the headers alone rule out.

    Raises:
        RequestError: The content type or encoding is not supported, or the body is too large.
    """
    kind, encoding = _content_type(request), request.headers.get("content-encoding", "identity")
    if kind.startswith("multipart/") and kind != FORM:
        raise RequestError(415, "form", f"{kind} is not supported; send a form as {FORM}")
    if kind == FORM and not boundary(request):
        hint = "leave the header out, and the client (fetch, requests, ...) sets it"
        message = f"the Content-Type of the form has no boundary; {hint}"
        raise RequestError(400, "form", message)
    if encoding.lower() not in ("identity", ""):
        message = f"Content-Encoding {shortened(encoding)} is not supported"
        raise RequestError(415, "encoding", f"{message}; send the body uncompressed")
    length = request.headers.get("content-length", "")
    most = _most_bytes(kind, limits, several)
    if length.isdecimal() and int(length) > most and not (several and kind == FORM):
        raise too_many_bytes("the body", f"{int(length):,}", most)


def read_body(request: Request, limits: Limits, reserve: Reserve, *, several: bool) -> Items:
    """Read a body; call ``check_headers`` first.

    Args:
        request: The request.
        limits: Limits on the bytes of a photo.
        reserve: Takes memory for the body.
        several: Whether there may be several photos.

    Returns:
        Options and photos as they arrive, at least one photo.

    Raises:
        RequestError: The body is malformed, has no photo, or the client disconnected.
    """
    kind = _content_type(request)
    if kind == FORM:
        return read_form(request, limits, several)
    if kind == JSON:
        return _read_json(request, limits, reserve, several)
    return _read_bytes(request, limits)


async def read_photo(items: Items) -> tuple[Upload, dict[str, Any]]:
    """The only photo of a body, and its options.

    Raises:
        RequestError: There are several photos, or the photo cannot be read.
    """
    fields: dict[str, Any] = {}
    found = None
    async for item in items:
        if isinstance(item, Field):
            add_field(fields, item)
        elif item.error is not None:
            raise item.error
        elif found is not None:
            raise RequestError(422, "fields", f"the form has several photos; {SEVERAL}")
        else:
            found = item
    assert found is not None  # see read_body
    return found, fields


def add_field(fields: dict[str, Any], field: Field) -> None:
    """Add an option; values of repeated fields become a list."""
    if field.name not in fields:
        fields[field.name] = field.value
    elif isinstance(fields[field.name], list):
        fields[field.name].append(field.value)
    else:
        fields[field.name] = [fields[field.name], field.value]


def _content_type(request: Request) -> str:
    """The request's content type in lower case, without parameters."""
    return request.headers.get("content-type", "").partition(";")[0].strip().lower()


def _most_bytes(kind: str, limits: Limits, several: bool) -> int:
    """Maximum size of a body that is read as a whole."""
    if kind == JSON:
        return limits.max_bytes * 4 // 3 * (JSON_PHOTOS if several else 1) + _OVERHEAD
    return limits.max_bytes + (_OVERHEAD if kind == FORM else 0)


# --- bytes ---------------------------------------------------------------------------------------


async def _read_bytes(request: Request, limits: Limits) -> Items:
    body = io.BytesIO()
    async for chunk in chunks(request.receive):
        body.write(chunk)
        if body.tell() > limits.max_bytes:
            raise too_many_bytes("the body", f"more than {limits.max_bytes:,}", limits.max_bytes)
    if body.tell() == 0:
        raise empty("the body")
    begin = body.getbuffer()[:32].tobytes().lstrip()
    if begin.startswith((b"{", b"[")):  # curl -d without a Content-Type
        raise RequestError(415, "json", f"the body looks like JSON; send Content-Type: {JSON}")
    if begin.startswith((b"image=", b"images=")):
        message = "the body is a URL-encoded form, which is not supported; with curl, send the file"
        raise RequestError(415, "form", f"{message} by -F image=@photo.jpg")
    body.seek(0)
    yield Upload(body, alone=True)


# --- JSON ----------------------------------------------------------------------------------------


async def _read_json(request: Request, limits: Limits, reserve: Reserve, several: bool) -> Items:
    body, most = bytearray(), _most_bytes(JSON, limits, several)
    async for chunk in chunks(request.receive):
        body += chunk
        reserve(2 * len(body))  # the text of the photos is a second copy
        if len(body) > most:
            raise too_many_bytes("the JSON", f"more than {most:,}", most)
    try:
        data = await asyncio.to_thread(from_json, body, allow_inf_nan=False)
    except ValueError as error:
        raise RequestError(400, "json", f"not valid JSON: {error}") from error
    del body
    if not isinstance(data, dict):
        raise RequestError(422, "fields", 'the JSON is no object; give {"image": "<base64>"}')
    photos = _take_photos(data, several)
    for name, value in data.items():
        if value is not None:
            yield Field(name, value)
    photos.reverse()
    while photos:  # each is freed when it has been decoded
        yield await asyncio.to_thread(_from_base64, photos.pop(), limits)


def _take_photos(data: dict[str, Any], several: bool) -> list[Any]:
    """Take the photos, still encoded, out of the JSON object."""
    found = shortened(", ".join(data)) or "no fields"
    given = {name: value for name in NAMES if (value := data.pop(name, None)) is not None}
    if not given:
        message = f"the JSON has no field named {NAMES[several]}; found {found}"
        raise RequestError(422, "fields", message)
    if len(given) > 1:
        raise RequestError(422, "fields", "the JSON has both image and images; give one of them")
    [(name, photos)] = given.items()
    if not several and (name == NAMES[1] or isinstance(photos, list)):
        raise RequestError(422, "fields", f"the JSON has a list of photos; {SEVERAL}")
    if photos == []:
        raise RequestError(422, "fields", f"{name} is an empty list; give at least one photo")
    return photos if isinstance(photos, list) else [photos]


def _from_base64(text: Any, limits: Limits) -> Upload:
    """Decode a photo; errors are the photo's own."""
    try:
        return Upload(_decoded(text, limits))
    except RequestError as error:
        return Upload(io.BytesIO(), error=error)


def _decoded(text: Any, limits: Limits) -> io.BytesIO:
    hint = "give the bytes of the file in base64 (base64 -w0 photo.jpg), or a data: URL of them"
    invalid = RequestError(
        422, "base64", f"the photo is not valid base64 ({shortened(str(text)[:20])}); {hint}"
    )
    if not isinstance(text, str):
        raise invalid
    if text[:5].lower() == "data:":
        header, _, text = text.partition(",")
        if not header.lower().rstrip().endswith(";base64"):
            raise invalid
    size = len(text) // 4 * 3
    if size > limits.max_bytes * 1.05:  # it may contain line breaks
        raise too_many_bytes("the photo", f"about {size:,}", limits.max_bytes)
    letters = text.encode("utf-8", "replace").translate(_URL_SAFE, b" \t\r\n").rstrip(b"=")
    try:
        data = base64.b64decode(letters + b"=" * (-len(letters) % 4), validate=True)
    except ValueError:
        raise invalid from None
    if len(data) > limits.max_bytes:
        raise too_many_bytes("the photo", f"{len(data):,}", limits.max_bytes)
    if not data:
        raise empty("the photo")
    return io.BytesIO(data)
