"""The description of the API at ``/openapi.json``, ``/docs`` and ``/redoc``.

Pydantic models describe requests and responses. `requests` builds the models of the options.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from importlib.resources import files
from typing import Any, Literal

from fastapi import FastAPI, Request
from fastapi.openapi.docs import get_redoc_html, get_swagger_ui_html
from fastapi.responses import JSONResponse, Response
from pydantic import BaseModel

from captioner.drawing import pages
from captioner.serving.request_errors import OPENAI, PHOTOPRISM

# --- responses -----------------------------------------------------------------------------------


def json_line(body: Mapping[str, Any]) -> bytes:
    """Encode data as JSON on one line, without a line end."""
    return json.dumps(body, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()


class ErrorResponse(BaseModel):
    """The reason why the request failed, and a remedy, in one line."""

    error: str


class PhotoPrismError(BaseModel):
    """An error for PhotoPrism's clients: the HTTP status, and one line with reason and remedy."""

    code: int
    error: str


class OpenAIErrorDetails(BaseModel):
    """The fields of an error for OpenAI's clients. message is one line with reason and remedy."""

    message: str
    type: Literal["invalid_request_error", "server_error"]
    param: None
    code: str


class OpenAIError(BaseModel):
    """An error for OpenAI's clients."""

    error: OpenAIErrorDetails


class AlternativeResult(BaseModel):
    """A candidate word, or `<end>`, and its natural log-probability given the preceding words."""

    word: str
    log_prob: float


class KeywordResult(BaseModel):
    """A word for a thing in the photo, with its probability, and its map if attention is true.

    The map contains the log-odds of each region, Gh x Gw. The odds of the whole photo are the mean
    of the odds of its regions.
    """

    word: str
    probability: float
    map: list[list[float]] | None = None


class PhraseResult(BaseModel):
    """A phrase of a caption, and the probability that it is true, or null without content words."""

    text: str
    truth: float | None


class LeftOutResult(BaseModel):
    """The words with which the model would have continued the caption.

    They are left out because they are probably not true of the photo.
    """

    text: str
    words: list[str]
    log_probs: list[float]
    truth: list[float | None]
    phrases: list[PhraseResult]
    gates: list[float] | None = None
    alphas: list[list[list[float]]] | None = None


class CaptionResult(BaseModel):
    """A caption of T words with attention over a grid of Gh x Gw regions.

    - words: the T words of the text, as in the vocabulary.
    - log_prob: natural log-probability of the caption, including its end token.
    - log_probs: T natural log-probabilities, one per word, given the preceding words.
    - confidence: calibrated probability that the caption is right, 0 to 1. It is null if the model
      or the search options are not calibrated, or if the caption is not the best one.
    - unsure: true if the confidence is below min_confidence. Present only with min_confidence.
    - doubtful: positions, from 0, of the words with a truth below 0.5. Without truth values, it
      lists the words with a probability below 0.25.
    - truth: T probabilities (0 to 1) that a word is true of the photo. It is null for words such as
      articles and prepositions. Present only if the model can compute it, as the shipped model can.
    - phrases: the words grouped into phrases, each with the product of its words' truths. Present
      together with truth.
    - left_out: words that were left out at the end of the caption. Present only if words were left
      out.
    - alternatives: the most probable words at each of the T positions, best first. Present only if
      alternatives > 0.
    - keywords: words for things in the photo, best first. Present only for the best caption, and
      only if keywords > 0.

    Present only if attention is true:

    - gates: T gate values from 0 (photo ignored for this word) to 1 (fully used).
    - alphas: attention weights, T x Gh x Gw, or the maps of a different method. Each map sums to 1.
      Maps of attention_gate sum to the gates. With gradients or occlusion, a map sums to 0 if no
      region supports the word.
    - region: the part of the photo that the maps cover: left, top, right and bottom as fractions of
      its width and height.
    - geometry: the position of the regions, as fractions of the photo's width (x) or height (y).
      first is the centre of the first region, and pitch is the distance between neighbouring
      centres. start and stop are the limits of the part that the model sees.
    - method: the method that computed alphas. Present only if it is not attention.
    """

    text: str
    words: list[str]
    log_prob: float
    log_probs: list[float]
    confidence: float | None
    unsure: bool | None = None
    doubtful: list[int]
    truth: list[float | None] | None = None
    phrases: list[PhraseResult] | None = None
    left_out: LeftOutResult | None = None
    alternatives: list[list[AlternativeResult]] | None = None
    keywords: list[KeywordResult] | None = None
    gates: list[float] | None = None
    alphas: list[list[list[float]]] | None = None
    region: tuple[float, float, float, float] | None = None
    geometry: (
        dict[Literal["x", "y"], dict[Literal["first", "pitch", "start", "stop"], float]] | None
    ) = None
    method: str | None = None


