"""Parse the options of a request, from its query and its body.

The options are the fields of `SearchOptions` with their docstrings as descriptions, limited in
range so that one request cannot block the server for the others.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, get_args, get_origin

from annotated_types import Interval
from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model

from captioner.errors import ConfigError
from captioner.inference.captioner import Captioner
from captioner.option_fields import OptionField, allowed_numbers, option_fields
from captioner.options import ExplanationMethod, SearchOptions
from captioner.serving.options import MAX_ALTERNATIVES, MAX_LENGTH, MAX_TEXT, MAX_WORDS, Limits
from captioner.serving.responses import RequestError, shortened

_LISTS = ("forced_words", "banned_words")

_FREE = ("attention", "attention_gate")
"""Methods whose maps the decoder computes anyway."""
_DECODED_AGAIN = 50
"""How often the other methods decode a caption, roughly: its words or the regions of the photo."""


@dataclass(frozen=True)
class CaptionRequest:
    """How to caption a photo."""

    options: SearchOptions | None
    """Search options; None: explain the given words."""
    words: tuple[str, ...] = ()
    """The words to explain, as in the vocabulary."""
    alternatives: int = 0
    """Number of alternatives per position."""
    style: str | None = None
    """Style in which to explain the words; None: the model's default."""
    method: ExplanationMethod = "attention"
    """How the maps are computed."""
    min_confidence: float | None = None
    """Mark captions with a lower confidence as unsure; None: do not."""

    @property
    def key(self) -> tuple[SearchOptions | None, int, str | None, ExplanationMethod]:
        """Requests with the same key can share a batch."""
        return self.options, self.alternatives, self.style, self.method

    @property
    def cost(self) -> int:
        """Maximum number of decoder steps for a photo; explaining given words counts as 1.

        Every method but attention decodes each caption again, once per word or region.
        """
        if self.options is None:
            return 1 if self.method in _FREE else _DECODED_AGAIN * len(self.words)
        options = self.options
        samples = options.candidates or options.num_captions
        beams = samples if options.temperature else options.beam_size
        search = beams * (1 + len(options.forced_words)) * options.max_length
        if self.method in _FREE:
            return search
        return search + _DECODED_AGAIN * options.num_captions * options.max_length


def query_model(
    limits: Limits, name: str = "Query", drawing: Mapping[str, Any] | None = None
) -> type[BaseModel]:
    """Create a pydantic model of the options of an endpoint; unknown options are refused.

    Args:
        limits: The server's limits.
        name: Name of the model.
        drawing: More options, of an endpoint that draws, in place of ``attention``.
    """
    fields: dict[str, Any] = {
        field.name: _parameter(field, limits) for field in option_fields(SearchOptions).values()
    }
    text = "Explain this caption instead of searching for one."
    fields["words"] = (str | None, Field(None, description=text, max_length=MAX_TEXT))
    if drawing is None:
        text = "Return attention: gates, alphas and the crop box that the model sees."
        fields["attention"] = (bool, Field(False, description=text))
    text = "Number of most probable words to return per position."
    fields["alternatives"] = (int, Field(0, ge=0, le=MAX_ALTERNATIVES, description=text))
    text = (
        "How the maps are computed: the attention, the attention times the gate, or the effect of "
        "each region on the word's log-probability."
    )
    if drawing is None:
        text += " Needs attention."
    fields["method"] = (ExplanationMethod, Field("attention", description=text))
    if drawing is None:
        text = "Return unsure: whether the confidence of each caption is lower than this."
        fields["min_confidence"] = (float | None, Field(None, ge=0, le=1, description=text))
    fields |= drawing or {}
    query: type[BaseModel] = create_model(name, __config__=ConfigDict(extra="forbid"), **fields)
    return query


def with_fields(query: BaseModel, fields: Mapping[str, Any]) -> BaseModel:
    """The query parameters together with the options of the body.

    Raises:
        RequestError: An option of the body is unknown, invalid, or in the query as well.
    """
    if not fields:
        return query
    defaults = {name: field.default for name, field in type(query).model_fields.items()}
    # Swagger UI puts defaults into the query.
    changed = {name for name in query.model_fields_set if getattr(query, name) != defaults[name]}
    twice = sorted(changed & set(fields))
    if twice:
        message = f"{', '.join(twice)} is given in the query and in the body; give it once"
        raise RequestError(422, "options", message)
    model = type(query)
    given = query.model_dump(exclude_unset=True)
    for name, value in fields.items():
        repeated = name in model.model_fields and is_list(model, name)
        given[name] = [value] if repeated and not isinstance(value, list) else value
    try:
        return model.model_validate(given)
    except ValidationError as error:
        # FastAPI's errors begin with where the value was found.
        found = [dict(one, loc=("body", *one["loc"])) for one in error.errors()]
        raise RequestError(422, "options", query_error(found, model)) from error


