"""Options of a request, and the bodies of responses.

The options are those of the search, of the response and of the picture (`captioner.option_fields`),
limited in range so that one request cannot block the server for the others. Pydantic models of them
check requests and describe them in the OpenAPI schema, as do those of the responses.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated, Any, Literal

from annotated_types import Interval, MaxLen
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, create_model
from starlette.datastructures import QueryParams

from captioner.errors import ConfigError
from captioner.inference.captioner import Captioner
from captioner.option_fields import OptionField, option_fields
from captioner.options import ExplanationMethod, SearchOptions
from captioner.serving.options import Limits
from captioner.serving.request_errors import RequestError, shortened

MAX_WORDS = 10  # in a list of words
MAX_LENGTH = 50  # of a caption that is given (tokens)
MAX_TEXT = 1000  # characters
MAX_OPTIONS = 100  # names and values in a query, form or JSON object

_FREE = ("attention", "attention_gate")  # methods whose maps the decoder computes anyway
_EXPLAINED_WORD = 250  # steps of the decoder that take as long as the maps of a word by the others


# --- options -------------------------------------------------------------------------------------


def query_model(limits: Limits, *options: type) -> type[BaseModel]:
    """Create the pydantic model of the search options and those of other dataclasses."""
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
    """Type and pydantic field of an option; of the search, None is the model's setting."""
    text = field.help.replace(" (0: never scale)", "")  # a request may not
    text += " Defaults to the model's setting." if searches else ""
    kind: Any = Annotated[field.kind, MaxLen(MAX_TEXT) if field.kind is str else bounds]
    if field.is_list:
        text += f" At most {MAX_WORDS}, separated by commas or as repeated parameters."
        split = BeforeValidator(partial(_split, r"[,\s]" if searches else ","))
        kind = Annotated[list[kind], MaxLen(MAX_WORDS), split]
    default = None if searches or field.is_list else field.default
    return kind | None if default is None else kind, Field(default, description=text)


def _split(separator: str, given: Any) -> Any:
    """The words of a text or of a list of texts; anything else as it is."""
    texts = [given] if isinstance(given, str) else given
    if isinstance(texts, list) and all(isinstance(text, str) for text in texts):
        words = (word.strip() for text in texts for word in re.split(separator, text))
        return [word for word in words if word]
    return given


def read_query(given: QueryParams, model: type[BaseModel]) -> BaseModel:
    """The options of a request's query."""
    values: dict[str, list[str]] = {}
    for name, value in given.multi_items():  # getlist would search all of them for each name
        values.setdefault(name, []).append(value)
    return _read(model, values)


def with_fields(query: BaseModel, fields: dict[str, Any]) -> BaseModel:
    """The query parameters together with the options of the body, which must be others."""
    given = query.model_dump(exclude_unset=True, exclude_defaults=True)  # Swagger UI sends defaults
    if twice := sorted(given.keys() & fields.keys()):
        message = f"{', '.join(twice)} is given in the query and in the body; give it once"
        raise RequestError(422, "options", message)
    return _read(type(query), given | fields)


def _read(model: type[BaseModel], given: dict[str, Any]) -> BaseModel:
    """Check options, given as lists of their values; errors are one line."""
    if (count := sum(len(v) if isinstance(v, list) else 1 for v in given.values())) > MAX_OPTIONS:
        message = f"the request has {count} options; give {MAX_OPTIONS} at most"
        raise RequestError(422, "options", message)
    plain = {n: v[0] if isinstance(v, list) and len(v) == 1 else v for n, v in given.items()}
    try:
        return model.model_validate(plain)
    except ValidationError as error:
        first = error.errors()[0]
    name = str(first["loc"][0])
    if first["type"] == "extra_forbidden":
        problem = f"unknown parameter {shortened(name)}; give {', '.join(model.model_fields)}"
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
    """How to caption a photo: search options, or None to explain the given words in a style."""

    options: SearchOptions | None
    words: tuple[str, ...] = ()
    alternatives: int = 0
    style: str | None = None
    method: ExplanationMethod = "attention"

    @property
    def key(self) -> tuple[SearchOptions | None, int, str | None, ExplanationMethod]:
        """Requests with the same key can share a batch."""
        return self.options, self.alternatives, self.style, self.method

    @property
    def cost(self) -> int:
        """Maximum number of decoder steps for a photo; explaining given words counts as 1.

        Every method but attention decodes each caption again, once per word or region.
        """
        words = 0 if self.method in _FREE else _EXPLAINED_WORD
        if self.options is None:
            return 1 + words * len(self.words)
        options = self.options
        samples = options.candidates or options.num_captions
        beams = samples if options.temperature else options.beam_size
        search = beams * (1 + len(options.forced_words)) * options.max_length
        return search + words * options.num_captions * options.max_length


