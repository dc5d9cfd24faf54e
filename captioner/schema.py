"""Functions that read everything about an option from the declaration of a dataclass field.

    @dataclass(kw_only=True)
    class DeviceOptions(Checked):
        \"\"\"Where the model runs.\"\"\"

        batch_size: Annotated[int, Ge(1)] = 32
        \"\"\"Number of photos per batch.\"\"\"

The annotation contains the type, bounds and choices. The docstring under the field is its help
text. `option_fields` reads both for Python, YAML files, the command line
(`captioner.cli.arguments`), HTTP and the tables of the documentation. A `Checked` dataclass checks
its values. `build_options` creates a dataclass from a mapping of setting names to values.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import inspect
import itertools
import math
import operator
import os
import sys
import types
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from annotated_types import Interval

from captioner.errors import ConfigError
from captioner.hints import SEARCH_OPTIONS, SETTINGS, similar
from captioner.messages import either

Options = TypeVar("Options")


@dataclass(frozen=True)
class Shown:
    """The appearance of a field on the command line, if its name and type are not enough."""

    value: str = ""
    """Placeholder for the value in the help."""
    flags: tuple[str, ...] = ()
    """Flags of the option, such as ``("-o", "--output")``. If empty, the only flag is ``--`` with
    the field's name."""
    positional: bool = False
    """True for an argument without a flag."""
    hidden: bool = False
    """True for a field that the command line does not show, because the command sets it."""


@dataclass(frozen=True)
class Untrusted:
    """Limits on the values of an option in input from strangers, to bound the work per photo."""

    request: int | str
    """Largest value in a request to a server, or the name of the server option that sets this
    limit."""
    model: int | None = None
    """Largest default value in a model folder, because such a folder may come from a stranger."""


File = Annotated[str, Shown("FILE")]
Folder = Annotated[str, Shown("FOLDER")]
ModelName = Annotated[str, Shown("MODEL")]


@dataclass(frozen=True)
class OptionField:
    """An option, which is declared as a field of a dataclass."""

    name: str
    type: Any
    """The type of the field without bounds and without None."""
    is_list: bool
    """True if the option takes several values."""
    kind: Any
    """The type of one value, or of one entry of a list."""
    optional: bool
    """True if None is also allowed."""
    bounds: Interval
    """Smallest and largest allowed value of a number, or of each number in a list."""
    choices: tuple[Any, ...]
    """Allowed values of a ``Literal``, or of the entries of a list. Empty for other types."""
    default: Any
    """The default value. For a required field, it is None (see ``required``)."""
    required: bool
    shown: Shown
    untrusted: Untrusted | None
    marks: tuple[Any, ...]
    """All entries of the annotation other than the type, such as ``Role.SAMPLING``."""
    owner: type
    """The dataclass that declares the field."""

    @property
    def help(self) -> str:
        """The docstring under the field, on one line, or "" if the source files are missing."""
        return _field_docs(self.owner).get(self.name, "")

    def allows(self, value: object) -> bool:
        """Return whether a value has the right type and is within the bounds."""
        if value is None:
            return self.optional
        if self.is_list:
            return isinstance(value, list | tuple) and all(map(self._allows_one, value))
        return self._allows_one(value)

    def _allows_one(self, value: Any) -> bool:
        if self.choices:
            return value in self.choices
        if not isinstance(value, _ABSTRACT.get(self.kind, object)):
            return False
        if self.kind in (int, float):
            if isinstance(value, bool):
                return False
            for name, holds in _BOUNDS.items():
                limit = getattr(self.bounds, name)
                if limit is not None and not holds(value, limit):  # NaN is never within bounds
                    return False
        return True

    @property
    def allowed(self) -> str:
        """The allowed values in words, for messages."""
        entry = self.allowed_entry
        return f"a list in which each entry is {entry}" if self.is_list else entry

    @property
    def allowed_entry(self) -> str:
        """The allowed values in words, or for a list, the allowed values of one entry."""
        if self.choices:
            return either(self.choices)
        if self.kind in (int, float):
            return allowed_numbers(self.kind, self.bounds)
        return {bool: "true or false", str: "text"}.get(self.kind, "a mapping of settings")


_ABSTRACT: dict[Any, Any] = {int: Integral, float: Real, bool: bool, str: str}
_BOUNDS = {"ge": operator.ge, "gt": operator.gt, "le": operator.le, "lt": operator.lt}


