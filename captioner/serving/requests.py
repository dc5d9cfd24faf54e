"""Requests with photos: their options, and the photos in their bodies.

The ranges of options are limited, so that one request cannot block the server for other clients.
Options are query parameters, or fields next to the photo in the body. The content type decides how
the body is read:

    multipart/form-data  files named image (curl -F image=@photo.jpg); other fields are options
    application/json     {"image": "<base64>", ...options}; several photos: {"images": [...], ...}
    anything else        the bytes of one photo; the format is detected from them

Photos are read one by one, in memory and within the size limits. Nothing is written to disk.
Starlette's form parser is not used, because it reads the whole body first, and writes files above 1
MiB to disk.
"""

from __future__ import annotations

import io
import math
import re
from collections.abc import AsyncGenerator
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated, Any

from annotated_types import Interval, MaxLen
from fastapi import Request
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, create_model
from pydantic_core import PydanticCustomError
from starlette.datastructures import QueryParams
from starlette.requests import ClientDisconnect
from werkzeug.exceptions import RequestEntityTooLarge
from werkzeug.http import parse_options_header
from werkzeug.sansio.multipart import Data, File, MultipartDecoder, NeedData
from werkzeug.sansio.multipart import Field as FormField

from captioner.errors import ConfigError
from captioner.inference.captioner import Captioner
from captioner.options import ExplanationMethod, SearchOptions
from captioner.schema import OptionField, option_fields
from captioner.serving.json_body import (
    LONG,
    MAX_TEXT,
    JsonBody,
    Upload,
    empty,
    from_base64,
    too_many_bytes,
)
from captioner.serving.options import Limits
from captioner.serving.request_errors import RequestError, client_closed, shortened

MAX_WORDS = 10  # entries of an option that is a list
MAX_LENGTH = 50  # tokens of a caption in a request
MAX_OPTIONS = 100  # names and values in a query, form or JSON object

FORM, JSON = "multipart/form-data", "application/json"
NAMES = ("image", "images")  # names of the fields with photos
JSON_PHOTOS = 8  # a JSON body may be as large as this many photos of max_bytes; forms may be larger

_FREE = ("attention", "attention_gate")  # methods whose maps the decoder computes anyway
_EXPLAINED_WORD = 250  # the other methods need as much time per word as this many decoder steps
_OVERHEAD = 64 << 10  # most bytes of a body in addition to its photos
_PIECE = 64 << 10  # bytes of a form that are decoded at a time
_SEVERAL = "send several photos to POST /v1/batch"


# --- options -------------------------------------------------------------------------------------


def query_model(limits: Limits, *options: type) -> type[BaseModel]:
    """Create a pydantic model with the search options and the options of further dataclasses."""
    fields: dict[str, Any] = {}
    for schema in (SearchOptions, *options):
        for key, field in option_fields(schema).items():
            most = field.untrusted.request if field.untrusted else field.bounds.le
            if isinstance(most, str):
                most = getattr(limits, most)
            bounds = replace(field.bounds, lt=None, le=most)
            if key == "panel_size":
                bounds = replace(bounds, ge=32)
            fields[key] = _parameter(field, bounds, searches=schema is SearchOptions)
    return create_model("Options", __config__=ConfigDict(extra="forbid"), **fields)


def _parameter(field: OptionField, bounds: Interval, *, searches: bool) -> tuple[Any, Any]:
    """Return the type and the pydantic field of an option.

    The default of a search option is None, which selects the setting of the model.
    """
    text = field.help.replace(" 0: never scale.", "")  # requests cannot set 0
    text += " Defaults to the model's setting." if searches else ""
    kind: Any = Annotated[field.kind, MaxLen(MAX_TEXT) if field.kind is str else bounds]
    if field.kind in (int, float):
        kind = Annotated[kind, BeforeValidator(_no_boolean)]
    if field.is_list:
        text += f" At most {MAX_WORDS}, separated by commas or as repeated parameters."
        split = BeforeValidator(partial(_split, r"[,\s]" if searches else ","))
        kind = Annotated[list[kind], MaxLen(MAX_WORDS), split]
    default = None if searches or field.is_list else field.default
    return kind | None if default is None else kind, Field(default, description=text)


def _no_boolean(given: Any) -> Any:
    """Reject booleans in place of numbers, as `captioner.schema` does. Pydantic accepts them."""
    if isinstance(given, bool):
        raise PydanticCustomError("number", "Input should be a number, not true or false")
    return given