def read_request(model: Captioner, query: BaseModel, max_cost: int) -> CaptionRequest:
    """The request of validated query parameters.

    Raises:
        ConfigError: They contradict each other, or cost too much.
    """
    given = query.model_dump(exclude_none=True)
    changes = {name: given[name] for name in option_fields(SearchOptions) if name in given}
    method = given["method"]
    if method != "attention":
        model.check_method(method)
        if not given.get("attention", True):
            raise ConfigError(f"method {method} computes maps; give attention=true to get them")
    if "words" in given:
        style, options = changes.pop("style", None), None
        if found := ", ".join(changes):
            raise ConfigError(
                f"words cannot be combined with search options ({found}); give one of them"
            )
        words = tuple(model.stored.vocabulary.known_words(given["words"]))
        if len(words) >= MAX_LENGTH:
            raise ConfigError(f"words has {len(words)} words; give {MAX_LENGTH - 1} at most")
    else:
        words, style, options = (), None, model.options(**changes)
    request = CaptionRequest(options, words, given["alternatives"], style, method)
    if request.cost > max_cost:
        hint = "give a smaller num_captions, max_length or beam_size, fewer forced_words"
        raise ConfigError(
            f"the request would cost {request.cost:,} steps of the decoder; the limit is "
            f"{max_cost:,}; {hint}, or method=attention"
        )
    return request


# --- responses -----------------------------------------------------------------------------------


