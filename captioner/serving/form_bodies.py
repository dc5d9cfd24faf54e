"""Photos and options in forms, parsed as they arrive.

In memory: Starlette's form parser would write files above 1 MiB to disk.
"""

from __future__ import annotations

import io
import logging
from collections.abc import AsyncGenerator
from typing import Any

from fastapi import Request
from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

from captioner.serving.limits import MAX_TEXT, Limits
from captioner.serving.responses import RequestError, shortened
from captioner.serving.uploads import NAMES, SEVERAL, Field, Upload, chunks, empty

logging.getLogger("python_multipart").setLevel(logging.ERROR)  # its warnings quote the body

MAX_FIELDS = 100
"""Maximum number of form fields that are not photos."""


def boundary(request: Request) -> bytes:
    """The boundary in the request's content type; empty if there is none."""
    options = parse_options_header(request.headers.get("content-type"))[1]
    return options.get(b"boundary", b"")


async def read_form(
    request: Request, limits: Limits, several: bool
) -> AsyncGenerator[Field | Upload, None]:
    """Read a form; see ``bodies.read_body``."""
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
                raise RequestError(422, "fields", f"the file field is named images; {SEVERAL}")
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
            self._add_photo(error=empty("the file"))
        else:
            self._data.seek(0)
            self._add_photo(self._data)
        self._data = None

    def _add_photo(self, data: io.BytesIO | None = None, error: RequestError | None = None) -> None:
        self.items.append(Upload(data or io.BytesIO(), self._file_name, error))

    def _end(self) -> None:
        self.ended = True
