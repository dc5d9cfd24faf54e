"""A reader of JSON bodies that decodes photos while the body arrives.

A JSON parser would build every value in a body (64 bytes of memory for ``[],``) and block all other
requests meanwhile. `JsonBody` therefore treats long strings as photos and decodes them as they
arrive. Only the short rest of the body goes to a JSON parser. Nothing is written to disk.
"""

from __future__ import annotations

import base64
import io
import re
import secrets
from dataclasses import dataclass
from typing import Any

from pydantic_core import from_json

from captioner.serving.request_errors import RequestError, shortened

MAX_TEXT = 1000  # characters of an option
LONG = 4 * MAX_TEXT  # bytes of text; longer strings are decoded as photos
MAX_REST = 1 << 20  # bytes of JSON without its long strings
MAX_VALUES = 10_000  # commas and opening brackets of JSON outside its long strings
MAX_QUOTES = 5 * MAX_VALUES  # quotation marks, including escaped ones
# URLs, and paths of files. No photo in base64 begins with / except JPEG, which begins with /9j/.
_LOCATION = re.compile(r"(?!data:)([a-z]+://|[.~]{0,2}/(?!9j/)|.*\.\w{2,5}$)", re.IGNORECASE)
_URL_SAFE = bytes.maketrans(b"-_", b"+/")
_ESCAPES = {  # how JSON may write the characters of base64 that are not letters or digits
    rb"\/": b"/", rb"\n": b"", rb"\r": b"", rb"\t": b"",
    rb"\u002b": b"+", rb"\u002B": b"+", rb"\u002f": b"/", rb"\u002F": b"/",
    rb"\u003d": b"=", rb"\u003D": b"=", rb"\u000a": b"", rb"\u000A": b"",
    rb"\u000d": b"", rb"\u000D": b"",
}  # fmt: skip


@dataclass(frozen=True)
class Upload:
    """A photo in the body of a request, as bytes."""

    data: io.BytesIO
    name: str = ""
    """File name that the client sent."""
    error: RequestError | None = None
    """Error for the client if the photo could not be read."""
    alone: bool = False
    """True if the body contains nothing but the photo."""
    number: int = 1
    """Number of photos in the body, as far as the server knows it when it reads this photo."""

    def __repr__(self) -> str:
        """Describe the photo in error messages if it was sent in place of an option."""
        return f"text of more than {LONG:,} bytes"


def from_base64(given: Any, most: int) -> Upload:
    """Decode a photo of at most ``most`` bytes from base64 or a data: URL.

    An error is stored in the result. A photo that `JsonBody` has already decoded is returned
    unchanged.
    """
    if isinstance(given, Upload):
        return given
    if not isinstance(given, str):
        return _not_base64("a photo in the JSON is not a string")
    if _LOCATION.match(given):
        problem = f"the photo is the URL or path {shortened(given)}"
        return _not_base64(f"{problem}, but the server does not fetch or open files")
    reader = _Base64(most)
    reader.receive(given.encode("utf-8", "replace"))
    return reader.upload()


def _not_base64(problem: str) -> Upload:
    hint = "send the content of the file in base64 (base64 -w0 photo.jpg), or as a data: URL"
    return Upload(io.BytesIO(), error=RequestError(422, "base64", f"{problem}; {hint}"))


class JsonBody:
    """A reader of JSON that decodes long strings as photos while the body arrives."""

    def __init__(self, most: int) -> None:
        """Create a reader that accepts photos of at most ``most`` bytes."""
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
                # An odd number of backslashes escapes the quote. The backslashes may start before
                # this part.
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
                most = f"the JSON has more than {MAX_REST:,} bytes besides its photos"
                raise RequestError(413, "fields", f"{most}; send only photos and options")
        if self._quotes > MAX_QUOTES:
            raise _too_many_values()

    def parsed(self) -> Any:
        """Return the value of the whole body, with an `Upload` in place of each long string."""
        if sum(map(self._rest.count, (b",", b"[", b"{"))) > MAX_VALUES:
            raise _too_many_values()
        try:
            return self._with_photos(from_json(self._rest, allow_inf_nan=False))
        except ValueError as error:
            raise RequestError(
                400, "json", f"the body is not valid JSON ({error}); check it with a JSON parser"
            ) from error

    def _add(self, part: bytes) -> None:
        """Add text to the current string."""
        if self._photo is not None:
            self._photo.receive(part)
            return
        self._rest += part
        if len(self._rest) - self._start > LONG:
            self._photo = _Base64(self._most)
            self._photo.receive(bytes(self._rest[self._start :]))
            del self._rest[self._start :]

    def _end(self) -> None:
        """End the current string."""
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
    message = f"the JSON has more than {MAX_VALUES:,} values; send fewer values, or send a form"
    return RequestError(413, "fields", message)


class _Base64:
    """A decoder for a JSON string that arrives in parts and contains base64 or a data: URL."""

    def __init__(self, most: int) -> None:
        """Start an empty photo. A photo of more than ``most`` bytes is discarded."""
        self._most, self._wrong = most, False
        self._data, self._size = io.BytesIO(), 0
        self._head = b""  # first characters of the text, for the error message
        self._escape = b""  # an escape sequence that the next part may continue
        self._letters = b""  # up to three letters that are not yet a group of four
        self._padded = False  # whether the text has ended with =

    def receive(self, text: bytes) -> None:
        """Decode the next part of the text.

        The first part contains the whole prefix of a data: URL.
        """
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
        """End the text, and return the decoded photo."""
        self._decode(self._escape + b"=")
        error = None
        if self._wrong:
            shown = shortened(self._head.decode("utf-8", "replace"))
            return _not_base64(f"the photo is not valid base64 (it starts with {shown})")
        if self._size > self._most:
            error = too_many_bytes("the photo", self._most)
        elif not self._size:
            error = empty("the photo")
        self._data.seek(0)
        return Upload(self._data, error=error)

    def _decode(self, text: bytes) -> None:
        if self._wrong or self._size > self._most:  # the photo is rejected: do not decode the rest
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


def too_many_bytes(what: str, most: float) -> RequestError:
    """Return the error for a photo or body with more than ``most`` bytes."""
    hint = "send a smaller file"
    if what != "the photo":  # the body may have several photos
        hint += ", or send many photos to /v1/batch as a form"
    return RequestError(413, "bytes", f"{what} has more than {most:,} bytes; {hint}")


def empty(what: str) -> RequestError:
    """Return the error for an empty photo or body."""
    return RequestError(415, "empty", f"{what} is empty (0 bytes); send an image file")