def is_list(model: type[BaseModel], name: str) -> bool:
    """Whether an option takes several values."""
    annotation = model.model_fields[name].annotation
    return list in {get_origin(part) for part in (annotation, *get_args(annotation))}


def _parameter(field: OptionField, limits: Limits) -> tuple[Any, Any]:
    """Type and pydantic field of a search option, None by default."""
    if field.name in _LISTS:
        text = f"{field.help} At most {MAX_WORDS}, separated by commas or as repeated parameters."
        word = Annotated[str, Field(max_length=MAX_TEXT)]
        return list[word] | None, Field(None, description=text)
    text = f"{field.help} Defaults to the model's setting."
    if field.type is str:
        return str | None, Field(None, description=text, max_length=MAX_TEXT)
    if field.type is bool:
        return bool | None, Field(None, description=text)
    low, most = field.bounds, _maximum(limits).get(field.name, field.bounds.le)
    return field.type | None, Field(None, ge=low.ge, gt=low.gt, le=most, description=text)


def _maximum(limits: Limits) -> dict[str, int]:
    """Upper bounds that only the server has, to limit the cost of a request."""
    return {
        "beam_size": limits.max_beam,
        "num_captions": limits.max_beam,
        "candidates": limits.max_beam,
        "min_length": MAX_LENGTH - 1,
        "max_length": MAX_LENGTH,
        "temperature": 100,
        "top_k": 1_000_000,
        "seed": 2**32 - 1,
        "beam_groups": limits.max_beam,
        "diversity": 100,
        "block_ngrams": MAX_LENGTH,
    }


def read_request(model: Captioner, query: BaseModel) -> CaptionRequest:
    """Convert validated query parameters to a request.

    Raises:
        ConfigError: Parameters contradict each other, or a word is not in the vocabulary.
    """
    given = query.model_dump(exclude_none=True)
    changes = {name: given[name] for name in option_fields(SearchOptions) if name in given}
    alternatives, method = given["alternatives"], given["method"]
    least = given.get("min_confidence")
    if method != "attention":
        model.check_method(method)
        if not given.get("attention", True):
            raise ConfigError(f"method {method} computes maps; give attention=true to get them")
    if "words" in given:
        style = changes.pop("style", None)
        if changes:
            raise ConfigError(
                f"words cannot be combined with search options ({', '.join(changes)}); give one "
                "or the other"
            )
        words = _known_words(model, given["words"])
        return CaptionRequest(None, words, alternatives, style, method, least)
    for name in _LISTS:
        if name in changes:
            changes[name] = _split_words(name, changes[name])
    options = model.options(**changes)
    return CaptionRequest(options, alternatives=alternatives, method=method, min_confidence=least)


def _known_words(model: Captioner, text: str) -> tuple[str, ...]:
    words = tuple(model.stored.vocabulary.known_words(text))
    if len(words) >= MAX_LENGTH:
        raise ConfigError(f"words has {len(words)} words; give {MAX_LENGTH - 1} at most")
    return words


def _split_words(name: str, given: Iterable[str]) -> list[str]:
    words = [word for text in given for word in text.replace(",", " ").split()]
    if len(words) > MAX_WORDS:
        raise ConfigError(f"{name} has {len(words)} words; give {MAX_WORDS} at most")
    return words


def query_error(errors: Iterable[Mapping[str, Any]], query: type[BaseModel]) -> str:
    """Summarize pydantic's validation errors in one line."""
    errors = list(errors)
    unknown = [str(error["loc"][-1]) for error in errors if error["type"] == "extra_forbidden"]
    if unknown:
        known = ", ".join(query.model_fields)
        return f"unknown parameter {shortened(', '.join(unknown))}; give {known}"
    error = errors[0]
    name = next((str(part) for part in error["loc"][1:] if part in query.model_fields), "query")
    return f"{name} is {shortened(error.get('input'))}; give {_allowed(name, error, query)}"


def _allowed(name: str, error: Mapping[str, Any], query: type[BaseModel]) -> str:
    if error["type"].startswith("bool"):
        return "true or false"
    if error["type"] == "literal_error":
        return str(error["ctx"]["expected"]).replace("'", "")
    if error["type"] == "string_too_long":
        return f"{error['ctx']['max_length']} characters at most"
    if error["type"] == "string_type":
        return "a text"
    schema = query.model_json_schema()["properties"].get(name, {})
    numbers = next((one for one in schema.get("anyOf", [schema]) if "maximum" in one), None)
    if numbers is None:
        return "something else"
    kind = int if numbers["type"] == "integer" else float
    low = {"ge": numbers.get("minimum"), "gt": numbers.get("exclusiveMinimum")}
    return allowed_numbers(kind, Interval(**low, le=numbers["maximum"]))
