"""The command line of a dataclass of options: argparse, generated from `captioner.option_fields`.

    new = Parser("serve", "[options]", ServeOptions)
    options, _ = new.parse(["--port", "80"])

The docstring of the dataclass is the description of the command. Fields of its bases are groups in
the help, with the first line of the base's docstring as title. Options may be typed with dashes or
underscores.
"""

from __future__ import annotations

import argparse
import dataclasses
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Generic, NoReturn, TypeVar

from captioner.errors import ConfigError
from captioner.option_fields import OptionField, build_options, option_fields, similar
from captioner.options import SearchOptions

Options = TypeVar("Options")
HELP = ("-h", "--help")
ALL = "all"
"""The help topic that shows every section."""


@dataclasses.dataclass
class _Group:
    """Options that the help shows together."""

    title: str
    defaults: bool = True
    """Their defaults are those of the dataclass."""
    actions: list[Any] = dataclasses.field(default_factory=list)


class Parser(argparse.ArgumentParser, Generic[Options]):
    """The parser of one command."""

    def __init__(
        self,
        command: str,
        usage: str,
        options: type[Options],
        *more: type,
        shown: Sequence[str] = (),
    ) -> None:
        """Add an option for each field.

        Args:
            command: Its name, such as ``prepare shards``.
            usage: What follows the name in the first line of the help.
            options: The command's options.
            *more: Options of which only those given are returned, because a model, a config file or
                the format of the output has the others. Sections become ``--section.option``. Of
                two options with one name, the first is shown.
            shown: Options of sections that the help shows without ``--help SECTION``.
        """
        super().__init__(
            prog=f"captioner {command}",
            usage=f"captioner {command} {usage}",
            description=_docstring(options),
            argument_default=argparse.SUPPRESS,
            formatter_class=_Formatter,
            allow_abbrev=False,  # a typo must not select another option
            add_help=False,
        )
        self._options, self._shown, self._topic = options, shown, ""
        self.fields: dict[str, OptionField] = {}
        """All options, by their names in config files: ``training.lr``."""
        self._groups = {"": _Group("options")}
        """By the name of the section or dataclass; those of the command itself first."""
        self._sections: list[str] = []
        self._add(options)
        self._own = [*self.fields]
        for added in more:
            self._add(added, changes=added is SearchOptions)
        help_ = self.add_argument(*HELP, action="store_true", help="Show this help and exit.")
        self._groups[""].actions.append(help_)

    def parse(self, argv: Sequence[str]) -> tuple[Options, dict[str, Any]]:
        """Parse the arguments; print the help and exit if it is requested.

        Returns:
            The command's options, and what was given of the others: by name, in a dictionary of its
            own for each section.

        Raises:
            ConfigError: An option is unknown, or its value is invalid.
        """
        end = argv.index("--") if "--" in argv else len(argv)
        head, rest = [_dashed(argument) for argument in argv[:end]], argv[end + 1 :]
        self._print_help_if_in(head)
        found, extra = self.parse_known_intermixed_args(head)
        given: dict[str, Any] = vars(found)
        if unknown := [text for text in extra if text.startswith("-")]:
            self._refuse(unknown[0].partition("=")[0])
        several = [
            n for n, field in self.fields.items() if field.shown.positional and field.is_list
        ]
        for name in several:
            given[name] = [*given.get(name, []), *rest]
        for text in extra if several else [*extra, *rest]:
            self.error(f"unexpected argument {text!r}")
        own = {name: given.pop(name) for name in self._own if name in given}
        return build_options(self._options, own), _nested(given)

    def error(self, message: str) -> NoReturn:
        """Raise an error instead of printing the usage."""
        raise ConfigError(f"{message} (see {self.prog} --help)")

    # --- options ---------------------------------------------------------------------------------

    def _add(self, options: type, section: str = "", *, changes: bool = False) -> None:
        """Add the fields of a dataclass, and of its sections."""
        fields = option_fields(options).values()
        with_sections = any(dataclasses.is_dataclass(field.type) for field in fields)
        for field in fields:
            if dataclasses.is_dataclass(field.type):
                self._sections.append(field.name)
                self._add(field.type, field.name)  # type: ignore[arg-type]
                continue
            name = f"{section}.{field.name}" if section else field.name
            if name in self.fields or field.shown.hidden:
                continue
            group = section
            if not (section or with_sections or field.owner is self._options):
                group = field.owner.__name__
            if group not in self._groups:
                title = _docstring(field.owner).partition(". ")[0].removesuffix(".")
                model = " (defaults: those of the model; see captioner info)" if changes else ""
                title = f"{flag(section)[2:]}: {title}" if section else title + model
                self._groups[group] = _Group(title, defaults=not changes)
            self._groups[group].actions.append(self._add_field(name, field, changes=changes))

    def _add_field(self, name: str, field: OptionField, *, changes: bool) -> argparse.Action:
        self.fields[name] = field
        if field.shown.positional:
            one = None if field.required else "?"
            several = "+" if field.required else "*"
            return self.add_argument(
                name,
                nargs=several if field.is_list else one,
                type=_reader(field, entry=True),
                metavar=field.shown.value or name,
            )
        settings: dict[str, Any] = {"dest": name, "required": field.required}
        if field.type is bool and "." not in name:
            both = changes or field.optional or field.default
            settings["action"] = argparse.BooleanOptionalAction if both else "store_true"
        else:
            settings |= {"type": _reader(field), "metavar": _placeholder(field)}
            settings["action"] = _Extend if field.is_list else "store"
        return self.add_argument(*(field.shown.flags or (flag(name),)), help="", **settings)

    def _refuse(self, typed: str) -> NoReturn:
        """Raise an error for an unknown option."""
        flags = {name for name in self._option_string_actions if name.startswith("--")}
        close = similar(typed, flags)
        hint = f"; did you mean {' or '.join(close)}?" if close else ""
        self.error(f"unknown option {typed}{hint}")

    # --- help ------------------------------------------------------------------------------------

    def _print_help_if_in(self, argv: Sequence[str]) -> None:
        """Print the help and exit; ``--help SECTION`` prints that of a section."""
        place = next((number for number, text in enumerate(argv) if text in HELP), None)
        if place is None:
            return
        topic = "".join(argv[place + 1 : place + 2]).replace("-", "_")
        self._topic = topic if topic in (*self._sections, ALL) else ""
        self.print_help()
        self.exit()

    def format_help(self) -> str:
        """The help of the requested section, of all, or without those of sections."""
        formatter: Any = self._get_formatter()
        formatter.names = self.fields.keys()
        if self._topic in ("", ALL):
            formatter.add_usage(self.usage, [], [])
            formatter.add_text(self.description)
        for name, group in self._groups.items():
            if self._topic not in (name, ALL) and (self._topic or name in self._sections):
                continue
            known = {
                action.dest: action for each in self._groups.values() for action in each.actions
            }
            more = [] if name or self._topic else [known[one] for one in self._shown]
            formatter.start_section(group.title)
            for action in [*group.actions, *more]:
                action.help = self._help_of(action, defaults=group.defaults)
            formatter.add_arguments([*group.actions, *more])
            formatter.end_section()
        if self._sections and not self._topic:
            formatter.start_section(f"more options, with {self.prog} --help SECTION")
            for name in self._sections:
                section, _, title = self._groups[name].title.partition(": ")
                formatter.add_row(section, title)
            formatter.add_row(ALL, "All of the above")
            formatter.end_section()
        return str(formatter.format_help())

    def _help_of(self, action: argparse.Action, *, defaults: bool) -> str:
        """An option's help, which is not read from the source before it is needed."""
        field = self.fields.get(action.dest)
        if field is None:
            return action.help or ""
        text, default = field.help.replace("%", "%%"), field.default
        if field.required and not field.shown.positional:
            return f"{text} (required)"
        empty = default in (None, "", [], ()) or action.nargs == 0
        if empty or not defaults or "(default" in text:
            return text
        shown = ", ".join(map(str, default)) if field.is_list else str(default)
        return f"{text} (default: {shown.lower() if field.type is bool else shown})"