def json_line(body: Mapping[str, Any]) -> bytes:
    """JSON in one line, without its end."""
    return json.dumps(body, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()


class ErrorResponse(BaseModel):
    """Why the request failed, in one line: what was given, what is allowed, what to do."""

    error: str


class AlternativeResult(BaseModel):
    """A candidate word, or `<end>`, and its natural log-probability given the preceding words."""

    word: str
    log_prob: float


class KeywordResult(BaseModel):
    """A word for a thing in the photo, its probability, and if attention is true its map.

    The map has the log-odds of each region, Gh x Gw. The odds of the photo are the mean of the odds
    of its regions.
    """

    word: str
    probability: float
    map: list[list[float]] | None = None


class PhraseResult(BaseModel):
    """A phrase of a caption, and the probability that it is true; null without content words."""

    text: str
    truth: float | None


class LeftOutResult(BaseModel):
    """The words with which the model would have continued, in the form of a caption.

    They are left out because they are not true enough.
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
    - confidence: calibrated probability that the caption is right, 0 to 1; null if the model or the
      search options are not calibrated, or the caption is not the best.
    - unsure: whether the confidence is below min_confidence; only if that is given.
    - doubtful: positions, from 0, of the words with a truth below 0.5; without truth, of those with
      a probability below 0.25.
    - truth: T probabilities that a word is true of the photo, 0 to 1; null for words such as
      articles and prepositions. Only if the model has it.
    - phrases: the words grouped into phrases, each with the least truth of its words; with truth.
    - left_out: the words that were left out after the caption; only if there are any.
    - alternatives: the most probable words at each of the T positions, best first; only if
      alternatives > 0.
    - keywords: words for things in the photo, best first; only of the best caption, and only if
      keywords > 0.

    Only if attention is true:

    - gates: T gate values from 0 (photo ignored for this word) to 1 (fully used).
    - alphas: attention weights, T x Gh x Gw; each map sums to 1. With another method, its maps: of
      attention_gate they sum to the gates, of the others to 1, or 0 if no region supports the word.
    - region: the part of the photo that the maps cover: left, top, right and bottom as fractions of
      its width and height.
    - geometry: where the regions lie, as fractions of the photo's width (x) or height (y): the
      centre of the first region, the distance between neighbouring centres, and where the part
      that the model sees starts and stops.
    - method: how alphas was computed; only if it is not attention.
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
    """The captions of a photo, best first, and its size after EXIF rotation in pixels."""

    width: int
    height: int
    captions: list[CaptionResult]


class BatchResult(BaseModel):
    """The captions of one photo of a batch, or its error.

    Its position in the request, counted from 0, its file name, if the form has one, and the HTTP
    status that it alone would have got.
    """

    index: int
    name: str | None = None
    status: int
    width: int | None = None
    height: int | None = None
    captions: list[CaptionResult] | None = None
    error: str | None = None


class BatchResponse(BaseModel):
    """The results of many photos, in their order."""

    results: list[BatchResult]


# The error responses of the OpenAPI schema.
ERROR_RESPONSES: dict[int | str, dict[str, Any]] = {
    status: {"model": ErrorResponse, "description": text}
    for status, text in {
        400: "Malformed request, form or JSON.",
        401: "No API key, or an unknown one.",
        403: "Cross-origin request.",
        408: "The photo was not received in time.",
        413: "The photo has too many bytes or pixels.",
        415: "Not an image, or an unsupported image format.",
        421: "Unknown host name.",
        422: "A corrupt image, an invalid option, or no field with a photo.",
        429: "Too many requests; retry after Retry-After seconds.",
        500: "Internal error.",
        503: "Timed out, or the server is shutting down; retry after Retry-After seconds.",
    }.items()
}


# --- requests in the OpenAPI schema --------------------------------------------------------------

# A PNG of 16 x 12 pixels.
EXAMPLE_PHOTO = (
    "iVBORw0KGgoAAAANSUhEUgAAABAAAAAMAgMAAAAWidUSAAAADFBMVEXV1dWKiopKSkoVFRUjjGE+AAAAIElEQVR42mP8"
    "z8DAwMTAwMDAshrGYmJgYGBgDEXhYgMAabMCEPW30DAAAAAASUVORK5CYII="
)

_BYTES = {"type": "string", "format": "binary"}
_BASE64 = {"type": "string", "description": "The bytes of an image file in base64, or a data: URL."}
_NOTE = """JPEG, PNG, WebP, GIF, BMP, TIFF, or HEIC if the server has pillow-heif; the format is
detected from the content. Options come before the photos if there are several.

"""


def described_request(options: type[BaseModel], example: str, *, several: bool = False) -> Any:
    """The query and body of an endpoint, for its ``openapi_extra``, with curl's arguments."""
    name, files = ("images", ["a.jpg", "b.jpg"]) if several else ("image", ["photo.jpg"])

    def described(photo: dict[str, str], others: dict[str, Any], examples: list[str]) -> Any:
        items = {"type": "array", "items": photo} if several else photo
        properties = {name: items, **others}
        schema = {"type": "object", "required": [name], "properties": properties}
        return {"schema": schema, "example": {name: examples if several else examples[0]}}

    fields = options.model_json_schema()["properties"]
    content = {
        # Without the options: Swagger UI would fill in values for all of them.
        "multipart/form-data": described(_BYTES, {}, files),
        "application/json": described(_BASE64, fields, [EXAMPLE_PHOTO] * 2),
    }
    if not several:
        content |= {kind: {"schema": _BYTES} for kind in ("application/octet-stream", "image/*")}
    photos = " ".join(f"-F {name}=@{file}" for file in files)
    text = f"{_NOTE}    curl {photos} 'http://localhost:8000{example}'\n"
    query = [
        {"name": name, "in": "query", "description": field["description"], "schema": field}
        for name, field in fields.items()
    ]
    body = {"required": True, "description": text, "content": content}
    return {"parameters": query, "requestBody": body}
