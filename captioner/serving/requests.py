"""Parse the query parameters of a caption request.

The parameters are the fields of `SearchOptions` with their docstrings as descriptions, limited in
range so that one request cannot block the server for the others.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from annotated_types import Interval
from pydantic import BaseModel, ConfigDict, Field, create_model

from captioner.api import Captioner
from captioner.config import SearchOptions
from captioner.errors import ConfigError
from captioner.option_fields import OptionField, allowed_numbers, option_fields
from captioner.serving.limits import MAX_ALTERNATIVES, MAX_LENGTH, MAX_TEXT, MAX_WORDS, Limits

_LISTS = ("forced_words", "banned_words")


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
    min_confidence: float | None = None
    """Mark captions with a lower confidence as unsure; None: do not."""

    @property
    def key(self) -> tuple[SearchOptions | None, int, str | None]:
        """Requests with the same key can share a batch."""
        return self.options, self.alternatives, self.style

    @property
    def cost(self) -> int:
        """Maximum number of decoder steps for a photo; explaining given words counts as 1."""
        if self.options is None:
            return 1
        options = self.options
        beams = options.num_captions if options.temperature else options.beam_size
        return beams * (1 + len(options.forced_words)) * options.max_length


def query_model(limits: Limits) -> type[BaseModel]:
    """Create a pydantic model of the query parameters; unknown parameters are refused."""
    fields: dict[str, Any] = {
        field.name: _parameter(field, limits) for field in option_fields(SearchOptions).values()
    }
    text = "Explain this caption instead of searching for one."
    fields["words"] = (str | None, Field(None, description=text, max_length=MAX_TEXT))
    text = "Return attention: gates, alphas and the crop box that the model sees."
    fields["attention"] = (bool, Field(False, description=text))
    text = "Number of most probable words to return per position."
    fields["alternatives"] = (int, Field(0, ge=0, le=MAX_ALTERNATIVES, description=text))
    text = "Return unsure: whether the confidence of each caption is lower than this."
    fields["min_confidence"] = (float | None, Field(None, ge=0, le=1, description=text))
    query: type[BaseModel] = create_model("Query", __config__=ConfigDict(extra="forbid"), **fields)
    return query


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
    alternatives = given["alternatives"]
    if "words" in given:
        style = changes.pop("style", None)
        if changes:
            raise ConfigError(
                f"words cannot be combined with search options ({', '.join(changes)}); give one "
                "or the other"
            )
        words = _known_words(model, given["words"])
        return CaptionRequest(None, words, alternatives, style, given.get("min_confidence"))
    for name in _LISTS:
        if name in changes:
            changes[name] = _split_words(name, changes[name])
    return CaptionRequest(
        model.options(**changes),
        alternatives=alternatives,
        min_confidence=given.get("min_confidence"),
    )


def _known_words(model: Captioner, text: str) -> tuple[str, ...]:
    words = tuple(model.known_words(text))
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
        return f"unknown parameter {_short(', '.join(unknown))}; give {known}"
    error = errors[0]
    name = next((str(part) for part in error["loc"][1:] if part in query.model_fields), "query")
    return f"{name} is {_short(error.get('input'))}; give {_allowed(name, error, query)}"


def _allowed(name: str, error: Mapping[str, Any], query: type[BaseModel]) -> str:
    if error["type"].startswith("bool"):
        return "true or false"
    if error["type"] == "string_too_long":
        return f"{error['ctx']['max_length']} characters at most"
    schema = query.model_json_schema()["properties"].get(name, {})
    numbers = next((one for one in schema.get("anyOf", [schema]) if "maximum" in one), None)
    if numbers is None:
        return "something else"
    kind = int if numbers["type"] == "integer" else float
    low = {"ge": numbers.get("minimum"), "gt": numbers.get("exclusiveMinimum")}
    return allowed_numbers(kind, Interval(**low, le=numbers["maximum"]))


def _short(value: object) -> str:
    """A value shortened to fit on one line."""
    text = str(value) if str(value).isprintable() else repr(value)
    return text if len(text) <= 60 else f"{text[:60]}…"
