"""Dataclasses of options: what their annotations and docstrings declare, read in one place.

    beam_size: Annotated[int, Ge(1)] = 5
    (then the help, as a docstring under the field)

`option_fields` returns type, bounds, choices, default and help of each field, for parsers, web
forms and documentation. `check_options` applies them in a dataclass's ``__post_init__``.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import types
from numbers import Integral, Real
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin, get_type_hints

from annotated_types import Interval
from docstring_parser import parse_from_object

from captioner.errors import ConfigError, OptionError, either


class OptionField(NamedTuple):
    """One option of a dataclass."""

    name: str
    type: Any
    """The type without its bounds and without None."""
    optional: bool
    """None is allowed too."""
    bounds: Interval
    """Greatest and least value of a number, or of each number in a list."""
    choices: tuple[Any, ...]
    """Allowed values of a ``Literal``; empty: not restricted."""
    default: Any
    help: str

    def allows(self, value: object) -> bool:
        """Whether a value has the right type and lies within the bounds."""
        if value is None:
            return self.optional
        if self.choices:
            return value in self.choices
        if self.type is bool:
            return isinstance(value, bool)
        if self.type in _NUMBERS:
            return self._is_number(value, self.type)
        if self._items in _NUMBERS:
            return isinstance(value, list | tuple) and all(
                self._is_number(item, self._items) for item in value
            )
        return True  # text, and lists of it

    @property
    def _items(self) -> Any:
        """The type of a list's items; None for all other types."""
        return get_args(self.type)[0] if get_origin(self.type) is list else None

    def _is_number(self, value: Any, kind: Any) -> bool:
        right = isinstance(value, _NUMBERS[kind]) and not isinstance(value, bool)
        return right and self._within(value)

    def _within(self, value: Any) -> bool:
        low, high = self.bounds.ge, self.bounds.le
        above, below = self.bounds.gt, self.bounds.lt
        return bool(  # each comparison is false for NaN
            (low is None or value >= low)
            and (above is None or value > above)
            and (high is None or value <= high)
            and (below is None or value < below)
        )

    @property
    def allowed(self) -> str:
        """The allowed values in words, for messages."""
        if self.choices:
            return either(self.choices)
        if self.type is bool:
            return "true or false"
        if self._items in _NUMBERS:
            return f"a list, each entry {allowed_numbers(self._items, self.bounds)}"
        return allowed_numbers(self.type, self.bounds)


_NUMBERS: dict[Any, type] = {int: Integral, float: Real}


def allowed_numbers(kind: type, bounds: Interval) -> str:
    """The numbers within bounds in words, such as ``an integer from 1 to 20``."""
    noun = "an integer" if kind is int else "a number"
    if bounds.lt == math.inf:
        noun, bounds = "a finite number", dataclasses.replace(bounds, lt=None)
    if bounds.ge is not None and bounds.le is not None:
        return f"{noun} from {bounds.ge:,} to {bounds.le:,}"
    signs = {">=": bounds.ge, ">": bounds.gt, "<=": bounds.le, "<": bounds.lt}
    limits = [f"{sign} {limit:,}" for sign, limit in signs.items() if limit is not None]
    return f"{noun} {' and '.join(limits)}".rstrip()


@functools.cache
def option_fields(options: type) -> dict[str, OptionField]:
    """The fields of a dataclass by name, in their order."""
    hints = get_type_hints(options, include_extras=True)
    docs = {entry.arg_name: entry.description for entry in parse_from_object(options).params}
    return {
        field.name: _read(field, hints[field.name], " ".join((docs.get(field.name) or "").split()))
        for field in dataclasses.fields(options)
    }


def _read(field: dataclasses.Field[Any], hint: Any, text: str) -> OptionField:
    optional = get_origin(hint) in (Union, types.UnionType)
    if optional:
        (hint,) = (part for part in get_args(hint) if part is not type(None))
    bounds: dict[str, Any] = {}
    limited = get_args(hint)[0] if get_origin(hint) is list else hint
    if get_origin(limited) is Annotated:
        plain, *limits = get_args(limited)
        hint = plain if limited is hint else types.GenericAlias(list, (plain,))
        for limit in limits:
            bounds |= {n: getattr(limit, n) for n in ("gt", "ge", "lt", "le") if hasattr(limit, n)}
    choices = get_args(hint) if get_origin(hint) is Literal else ()
    return OptionField(field.name, hint, optional, Interval(**bounds), choices, field.default, text)


def check_options(options: Any, section: str = "") -> None:
    """Check every field of a dataclass against its declaration.

    Args:
        options: The dataclass instance.
        section: Its name in a config file, put before the fields' names in messages.

    Raises:
        ConfigError: A value has the wrong type or is out of bounds.
    """
    kind: type = type(options)
    for field in option_fields(kind).values():
        check_option(field, getattr(options, field.name), section)


def check_option(field: OptionField, value: object, section: str = "") -> None:
    """Check one value, as `check_options` does."""
    if field.allows(value):
        return
    if section:
        raise ConfigError(f"{section}.{field.name} is {value!r}; give {field.allowed}")
    raise OptionError(
        f"{{{field.name}}} is {{given!r}}; give {{expected}}", given=value, expected=field.allowed
    )
