"""Endpoints with the protocols of other programs: Ollama, OpenAI and PhotoPrism's Vision API.

A request contains photos in base64 or as data: URLs. Other fields, such as a prompt or sampling
options, have no meaning for captions. They are ignored, and the header ``X-Captioner-Ignored``
lists them. Tools and output formats are rejected, because the client would not get the response it
expects. URLs to other servers are rejected too, because this server does not fetch photos.

Captions match ``/v1/captions`` without options. Keywords become PhotoPrism's labels. For several
photos, the response has one line per photo. Clients name the model ``captioner`` or by its folder.
A tag selects a style, such as ``captioner:flickr8k``. A stream contains the whole caption in one
part, because the search finds the best caption only at its end.

Sources: ollama/ollama, docs/api.md; OpenAI's API reference; photoprism/photoprism,
internal/ai/vision.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping
from datetime import datetime, timezone
from functools import partial
from itertools import islice
from typing import Any, NamedTuple

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response

from captioner.caption_types import Caption, Keyword
from captioner.messages import counted, either
from captioner.serving import request_errors
from captioner.serving.batch_endpoint import NDJSON
from captioner.serving.json_body import Upload, from_base64
from captioner.serving.openapi import EXAMPLE_PHOTO, error_responses, json_line
from captioner.serving.options import WordOptions
from captioner.serving.request_errors import RequestError, shortened
from captioner.serving.requests import (
    JSON,
    check_headers,
    query_model,
    read_object,
)
from captioner.serving.service import Service
from captioner.version import __version__

IGNORED = "X-Captioner-Ignored"  # header of responses with the names of ignored fields
NAME = "captioner"  # a model name that clients can always use
SSE = "text/event-stream"
GENERATE, CHAT, SHOW = "/api/generate", "/api/chat", "/api/show"
OPENAI, MODELS = request_errors.OPENAI
CAPTION, LABELS = request_errors.PHOTOPRISM + "caption", request_errors.PHOTOPRISM + "labels"
MOST_LABELS = 10
MAX_PARTS = 1000  # messages of a chat, and parts of a message, that are searched for photos

# Fields that would change the kind of response, each with the values that are accepted.
_UNSUPPORTED: Mapping[str, tuple[Any, ...]] = {
    "tools": ([],),
    "functions": ([],),
    "format": ("", "text"),
    "response_format": ({"type": "text"},),
    "schema": (),
    "n": (1,),
}
# Fields that are not reported as ignored.
_READ = {"model", "name", "version", "stream", "images", "url", "messages", "id", *_UNSUPPORTED}
_PLAIN = re.compile(r"[A-Za-z0-9_]{1,40}")  # names that may be in a header


# --- requests ------------------------------------------------------------------------------------


class ProtocolRequest(NamedTuple):
    """A request in one of the protocols."""

    data: dict[str, Any]
    """Fields of the request that are not null."""
    model: str
    stream: bool
    photos: list[Any]
    """Unchecked photos in base64 or as data: URLs."""
    ignored: list[str]
    """Names of ignored fields and message parts."""
    empty: bool
    """True if the request has neither a photo nor a prompt. Ollama clients send such requests to
    load a model."""


def read_fields(data: dict[str, Any], streams: bool) -> ProtocolRequest:
    """Return the request that a JSON object describes.

    Args:
        data: The JSON object.
        streams: Default of the field ``stream``.

    Raises:
        RequestError: A field is not supported, or the photos are malformed.
    """
    data = {name: value for name, value in data.items() if value is not None}
    for name, harmless in _UNSUPPORTED.items():
        if name in data and data[name] not in harmless:
            message = (
                f"{name} is not supported, because every response is a caption; leave out {name}"
            )
            raise RequestError(400, "unsupported", message)
    try:
        photos, kinds = _photos_of(data)
    except (AttributeError, TypeError, LookupError) as error:
        message = "images or messages are malformed; send them as in the examples at /docs"
        raise RequestError(400, "fields", message) from error
    model = str(data.get("model") or data.get("name", ""))
    names = [*kinds, *(name for name, value in data.items() if value and name not in _READ)]
    ignored = [*islice(filter(_PLAIN.fullmatch, dict.fromkeys(names)), 30)]
    stream = bool(data.get("stream", streams))
    empty = not any(data.get(name) for name in ("prompt", "messages", "images"))
    return ProtocolRequest(data, model or NAME, stream, photos, ignored, empty)


def _photos_of(data: dict[str, Any]) -> tuple[list[Any], list[str]]:
    """Return the photos in a request, and the kinds of its other parts.

    Only the last photos in a chat are returned, because clients repeat earlier messages. Ollama's
    messages have a field ``images``. OpenAI's messages contain images among their parts.
    """
    if found := data.get("images") or data.get("url"):
        return (found if isinstance(found, list) else [found]), []
    photos: list[Any] = []
    kinds: list[str] = []
    for message in reversed(data.get("messages", [])[-MAX_PARTS:]):
        content = message.get("content") or []
        parts = [{"type": "text"}] if isinstance(content, str | Upload) else content[:MAX_PARTS]
        for part in parts:
            if url := part.get("image_url"):
                photos.append(url.get("url") if isinstance(url, dict) else url)
            else:
                kinds.append(str(part.get("type") or "").replace("text", "prompt"))
        photos += message.get("images") or []
        if photos:
            break
    return photos, kinds


def _check_photos(photos: list[Any], most: int) -> None:
    if not 0 < len(photos) <= most:
        allowed = "one photo" if most == 1 else f"1 to {most} photos"
        problem = f"{counted(len(photos), 'photo')}; send {allowed}, in base64 or as data: URLs"
        raise RequestError(413 if photos else 400, "fields", f"the request has {problem}")


# --- responses -----------------------------------------------------------------------------------


class Found(NamedTuple):
    """The results that go into a response."""

    id: str = ""
    text: str = ""
    words: int = 0
    confidence: float | None = None
    keywords: tuple[Keyword, ...] = ()
    """Keywords of the first photo."""
    seconds: float = 0


Parts = list[dict[str, Any]]
"""The JSON object of a response, or the JSON objects of a stream."""


def _ollama(field: Callable[[str], dict[str, Any]], body: ProtocolRequest, found: Found) -> Parts:
    """Return a response for Ollama's clients. ``field`` returns the JSON field for a text."""
    nanoseconds = round(found.seconds * 1e9)
    counts = {"eval_count": found.words, "eval_duration": nanoseconds}
    reason = "stop" if found.id else "load"
    end = {"done": True, "done_reason": reason, "total_duration": nanoseconds, **counts}
    head = {"model": body.model, "created_at": datetime.now(timezone.utc).isoformat()}
    if not body.stream:
        return [head | field(found.text) | end]
    return [head | field(found.text) | {"done": False}, head | field("") | end]