def allowed_numbers(kind: type, bounds: Interval) -> str:
    """Describe the allowed numbers in words, such as ``an integer from 1 to 20``."""
    noun = "an integer" if kind is int else "a number"
    if bounds.lt == math.inf:
        noun, bounds = "a finite number", dataclasses.replace(bounds, lt=None)
    if bounds.ge is not None and bounds.le is not None:
        return f"{noun} from {bounds.ge:,} to {bounds.le:,}"
    signs = {">=": bounds.ge, ">": bounds.gt, "<=": bounds.le, "<": bounds.lt}
    limits = [f"{sign} {limit:,}" for sign, limit in signs.items() if limit is not None]
    return f"{noun} {' and '.join(limits)}".rstrip()


# --- reading declarations ------------------------------------------------------------------------


@functools.cache
def option_fields(options: type) -> dict[str, OptionField]:
    """Return the fields of a dataclass by name, in the order of their declaration."""
    hints = get_type_hints(options, include_extras=True)
    owners = {
        name: base for base in reversed(options.__mro__) for name in inspect.get_annotations(base)
    }
    return {
        field.name: _read(field, hints[field.name], owners[field.name])
        for field in dataclasses.fields(options)
    }


def _read(field: dataclasses.Field[Any], hint: Any, owner: type) -> OptionField:
    marks: list[Any] = []
    optional = False
    while True:  # Annotated[X | None, ...] and Annotated[X, ...] | None are both written
        if get_origin(hint) is Annotated:
            hint, *found = get_args(hint)
            marks += found
        elif get_origin(hint) in (Union, types.UnionType):
            optional = True
            [hint] = [part for part in get_args(hint) if part is not type(None)]
        else:
            break
    is_list, kind = get_origin(hint) in (list, tuple), hint
    if is_list:
        kind, *rest = get_args(hint)
        if get_origin(kind) is Annotated:
            kind, *found = get_args(kind)
            marks += found
        hint = types.GenericAlias(get_origin(hint), (kind, *rest))
    bounds: dict[str, Any] = {}
    by_type: dict[type, Any] = {}
    for mark in marks:
        by_type[type(mark)] = mark
        for name in _BOUNDS:
            if (limit := getattr(mark, name, None)) is not None:
                bounds[name] = limit
    made, missing = field.default_factory, dataclasses.MISSING
    default = None if field.default is missing else field.default
    return OptionField(
        name=field.name,
        type=hint,
        is_list=is_list,
        kind=kind,
        optional=optional,
        bounds=Interval(**bounds),
        choices=get_args(kind) if get_origin(kind) is Literal else (),
        default=default if made is missing else made(),
        required=field.default is missing and made is missing,
        shown=by_type.get(Shown, Shown()),
        untrusted=by_type.get(Untrusted),
        marks=tuple(marks),
        owner=owner,
    )


@functools.cache
def marked(options: type, mark: Any) -> tuple[str, ...]:
    """Return the names of a dataclass's fields that have a mark in their annotation."""
    return tuple([name for name, field in option_fields(options).items() if mark in field.marks])


@functools.cache
def _field_docs(owner: type) -> dict[str, str]:
    """Return the docstrings under a class's own fields by name. Base classes are not searched."""
    body = _classes(owner.__module__).get(owner.__qualname__, [])
    return {
        field.target.id: " ".join(text.value.value.split())
        for field, text in itertools.pairwise(body)
        if isinstance(field, ast.AnnAssign)
        and isinstance(field.target, ast.Name)
        and isinstance(text, ast.Expr)
        and isinstance(text.value, ast.Constant)
        and isinstance(text.value.value, str)
    }


@functools.cache
def _classes(module: str) -> dict[str, list[ast.stmt]]:
    """Return the body of each class in a module by name. Without source code, return no bodies."""
    try:
        tree = ast.parse(inspect.getsource(sys.modules[module]))
    except (OSError, TypeError):  # a frozen program has no source files
        return {}
    return {node.name: node.body for node in tree.body if isinstance(node, ast.ClassDef)}


# --- checking values -----------------------------------------------------------------------------


class Checked:
    """A base class for dataclasses that check their fields when an instance is created.

    Raises:
        ConfigError: A field has the wrong type or is out of bounds.
    """

    def __post_init__(self) -> None:
        for name, field in option_fields(type(self)).items():  # type: ignore[arg-type]
            value = getattr(self, name)
            # Skip defaults, because a test checks that they are allowed.
            if value is not field.default and not field.allows(value):
                raise not_allowed(field, value)


def taken(given: dict[str, Any], kind: type) -> dict[str, Any]:
    """Move the options that are fields of a dataclass from one dictionary to a new dictionary."""
    return {name: given.pop(name) for name in option_fields(kind) if name in given}


