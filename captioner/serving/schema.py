"""Options of a request, and the bodies of responses: captions, or one line that explains an error.

The options are those of the search, of the response and of the picture (`captioner.option_fields`),
limited in range so that one request cannot block the server for the others. Pydantic models of them
check requests and describe them in the OpenAPI schema, as do those of the responses.
"""

from __future__ import annotations

import json
import re
import reprlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated, Any, ClassVar

from annotated_types import Interval
from fastapi.responses import JSONResponse
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, create_model
from starlette.datastructures import QueryParams

from captioner.errors import ConfigError
from captioner.inference.captioner import Captioner
from captioner.option_fields import OptionField, option_fields
from captioner.options import ExplanationMethod, SearchOptions
from captioner.serving.options import Limits

MAX_WORDS = 10  # in a list of words
MAX_LENGTH = 50  # of a caption (tokens)
MAX_TEXT = 1000  # characters
MAX_PANEL = 1280  # pixels

_BEAMS = ("beam_size", "num_captions", "candidates", "beam_groups")
_FREE = ("attention", "attention_gate")  # methods whose maps the decoder computes anyway
_EXPLAINED_WORD = 250  # steps of the decoder that take as long as the maps of a word by the others


# --- errors --------------------------------------------------------------------------------------


class RequestError(Exception):
    """A request that cannot be served: HTTP status, label for the metrics, and a line.

    The line has what was given, what is allowed and what to do. Retry-After is in seconds.
    """

    def __init__(self, status: int, reason: str, message: str, *, retry_after: int = 2) -> None:
        super().__init__(message)
        self.status, self.reason, self.retry_after = status, reason, retry_after

    def response(self, body: Mapping[str, Any] | None = None) -> JSONResponse:
        """The HTTP response; its body is by default ``{"error": line}``."""
        headers = {}
        if self.status in (429, 503):
            headers["Retry-After"] = str(self.retry_after)
        if self.status in (408, 503):  # do not send the next request here
            headers["Connection"] = "close"
        if self.status == 401:
            headers["WWW-Authenticate"] = 'Bearer realm="captioner"'
        return JSONResponse(body or {"error": str(self)}, self.status, headers)


# An unexpected exception; the server's log has its location.
internal_error = partial(RequestError, 500, "mistake", "internal error; see the server log")
# The client disconnected, or the body ended early, which looks the same; the status is nginx's.
_LEFT = "the body is shorter than declared or not valid HTTP, or the client disconnected"
client_closed = partial(RequestError, 499, "left", _LEFT)
closing = partial(RequestError, 503, "closing", "the server is shutting down; try again later")


def shortened(value: object) -> str:
    """A value of a request, shortened to fit into the line of an error."""
    text = value[:61] if isinstance(value, str) else reprlib.repr(value)
    text = text if text.isprintable() else repr(text)
    return text if len(text) <= 60 else f"{text[:60]}…"


# --- options -------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class WordOptions:
    """Options of every endpoint, beside those of the search."""

    words: str | None = None
    """Explain this caption instead of searching for one."""
    alternatives: Annotated[int, Interval(ge=0, le=20)] = 0
    """Number of most probable words to return per position."""
    method: ExplanationMethod = "attention"
    """How the maps are computed: the attention, the attention times the gate, or the effect of each
    region on the word's log-probability."""


@dataclass(frozen=True, kw_only=True)
class ResponseOptions(WordOptions):
    """Options of the endpoints that return JSON."""

    attention: bool = False
    """Return attention: gates, alphas and the crop box that the model sees. The methods other than
    attention need it."""
    min_confidence: Annotated[float, Interval(ge=0, le=1)] | None = None
    """Return unsure: whether the confidence of each caption is lower than this."""


class RequestQuery(BaseModel):
    """The options of an endpoint; see `query_model`."""

    model_config = ConfigDict(extra="forbid")
    known: ClassVar[dict[str, OptionField]] = {}


def query_model(limits: Limits, name: str, *options: type) -> type[RequestQuery]:
    """Create the pydantic model of the search options and those of other dataclasses."""
    most = {  # that only the server has, to limit the cost of a request
        **dict.fromkeys(_BEAMS, limits.max_beam),
        **{"max_length": MAX_LENGTH, "min_length": MAX_LENGTH - 1, "block_ngrams": MAX_LENGTH},
        **{"temperature": 100, "diversity": 100, "top_k": 1_000_000, "seed": 2**32 - 1},
        **{"panel_size": MAX_PANEL, "columns": 50},
    }
    known: dict[str, OptionField] = {}
    fields: dict[str, Any] = {}
    for schema in (SearchOptions, *options):
        for key, field in option_fields(schema).items():
            bounds = replace(field.bounds, lt=None, le=most.get(key, field.bounds.le))
            if key == "panel_size":
                bounds = replace(bounds, ge=32)
            known[key] = replace(field, bounds=bounds)
            fields[key] = _parameter(known[key], searches=schema is SearchOptions)
    query: type[RequestQuery] = create_model(name, __base__=RequestQuery, **fields)
    query.known = known
    return query


