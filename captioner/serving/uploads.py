"""Read the photos and options of a request body, by its content type.

    multipart/form-data  files named image (curl -F image=@photo.jpg); other fields are options
    application/json     {"image": "<base64>", ...options}; several photos: {"images": [...], ...}
    anything else        the bytes of one photo; the format is detected from them

Photos come one by one, in memory and within the size limits. Nothing is written to disk, as
Starlette's form parser would do with files above 1 MiB.
"""

from __future__ import annotations

import asyncio
import base64
import io
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from typing import Any, NamedTuple

from fastapi import Request
from pydantic_core import from_json
from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

from captioner.serving.limits import MAX_TEXT, Limits
from captioner.serving.responses import CLIENT_CLOSED, RequestError, shortened

logging.getLogger("python_multipart").setLevel(logging.ERROR)  # its warnings quote the body

Receive = Callable[[], Awaitable[Any]]

NAMES = ("image", "images")
"""Names of the fields that hold photos; the second one for several photos only."""

JSON_PHOTOS = 8
"""A JSON list may be as long as this many of the largest photos; forms have no such limit."""

OVERHEAD = 64 << 10
"""Maximum number of bytes of a body beside its photos."""

MAX_FIELDS = 100
"""Maximum number of form fields that are not photos."""

_FORM, _JSON = "multipart/form-data", "application/json"
_SEVERAL = "send several photos to POST /v1/batch"


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


def has_fields(request: Request) -> bool:
    """Whether the body may contain options."""
    return content_type(request) in (_FORM, _JSON)


def check_headers(request: Request, limits: Limits, *, several: bool) -> None:
    """Refuse what the headers alone rule out.

    Raises:
        RequestError: The content type or encoding is not supported, or the body is too large.
    """
    kind, encoding = content_type(request), request.headers.get("content-encoding", "identity")
    if kind.startswith("multipart/") and kind != _FORM:
        raise RequestError(415, "form", f"{kind} is not supported; send a form as {_FORM}")
    if kind == _FORM and not _boundary(request):
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
    if not length.isdecimal() or (several and kind == _FORM):
        return
    if int(length) > _most_bytes(kind, limits, several):
        raise _too_many_bytes(f"{int(length):,} bytes", limits, kind, several)


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
    if kind == _FORM:
        return _read_form(request, limits, several)
    if kind == _JSON:
        return _read_json(request, limits, reserve, several)
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
            raise RequestError(422, "fields", f"the form has several photos; {_SEVERAL}")
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


def client_closed() -> RequestError:
    """The client disconnected."""
    return RequestError(CLIENT_CLOSED, "left", "the client disconnected")


async def _chunks(receive: Receive) -> AsyncGenerator[bytes, None]:
    more = True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise client_closed()
        if message.get("body"):
            yield message["body"]
        more = message.get("more_body", False)


def _most_bytes(kind: str, limits: Limits, several: bool) -> int:
    """Maximum size of a body that is read as a whole."""
    if kind == _JSON:
        return limits.max_bytes * 4 // 3 * (JSON_PHOTOS if several else 1) + OVERHEAD
    return limits.max_bytes + (OVERHEAD if kind == _FORM else 0)


def _too_many_bytes(
    given: str, limits: Limits, kind: str = "", several: bool = False
) -> RequestError:
    if several and kind == _JSON:
        most = _most_bytes(kind, limits, several)
        message = f"the JSON has {given}; the limit is {most:,}; send a form (curl -F images=@...)"
        return RequestError(413, "bytes", f"{message}, which has no limit on the number of photos")
    what = {_JSON: "the JSON", _FORM: "the form"}.get(kind, "the photo")
    limit = f"the limit is {limits.max_bytes:,}" + (" for a photo" if kind else "")
    return RequestError(413, "bytes", f"{what} has {given}; {limit}; send a smaller file")


def _empty(what: str) -> RequestError:
    return RequestError(415, "empty", f"{what} is empty (0 bytes); send a photo")


# --- the bytes of a photo ------------------------------------------------------------------------


async def _read_bytes(request: Request, limits: Limits) -> AsyncGenerator[Field | Upload, None]:
    body = io.BytesIO()
    async for chunk in _chunks(request.receive):
        body.write(chunk)
        if body.tell() > limits.max_bytes:
            raise _too_many_bytes(f"more than {limits.max_bytes:,} bytes", limits)
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
        raise RequestError(415, "json", f"{message}; send Content-Type: {_JSON}")
    if begin.startswith((b"image=", b"images=")):
        message = "the body is a URL-encoded form, which is not supported; with curl, send the file"
        raise RequestError(415, "form", f"{message} by -F image=@photo.jpg")
    yield Upload(body, alone=True)


# --- forms ---------------------------------------------------------------------------------------