def different(given: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings that differ from their defaults. Sections are compared field by field."""
    found: dict[str, Any] = {}
    for name, value in given.items():
        default = defaults.get(name)
        if isinstance(value, dict):
            if inner := different(value, default or {}):
                found[name] = inner
        elif value != default:
            found[name] = value
    return found


def changed(options: Any) -> list[str]:
    """Return the names of the options that differ from their defaults."""
    fields = option_fields(type(options))  # type: ignore[arg-type]
    return [name for name, field in fields.items() if getattr(options, name) != field.default]


def not_allowed(field: OptionField, value: object, section: str = "") -> ConfigError:
    """Return the error for a value of the wrong type or out of bounds."""
    name = f"{section}.{field.name}" if section else field.name
    return ConfigError(f"{name} is {value!r}; use {field.allowed}")


# --- options as the command line spells them ---------------------------------------------------


def flag(name: str) -> str:
    """Return an option as the command line spells it: ``--beam-size``."""
    return f"--{name.replace('_', '-')}"


def flags_given(options: Any, *names: str) -> list[str]:
    """Return the flags of the options in ``names`` that differ from their defaults."""
    return [flag(name) for name in changed(options) if name in names]


def refuse(options: Any, names: Iterable[str], why: str) -> None:
    """Raise an error if one of the options in ``names`` differs from its default.

    Raises:
        ConfigError: An option was set. The message is its flag, followed by ``why``.
    """
    for name in flags_given(options, *names):
        raise ConfigError(f"{name} {why}")


# --- options from named settings -----------------------------------------------------------------


def build_options(kind: type[Options], *layers: Any) -> Options:
    """Create a dataclass of options from named settings.

    Args:
        kind: The dataclass. A field whose type is a dataclass is a section.
        *layers: Mappings of setting names to values, with a nested mapping for each section, or
            instances of ``kind``. Settings of a later layer replace settings of earlier layers.

    Raises:
        ConfigError: A setting is unknown or invalid, or two settings contradict each other.
    """
    fields: Any = option_fields(kind)  # type: ignore[arg-type]
    values: dict[str, Any] = {}
    sections: dict[str, list[Any]] = {}
    for layer in layers:
        for name, value in checked_settings(kind, layer).items():
            if dataclasses.is_dataclass(fields[name].type):
                sections.setdefault(name, []).append(value)
            else:
                values[name] = value
    for name, given in sections.items():
        values[name] = _section(name, fields[name].type, *given)
    return kind(**values)


def _section(name: str, kind: type[Options], *layers: Any) -> Options:
    """Create the options of a section.

    Raises:
        ConfigError: See `build_options`. Names in the message include the section, such as
            ``search.beam_size``.
    """
    try:
        return build_options(kind, *layers)
    except ConfigError as error:
        prefix = "" if str(error).startswith(f"{name}.") else f"{name}."
        raise ConfigError(f"{prefix}{error}") from error


def checked_settings(kind: Any, given: Any, section: str = "") -> dict[str, Any]:
    """Check named settings one by one, and return them in their final types.

    Paths become text. A single value becomes a list if the option takes several values.

    Raises:
        ConfigError: A setting is unknown or invalid.
    """
    known, prefix = option_fields(kind), f"{section}." if section else ""
    given = vars(given) if dataclasses.is_dataclass(given) else given
    if not isinstance(given, Mapping | None):
        what = "use a mapping of setting names to values"
        raise ConfigError(f"{section or 'config'} is {given!r:.60}; {what}")
    checked: dict[str, Any] = {}
    for name, value in (given or {}).items():
        field = known.get(name)
        if field is None:
            raise ConfigError(
                f"{prefix}{name} is an unknown setting{_suggestion(name, prefix, known)}"
            )
        if dataclasses.is_dataclass(field.type):
            checked[name] = checked_settings(field.type, value, prefix + name)
        else:
            plain = checked[name] = _plain(field, value)
            if plain is not field.default and not field.allows(plain):
                raise not_allowed(field, plain, section)
    return checked


def _suggestion(name: Any, prefix: str, known: Mapping[str, OptionField]) -> str:
    """Return a suggestion for an unknown setting, as the end of an error message.

    All sections are searched, because the user may have left out the section.
    """
    names = {f"{prefix}{one}" for one in known}
    for section in known.values():
        if dataclasses.is_dataclass(section.type):
            names |= {f"{section.name}.{one}" for one in option_fields(section.type)}  # type: ignore[arg-type]
    usual = SEARCH_OPTIONS if prefix == "search." else SETTINGS
    close = similar(f"{prefix}{name}", names, usual)
    return f"; did you mean {' or '.join(close)}?" if close else f"; use {', '.join(known)}"


def _plain(field: OptionField, value: Any) -> Any:
    if field.is_list and isinstance(value, str | os.PathLike):
        value = [value]
    if isinstance(value, list | tuple):
        return [os.fspath(part) if isinstance(part, os.PathLike) else part for part in value]
    return os.fspath(value) if isinstance(value, os.PathLike) else value
