"""Read the photos and options of a request body, by its content type.

    multipart/form-data  files named image (curl -F image=@photo.jpg); other fields are options
    application/json     {"image": "<base64>", ...options}; several photos: {"images": [...], ...}
    anything else        the bytes of one photo; the format is detected from them

Photos come one by one, in memory and within the size limits. Nothing is written to disk:
Starlette's form parser would write files above 1 MiB, and read the whole body first.
"""

from __future__ import annotations

import asyncio
import base64
import io
import math
from collections.abc import AsyncGenerator
from typing import Any, NamedTuple

from fastapi import Request
from pydantic_core import from_json
from starlette.requests import ClientDisconnect
from werkzeug.exceptions import RequestEntityTooLarge
from werkzeug.http import parse_options_header
from werkzeug.sansio.multipart import Data, Field, File, MultipartDecoder, NeedData

from captioner.serving.options import Limits
from captioner.serving.schema import MAX_TEXT, RequestError, client_closed, shortened

FORM, JSON = "multipart/form-data", "application/json"
NAMES = ("image", "images")  # of the fields that hold photos
MAX_FIELDS = 100  # of a form, beside its photos
JSON_PHOTOS = 8  # of the largest, as long as a JSON list may be; forms have no such limit
_OVERHEAD = 64 << 10  # most bytes of a body beside its photos
_PIECE = 64 << 10  # bytes of a form that are decoded at a time
_URL_SAFE = bytes.maketrans(b"-_", b"+/")
_SEVERAL = "send several photos to POST /v1/batch"


class Upload(NamedTuple):
    """A photo in a body, its file name as sent by the client, and why it was not read."""

    data: io.BytesIO
    name: str = ""
    error: RequestError | None = None
    alone: bool = False  # the photo's bytes are the whole body


Options = dict[str, Any]
Photos = AsyncGenerator[Upload, None]  # as they arrive


def check_headers(
    request: Request, limits: Limits, *, several: bool, kind: str | None = None
) -> int:
    """Refuse what the headers alone rule out; returns the memory in units of ``max_bytes``.

    ``kind`` is the content type of the body; None: that of the headers.
    """
    declared, boundary = _content_type(request)
    kind = kind or declared
    if kind == FORM and not boundary:
        hint = "leave the header out, and the client (fetch, requests, ...) sets it"
        message = f"the Content-Type of the form has no boundary; {hint}"
        raise RequestError(400, "form", message)
    most = _most_bytes(kind, limits, several)
    length = request.headers.get("content-length", "")
    size = int(length) if length.isdecimal() else most
    if size > most:
        raise _too_many_bytes("the body", f"{size:,}", most)
    # The text of photos in JSON is held twice while it is parsed.
    return math.ceil(max(1, 2 * size / limits.max_bytes)) if kind == JSON else 1


def read_body(request: Request, limits: Limits, options: Options, *, several: bool) -> Photos:
    """Photos as they arrive, at least one; call ``check_headers`` first.

    Adds the options of the body to ``options``, each as a list of its values.
    """
    readers = {FORM: _read_form, JSON: _read_json}
    return readers.get(_content_type(request)[0], _read_bytes)(request, limits, options, several)


async def read_photo(request: Request, limits: Limits, options: Options) -> Upload:
    """The only photo of a body; see `read_body`."""
    photos = [photo async for photo in read_body(request, limits, options, several=False)]
    if len(photos) > 1:
        raise RequestError(422, "fields", f"the form has several photos; {_SEVERAL}")
    if photos[0].error is not None:
        raise photos[0].error
    return photos[0]


def _content_type(request: Request) -> tuple[str, bytes]:
    """The request's content type in lower case, and a form's boundary."""
    kind, parameters = parse_options_header(request.headers.get("content-type"))
    return kind.lower(), parameters.get("boundary", "").encode("latin-1", "replace")