def _split(separator: str, given: Any) -> Any:
    """Split a string, or a list of strings, into words. Other values are returned unchanged."""
    texts = [given] if isinstance(given, str) else given
    if isinstance(texts, list) and all(isinstance(text, str) for text in texts):
        words = (word.strip() for text in texts for word in re.split(separator, text))
        return [word for word in words if word]
    return given


def read_query(given: QueryParams, model: type[BaseModel]) -> BaseModel:
    """Return the options in the query of a request."""
    values: dict[str, list[str]] = {}
    for name, value in given.multi_items():  # getlist would read all pairs once per name
        values.setdefault(name, []).append(value)
    return _read(model, values)


def with_fields(query: BaseModel, fields: dict[str, Any]) -> BaseModel:
    """Return the options of the query together with the options of the body.

    Raises:
        RequestError: An option is set in the query and in the body.
    """
    given = query.model_dump(exclude_unset=True, exclude_defaults=True)  # Swagger UI sends defaults
    if twice := sorted(given.keys() & fields.keys()):
        message = f"{', '.join(twice)} is set in the query and in the body; set it once"
        raise RequestError(422, "options", message)
    return _read(type(query), given | fields)


def _read(model: type[BaseModel], given: dict[str, Any]) -> BaseModel:
    """Check the options in a request, and return them. Each option is a list of values."""
    if (count := sum(len(v) if isinstance(v, list) else 1 for v in given.values())) > MAX_OPTIONS:
        message = f"the request has {count} options; send at most {MAX_OPTIONS}"
        raise RequestError(422, "options", message)
    plain = {n: v[0] if isinstance(v, list) and len(v) == 1 else v for n, v in given.items()}
    try:
        return model.model_validate(plain)
    except ValidationError as error:
        first = error.errors()[0]
    name = str(first["loc"][0])
    if first["type"] == "extra_forbidden":
        known = ", ".join(model.model_fields)
        problem = f"{shortened(name)} is not an option of this endpoint; use {known}"
    else:
        should = first["msg"][0].lower() + first["msg"][1:].partition(", unable")[0]
        problem = f"{name} is {shortened(first['input'])}; {should}"
        limit = option_fields(SearchOptions).get(name)
        if first["type"] == "less_than_equal" and limit and limit.untrusted:
            of_server = limit.untrusted.request
            problem += f" (the server's {of_server})" if isinstance(of_server, str) else ""
    raise RequestError(422, "options", problem)


@dataclass(frozen=True)
class CaptionRequest:
    """A request to caption a photo, with checked options.

    ``options`` are the search options, or None to explain ``words`` instead of searching.
    """

    options: SearchOptions | None
    words: tuple[str, ...] = ()
    alternatives: int = 0
    style: str | None = None
    method: ExplanationMethod = "attention"

    @property
    def key(self) -> tuple[SearchOptions | None, int, str | None, ExplanationMethod]:
        """The properties that two requests must share to be captioned in one batch."""
        return self.options, self.alternatives, self.style, self.method

    @property
    def cost(self) -> int:
        """The maximum number of decoder steps for a photo. Explaining a caption counts as one step.

        Every method except attention and attention_gate decodes each caption again, once per word
        or region.
        """
        words = 0 if self.method in _FREE else _EXPLAINED_WORD
        if self.options is None:
            return 1 + words * len(self.words)
        options = self.options
        samples = options.candidates or options.num_captions
        beams = samples if options.temperature else options.beam_size
        search = beams * (1 + len(options.forced_words)) * options.max_length
        return search + words * options.num_captions * options.max_length


def caption_request(model: Captioner, query: BaseModel, max_cost: int) -> CaptionRequest:
    """Return the request that the options describe.

    Raises:
        ConfigError: The options contradict each other, or the request costs too much.
    """
    given = query.model_dump(exclude_none=True)
    changes = {name: given[name] for name in option_fields(SearchOptions) if name in given}
    method = given["method"]
    if method != "attention":
        model.check_method(method)
        if not given.get("attention", True):
            raise ConfigError(
                f"method {method} computes maps, but attention is false; set attention=true"
            )
    if "words" in given:
        style, options = changes.pop("style", None), None
        if found := ", ".join(changes):
            raise ConfigError(
                f"words sets the caption, so search options have no effect; leave out {found}, or "
                "leave out words"
            )
        words = tuple(model.stored.vocabulary.known_words(given["words"]))
        if len(words) >= MAX_LENGTH:
            raise ConfigError(
                f"the caption in words has {len(words)} words; send at most {MAX_LENGTH - 1}"
            )
    else:
        words, style, options = (), None, model.options(**changes)
    request = CaptionRequest(options, words, given["alternatives"], style, method)
    if request.cost > max_cost:
        hint = "use a smaller num_captions, max_length or beam_size, fewer forced_words"
        raise ConfigError(
            f"the request would cost {request.cost:,} steps of the decoder, but the limit is "
            f"{max_cost:,}; {hint}, or method=attention"
        )
    return request