def _boundary(request: Request) -> bytes:
    options = parse_options_header(request.headers.get("content-type"))[1]
    return options.get(b"boundary", b"")


async def _read_form(
    request: Request, limits: Limits, several: bool
) -> AsyncGenerator[Field | Upload, None]:
    form = _Form(limits.max_bytes, NAMES if several else NAMES[:1])
    try:
        parser = MultipartParser(_boundary(request), form.callbacks())
        async for chunk in _chunks(request.receive):
            parser.write(chunk)
            while form.items:
                yield form.items.pop(0)
    except FormParserError as error:
        raise RequestError(400, "form", f"not a valid form: {error}") from error
    if not form.ended:
        message = "the form ends before its last boundary; send it again"
        raise RequestError(400, "form", message)
    if not form.photos:
        raise form.no_photo()


class _Form:
    """Collects the parts of a form from the parser's callbacks."""

    def __init__(self, max_bytes: int, names: tuple[str, ...]) -> None:
        self.items: list[Field | Upload] = []
        """Complete parts."""
        self.photos = 0
        self.ended = False
        self._max_bytes = max_bytes
        self._names = names
        self._found: list[str] = []
        self._headers: dict[bytes, bytes] = {}
        self._header, self._value = b"", b""
        self._name, self._file_name = "", ""
        self._is_photo = False
        self._data: io.BytesIO | None = None  # None: the rest of the part is skipped

    def callbacks(self) -> Any:
        """For ``MultipartParser``."""
        return {
            "on_part_begin": self._begin,
            "on_header_field": self._add_header,
            "on_header_value": self._add_value,
            "on_header_end": self._end_header,
            "on_headers_finished": self._end_headers,
            "on_part_data": self._add_data,
            "on_part_end": self._end_part,
            "on_end": self._end,
        }

    def no_photo(self) -> RequestError:
        """The error of a form without a photo."""
        found = shortened(", ".join(dict.fromkeys(self._found))) or "no fields"
        message = f"the form has no file field named {self._names[0]}; found {found}"
        return RequestError(422, "fields", message)

    def _begin(self) -> None:
        self._headers, self._header, self._value = {}, b"", b""

    def _add_header(self, data: bytes, start: int, end: int) -> None:
        self._header += data[start:end]

    def _add_value(self, data: bytes, start: int, end: int) -> None:
        self._value += data[start:end]

    def _end_header(self) -> None:
        self._headers[self._header.lower()] = self._value
        self._header, self._value = b"", b""

    def _end_headers(self) -> None:
        _, options = parse_options_header(self._headers.get(b"content-disposition"))
        kind = self._headers.get(b"content-type", b"").lower()
        self._name = options.get(b"name", b"").decode("utf-8", "replace")
        self._file_name = options.get(b"filename", b"").decode("utf-8", "replace")
        self._is_photo = b"filename" in options or kind.startswith((b"image/", b"application/oct"))
        self._data = io.BytesIO()
        self._found.append(self._name)
        if self._is_photo and self._name not in self._names:
            if self._name == NAMES[1]:
                raise RequestError(422, "fields", f"the file field is named images; {_SEVERAL}")
            raise self.no_photo()
        if len(self._found) - self.photos > MAX_FIELDS:
            raise RequestError(422, "fields", f"the form has more than {MAX_FIELDS} options")
        self.photos += self._is_photo

    def _add_data(self, data: bytes, start: int, end: int) -> None:
        if self._data is None:
            return
        self._data.write(memoryview(data)[start:end])
        size = self._data.tell()
        if self._is_photo and size > self._max_bytes:
            self._data = None
            given = f"more than {self._max_bytes:,} bytes; the limit is {self._max_bytes:,}"
            message = f"the photo has {given}; send a smaller file"
            self._add_photo(error=RequestError(413, "bytes", message))
        elif not self._is_photo and size > 4 * MAX_TEXT:
            message = f"the field {shortened(self._name)} has more than {4 * MAX_TEXT:,} bytes"
            hint = "; a photo needs a file name" if self._name in NAMES else ""
            raise RequestError(422, "fields", message + hint)

    def _end_part(self) -> None:
        if self._data is None:
            return
        if not self._is_photo:
            text = self._data.getvalue().decode("utf-8", "replace")
            if self._name in NAMES:
                raise RequestError(
                    422,
                    "fields",
                    f"{self._name} is the text {shortened(text)!r}, not a file; with curl, put @ "
                    f"before the file's name: -F {self._name}=@photo.jpg",
                )
            self.items.append(Field(self._name, text))
        elif self._data.tell() == 0:
            self._add_photo(error=_empty("the file"))
        else:
            self._data.seek(0)
            self._add_photo(self._data)
        self._data = None

    def _add_photo(self, data: io.BytesIO | None = None, error: RequestError | None = None) -> None:
        self.items.append(Upload(data or io.BytesIO(), self._file_name, error))

    def _end(self) -> None:
        self.ended = True