def _most_bytes(kind: str, limits: Limits, several: bool) -> float:
    if kind == JSON:
        return limits.max_bytes * 4 // 3 * (JSON_PHOTOS if several else 1) + _OVERHEAD
    if kind == FORM:
        return math.inf if several else limits.max_bytes + _OVERHEAD
    return limits.max_bytes


async def _chunks(request: Request, most: float, what: str) -> AsyncGenerator[bytes, None]:
    """The parts of a body, at most ``most`` bytes in all."""
    size = 0
    try:
        async for chunk in request.stream():
            size += len(chunk)
            if size > most:
                raise _too_many_bytes(what, f"more than {most:,}", most)
            yield chunk
    except ClientDisconnect:
        raise client_closed() from None


def _too_many_bytes(what: str, given: str, most: float) -> RequestError:
    """A photo or body is too large; ``given`` is its number of bytes in words."""
    hint = "send a smaller file; many photos as a form to /v1/batch, which has no limit"
    return RequestError(413, "bytes", f"{what} has {given} bytes; the limit is {most:,}; {hint}")


def _empty(what: str) -> RequestError:
    return RequestError(415, "empty", f"{what} is empty (0 bytes); send the bytes of a photo")


# --- bytes and JSON ------------------------------------------------------------------------------


async def _read_bytes(request: Request, limits: Limits, _: Options, __: bool) -> Photos:
    body = io.BytesIO()
    async for chunk in _chunks(request, limits.max_bytes, "the body"):
        body.write(chunk)
    if body.tell() == 0:
        raise _empty("the body")
    begin = body.getbuffer()[:32].tobytes().lstrip()
    if begin.startswith((b"{", b"[")):  # curl -d without a Content-Type
        raise RequestError(415, "json", f"the body looks like JSON; send Content-Type: {JSON}")
    if begin.startswith((b"image=", b"images=")):
        message = "the body is a URL-encoded form, which is not supported; with curl, send the file"
        raise RequestError(415, "form", f"{message} by -F image=@photo.jpg")
    body.seek(0)
    yield Upload(body, alone=True)


async def read_object(request: Request, limits: Limits, *, several: bool) -> dict[str, Any]:
    """The object of a JSON body, whatever its content type; call ``check_headers`` first."""
    body = bytearray()
    async for chunk in _chunks(request, _most_bytes(JSON, limits, several), "the JSON"):
        body += chunk
    try:
        data = await asyncio.to_thread(from_json, body, allow_inf_nan=False)
    except ValueError as error:
        raise RequestError(400, "json", f"not valid JSON: {error}") from error
    if not isinstance(data, dict):
        raise RequestError(422, "fields", 'the JSON is no object, {"...": ...}; see /docs')
    return data


async def _read_json(request: Request, limits: Limits, options: Options, several: bool) -> Photos:
    data = await read_object(request, limits, several=several)
    if nulls := [name for name in NAMES if data.get(name, "") is None]:
        raise RequestError(422, "fields", f"{nulls[0]} is null; give the photo in base64")
    data = {name: value for name, value in data.items() if value is not None}
    found = shortened(", ".join(data)) or "no fields"
    given = [photo for name in NAMES if (photo := data.pop(name, None)) is not None]
    if len(given) != 1:
        message = f"the JSON needs one field named {NAMES[several]}; found {found}"
        raise RequestError(422, "fields", message)
    photos = given.pop()
    if not several and isinstance(photos, list):
        raise RequestError(422, "fields", f"the JSON has a list of photos; {_SEVERAL}")
    photos = photos[::-1] if isinstance(photos, list) else [photos]
    options |= {name: [value] for name, value in data.items()}
    while photos:  # each is freed when it has been decoded
        yield await asyncio.to_thread(from_base64, photos.pop(), limits.max_bytes)


