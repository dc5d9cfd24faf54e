"""Query parameters become what is asked of the model.

The parameters are the fields of `SearchOptions`, described by its docstrings, within bounds that
keep one request from taking the server from the others.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Annotated, Any

from annotated_types import Interval
from pydantic import BaseModel, ConfigDict, Field, create_model

from captioner.api import Captioner
from captioner.config import SearchOptions
from captioner.errors import ConfigError
from captioner.option_fields import OptionField, allowed_numbers, option_fields
from captioner.serving.batching import Ask
from captioner.serving.limits import MAX_ALTERNATIVES, MAX_LENGTH, MAX_TEXT, MAX_WORDS, Limits

_LISTS = ("forced_words", "banned_words")


def query_model(limits: Limits) -> type[BaseModel]:
    """The query parameters of a caption as a pydantic model; anything else is refused."""
    fields: dict[str, Any] = {
        field.name: _parameter(field, limits) for field in option_fields(SearchOptions).values()
    }
    text = "Your own caption; returned with its attention instead of a generated one."
    fields["words"] = (str | None, Field(None, description=text, max_length=MAX_TEXT))
    text = "Include the attention: maps, gates and the crop box of the photo that the model sees."
    fields["attention"] = (bool, Field(False, description=text))
    text = "Number of most probable words to return per position."
    fields["alternatives"] = (int, Field(0, ge=0, le=MAX_ALTERNATIVES, description=text))
    made: type[BaseModel] = create_model("Query", __config__=ConfigDict(extra="forbid"), **fields)
    return made


def _parameter(field: OptionField, limits: Limits) -> tuple[Any, Any]:
    """Type and bounds of one search option, with the server's upper bound; None by default."""
    if field.name in _LISTS:
        text = f"{field.help} At most {MAX_WORDS}, separated by commas or in repeated parameters."
        word = Annotated[str, Field(max_length=MAX_TEXT)]
        return list[word] | None, Field(None, description=text)
    text = f"{field.help} Default: the model's own."
    if field.type is str:
        return str | None, Field(None, description=text, max_length=MAX_TEXT)
    if field.type is bool:
        return bool | None, Field(None, description=text)
    low, most = field.bounds, _most(limits).get(field.name, field.bounds.le)
    return field.type | None, Field(None, ge=low.ge, gt=low.gt, le=most, description=text)


def _most(limits: Limits) -> dict[str, int]:
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


def read_ask(model: Captioner, query: BaseModel) -> Ask:
    """What is asked of the model.

    Raises:
        ConfigError: The parameters contradict each other, or name words that cannot be used.
    """
    given = query.model_dump(exclude_none=True)
    changes = {name: given[name] for name in option_fields(SearchOptions) if name in given}
    alternatives = given["alternatives"]
    if "words" in given:
        if changes:
            raise ConfigError(
                f"words gives the sentence, {', '.join(changes)} would search for one; give one "
                "of the two"
            )
        return Ask(None, _own_words(model, given["words"]), alternatives)
    for name in _LISTS:
        if name in changes:
            changes[name] = _apart(name, changes[name])
    return Ask(model.options(**changes), alternatives=alternatives)


def _own_words(model: Captioner, text: str) -> tuple[str, ...]:
    words = tuple(model.known_words(text))
    if len(words) >= MAX_LENGTH:
        raise ConfigError(f"words holds {len(words)} words; give {MAX_LENGTH - 1} at most")
    return words


def _apart(name: str, given: Iterable[str]) -> list[str]:
    words = [word for text in given for word in text.replace(",", " ").split()]
    if len(words) > MAX_WORDS:
        raise ConfigError(f"{name} holds {len(words)} words; give {MAX_WORDS} at most")
    return words


def query_problem(problems: Iterable[Mapping[str, Any]], query: type[BaseModel]) -> str:
    """One line about query parameters that pydantic refuses."""
    listed = list(problems)
    unknown = [str(one["loc"][-1]) for one in listed if one["type"] == "extra_forbidden"]
    if unknown:
        known = ", ".join(query.model_fields)
        return f"{_short(', '.join(unknown))}: no such parameter; give {known}"
    problem = listed[0]
    name = next((str(part) for part in problem["loc"][1:] if part in query.model_fields), "query")
    return f"{name} is {_short(problem.get('input'))}; give {_allowed(name, problem, query)}"


def _allowed(name: str, problem: Mapping[str, Any], query: type[BaseModel]) -> str:
    if problem["type"].startswith("bool"):
        return "true or false"
    if problem["type"] == "string_too_long":
        return f"{problem['ctx']['max_length']} characters at most"
    schema = query.model_json_schema()["properties"].get(name, {})
    numbers = next((one for one in schema.get("anyOf", [schema]) if "maximum" in one), None)
    if numbers is None:
        return "something else"
    kind = int if numbers["type"] == "integer" else float
    low = {"ge": numbers.get("minimum"), "gt": numbers.get("exclusiveMinimum")}
    return allowed_numbers(kind, Interval(**low, le=numbers["maximum"]))


def _short(value: object) -> str:
    """What was given, fit for one line."""
    text = str(value) if str(value).isprintable() else repr(value)
    return text if len(text) <= 60 else f"{text[:60]}…"
