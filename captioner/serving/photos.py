"""Read the photos and options of a request body, by its content type.

    multipart/form-data  files named image (curl -F image=@photo.jpg); other fields are options
    application/json     {"image": "<base64>", ...options}; several photos: {"images": [...], ...}
    anything else        the bytes of one photo; the format is detected from them

Photos come one by one, in memory and within the size limits. Nothing is written to disk:
Starlette's form parser would write files above 1 MiB, and read the whole body first.

A JSON parser would build every value of a body (64 bytes of memory for ``[],``) and hold up all
other requests meanwhile. `JsonBody` therefore decodes long strings as they arrive, which are the
photos, and passes only the short rest to a parser.
"""

from __future__ import annotations

import base64
import io
import math
import secrets
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Any

from fastapi import Request
from pydantic_core import from_json
from starlette.requests import ClientDisconnect
from werkzeug.exceptions import RequestEntityTooLarge
from werkzeug.http import parse_options_header
from werkzeug.sansio.multipart import Data, Field, File, MultipartDecoder, NeedData

from captioner.serving.options import Limits
from captioner.serving.request_errors import RequestError, client_closed, shortened
from captioner.serving.schema import MAX_OPTIONS, MAX_TEXT

FORM, JSON = "multipart/form-data", "application/json"
NAMES = ("image", "images")  # of the fields that hold photos
JSON_PHOTOS = 8  # of the largest, as long as a JSON list may be; forms have no such limit
LONG = 4 * MAX_TEXT  # bytes of a text; longer strings in JSON are decoded as photos
MAX_REST = 1 << 20  # bytes of JSON without its long strings
MAX_VALUES = 10_000  # commas and opening brackets of JSON outside its long strings
MAX_QUOTES = 5 * MAX_VALUES  # escaped quotes included
_OVERHEAD = 64 << 10  # most bytes of a body beside its photos
_PIECE = 64 << 10  # bytes of a form that are decoded at a time
_URL_SAFE = bytes.maketrans(b"-_", b"+/")
_ESCAPES = {  # how JSON may write the characters of base64 that are not letters or digits
    rb"\/": b"/", rb"\n": b"", rb"\r": b"", rb"\t": b"",
    rb"\u002b": b"+", rb"\u002B": b"+", rb"\u002f": b"/", rb"\u002F": b"/",
    rb"\u003d": b"=", rb"\u003D": b"=", rb"\u000a": b"", rb"\u000A": b"",
    rb"\u000d": b"", rb"\u000D": b"",
}  # fmt: skip
_SEVERAL = "send several photos to POST /v1/batch"


@dataclass(frozen=True)
class Upload:
    """A photo in a body, its file name as sent by the client, and why it was not read."""

    data: io.BytesIO
    name: str = ""
    error: RequestError | None = None
    alone: bool = False  # the photo's bytes are the whole body

    def __repr__(self) -> str:
        """Describe the photo for errors, if a body has it in place of another value."""
        return f"a text of more than {LONG:,} bytes"


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
    # A form has one photo in memory at a time.
    photos = (size - _OVERHEAD) * 3 / 4 / limits.max_bytes if kind == JSON else 1
    return max(1, math.ceil(photos))


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
    """Return the object of a JSON body, with an `Upload` for each string of more than `LONG` bytes.

    The content type does not matter. Call ``check_headers`` first.
    """
    body = JsonBody(limits.max_bytes)
    async for chunk in _chunks(request, _most_bytes(JSON, limits, several), "the JSON"):
        body.receive(chunk)
    data = body.parsed()
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
    for name, value in data.items():
        if isinstance(value, Upload):
            raise _long_text(name)
    photos = photos[::-1] if isinstance(photos, list) else [photos]
    options |= {name: [value] for name, value in data.items()}
    while photos:  # each is freed when it has been decoded
        yield from_base64(photos.pop(), limits.max_bytes)


def from_base64(given: Any, most: int) -> Upload:
    """Decode a photo of at most ``most`` bytes, in base64 or a data: URL.

    An error is stored in the result. A photo that `read_object` has decoded is returned unchanged.
    """
    if isinstance(given, Upload):
        return given
    reader = _Base64(most, wrong=not isinstance(given, str))
    reader.receive(str(given).encode("utf-8", "replace"))
    return reader.upload()