# --- bodies --------------------------------------------------------------------------------------

Options = dict[str, Any]
Photos = AsyncGenerator[Upload, None]  # as they arrive


def check_headers(
    request: Request, limits: Limits, *, several: bool, kind: str | None = None
) -> int:
    """Check the headers of a request before its body is read.

    Args:
        request: The request.
        limits: The server's limits.
        several: True if the body may have several photos.
        kind: Content type of the body. It overrides the header.

    Returns:
        The most memory that the body needs, in units of ``max_bytes``.
    """
    declared, boundary = _content_type(request)
    kind = kind or declared
    if kind == FORM and not boundary:
        hint = "leave out the header, because clients (fetch, requests, ...) set it themselves"
        message = f"the Content-Type of the form has no boundary; {hint}"
        raise RequestError(400, "form", message)
    most = _most_bytes(kind, limits, several)
    length = request.headers.get("content-length", "")
    size = int(length) if length.isdecimal() else most
    if size > most:
        raise too_many_bytes("the body", most)
    # A form has one photo in memory at a time.
    photos = (size - _OVERHEAD) * 3 / 4 / limits.max_bytes if kind == JSON else 1
    return max(1, math.ceil(photos))


def read_body(request: Request, limits: Limits, options: Options, *, several: bool) -> Photos:
    """Yield the photos in a body (at least one) as they arrive.

    Call `check_headers` first. The options in the body are added to ``options``, each with a list
    of its values.
    """
    readers = {FORM: _read_form, JSON: _read_json}
    return readers.get(_content_type(request)[0], _read_bytes)(request, limits, options, several)


async def read_photo(request: Request, limits: Limits, options: Options) -> Upload:
    """Read the photo in a body that must contain a single photo. See `read_body`."""
    photos = [photo async for photo in read_body(request, limits, options, several=False)]
    if len(photos) > 1:
        raise RequestError(422, "fields", f"the form has several photos; {_SEVERAL}")
    if photos[0].error is not None:
        raise photos[0].error
    return photos[0]


def _content_type(request: Request) -> tuple[str, bytes]:
    """Return the content type of a request in lower case, and the boundary of a form."""
    kind, parameters = parse_options_header(request.headers.get("content-type"))
    return kind.lower(), parameters.get("boundary", "").encode("latin-1", "replace")


def _most_bytes(kind: str, limits: Limits, several: bool) -> float:
    if kind == JSON:
        return limits.max_bytes * 4 // 3 * (JSON_PHOTOS if several else 1) + _OVERHEAD
    if kind == FORM:
        return math.inf if several else limits.max_bytes + _OVERHEAD
    return limits.max_bytes


async def _chunks(request: Request, most: float, what: str) -> AsyncGenerator[bytes, None]:
    """Yield the parts of a body as they arrive, and reject bodies of more than ``most`` bytes."""
    size = 0
    try:
        async for chunk in request.stream():
            size += len(chunk)
            if size > most:
                raise too_many_bytes(what, most)
            yield chunk
    except ClientDisconnect:
        raise client_closed() from None


async def _read_bytes(request: Request, limits: Limits, _: Options, __: bool) -> Photos:
    body = io.BytesIO()
    async for chunk in _chunks(request, limits.max_bytes, "the body"):
        body.write(chunk)
    if body.tell() == 0:
        raise empty("the body")
    begin = body.getbuffer()[:32].tobytes().lstrip()
    if begin.startswith((b"{", b"[")):  # curl -d without a Content-Type
        raise RequestError(415, "json", f"the body looks like JSON; send Content-Type: {JSON}")
    if begin.startswith((b"image=", b"images=")):
        message = "the body is a URL-encoded form, which is not supported"
        raise RequestError(415, "form", f"{message}; with curl, use -F image=@photo.jpg")
    body.seek(0)
    yield Upload(body, alone=True)


async def read_object(request: Request, limits: Limits, *, several: bool) -> dict[str, Any]:
    """Read the JSON object in a body, and replace strings of more than `LONG` bytes with `Upload`.

    The content type does not matter. Call `check_headers` first.
    """
    body = JsonBody(limits.max_bytes)
    async for chunk in _chunks(request, _most_bytes(JSON, limits, several), "the JSON"):
        body.receive(chunk)
    data = body.parsed()
    if not isinstance(data, dict):
        raise RequestError(
            422, "fields", "the JSON is not an object; send an object (see the examples at /docs)"
        )
    return data