class CaptionsResponse(BaseModel):
    """The captions of a photo, best first, and its size in pixels after EXIF rotation."""

    width: int
    height: int
    captions: list[CaptionResult]


class BatchResult(BaseModel):
    """The captions or the error of one photo in a batch.

    index is the photo's position in the request, counted from 0. name is its file name, if the form
    contains one. status is the HTTP status that the photo would get in a request of its own.
    """

    index: int
    name: str | None = None
    status: int
    width: int | None = None
    height: int | None = None
    captions: list[CaptionResult] | None = None
    error: str | None = None


class BatchResponse(BaseModel):
    """The results for many photos, in the order of the photos."""

    results: list[BatchResult]


_ERRORS = {
    400: "Malformed request, form or JSON.",
    401: "The API key is missing or unknown.",
    403: "Cross-origin request.",
    404: "The model is unknown.",
    408: "The photo was not received in time.",
    413: "The request has too many photos, or a photo has too many bytes or pixels.",
    415: "The file is not an image, or its format is not supported.",
    421: "Unknown host name.",
    422: "The image is corrupt, an option is invalid, or the photo is missing.",
    429: "Too many requests; retry after Retry-After seconds.",
    500: "Internal error.",
    503: "Timed out, or the server is shutting down; retry after Retry-After seconds.",
}
_READING = (400, 401, 421, 429, 500)  # statuses of errors of GET requests


def error_responses(path: str, *, reads: bool = False, models: bool = False) -> Any:
    """Return the error responses of an endpoint, for the OpenAPI schema.

    Args:
        path: Path of the endpoint. It decides the format of the errors (see `error_body`).
        reads: True for GET requests, which have no body.
        models: True if the request names a model.
    """
    if path.startswith(PHOTOPRISM):
        model: type[BaseModel] = PhotoPrismError
    else:
        model = OpenAIError if path.startswith(OPENAI) else ErrorResponse
    statuses = {*(_READING if reads else _ERRORS)} - {404} | ({404} if models else set())
    return {
        status: {"model": model, "description": text}
        for status, text in _ERRORS.items()
        if status in statuses
    }


# --- requests in the OpenAPI schema --------------------------------------------------------------

# A PNG of 16 x 12 pixels.
EXAMPLE_PHOTO = (
    "iVBORw0KGgoAAAANSUhEUgAAABAAAAAMAgMAAAAWidUSAAAADFBMVEXV1dWKiopKSkoVFRUjjGE+AAAAIElEQVR42mP8"
    "z8DAwMTAwMDAshrGYmJgYGBgDEXhYgMAabMCEPW30DAAAAAASUVORK5CYII="
)

_BYTES = {"type": "string", "format": "binary"}
_BASE64 = {"type": "string", "description": "The bytes of an image file in base64, or a data: URL."}
_NOTE = """A photo is a JPEG, PNG, WebP, GIF, BMP or TIFF file, or a HEIC file if the server has
pillow-heif. The server detects the format from the content. In a form, put the options before the
photos.

"""


