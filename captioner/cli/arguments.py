"""Build the parser of a command from a dataclass of options (argparse and `captioner.schema`).

    new = Parser("serve", "[options]", ServeOptions)
    options, _ = new.parse(["--port", "80"])

The docstring of the dataclass describes the command. Fields of its base classes form groups in the
help, titled by the first line of the base's docstring. Users may type the names of options with
dashes or underscores.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import re
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Generic, NamedTuple, NoReturn, TypeVar

from captioner.errors import ConfigError
from captioner.hints import SEARCH_OPTIONS, SETTINGS, similar
from captioner.options import SearchOptions
from captioner.schema import (
    OptionField,
    build_options,
    flag,
    option_fields,
    taken,
)

Options = TypeVar("Options")
HELP = ("-h", "--help")
_PREFIX = "CAPTIONER_"  # of environment variables that set options
# For a service named captioner or captioner-x, Kubernetes sets variables with these endings, and
# variables whose values are addresses.
_KUBERNETES = re.compile(
    r"(_SERVICE_(HOST|PORT(_\w+)?)|_PORT_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)$"
)
_ADDRESS = re.compile("(tcp|udp|sctp)://")


class Parser(argparse.ArgumentParser, Generic[Options]):
    """The parser of one command."""

    def __init__(
        self,
        command: str,
        usage: str,
        options: type[Options],
        *more: type,
        environment: bool = False,
    ) -> None:
        """Add an option for each field of the command's ``options``, and of ``more``.

        The model or the config file sets the options in ``more``, so only the values that the user
        types are returned. Fields that are dataclasses themselves (the sections of a training
        config) are not added. If two options have the same name, the first is used. With
        ``environment``, variables such as ``CAPTIONER_PORT`` set options that the command line does
        not set.
        """
        super().__init__(
            prog=f"captioner {command}",
            usage=f"captioner {command} {usage}",
            description=_docstring(options),
            argument_default=argparse.SUPPRESS,
            allow_abbrev=False,  # a typo must not select another option
            add_help=False,
        )
        self.options, self._environment = options, environment
        self.fields: dict[str, OptionField] = {}
        """All options by name."""
        self._groups: dict[str, Any] = {"": self._optionals}
        """Groups of options by the name of their dataclass. The command's own options come first.
        """
        self._settings: list[str] = []
        """Names of the settings in sections, such as ``training.lr``."""
        self._add(options)
        for added in more:
            self._add(added)
        self.add_argument(*HELP, action="store_true", help="Show this help and exit.")

    def parse(self, argv: Sequence[str]) -> tuple[Options, dict[str, Any]]:
        """Return the command's options, and a dictionary of all options that the user set, by name.

        If the user asks for the help, print it and exit.
        """
        end = argv.index("--") if "--" in argv else len(argv)
        head = [_dashed(argument) for argument in argv[:end]]
        if not {*HELP}.isdisjoint(head):
            self.print_help()
            self.exit()
        found, extra = self.parse_known_intermixed_args(head)
        if unknown := [text for text in extra if text.startswith("-")]:
            typed = unknown[0].partition("=")[0]
            self._refuse_dashes(typed, unknown[0], head)
            known = [name for name in self._option_string_actions if name[1] == "-"]
            usual = {**SEARCH_OPTIONS, **SETTINGS}
            close = similar(typed, known, usual) or similar(typed, self._settings, usual)
            hint = f"; did you mean {' or '.join(close)}?" if close else ""
            if Path(typed).exists():
                hint = f"; to name the file {typed}, write ./{typed}"
            if typed == "-r" and "--recursive" in known:
                hint = "; did you mean --recursive?"
            if typed == "--remove":
                hint = "; did you mean captioner apply --remove?"
            if typed[2:] in self.fields:  # a positional argument
                hint = f"; write its value without {typed}"
            self.error(f"{typed} is an unknown option{hint}")
        extra += argv[end + 1 :]
        lists = [n for n, f in self.fields.items() if f.shown.positional and f.is_list]
        if extra and not lists:
            has_model = "--model" in self._option_string_actions
            hint = f"did you mean --model {extra[0]}?" if has_model else "leave it out"
            self.error(f"the argument {extra[0]!r} was not expected; {hint}")
        given = self._read_environment() | vars(found)
        if extra:
            given[lists[0]] = [*given.get(lists[0], []), *extra]
        own = taken(given, self.options)
        return build_options(self.options, own), given

    def _refuse_dashes(self, typed: str, argument: str, argv: Sequence[str]) -> None:
        """Stop with an error that shows how to write a setting typed as ``--training.lr 1e-4``."""
        name = typed[2:].replace("-", "_")
        if name in self._settings:
            _, equals, value = argument.partition("=")
            following = argv[argv.index(argument) + 1 :]
            value = value if equals else "".join(following[:1])
            self.error(f"{typed} is a setting, not an option; write {name}={value}")

    def _read_environment(self) -> dict[str, Any]:
        """Return the options that environment variables set.

        Commas separate the entries of a list. Empty variables and Kubernetes's addresses, such as
        ``CAPTIONER_PORT=tcp://...``, are ignored.
        """
        given: dict[str, Any] = {}
        for name, field in self.fields.items() if self._environment else ():
            variable = f"{_PREFIX}{name.upper()}"
            text = os.environ.get(variable, "")
            if not text or _ADDRESS.match(text):
                continue
            try:
                parts = [part.strip() for part in text.split(",")] if field.is_list else [text]
                values = [_read(field, part, entry=field.is_list) for part in parts]
            except argparse.ArgumentTypeError as error:
                self.error(f"the environment variable {variable} {error}")
            given[name] = values if field.is_list else values[0]
        return given

    def error(self, message: str) -> NoReturn:
        """Raise an error instead of printing the usage."""
        message = re.sub(r"^argument (.+?): (?=is )", r"\1 ", message)
        message = re.sub(r"^argument (.+): expected .*", r"\1 needs a value", message)
        message = re.sub(r"^the following arguments are required: (.+)", r"\1 is missing", message)
        message = re.sub(
            r"^argument (.+): ignored explicit argument (.+)",
            r"\1 does not accept a value; leave out \2",
            message,
        )
        raise ConfigError(f"{message} (see {self.prog} --help)")

    # --- options ---------------------------------------------------------------------------------

    def _add(self, options: type) -> None:
        """Add an option for each field of a dataclass, and keep the names of its settings."""
        for name, field in option_fields(options).items():
            if dataclasses.is_dataclass(field.type):
                fields = option_fields(field.type)  # type: ignore[arg-type]
                self._settings += [f"{name}.{setting}" for setting in fields]
            elif name not in self.fields and not field.shown.hidden:
                group = "" if field.owner is self.options else field.owner.__name__
                if group not in self._groups:
                    self._groups[group] = self.add_argument_group(_title(field))
                self._add_field(self._groups[group], name, field)

    def _add_field(self, group: Any, name: str, field: OptionField) -> None:
        self.fields[name] = field
        if field.shown.positional:
            one = None if field.required else "?"
            several = "+" if field.required else "*"
            group.add_argument(
                name,
                nargs=several if field.is_list else one,
                type=partial(_read, field, entry=True),
                metavar=field.shown.value or name,
            )
            return
        settings: dict[str, Any] = {"dest": name, "required": field.required}
        if field.type is bool:
            both = _of_model(field) or field.optional or field.default
            settings["action"] = argparse.BooleanOptionalAction if both else "store_true"
        else:
            settings["type"] = partial(_read, field)
            last_counts = field.kind in (int, float)
            settings["action"] = "extend" if field.is_list else "store" if last_counts else _Once
        group.add_argument(*(field.shown.flags or (flag(name),)), **settings)

    # --- help ------------------------------------------------------------------------------------

    def format_help(self) -> str:
        """Return the help.

        The help text and placeholder of each option are added here, because nothing else needs
        them.
        """
        for action in self._actions:
            if field := self.fields.get(action.dest):
                action.help = _help_of(field, has_value=action.nargs != 0)
                action.metavar = action.metavar or _placeholder(field)
        return super().format_help()


def unknown_variables(options: type) -> list[str]:
    """Return a warning for each environment variable that looks like an option but sets none."""
    known = option_fields(options)
    warnings = []
    for variable, text in sorted(os.environ.items()):
        name = variable.removeprefix(_PREFIX).lower()
        of_kubernetes = _ADDRESS.match(text) or _KUBERNETES.search(variable)
        if not variable.startswith(_PREFIX) or name in known or not text or of_kubernetes:
            continue
        close = [f"{_PREFIX}{one.upper()}" for one in similar(name, known)]
        hint = f"did you mean {' or '.join(close)}?" if close else "correct its name, or remove it"
        warnings.append(f"the environment variable {variable} sets no option; {hint}")
    return warnings


def settings_help(config: type) -> str:
    """Return a list of all settings in the sections of a dataclass, as users type them."""
    parser = argparse.ArgumentParser(add_help=False, usage=argparse.SUPPRESS)
    for section, fields in option_fields(config).items():
        if dataclasses.is_dataclass(fields.type):
            group = parser.add_argument_group(f"{section}: {_first_sentence(fields.type)}")
            for name, field in option_fields(fields.type).items():  # type: ignore[arg-type]
                value = _placeholder(field)
                group.add_argument(
                    f"{section}.{name}",
                    metavar=f"{section}.{name}={f'[{value}, ...]' if field.is_list else value}",
                    help=_help_of(field),
                )
    return parser.format_help()


def _help_of(field: OptionField, *, has_value: bool = True) -> str:
    """Return the help of an option, with its default.

    Without ``has_value``, the default is left out, because the option is a flag.
    """
    text = field.help.replace("%", "%%")
    if field.required and not field.shown.positional:
        return f"{text} Required."
    empty = field.default in (None, "", [], ()) or not has_value
    if empty or _of_model(field) or "(default" in text or "Default:" in text:
        return text
    shown = ", ".join(map(str, field.default)) if field.is_list else str(field.default)
    shown = shown.lower() if field.type is bool else shown
    return f"{text} Default: {shown}.".lstrip()


class Command(NamedTuple):
    """A command: its parser, and a function that runs it and returns the exit code."""

    parser: Callable[[], Parser[Any]]
    run: Callable[[Any, dict[str, Any]], int]

    def __call__(self, argv: Sequence[str]) -> int:
        """Parse the arguments, and run the command."""
        return self.run(*self.parser().parse(argv))


def command(name: str, usage: str, *options: type, **settings: Any) -> Callable[[Any], Command]:
    """Return a decorator that turns a function into a command.

    The function receives the results of `Parser.parse`.
    """
    return lambda run: Command(lambda: Parser(name, usage, *options, **settings), run)


class _Once(argparse.Action):
    """An argparse action that stores the value of an option that may be set only once."""

    def __call__(self, _: Any, namespace: Any, values: Any, __: str | None = None) -> None:
        if hasattr(namespace, self.dest):
            raise argparse.ArgumentError(self, "is set twice; set it once")
        setattr(namespace, self.dest, values)


def _of_model(field: OptionField) -> bool:
    """Return whether an option's default comes from the model instead of the command."""
    return field.owner is SearchOptions


