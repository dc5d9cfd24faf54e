"""The argument parser of all commands: spelling, suggestions, help and one-line errors.

An option is declared with the name of its Python field (``data.train_annotations``) and shown with
dashes (``--data.train-annotations``); users may type dashes or underscores.
"""

from __future__ import annotations

import argparse
import difflib
import json
import re
import types
from collections import deque
from collections.abc import Callable, Container, Iterable, Sequence
from typing import Annotated, Any, NoReturn, TypeVar, Union, get_args, get_origin

import jsonargparse

from captioner.cli.main import flag
from captioner.errors import ConfigError, either

HELP = ("-h", "--help")
Kind = TypeVar("Kind", bound="Parser")


class Parser(jsonargparse.ArgumentParser):
    """A parser with one-line errors and suggestions for unknown options.

    An option that takes a list (``--data.images``) may be given one value, or repeated for several.
    """

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        """Raise an error instead of printing the usage."""
        cause: BaseException | None = ex
        while cause is not None and not isinstance(cause, ConfigError):
            cause = cause.__cause__ or cause.__context__
        text = str(cause) if cause is not None else self._one_line(message)
        raise ConfigError(f"{text} (see {self.prog} --help)") from ex

    def parse(self, argv: Sequence[str]) -> jsonargparse.Namespace:
        """Parse arguments with dashes or underscores in their options.

        Raises:
            ConfigError: An option is unknown, or its value is invalid.
        """
        return self.parse_args(self._normalized(argv))

    def visible(self) -> dict[str, Any]:
        """The options that help shows, by their names in Python: ``{"training.lr": action}``."""
        return {
            action.dest: action
            for action in self._actions
            if action.option_strings
            and action.help != argparse.SUPPRESS
            and not _loads_section(action)
        }

    def _normalized(self, argv: Sequence[str]) -> list[str]:
        """The arguments as argparse needs them: declared spellings, lists in one piece."""
        spellings = {name.replace("_", "-"): name for name in self._option_string_actions}
        rest = deque(argv)
        found: list[str] = []
        lists: dict[str, list[str]] = {}
        while rest and rest[0] != "--":
            argument = rest.popleft()
            if not argument.startswith("-") or argument == "-":
                found += self._positional(argument)
                continue
            typed, equals, value = argument.partition("=")
            name = spellings.get(typed.replace("_", "-"))
            if name in HELP:
                self._help([value] if equals else list(rest))
            if name is None:
                if not (typed[:2] in spellings or re.match(r"-\.?\d", typed)):
                    self.error(_with_suggestions(f"Unknown option {typed}", typed, self._flags()))
                found.append(argument)  # -oFILE, or a negative number
                continue
            action = self._option_string_actions[name]
            if not equals and _takes_next(action, rest, spellings):
                equals, value = "=", rest.popleft()
            if equals and _is_list(action) and not name.endswith("+") and value != "null":
                lists.setdefault(name, []).extend(_elements(value, _plain_type(action)))
            elif equals and name.startswith("--"):
                found.append(f"{name}={value}")
            elif equals:
                found += [name, value]
            elif action.nargs == "?":
                found.append(f"{name}={action.const}")
            else:
                found.append(name)
        found += [f"{name}=[{', '.join(values)}]" for name, values in lists.items()]
        return [*found, *rest]

    def _get_formatter(self, *args: Any, **kwargs: Any) -> Any:
        formatter: Any = super()._get_formatter(*args, **kwargs)
        formatter.options = self.visible()
        return formatter

    def _positional(self, argument: str) -> list[str]:
        """How an argument that belongs to no option is passed on."""
        return [argument]

    def _help(self, following: Sequence[str]) -> None:
        """Print the help and exit; the arguments that follow ``--help`` do not matter."""
        del following
        self.print_help()
        self.exit()

    def _flags(self) -> list[str]:
        """Every option with two dashes, as help shows it."""
        names = (name for action in self.visible().values() for name in _flags_of(action))
        return [name for name in names if name.startswith("--")]

    def _one_line(self, message: str) -> str:
        """Rewrite argparse's and jsonargparse's messages; those unknown here become one line."""
        message = " ".join(message.split())
        for pattern, rewritten in self._rewritten().items():
            if found := re.search(pattern, message):
                return rewritten(*found.groups())
        return message

    def _rewritten(self) -> dict[str, Callable[..., str]]:
        """Regular expressions of messages, and what is printed instead."""
        expected = r"Expected a (?:<class '(int|float|bool|list)'>|typing\.Literal\[(.+?)\])"
        return {
            r'Parser key "config": File does not exist: \'(.+)\'': (
                lambda path: f"{path} does not exist; give a YAML config file"
            ),
            r"Group '(.+)' does not accept option '(.+)'": (
                lambda section, name: self._unknown_setting(f"{section}.{name}")
            ),
            r"Option '(.+)' is not accepted": self._unknown_setting,
            r"the following arguments are required: (.+)": lambda names: (
                f"Missing {' and '.join(self._typed(name) for name in names.split(', '))}"
            ),
            r"unrecognized arguments: (.+)": lambda argument: f"Unexpected argument {argument}",
            r"argument (?:-\w/)?(-\S+?)(?:/\S+)?: expected one arg": (
                lambda option: f"{option.replace('_', '-')} needs a value"
            ),
            r"argument \S*?(--\S+): invalid choice: '(.*?)' \(choose from (.+)\)": (
                lambda option, value, choices: f"{option} is {value}; give {_listed(choices)}"
            ),
            rf'Parser key "([\w.]+)".*?{expected}.*?(?:Got|Given) value: (\S+)': _wrong_value,
        }

    def _typed(self, name: str) -> str:
        """An argument as users know it: ``--output`` or, without an option, ``photos``."""
        return flag(name) if name in self.visible() else name

    def _unknown_setting(self, key: str) -> str:
        """An unknown key of a config file; only these reach jsonargparse."""
        return _with_suggestions(f"Unknown setting {key}", key, list(self.visible()))