class JsonBody:
    """A reader of JSON that decodes long strings as photos while the body arrives."""

    def __init__(self, most: int) -> None:
        """Start an empty body, in which photos have at most ``most`` bytes."""
        self._most = most
        self._rest = bytearray()  # with a placeholder for each long string
        self._photos: dict[str, Upload] = {}  # by placeholder
        self._token = secrets.token_hex(16)  # a client cannot guess it
        self._inside = False  # whether the next byte belongs to a string
        self._escaped = False  # whether a backslash escapes the next byte
        self._start = 0  # where the current string starts in the rest
        self._photo: _Base64 | None = None  # the current string if it is long
        self._quotes = 0

    def receive(self, chunk: bytes) -> None:
        """Read the next part of the body."""
        self._quotes += chunk.count(b'"')
        place = 0
        while place < len(chunk) and self._quotes <= MAX_QUOTES:
            quote = chunk.find(b'"', place)
            part = chunk[place:] if quote < 0 else chunk[place:quote]
            place += len(part) + 1
            if self._inside:
                self._add(part)
                # An odd number of backslashes escapes the quote. They may start before this part.
                backslashes = len(part) - len(part.rstrip(b"\\"))
                odd = (backslashes + (self._escaped and backslashes == len(part))) % 2 == 1
                self._escaped = odd and quote < 0
                if quote >= 0 and odd:
                    self._add(b'"')
                elif quote >= 0:
                    self._end()
            else:
                self._rest += part
                if quote >= 0:
                    self._rest += b'"'
                    self._start, self._inside = len(self._rest), True
            if len(self._rest) > MAX_REST:
                most = f"the JSON has more than {MAX_REST:,} bytes without its photos"
                raise RequestError(413, "fields", f"{most}; send the photos and options only")
        if self._quotes > MAX_QUOTES:
            raise _too_many_values()

    def parsed(self) -> Any:
        """Return the value of the whole body, with an `Upload` in place of each long string."""
        if sum(map(self._rest.count, (b",", b"[", b"{"))) > MAX_VALUES:
            raise _too_many_values()
        try:
            return self._with_photos(from_json(self._rest, allow_inf_nan=False))
        except ValueError as error:
            raise RequestError(400, "json", f"not valid JSON: {error}") from error

    def _add(self, part: bytes) -> None:
        """Add to the string."""
        if self._photo is not None:
            self._photo.receive(part)
            return
        self._rest += part
        if len(self._rest) - self._start > LONG:
            self._photo = _Base64(self._most)
            self._photo.receive(bytes(self._rest[self._start :]))
            del self._rest[self._start :]

    def _end(self) -> None:
        """End the string."""
        if self._photo is not None:
            placeholder = f"{self._token}{len(self._photos)}"
            self._photos[placeholder] = self._photo.upload()
            self._rest += placeholder.encode()
        self._rest += b'"'
        self._photo, self._inside = None, False

    def _with_photos(self, value: Any) -> Any:
        if isinstance(value, dict):
            return {name: self._with_photos(one) for name, one in value.items()}
        if isinstance(value, list):
            return [self._with_photos(one) for one in value]
        return self._photos.get(value, value) if isinstance(value, str) else value


def _too_many_values() -> RequestError:
    message = f"the JSON has more than {MAX_VALUES:,} values; send fewer, or a form"
    return RequestError(413, "fields", message)


class _Base64:
    """A decoder of base64 or a data: URL in the text of a JSON string that arrives in parts."""

    def __init__(self, most: int, *, wrong: bool = False) -> None:
        """Start an empty photo, which is not kept if it has more than ``most`` bytes."""
        self._most, self._wrong = most, wrong
        self._data, self._size = io.BytesIO(), 0
        self._head = b""  # first characters, for the error
        self._escape = b""  # an escape that the next part may continue
        self._letters = b""  # up to three, which the next part makes a group of four
        self._padded = False  # whether the text has ended with =

    def receive(self, text: bytes) -> None:
        """Decode the next part of the text. The first part has the whole prefix of a data: URL."""
        if not self._head:
            self._head = text[:20]
            if text[:5].lower() == b"data:":
                _, found, text = text.partition(b";base64,")
                self._wrong = self._wrong or not found
        text = self._escape + text
        escape = text.rfind(b"\\", -5)
        self._escape = text[escape:] if escape >= 0 else b""
        self._decode(text[:escape] if escape >= 0 else text)

    def upload(self) -> Upload:
        """Return the photo at the end of its text."""
        self._decode(self._escape + b"=")
        error = None
        if self._wrong:
            shown = shortened(self._head.decode("utf-8", "replace"))
            hint = "give the bytes of the file in base64 (base64 -w0 photo.jpg)"
            message = f"the photo is not valid base64 ({shown}); {hint}, or a data: URL of them"
            error = RequestError(422, "base64", message)
        elif self._size > self._most:
            error = _too_many_bytes("the photo", f"about {self._size:,}", self._most)
        elif not self._size:
            error = _empty("the photo")
        self._data.seek(0)
        return Upload(self._data, error=error)

    def _decode(self, text: bytes) -> None:
        if self._wrong or self._size > self._most:  # to decode more would only cost time
            self._size += len(text) * 3 // 4
            return
        if b"\\" in text:
            for escape, character in _ESCAPES.items():
                text = text.replace(escape, character)
        text = self._letters + text.translate(_URL_SAFE, b" \t\r\n")
        letters = text.rstrip(b"=")
        self._wrong = self._padded and bool(letters)
        self._padded = self._padded or len(letters) < len(text)
        whole = len(letters) if self._padded else len(letters) // 4 * 4
        self._letters = letters[whole:]
        try:
            data = base64.b64decode(letters[:whole] + b"=" * (-whole % 4), validate=True)
        except ValueError:
            self._wrong, data = True, b""
        self._size += len(data)
        if self._wrong or self._size > self._most:
            self._data = io.BytesIO()
        else:
            self._data.write(data)


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
            if fields > MAX_OPTIONS:
                raise RequestError(422, "fields", f"the form has more than {MAX_OPTIONS} options")
            continue
        if error is None:
            content.write(event.data)
        size, most = content.tell(), limits.max_bytes
        if is_photo and size > most:
            content, error = io.BytesIO(), _too_many_bytes("the photo", f"more than {most:,}", most)
        elif not is_photo and size > LONG:
            raise _long_text(name, "; a photo needs a file name")
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


def _long_text(name: str, hint: str = "; give a shorter text") -> RequestError:
    message = f"the field {shortened(name)} has more than {LONG:,} bytes{hint}"
    return RequestError(422, "fields", message)


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
