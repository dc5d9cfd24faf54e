"""Photos in base64 and options in a JSON object."""

from __future__ import annotations

import asyncio
import base64
import io
from collections.abc import AsyncGenerator, Callable, Mapping
from typing import Any

from fastapi import Request
from pydantic_core import from_json

from captioner.serving.limits import Limits
from captioner.serving.responses import RequestError, shortened
from captioner.serving.uploads import (
    JSON,
    NAMES,
    SEVERAL,
    Field,
    Upload,
    chunks,
    empty,
    most_bytes,
    too_many_bytes,
)


async def read_json(
    request: Request, limits: Limits, reserve: Callable[[int], None], several: bool
) -> AsyncGenerator[Field | Upload, None]:
    """Read a JSON object; see ``bodies.read_body``."""
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
    body, most = bytearray(), most_bytes(JSON, limits, several)
    async for chunk in chunks(request.receive):
        body += chunk
        reserve(2 * len(body))  # the text of the photos is a second copy
        if len(body) > most:
            raise too_many_bytes(f"more than {most:,} bytes", limits, JSON, several)
    try:
        data = await asyncio.to_thread(from_json, body, allow_inf_nan=False)
    except ValueError as error:
        hint = f"; to send a photo's bytes, leave out Content-Type: {JSON}"
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
        raise RequestError(422, "fields", f"{what}; {SEVERAL}, or one as image")
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
        raise too_many_bytes(f"about {len(text) // 4 * 3:,} bytes", limits)
    letters = text.encode("utf-8", "replace").translate(_URL_SAFE, b" \t\r\n").rstrip(b"=")
    try:
        data = base64.b64decode(letters + b"=" * (-len(letters) % 4), validate=True)
    except ValueError:
        message = f"the photo is not valid base64 (it begins with {shortened(text[:20])!r})"
        hint = "encode the bytes of the file: base64 -w0 photo.jpg"
        raise RequestError(422, "base64", f"{message}; {hint}") from None
    if len(data) > limits.max_bytes:
        raise too_many_bytes(f"{len(data):,} bytes", limits)
    if not data:
        raise empty("the photo")
    return io.BytesIO(data)


_URL_SAFE = bytes.maketrans(b"-_", b"+/")


def _kind(value: Any) -> str:
    """The type of a JSON value, in words."""
    if isinstance(value, Mapping):
        return "an object"
    if isinstance(value, list):
        return f"a list of {len(value)}"
    return {str: "a string", bool: "true or false", type(None): "null"}.get(type(value), "a number")
