"""Photos and options in a form, parsed as they arrive, in memory.

Starlette's form parser would write files above 1 MiB to disk, and read the whole body first.
"""

from __future__ import annotations

import io
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any, NamedTuple

from fastapi import Request
from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

from captioner.serving.options import MAX_TEXT, Limits
from captioner.serving.responses import RequestError, client_closed, shortened

logging.getLogger("python_multipart").setLevel(logging.ERROR)  # its warnings quote the body

Receive = Callable[[], Awaitable[Any]]

NAMES = ("image", "images")
"""Names of the fields that hold photos; the second one for several photos only."""

SEVERAL = "send several photos to POST /v1/batch"
"""What to do with photos that are too many for an endpoint."""

MAX_FIELDS = 100
"""Maximum number of form fields that are not photos."""


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


Items = AsyncGenerator[Field | Upload, None]
"""Options and photos as they arrive."""


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


def too_many_bytes(what: str, given: str, most: int) -> RequestError:
    """A photo or body is too large; ``given`` is its number of bytes in words."""
    hint = "send a smaller file; many photos as a form to /v1/batch, which has no limit"
    return RequestError(413, "bytes", f"{what} has {given} bytes; the limit is {most:,}; {hint}")


def empty(what: str) -> RequestError:
    """There is no photo in what was sent."""
    return RequestError(415, "empty", f"{what} is empty (0 bytes); send the bytes of a photo")


def boundary(request: Request) -> bytes:
    """The boundary in the request's content type; empty if there is none."""
    options = parse_options_header(request.headers.get("content-type"))[1]
    return options.get(b"boundary", b"")


async def read_form(request: Request, limits: Limits, several: bool) -> Items:
    """Read a form; see ``photos.read_body``."""
    form = _Form(limits.max_bytes, NAMES if several else NAMES[:1])
    try:
        parser = MultipartParser(boundary(request), form.callbacks())
        async for chunk in chunks(request.receive):
            parser.write(chunk)
            while form.items:
                yield form.items.pop(0)
    except FormParserError as error:
        raise RequestError(400, "form", f"not a valid form: {error}") from error
    if not form.ended:
        raise RequestError(400, "form", "the form ends before its last boundary; send it again")
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
        self._headers = {}
        self._name = options.get(b"name", b"").decode("utf-8", "replace")
        self._file_name = options.get(b"filename", b"").decode("utf-8", "replace")
        self._is_photo = b"filename" in options or kind.startswith((b"image/", b"application/oct"))
        self._data = io.BytesIO()
        self._found.append(self._name)
        if self._is_photo and self._name not in self._names:
            if self._name == NAMES[1]:
                raise RequestError(422, "fields", f"the file field is named images; {SEVERAL}")
            raise self.no_photo()
        if len(self._found) - self.photos > MAX_FIELDS:
            raise RequestError(422, "fields", f"the form has more than {MAX_FIELDS} options")
        self.photos += self._is_photo

    def _add_data(self, data: bytes, start: int, end: int) -> None:
        if self._data is None:
            return
        self._data.write(memoryview(data)[start:end])
        size, most = self._data.tell(), self._max_bytes
        if self._is_photo and size > most:
            self._data = None
            self._add_photo(error=too_many_bytes("the photo", f"more than {most:,}", most))
        elif not self._is_photo and size > 4 * MAX_TEXT:
            message = f"the field {shortened(self._name)} has more than {4 * MAX_TEXT:,} bytes"
            raise RequestError(422, "fields", f"{message}; a photo needs a file name")

    def _end_part(self) -> None:
        if self._data is None:
            return
        if not self._is_photo:
            text = self._data.getvalue().decode("utf-8", "replace")
            if self._name in NAMES:
                message = f"{self._name} is the text {shortened(text)!r}, not a file; with curl"
                hint = f"put @ before the file's name: -F {self._name}=@photo.jpg"
                raise RequestError(422, "fields", f"{message}, {hint}")
            self.items.append(Field(self._name, text))
        elif self._data.tell() == 0:
            self._add_photo(error=empty("the file"))
        else:
            self._data.seek(0)
            self._add_photo(self._data)
        self._data = None

    def _add_photo(self, data: io.BytesIO | None = None, error: RequestError | None = None) -> None:
        self.items.append(Upload(data or io.BytesIO(), self._file_name, error))

    def _end(self) -> None:
        self.ended = True