def described_request(options: type[BaseModel], example: str, *, several: bool = False) -> Any:
    """Return the ``openapi_extra`` of an endpoint: its query and body, with a curl example."""
    name, files = ("images", ["a.jpg", "b.jpg"]) if several else ("image", ["photo.jpg"])

    def described(photo: dict[str, str], others: dict[str, Any], examples: list[str]) -> Any:
        items = {"type": "array", "items": photo} if several else photo
        properties = {name: items, **others}
        schema = {"type": "object", "required": [name], "properties": properties}
        return {"schema": schema, "example": {name: examples if several else examples[0]}}

    fields = options.model_json_schema()["properties"]
    content = {
        # Options are not listed here, because Swagger UI would fill in values for all of them.
        "multipart/form-data": described(_BYTES, {}, files),
        "application/json": described(_BASE64, fields, [EXAMPLE_PHOTO] * 2),
    }
    content |= {kind: {"schema": _BYTES} for kind in ("application/octet-stream", "image/*")}
    photos = " ".join(f"-F {name}=@{file}" for file in files)
    text = f"{_NOTE}    curl {photos} 'http://localhost:8000{example}'\n"
    query = [
        {"name": name, "in": "query", "description": field["description"], "schema": field}
        for name, field in fields.items()
    ]
    body = {"required": True, "description": text, "content": content}
    return {"parameters": query, "requestBody": body}


# --- pages ---------------------------------------------------------------------------------------


def add_api_pages(app: FastAPI, *, keys: bool) -> None:
    """Add ``/openapi.json``, ``/docs`` (Swagger UI) and ``/redoc``. All work without a network.

    The example commands show the address that was requested and, with ``keys``, a header for an API
    key. FastAPI's own pages load scripts from a different host. These pages use the scripts in the
    package fastapi-offline instead. Addresses are relative, so that they also work below a proxy's
    prefix.
    """

    async def described(request: Request) -> Response:
        address = json.dumps(str(request.base_url).rstrip("/"))[1:-1]
        curl = "curl -H 'Authorization: Bearer KEY' " if keys else "curl "
        text = json.dumps(app.openapi()).replace("http://localhost:8000", address)
        prefix = request.scope.get("root_path")
        servers = {"servers": [{"url": prefix}]} if prefix else {}
        return JSONResponse(json.loads(text.replace("curl ", curl)) | servers)

    app.add_route("/openapi.json", described, include_in_schema=False)
    same: dict[str, Any] = {"openapi_url": "openapi.json", "title": "captioner API"}
    js, css, redoc_js = "swagger-ui-bundle.js", "swagger-ui.css", "redoc.standalone.js"
    swagger = get_swagger_ui_html(
        **same,
        swagger_js_url=f"docs/{js}",
        swagger_css_url=f"docs/{css}",
        swagger_favicon_url="data:,",
    )
    redoc = get_redoc_html(
        **same, redoc_js_url=f"docs/{redoc_js}", redoc_favicon_url="data:,", with_google_fonts=False
    )
    for path, response in {"/docs": swagger, "/redoc": redoc}.items():
        html = bytes(response.body).decode()
        scripts = pages.hashes("script", html) if "<script>" in html else ""
        response.headers["Content-Security-Policy"] = (
            f"default-src 'none'; script-src 'self' {scripts}; "
            "style-src 'self' 'unsafe-inline'; worker-src blob:; img-src 'self' data: blob:; "
            "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
        )
        add_file(app, path, response)
    for name, kind in {css: "text/css", js: "text/javascript", redoc_js: "text/javascript"}.items():
        content = (files("fastapi_offline") / "static" / name).read_bytes()
        content = content.replace(b"https://cdn.redoc.ly/redoc/logo-mini.svg", b"data:,")
        headers = {"Cache-Control": "max-age=86400"}
        add_file(app, f"/docs/{name}", Response(content, media_type=kind, headers=headers))


def add_file(app: FastAPI, path: str, response: Response) -> None:
    """Add a page or file that is not part of the API."""

    async def file(_: Any) -> Response:
        return response

    app.add_route(path, file, include_in_schema=False)