# --- JSON ----------------------------------------------------------------------------------------


async def _read_json(
    request: Request, limits: Limits, reserve: Callable[[int], None], several: bool
) -> AsyncGenerator[Field | Upload, None]:
    photos, options = await _parse_json(request, limits, reserve, several)
    for name, value in options.items():
        if value is not None:
            yield Field(name, value)
    photos.reverse()
    while photos:  # each is freed when it has been decoded
        yield await asyncio.to_thread(_from_base64, photos.pop(), limits)


async def _parse_json(
    request: Request, limits: Limits, reserve: Callable[[int], None], several: bool
) -> tuple[list[Any], dict[str, Any]]:
    """The photos, still encoded, and the options."""
    body, most = bytearray(), _most_bytes(_JSON, limits, several)
    async for chunk in _chunks(request.receive):
        body += chunk
        reserve(2 * len(body))  # the text of the photos is a second copy
        if len(body) > most:
            raise _too_many_bytes(f"more than {most:,} bytes", limits, _JSON, several)
    try:
        data = await asyncio.to_thread(from_json, body, allow_inf_nan=False)
    except ValueError as error:
        hint = f"; to send a photo's bytes, leave out Content-Type: {_JSON}"
        raise RequestError(400, "json", f"not valid JSON: {error}{hint}") from error
    if not isinstance(data, dict):
        message = f"the JSON is {_kind(data)}; give an object"
        raise RequestError(422, "fields", f'{message}: {{"image": "<base64>"}}')
    return _photos(data, several), data


def _photos(data: dict[str, Any], several: bool) -> list[Any]:
    """Take the photos out of the JSON object."""
    given = [name for name in NAMES if data.get(name) is not None]
    if not given:
        found = shortened(", ".join(data)) or "no fields"
        raise RequestError(
            422, "fields", f"the JSON has no field named {NAMES[several]}; found {found}"
        )
    if len(given) > 1:
        raise RequestError(422, "fields", "the JSON has both image and images; give one of them")
    photos = data.pop(given[0])
    for name in NAMES:
        data.pop(name, None)
    if not several and (given[0] == NAMES[1] or isinstance(photos, list)):
        what = f"{given[0]} is {_kind(photos)}" if isinstance(photos, list) else "images is given"
        raise RequestError(422, "fields", f"{what}; {_SEVERAL}, or one as image")
    if photos == []:
        raise RequestError(422, "fields", f"{given[0]} is an empty list; give at least one photo")
    return photos if isinstance(photos, list) else [photos]


def _from_base64(text: Any, limits: Limits) -> Upload:
    """Decode a photo; errors are the photo's own."""
    try:
        return Upload(_decoded(text, limits))
    except RequestError as error:
        return Upload(io.BytesIO(), error=error)


def _decoded(text: Any, limits: Limits) -> io.BytesIO:
    if not isinstance(text, str):
        raise RequestError(422, "base64", f"the photo is {_kind(text)}; give a base64 string")
    if text[:8].lower().startswith(("http://", "https:/", "file://")):
        message = "the photo is a URL, which the server does not download"
        raise RequestError(422, "base64", f"{message}; send the file itself, as base64")
    if text[:5].lower() == "data:":
        header, comma, text = text.partition(",")
        if not comma or not header.lower().rstrip().endswith(";base64"):
            message = f"the data: URL begins {shortened(header)!r}; give data:image/jpeg;base64,..."
            raise RequestError(422, "base64", message)
    if len(text) // 4 * 3 > limits.max_bytes * 1.05:  # it may contain line breaks
        raise _too_many_bytes(f"about {len(text) // 4 * 3:,} bytes", limits)
    letters = text.encode("utf-8", "replace").translate(_URL_SAFE, b" \t\r\n").rstrip(b"=")
    try:
        data = base64.b64decode(letters + b"=" * (-len(letters) % 4), validate=True)
    except ValueError:
        message = f"the photo is not valid base64 (it begins with {shortened(text[:20])!r})"
        hint = "encode the bytes of the file: base64 -w0 photo.jpg"
        raise RequestError(422, "base64", f"{message}; {hint}") from None
    if len(data) > limits.max_bytes:
        raise _too_many_bytes(f"{len(data):,} bytes", limits)
    if not data:
        raise _empty("the photo")
    return io.BytesIO(data)


_URL_SAFE = bytes.maketrans(b"-_", b"+/")


def _kind(value: Any) -> str:
    """The type of a JSON value, in words."""
    if isinstance(value, Mapping):
        return "an object"
    if isinstance(value, list):
        return f"a list of {len(value)}"
    return {str: "a string", bool: "true or false", type(None): "null"}.get(type(value), "a number")