def _openai(body: ProtocolRequest, found: Found) -> Parts:
    kind = "chat.completion.chunk" if body.stream else "chat.completion"
    head = {"id": f"chatcmpl-{found.id}", "object": kind, "created": int(time.time())}
    head["model"] = body.model
    usage = {"completion_tokens": found.words, "total_tokens": found.words}
    end = {"usage": {"prompt_tokens": 0, **usage}}
    message = {"role": "assistant", "content": found.text}

    def choice(reason: str | None, **content: Any) -> dict[str, Any]:
        return {"choices": [{"index": 0, **content, "logprobs": None, "finish_reason": reason}]}

    if not body.stream:
        return [head | choice("stop", message={**message, "refusal": None}) | end]
    return [head | choice(None, delta=message), head | choice("stop", delta={}) | end]


def _photoprism(body: ProtocolRequest, found: Found) -> Parts:
    caption: dict[str, Any] = {"text": found.text}
    if found.confidence is not None:
        caption["confidence"] = round(found.confidence, 4)
    return _vision(body, found, "caption", caption)


def _labels(body: ProtocolRequest, found: Found) -> Parts:
    labels = [
        {"name": one.word, "source": "image", "confidence": p, "topicality": p}
        for one in found.keywords
        for p in [round(one.probability, 4)]
    ]
    return _vision(body, found, "labels", labels)