def from_base64(given: Any, most: int) -> Upload:
    """Decode a photo of at most ``most`` bytes, in base64 or a data: URL; errors are its own."""
    text, error = given, None
    if isinstance(given, str) and given[:5].lower() == "data:":
        text = given.partition(";base64,")[2] or None
    try:
        letters = text.encode().translate(_URL_SAFE, b" \t\r\n").rstrip(b"=")
        data = base64.b64decode(letters + b"=" * (-len(letters) % 4), validate=True)
    except (AttributeError, ValueError):
        data, hint = b"", "give the bytes of the file in base64 (base64 -w0 photo.jpg)"
        message = f"the photo is not valid base64 ({shortened(str(given)[:20])}); {hint}"
        error = RequestError(422, "base64", f"{message}, or a data: URL of them")
    if len(data) > most:
        data, error = b"", _too_many_bytes("the photo", f"{len(data):,}", most)
    return Upload(io.BytesIO(data), error=error or (None if data else _empty("the photo")))


# --- forms ---------------------------------------------------------------------------------------


async def _read_form(request: Request, limits: Limits, options: Options, several: bool) -> Photos:
    found: dict[str, None] = {}  # names of fields
    photos = fields = 0
    part: File | Field | None = None
    async for event in _events(request, _most_bytes(FORM, limits, several)):
        if isinstance(event, File | Field):
            part, name = event, event.name or ""
            content, error = io.BytesIO(), None
            kind = part.headers.get("content-type", "").lower()
            is_photo = isinstance(part, File) or kind.startswith(("image/", "application/oct"))
            found[name] = None
            if is_photo and name not in NAMES:
                raise _no_photo(found)
            photos, fields = photos + is_photo, fields + (not is_photo)
            if fields > MAX_FIELDS:
                raise RequestError(422, "fields", f"the form has more than {MAX_FIELDS} options")
            continue
        if error is None:
            content.write(event.data)
        size, most = content.tell(), limits.max_bytes
        if is_photo and size > most:
            content, error = io.BytesIO(), _too_many_bytes("the photo", f"more than {most:,}", most)
        elif not is_photo and size > 4 * MAX_TEXT:
            message = f"the field {shortened(name)} has more than {4 * MAX_TEXT:,} bytes"
            raise RequestError(422, "fields", f"{message}; a photo needs a file name")
        if event.more_data:
            continue
        if is_photo:
            content.seek(0)
            error = error or (None if size else _empty("the file"))
            yield Upload(content, getattr(part, "filename", ""), error)
            continue
        text = content.getvalue().decode("utf-8", "replace")
        if name in NAMES:
            message = f"{name} is the text {shortened(text)!r}, not a file; with curl"
            hint = f"put @ before the file's name: -F {name}=@photo.jpg"
            raise RequestError(422, "fields", f"{message}, {hint}")
        if photos and several:  # the photos are captioned as they arrive
            message = f"the option {name} comes after a photo"
            hint = "put options before the photos, or in the query"
            raise RequestError(422, "options", f"{message}; {hint}")
        options.setdefault(name, []).append(text)
    if not photos:
        raise _no_photo(found)


def _no_photo(found: dict[str, None]) -> RequestError:
    names = shortened(", ".join(found)) or "no fields"
    message = f"the form has no file field named {NAMES[0]}; found {names}"
    return RequestError(422, "fields", message)


async def _events(request: Request, most: float) -> AsyncGenerator[File | Field | Data, None]:
    """The parts of a form as they arrive, each followed by pieces of its content."""
    decoder = MultipartDecoder(_content_type(request)[1], 4 * _PIECE)
    try:
        async for chunk in _chunks(request, most, "the form"):
            for start in range(0, len(chunk), _PIECE):
                decoder.receive_data(chunk[start : start + _PIECE])
                while not isinstance(event := decoder.next_event(), NeedData):
                    if isinstance(event, File | Field | Data):
                        yield event
        decoder.receive_data(None)
        decoder.next_event()
    except (ValueError, RequestEntityTooLarge) as error:
        message = "the form is malformed, or ends before its last boundary; send it again"
        raise RequestError(400, "form", message) from error