def _title(field: OptionField) -> str:
    """Return the title of the group in which the help lists an option."""
    model = " (defaults come from the model; see captioner info)"
    return _first_sentence(field.owner) + (model if _of_model(field) else "")


def _first_sentence(options: Any) -> str:
    """Return the first sentence of a dataclass's docstring, without its full stop."""
    return _docstring(options).partition(". ")[0].removesuffix(".")


def _docstring(options: type) -> str:
    """Return the docstring of a dataclass on one line, or an empty text without a docstring.

    Under ``python -OO``, the result is empty, because Python removes docstrings.
    """
    text = options.__doc__ or ""  # without one, a dataclass writes its signature there
    return "" if text.startswith(f"{options.__name__}(") else " ".join(text.split())


def _dashed(argument: str) -> str:
    """Return an argument with dashes in place of the underscores in its option's name."""
    name, equals, value = argument.partition("=")
    return f"{name.replace('_', '-')}{equals}{value}" if name.startswith("--") else argument


# --- values --------------------------------------------------------------------------------------


def _placeholder(field: OptionField) -> str:
    if field.choices:
        return f"{{{','.join(map(str, field.choices))}}}"
    named = {int: "N", float: "X", bool: "true|false"}.get(field.kind, field.name.upper())
    return field.shown.value or named


_KINDS: dict[Any, Callable[[str], Any]] = {
    int: int, float: float, bool: {"true": True, "false": False}.__getitem__,
}  # fmt: skip
"""Functions that read a value, by type. Values of other types stay text."""


def _read(field: OptionField, text: str, *, entry: bool = False) -> Any:
    """Read the value of an option from text.

    With ``entry``, the text is a single entry of a list.
    """
    try:
        if field.type == tuple[str, ...] and not entry:  # words with commas or spaces
            return text.strip(" []").replace(",", " ").split()
        value = _KINDS.get(field.kind, str)(text)
        if field.allows([value] if field.is_list else value):
            return [value] if field.is_list and not entry else value
    except (ValueError, KeyError):
        pass
    raise argparse.ArgumentTypeError(f"is {text!r}; use {field.allowed_entry}")