def _vision(body: ProtocolRequest, found: Found, kind: str, result: Any) -> Parts:
    """Return a response for PhotoPrism with a result of a kind: caption or labels."""
    model = {"type": kind, "name": body.model, "version": body.data.get("version") or "latest"}
    given = body.data.get("id")
    name = given if given and isinstance(given, str) else found.id
    head = {"id": name, "code": 200, "model": model}
    return [{**head, "result": {kind: result}}]


def _shown(_: ProtocolRequest, __: Found) -> Parts:
    """Return a description of the model for Ollama's clients."""
    info = {"details": _DETAILS, "model_info": {"general.architecture": NAME}}
    return [{**info, "template": "", "capabilities": ["completion", "vision"]}]


class Protocol(NamedTuple):
    """An endpoint of a protocol. Its requests are JSON."""

    summary: str
    example: dict[str, Any]
    parts: Callable[[ProtocolRequest, Found], Parts]
    streams: str | None = None
    """Content type of streams, or None if the endpoint does not support streams."""

    def encode(self, body: ProtocolRequest, found: Found) -> tuple[bytes, str]:
        """Return the body of a response, and its content type."""
        lines = [*map(json_line, self.parts(body, found))]
        if not body.stream or self.streams is None:
            return lines[0], JSON
        if self.streams == NDJSON:
            return b"\n".join(lines) + b"\n", NDJSON
        return b"".join(b"data: " + line + b"\n\n" for line in [*lines, b"[DONE]"]), SSE


_DETAILS = {"format": NAME, "family": NAME, "families": [NAME]}
_GENERATE = partial(_ollama, lambda text: {"response": text})
_CHAT = partial(_ollama, lambda text: {"message": {"role": "assistant", "content": text}})
_IMAGES: dict[str, Any] = {"images": [EXAMPLE_PHOTO]}
_URL = f"data:image/png;base64,{EXAMPLE_PHOTO}"
_PARTS = [{"type": "image_url", "image_url": {"url": _URL}}]
PROTOCOLS = {
    GENERATE: Protocol("Caption photos for Ollama's clients", _IMAGES, _GENERATE, NDJSON),
    CHAT: Protocol(
        "Caption photos in a chat of Ollama's clients", {"messages": [_IMAGES]}, _CHAT, NDJSON
    ),
    SHOW: Protocol("Describe the model for Ollama's clients", {"model": NAME}, _shown),
    OPENAI: Protocol(
        "Caption photos for OpenAI's clients", {"messages": [{"content": _PARTS}]}, _openai, SSE
    ),
    CAPTION: Protocol("Caption a photo for PhotoPrism", {"images": [_URL]}, _photoprism),
    LABELS: Protocol("Label a photo for PhotoPrism", {"images": [_URL]}, _labels),
}


# --- endpoints -----------------------------------------------------------------------------------


def _lists(names: list[str], digest: str) -> dict[str, dict[str, Any]]:
    """Return the responses to GET requests by path: lists of models, and the version."""
    now = datetime.now(timezone.utc)
    ollama = {"modified_at": now.isoformat(), "size": 0, "digest": digest, "details": _DETAILS}
    openai = {"object": "model", "created": int(now.timestamp()), "owned_by": NAME}
    tags = [name if ":" in name else f"{name}:latest" for name in names]
    models = [{"name": tag, "model": tag, **ollama} for tag in tags]
    loaded = {"expires_at": "9999-12-31T23:59:59Z", "size_vram": 0}
    return {
        "/api/tags": {"models": models},
        "/api/ps": {"models": [one | loaded for one in models]},
        MODELS: {"object": "list", "data": [{"id": name, **openai} for name in names]},
        "/api/version": {"version": __version__},
    }