def _wrong_value(key: str, kind: str | None, choices: str, value: str) -> str:
    """What is printed for a value of the wrong type."""
    kinds = {
        "int": "an integer",
        "float": "a number",
        "bool": "true or false",
        "list": f"a list: [{value}]",
    }
    name = key if "." in key else flag(key)  # a name with a dot may come from a config file
    return f"{name} is {value}; give {kinds[kind] if kind else _listed(choices)}"


def _listed(choices: str) -> str:
    """``'a', 'b', 'c'`` as a, b or c."""
    return either(choices.replace("'", "").split(", "))


def new_parser(command: str, description: str, usage: str) -> Parser:
    """Create the parser of a subcommand."""
    return make_parser(Parser, command, description, usage)


def make_parser(kind: type[Kind], command: str, description: str, usage: str) -> Kind:
    """Create the parser of a subcommand, of a class of its own."""
    return kind(
        prog=f"captioner {command}",
        description=description,
        usage=f"captioner {command} {usage}",
        exit_on_error=True,
        allow_abbrev=False,  # a typo must not select another option
        formatter_class=HelpFormatter,
    )


# --- suggestions ---------------------------------------------------------------------------------


def _with_suggestions(problem: str, typed: str, names: Iterable[str]) -> str:
    similar = similar_names(typed, names)
    return f"{problem}. Did you mean {' or '.join(similar)}?" if similar else problem


def similar_names(typed: str, names: Iterable[str]) -> list[str]:
    """At most three of the names that the user probably meant, the most similar first.

    A name may lack its section (``--epochs`` for ``--training.epochs``), its end (``--beam`` for
    ``--beam-size``), be another program's or command's (``--num-beams``), or be misspelled.
    """
    rated = sorted(((_similarity(typed, name), name) for name in names), key=lambda one: -one[0])
    best = rated[0][0] if rated else 0.0
    return [name for rate, name in rated if rate >= max(0.65, best - 0.05)][:3]


_SYNONYMS = {
    "batch": "batch-size",
    "learning-rate": "lr",
    "num-beams": "beam-size",
    "num-epochs": "epochs",
    "overwrite": "force",
    "resume": "skip-existing",
}
"""Names of options elsewhere, and what they are called here."""


def _similarity(typed: str, name: str) -> float:
    typed, name = (text.lstrip("-").replace("_", "-").lower() for text in (typed, name))
    last_typed, last = typed.rpartition(".")[2], name.rpartition(".")[2]
    if last in (last_typed, _SYNONYMS.get(last_typed)):
        return 1.0
    if last.startswith(f"{last_typed}-") and len(last_typed) > 2:
        return 0.9
    matcher = difflib.SequenceMatcher(None, typed, name)
    return max(matcher.ratio(), 0.95 * difflib.SequenceMatcher(None, last_typed, last).ratio())