async def _read_json(request: Request, limits: Limits, options: Options, several: bool) -> Photos:
    data = await read_object(request, limits, several=several)
    if nulls := [name for name in NAMES if data.get(name, "") is None]:
        raise RequestError(422, "fields", f"{nulls[0]} is null; send a photo in base64")
    data = {name: value for name, value in data.items() if value is not None}
    found = shortened(", ".join(data)) or "no fields"
    given = [photo for name in NAMES if (photo := data.pop(name, None)) is not None]
    if len(given) != 1:
        message = (
            f"the JSON has {found}, but needs one field named {NAMES[several]}; send the photo in "
            "base64 in this field"
        )
        raise RequestError(422, "fields", message)
    photos = given.pop()
    if not several and isinstance(photos, list):
        raise RequestError(422, "fields", f"the JSON has a list of photos; {_SEVERAL}")
    for name, value in data.items():
        if isinstance(value, Upload):
            raise _long_text(name)
    photos = photos[::-1] if isinstance(photos, list) else [photos]
    options |= {name: [value] for name, value in data.items()}
    number = len(photos)
    while photos:  # each is freed when it has been decoded
        yield replace(from_base64(photos.pop(), limits.max_bytes), number=number)


# --- forms ---------------------------------------------------------------------------------------


async def _read_form(request: Request, limits: Limits, options: Options, several: bool) -> Photos:
    found: dict[str, None] = {}  # names of fields
    photos = fields = 0
    part: File | FormField | None = None
    async for event in _events(request, _most_bytes(FORM, limits, several)):
        if isinstance(event, File | FormField):
            part, name = event, event.name or ""
            content, error = io.BytesIO(), None
            kind = part.headers.get("content-type", "").lower()
            is_photo = isinstance(part, File) or kind.startswith(("image/", "application/oct"))
            found[name] = None
            if is_photo and name not in NAMES:
                raise _no_photo(found, several)
            photos, fields = photos + is_photo, fields + (not is_photo)
            if fields > MAX_OPTIONS:
                message = f"the form has more than {MAX_OPTIONS} options; send fewer options"
                raise RequestError(422, "fields", message)
            continue
        if error is None:
            content.write(event.data)
        size, most = content.tell(), limits.max_bytes
        if is_photo and size > most:
            content, error = io.BytesIO(), too_many_bytes("the photo", most)
        elif not is_photo and size > LONG:
            raise _long_text(name, "; if it is a photo, send it with a file name")
        if event.more_data:
            continue
        if is_photo:
            content.seek(0)
            error = error or (None if size else empty("the file"))
            yield Upload(content, getattr(part, "filename", ""), error, number=photos)
            continue
        text = content.getvalue().decode("utf-8", "replace")
        if name in NAMES:
            message = f"{name} is the text {shortened(text)!r}, not a file"
            hint = f"with curl, put @ before the file name: -F {name}=@photo.jpg"
            raise RequestError(422, "fields", f"{message}; {hint}")
        if photos and several:  # the photos are captioned as they arrive
            message = f"the option {name} comes after a photo"
            hint = "put the options before the photos, or in the query"
            raise RequestError(422, "options", f"{message}; {hint}")
        options.setdefault(name, []).append(text)
    if not photos:
        raise _no_photo(found, several)


def _long_text(name: str, hint: str = "; send a shorter text") -> RequestError:
    message = f"the field {shortened(name)} has more than {LONG:,} bytes of text{hint}"
    return RequestError(422, "fields", message)


def _no_photo(found: dict[str, None], several: bool) -> RequestError:
    names = shortened(", ".join(found)) or "no fields"
    field = NAMES[several]
    message = f"the form has {names}, but needs a file field named {field}"
    message += f"; send the photo in this field, with curl: -F {field}=@photo.jpg"
    return RequestError(422, "fields", message)


async def _events(request: Request, most: float) -> AsyncGenerator[File | FormField | Data, None]:
    """Yield the parts of a form as they arrive, each followed by pieces of its content."""
    decoder = MultipartDecoder(_content_type(request)[1], 4 * _PIECE)
    try:
        async for chunk in _chunks(request, most, "the form"):
            for start in range(0, len(chunk), _PIECE):
                decoder.receive_data(chunk[start : start + _PIECE])
                while not isinstance(event := decoder.next_event(), NeedData):
                    if isinstance(event, File | FormField | Data):
                        yield event
        decoder.receive_data(None)
        decoder.next_event()
    except (ValueError, RequestEntityTooLarge) as error:
        message = (
            "the form is malformed, or ends before its last boundary; build the form with an HTTP "
            "library, and send it again"
        )
        raise RequestError(400, "form", message) from error