def _parameter(field: OptionField, *, searches: bool) -> tuple[Any, Any]:
    """Type and pydantic field of an option; of the search, None is the model's setting."""
    text = field.help.replace(" (0: never scale)", "")  # a request may not
    text += " Defaults to the model's setting." if searches else ""
    if field.is_list:
        text += f" At most {MAX_WORDS}, separated by commas or as repeated parameters."
        words = list[Annotated[str, Field(max_length=MAX_TEXT)]]
        split = BeforeValidator(partial(_split, r"[,\s]" if searches else ","))
        listed: Any = Annotated[words | None, split]
        return listed, Field(None, description=text, max_length=MAX_WORDS)
    limits: dict[str, Any] = {name: getattr(field.bounds, name) for name in ("gt", "ge", "le")}
    if field.kind is str:
        limits = {"max_length": MAX_TEXT}
    default = None if searches else field.default
    kind = field.type | None if searches or field.optional else field.type
    return kind, Field(default, description=text, **limits)


def _split(separator: str, given: Any) -> Any:
    """The words of a text or of a list of texts; anything else as it is."""
    texts = [given] if isinstance(given, str) else given
    if isinstance(texts, list) and all(isinstance(text, str) for text in texts):
        words = (word.strip() for text in texts for word in re.split(separator, text))
        return [word for word in words if word]
    return given


def check_once(given: QueryParams, query: RequestQuery) -> None:
    """Refuse query parameters that are repeated but are not lists, of which one would count."""
    for name in given:
        if (count := len(given.getlist(name))) > 1 and not query.known[name].is_list:
            raise RequestError(422, "options", f"{name} is given {count} times; give it once")


def with_fields(query: RequestQuery, fields: dict[str, Any]) -> RequestQuery:
    """The query parameters together with the options of the body, which must be others."""
    model = type(query)
    given = query.model_dump(exclude_unset=True, exclude_defaults=True)  # Swagger UI sends defaults
    if twice := sorted(given.keys() & fields.keys()):
        message = f"{', '.join(twice)} is given in the query and in the body; give it once"
        raise RequestError(422, "options", message)
    try:
        return model.model_validate(given | fields)
    except ValidationError as error:
        raise RequestError(422, "options", query_error(error.errors(), model)) from error


def query_error(errors: Iterable[Mapping[str, Any]], query: type[RequestQuery]) -> str:
    """Summarize pydantic's validation errors in one line."""
    errors = list(errors)
    unknown = [str(error["loc"][-1]) for error in errors if error["type"] == "extra_forbidden"]
    if unknown:
        return f"unknown parameter {shortened(', '.join(unknown))}; give {', '.join(query.known)}"
    name = next(part for part in errors[0]["loc"] if part in query.known)
    field, allowed = query.known[name], query.known[name].allowed
    if name in _BEAMS:
        allowed += " (the server's --max-beam)"
    if most := errors[0].get("ctx", {}).get("max_length"):
        allowed = f"at most {most} {'words' if field.is_list else 'characters'}"
    return f"{name} is {shortened(errors[0].get('input'))}; give {allowed}"


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


def read_request(model: Captioner, query: RequestQuery, max_cost: int) -> CaptionRequest:
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


class AxisResult(BaseModel):
    """The regions along one axis, as fractions of the photo's width or height.

    The centre of the first region, the distance between the centres of neighbouring regions, and
    where the part that the model sees starts and stops.
    """

    first: float
    pitch: float
    start: float
    stop: float


class GeometryResult(BaseModel):
    """Where the regions lie: (i, j) is centred on y.first + i y.pitch, x.first + j x.pitch."""

    x: AxisResult
    y: AxisResult


class KeywordResult(BaseModel):
    """A word for a thing in the photo, its probability, and if attention is true its map.

    The map has the log-odds of each region, Gh x Gw; their mean is that of the photo.
    """

    word: str
    probability: float
    map: list[list[float]] | None = None


class CaptionResult(BaseModel):
    """A caption of T words with attention over a grid of Gh x Gw regions.

    - words: the T words of the text, as in the vocabulary.
    - log_prob: natural log-probability of the caption, including its end token.
    - log_probs: T natural log-probabilities, one per word, given the preceding words.
    - confidence: calibrated probability that the caption is right, 0 to 1; null if the model or the
      search options are not calibrated, or the caption is not the best.
    - unsure: whether the confidence is below min_confidence; only if that is given.
    - doubtful: positions, from 0, of the words with a probability below 0.25.
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
    - geometry: where the regions lie in the photo.
    - method: how alphas was computed; only if it is not attention.
    """

    text: str
    words: list[str]
    log_prob: float
    log_probs: list[float]
    confidence: float | None
    unsure: bool | None = None
    doubtful: list[int]
    alternatives: list[list[AlternativeResult]] | None = None
    keywords: list[KeywordResult] | None = None
    gates: list[float] | None = None
    alphas: list[list[list[float]]] | None = None
    region: tuple[float, float, float, float] | None = None
    geometry: GeometryResult | None = None
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
