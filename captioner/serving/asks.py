"""Query parameters become what is asked of the model.

The parameters are the fields of `SearchOptions`, described by its docstrings, within bounds that
keep one request from taking the server from the others.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Annotated, Any

from docstring_parser import parse_from_object
from pydantic import BaseModel, ConfigDict, Field, create_model

from captioner.api import Captioner
from captioner.config import SearchOptions
from captioner.errors import ConfigError
from captioner.serving.batching import Ask
from captioner.serving.limits import MAX_ALTERNATIVES, MAX_LENGTH, MAX_TEXT, MAX_WORDS, Limits

_SEARCH = [field.name for field in dataclasses.fields(SearchOptions)]
_LISTS = ("forced_words", "banned_words")


def query_model(limits: Limits) -> type[BaseModel]:
    """The query parameters of a caption as a pydantic model; anything else is refused."""
    texts = {entry.arg_name: entry.description for entry in parse_from_object(SearchOptions).params}
    fields: dict[str, Any] = {}
    for field in dataclasses.fields(SearchOptions):
        text = " ".join((texts[field.name] or "").split())
        fields[field.name] = _parameter(field.name, str(field.type), text, limits)
    own = "Own words: the sentence is explained instead of searched for."
    fields["words"] = (str | None, Field(None, description=own, max_length=MAX_TEXT))
    fields["attention"] = (
        bool,
        Field(False, description="Tell gates, alphas and region: where the model looked."),
    )
    fields["alternatives"] = (
        int,
        Field(
            0,
            ge=0,
            le=MAX_ALTERNATIVES,
            description="So many of the most probable words are told at every place.",
        ),
    )
    made: type[BaseModel] = create_model("Query", __config__=ConfigDict(extra="forbid"), **fields)
    return made


def _parameter(name: str, kind: str, text: str, limits: Limits) -> tuple[Any, Any]:
    """Type and bounds of one search option; None where it is not given."""
    if name in _LISTS:
        text += f" Up to {MAX_WORDS}, with commas between, or the parameter more than once."
        word = Annotated[str, Field(max_length=MAX_TEXT)]
        return list[word] | None, Field(None, description=text)
    text += " Not given: the model's own."
    if kind == "bool":
        return bool | None, Field(None, description=text)
    low, high = _bounds(limits)[name]
    bounded = Field(None, ge=low, le=high, description=text)
    return {"int": int, "float": float}[kind] | None, bounded


def _bounds(limits: Limits) -> dict[str, tuple[int, int]]:
    return {
        "beam_size": (1, limits.max_beam),
        "num_captions": (1, limits.max_beam),
        "min_length": (0, MAX_LENGTH - 1),
        "max_length": (1, MAX_LENGTH),
        "length_penalty": (0, 10),
        "temperature": (0, 100),
        "top_k": (0, 1_000_000),
        "top_p": (0, 1),
        "seed": (0, 2**32 - 1),
        "beam_groups": (1, limits.max_beam),
        "diversity": (0, 100),
        "block_ngrams": (0, MAX_LENGTH),
    }


def read_ask(model: Captioner, query: BaseModel) -> Ask:
    """What is asked of the model.

    Raises:
        ConfigError: The parameters contradict each other, or name words that cannot be used.
    """
    given = query.model_dump(exclude_none=True)
    changes = {name: given[name] for name in _SEARCH if name in given}
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
    try:
        return Ask(model.options(**changes), alternatives=alternatives)
    except ConfigError as error:
        raise ConfigError(respelled(str(error))) from error


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


def respelled(message: str) -> str:
    """A message about search options with their names as the query spells them."""
    for name in _SEARCH:
        message = message.replace(name.replace("_", "-"), name)
    return message


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
    kind = "a whole number from" if numbers["type"] == "integer" else "a number from"
    return f"{kind} {numbers['minimum']:g} to {numbers['maximum']:,}"


def _short(value: object) -> str:
    """What was given, fit for one line."""
    text = str(value) if str(value).isprintable() else repr(value)
    return text if len(text) <= 60 else f"{text[:60]}…"
