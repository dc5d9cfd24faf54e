"""Read the photos and options of a request body, by its content type.

    multipart/form-data  files named image (curl -F image=@photo.jpg); other fields are options
    application/json     {"image": "<base64>", ...options}; several photos: {"images": [...], ...}
    anything else        the bytes of one photo; the format is detected from them

Photos come one by one, in memory and within the size limits. Nothing is written to disk.
"""

from __future__ import annotations

import io
from collections.abc import AsyncGenerator, Callable
from typing import Any

from fastapi import Request

from captioner.serving.form_bodies import boundary, read_form
from captioner.serving.json_bodies import read_json
from captioner.serving.limits import Limits
from captioner.serving.responses import RequestError, shortened
from captioner.serving.uploads import (
    FORM,
    JSON,
    SEVERAL,
    Field,
    Upload,
    add_field,
    chunks,
    content_type,
    most_bytes,
    too_many_bytes,
)


def has_fields(request: Request) -> bool:
    """Whether the body may contain options."""
    return content_type(request) in (FORM, JSON)


def check_headers(request: Request, limits: Limits, *, several: bool) -> None:
    """Refuse what the headers alone rule out.

    Raises:
        RequestError: The content type or encoding is not supported, or the body is too large.
    """
    kind, encoding = content_type(request), request.headers.get("content-encoding", "identity")
    if kind.startswith("multipart/") and kind != FORM:
        raise RequestError(415, "form", f"{kind} is not supported; send a form as {FORM}")
    if kind == FORM and not boundary(request):
        raise RequestError(
            400,
            "form",
            "the Content-Type of the form has no boundary; leave the header out, and the client "
            "(fetch, requests, ...) sets it",
        )
    if encoding.lower() not in ("identity", ""):
        message = f"Content-Encoding {shortened(encoding)} is not supported"
        raise RequestError(415, "encoding", f"{message}; send the body uncompressed")
    length = request.headers.get("content-length", "")
    if not length.isdecimal() or (several and kind == FORM):
        return
    if int(length) > most_bytes(kind, limits, several):
        raise too_many_bytes(f"{int(length):,} bytes", limits, kind, several)


def read_body(
    request: Request, limits: Limits, reserve: Callable[[int], None], *, several: bool
) -> AsyncGenerator[Field | Upload, None]:
    """Read a body; call ``check_headers`` first.

    Args:
        request: The request.
        limits: Limits on the bytes of a photo.
        reserve: Called with the memory that the body takes (bytes), as it grows; may raise.
        several: Whether there may be several photos.

    Returns:
        Options and photos as they arrive, at least one photo.

    Raises:
        RequestError: The body is malformed, has no photo, or the client disconnected.
    """
    kind = content_type(request)
    if kind == FORM:
        return read_form(request, limits, several)
    if kind == JSON:
        return read_json(request, limits, reserve, several)
    return _read_bytes(request, limits)


async def read_photo(items: AsyncGenerator[Field | Upload, None]) -> tuple[Upload, dict[str, Any]]:
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


async def _read_bytes(request: Request, limits: Limits) -> AsyncGenerator[Field | Upload, None]:
    body = io.BytesIO()
    async for chunk in chunks(request.receive):
        body.write(chunk)
        if body.tell() > limits.max_bytes:
            raise too_many_bytes(f"more than {limits.max_bytes:,} bytes", limits)
    if body.tell() == 0:
        raise RequestError(
            415,
            "empty",
            "the body is empty; send the bytes of a photo: --data-binary @photo.jpg",
        )
    body.seek(0)
    begin = body.read(32).lstrip()
    body.seek(0)
    if begin.startswith((b"{", b"[")):
        declared = content_type(request) or "missing"
        message = f"the body looks like JSON, but its Content-Type is {shortened(declared)}"
        raise RequestError(415, "json", f"{message}; send Content-Type: {JSON}")
    if begin.startswith((b"image=", b"images=")):
        message = "the body is a URL-encoded form, which is not supported; with curl, send the file"
        raise RequestError(415, "form", f"{message} by -F image=@photo.jpg")
    yield Upload(body, alone=True)