class _Extend(argparse.Action):
    """Appends the entries of each value; ``null`` removes the list."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        """Append to the list of an option."""
        del parser, option_string
        found = getattr(namespace, self.dest, None) or []
        setattr(namespace, self.dest, None if values is None else [*found, *values])


class _Formatter(argparse.HelpFormatter):
    """Spells the options that a text mentions (``beam_size``) as they are typed."""

    names: Any = ()

    def _expand_help(self, action: Any) -> str:
        section = str(action.dest).rpartition(".")[0]

        def spelled(mention: re.Match[str]) -> str:
            names = (f"{section}.{mention[0]}", mention[0])
            return next((flag(name) for name in names if name in self.names), mention[0])

        text = super()._expand_help(action)
        return re.sub(r"(?<![-\w./])[a-z]+(?:[_.][a-z]+)+(?![\w/])", spelled, text)

    def add_row(self, name: str, text: str) -> None:
        """Add a line of a table."""
        self._add_item(lambda row: row, [f"  {name:<22}{text}\n"])


def _docstring(options: type) -> str:
    return " ".join((options.__doc__ or "").split())


def _dashed(argument: str) -> str:
    """An option with dashes for the underscores in its name."""
    name, equals, value = argument.partition("=")
    return f"{name.replace('_', '-')}{equals}{value}" if name.startswith("--") else argument


def flag(name: str) -> str:
    """An option as the command line spells it: ``--beam-size``."""
    return f"--{name.replace('_', '-')}"


def _nested(given: Mapping[str, Any]) -> dict[str, Any]:
    """``{"training.lr": 1}`` as ``{"training": {"lr": 1}}``."""
    nested: dict[str, Any] = {}
    for name, value in given.items():
        section, _, last = name.rpartition(".")
        (nested.setdefault(section, {}) if section else nested)[last] = value
    return nested


# --- values --------------------------------------------------------------------------------------


def _placeholder(field: OptionField) -> str:
    if field.choices:
        return f"{{{','.join(map(str, field.choices))}}}"
    named = {int: "N", float: "X", bool: "true|false"}.get(field.kind, field.name.upper())
    return field.shown.value or named


def _reader(field: OptionField, *, entry: bool = False) -> Callable[[str], Any]:
    """A function that reads a value from its text, or values for a list."""

    def read(text: str) -> Any:
        if text == "null" and field.optional:
            return None
        try:
            if entry or not field.is_list:
                value = _KINDS.get(field.kind, str)(text)
                good = field.allows([value] if field.is_list else value)
            else:
                value = [_KINDS.get(field.kind, str)(part) for part in _entries(field, text)]
                good = field.allows(value)
        except (ValueError, KeyError):
            good = False
        if not good:
            raise argparse.ArgumentTypeError(f"{text!r} is not allowed; give {field.allowed_entry}")
        return value

    return read


_KINDS: dict[Any, Callable[[str], Any]] = {
    int: int, float: float, bool: {"true": True, "false": False}.__getitem__,
}  # fmt: skip


def _entries(field: OptionField, text: str) -> list[str]:
    """The entries of ``[a, b]``, or the text alone; words may be separated by commas or spaces."""
    if field.type == tuple[str, ...]:
        return text.strip(" []").replace(",", " ").split()
    if text.startswith("[") and text.endswith("]"):
        return [part.strip(" \"'") for part in text[1:-1].split(",") if part.strip()]
    return [text]


def model_folders(models: Sequence[str]) -> list[str | Path]:
    """The models of ``--model``: those given, or the shipped one."""
    from captioner.inference.folder import SHIPPED_MODEL

    return [*models] or [SHIPPED_MODEL]


def checked_search(models: Sequence[str], given: Mapping[str, Any]) -> SearchOptions:
    """Return the model's search options with those of the command line.

    Reads the model's config only, so that an error does not have to wait for torch and the model.

    Raises:
        ConfigError: An option is out of range, two contradict each other, or the model does not
            know a style or a forced word.
        ModelError: The model folder cannot be read.
    """
    from captioner.inference.folder import read_search
    from captioner.search.words import encode_search_words

    own, vocabulary = read_search(model_folders(models)[0])
    search = own.changed(**given)
    encode_search_words(search, vocabulary)
    vocabulary.start(search.style)
    return search