async def _caption(service: Service, request: Request, photos: list[Any], wanted: Any) -> Found:
    client, limits, start = request.state.client, service.options, time.monotonic()
    _check_photos(photos, min(limits.max_batch, limits.rate_limit or limits.max_batch))
    captions: list[Caption] = []

    async def caption_all() -> None:
        for number, photo in enumerate(photos):
            if number:
                request.state.count_photo()
            upload = from_base64(photo, limits.max_bytes)
            if upload.error:
                raise upload.error
            decoded = await service.decode(client, upload)
            captions.append((await service.caption_photo(client, decoded, wanted))[0])

    await service.captioned(caption_all(), wanted.cost, request, len(photos))
    text = "\n".join(one.text for one in captions)
    words = sum(len(one.words) for one in captions)
    confidence = captions[0].confidence if len(captions) == 1 else None
    seconds, keywords = time.monotonic() - start, captions[0].keywords or ()
    return Found(request.state.request_id, text, words, confidence, keywords, seconds)


def add_protocols(app: FastAPI, service: Service, checks: list[Any], model_name: str) -> None:
    """Add the endpoints of all protocols.

    Args:
        app: The application.
        service: The service that captions.
        checks: Dependencies of the endpoints, from `security.checks`.
        model_name: Name of the model, as in `create_app`.
    """
    folder, digest = re.sub("@[0-9a-f]+", "", model_name), model_name.partition("@")[2]
    styles = service.model.stored.vocabulary.styles
    names = [*dict.fromkeys((NAME, *(f"{NAME}:{style}" for style in styles[1:]), folder))]
    query = query_model(service.options, WordOptions)

    def unknown(name: str) -> RequestError:
        message = f"the model {shortened(repr(name))} was not found; use {either(names)}"
        return RequestError(404, "model", message)

    def style_of(body: ProtocolRequest) -> str | None:
        """Return the style that a request selects, or None for the default style."""
        name, _, tag = body.model.partition(":")
        tag = tag or str(body.data.get("version") or "latest")  # PhotoPrism sends the tag here
        if name not in (NAME, folder) or tag not in ("latest", *styles):
            raise unknown(name if tag == "latest" else f"{name}:{tag}")
        return tag if tag in styles else None

    def add(path: str, protocol: Protocol) -> None:
        async def endpoint(request: Request) -> Response:
            memory = check_headers(request, service.options, several=True, kind=JSON)
            with service.slots(memory, request.state.client):
                reading = read_object(request, service.options, several=True)
                data = await service.received(reading, "the JSON")
                body = read_fields(data, protocol.streams == NDJSON)
                most = MOST_LABELS if path == LABELS else 0
                options = query.model_validate({"style": style_of(body), "keywords": most})
                wanted = service.wanted(options)
                found = Found()
                if path != SHOW and not (body.empty and path in (GENERATE, CHAT)):
                    found = await _caption(service, request, body.photos, wanted)
            content, media_type = protocol.encode(body, found)
            headers = {IGNORED: ", ".join(body.ignored)} if body.ignored else {}
            return Response(content, media_type=media_type, headers=headers)

        content = {JSON: {"schema": {"type": "object"}, "example": protocol.example}}
        app.post(
            path,
            summary=protocol.summary,
            operation_id=path.strip("/").replace("/", "_"),
            dependencies=checks,
            responses=error_responses(path, models=True),
            openapi_extra={"requestBody": {"required": True, "content": content}},
        )(endpoint)

    for path, protocol in PROTOCOLS.items():
        add(path, protocol)
    listed = _lists(names, digest)
    for path, content in listed.items():
        summary = f"{'OpenAI' if path.startswith('/v1/') else 'Ollama'}'s GET {path}"
        errors = error_responses(path, reads=True)
        app.get(path, summary=summary, dependencies=checks, responses=errors)(
            partial(_respond, content)
        )

    # FastAPI would add status 422 for a parameter of the function.
    parameter = {"name": "model", "in": "path", "required": True, "schema": {"type": "string"}}

    @app.get(
        f"{MODELS}/{{model}}",
        summary="OpenAI's GET /v1/models/{model}",
        dependencies=checks,
        responses=error_responses(MODELS, reads=True, models=True),
        openapi_extra={"parameters": [parameter]},
    )
    async def describe(request: Request) -> Response:
        model = request.path_params["model"]
        for one in listed[MODELS]["data"]:
            if one["id"] == model:
                return JSONResponse(one)
        raise unknown(model)


async def _respond(content: dict[str, Any]) -> Response:
    return JSONResponse(content)