# --- values --------------------------------------------------------------------------------------


def _takes_next(action: Any, rest: Sequence[str], spellings: dict[str, str]) -> bool:
    """Whether the next argument is this option's value."""
    if not rest:
        return False
    if action.nargs == "?":  # a positional argument may follow
        return action.choices is not None and rest[0] in action.choices
    following = rest[0].partition("=")[0]
    option = following.startswith("--") or following.replace("_", "-") in spellings
    return action.nargs is None and not option


def _is_list(action: Any) -> bool:
    return get_origin(_plain_type(action)) in (list, tuple)


def _plain_type(action: Any) -> Any:
    """The declared type without None and bounds."""
    hint = getattr(action, "_typehint", action.type)
    if get_origin(hint) in (Union, types.UnionType):
        hint = next(part for part in get_args(hint) if part is not type(None))
    return get_args(hint)[0] if get_origin(hint) is Annotated else hint


def _elements(value: str, kind: Any) -> list[str]:
    """Elements of a list option's value as YAML: of ``[a, b]``, or one."""
    if value.startswith("[") and value.endswith("]"):
        return [value[1:-1]] if value[1:-1].strip() else []
    words = value.replace(",", " ").split() if get_origin(kind) is tuple else [value]
    text = str in get_args(kind)
    return [json.dumps(word, ensure_ascii=False) if text else word for word in words]


# --- help ----------------------------------------------------------------------------------------


class HelpFormatter(jsonargparse.DefaultHelpFormatter):
    """Options with dashes, short names for values, and no empty defaults."""

    options: Container[str] = ()
    """Names in Python of all options, which help texts may mention."""

    def _format_action_invocation(self, action: Any) -> str:
        if not action.option_strings:
            return str(super()._format_action_invocation(action))
        flags = ", ".join(_flags_of(action))
        if action.nargs == 0:
            return flags
        return f"{flags} {self._format_args(action, _value_name(action))}".rstrip()

    def _expand_help(self, action: Any) -> str:
        """Spell the options that the text mentions (``beam_size``) as they are typed."""
        section = str(action.dest).rpartition(".")[0]

        def spelled(mention: re.Match[str]) -> str:
            names = (mention[0], f"{section}.{mention[0]}")
            return next((flag(name) for name in names if name in self.options), mention[0])

        text = str(super()._expand_help(action))
        return re.sub(r"(?<![-\w./])[a-z]+(?:[_.][a-z]+)+(?![\w/])", spelled, text)

    def _get_default_metavar_for_positional(self, action: Any) -> str:
        return str(action.dest)

    def _get_help_string(self, action: Any) -> str:
        text = re.sub(r"^[a-z]+(?= )", lambda word: word[0].capitalize(), action.help or "")
        if not text.endswith((".", ")")):
            text += "."
        if not action.option_strings:
            return text
        if _is_list(action) and not str(action.metavar).startswith("["):  # not [R,G,B]
            text += " Repeat the option for several."
        if action.required:
            return f"{text} (required)"
        switch = action.nargs == 0 and action.default is False
        empty = switch or action.default in (None, [], (), "", argparse.SUPPRESS)
        if empty or "(default" in text:
            return text
        if isinstance(action.default, list):
            return f"{text} (default: {', '.join(map(str, action.default))})"
        shown = str(action.default).lower() if isinstance(action.default, bool) else "%(default)s"
        return f"{text} (default: {shown})"


def _value_name(action: Any) -> str:
    """Placeholder of an option's value in the help, unless it has a ``metavar``."""
    if action.choices is not None:
        return f"{{{','.join(map(str, action.choices))}}}"
    name = str(action.dest).rpartition(".")[2].upper()
    return {int: "N", float: "X"}.get(_plain_type(action), name)


def _flags_of(action: Any) -> list[str]:
    """An option's names as help shows them; ``shown_as`` replaces those that are parsed."""
    names = getattr(action, "shown_as", action.option_strings)
    return [name.replace("_", "-") for name in names if not name.endswith("+")]


def _loads_section(action: Any) -> bool:
    """Whether an option is jsonargparse's own: ``--data FILE`` reads a section from a file."""
    return type(action).__name__ == "_ActionConfigLoad"
