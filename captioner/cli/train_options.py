"""Shared by the commands that take a training config."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jsonargparse

from captioner.cli.parser import Parser, make_parser
from captioner.errors import ConfigError, ModelError, OptionError
from captioner.options import TrainConfig

ALL = "all"
"""The help topic that shows every option."""
_SETTINGS = tuple(field.name for field in dataclasses.fields(TrainConfig))


class TrainParser(Parser):
    """A parser with all settings of `TrainConfig`, most of which ``--help SECTION`` shows.

    The argument that belongs to no option is the config file, wherever it stands; options override
    its settings.
    """

    shown: Sequence[str] = ()
    """Settings that ``--help`` without a section shows, by their names in Python."""

    def _normalized(self, argv: Sequence[str]) -> list[str]:
        found = super()._normalized(argv)
        configs = [argument for argument in found if argument.startswith("--config=")]
        if len(configs) > 1:
            name = configs[1].partition("=")[2]
            self.error(
                f"Unexpected argument {name}; give one config file, and repeat an option to give "
                "it several values"
            )
        for config in configs:
            from captioner.cli.own_data import check_config_file

            check_config_file(config.partition("=")[2])
        return [*configs, *(argument for argument in found if argument not in configs)]

    def _positional(self, argument: str) -> list[str]:
        return [f"--config={argument}"]

    def _help(self, following: Sequence[str]) -> None:
        given = following[0] if following and not following[0].startswith("-") else ""
        topic = given.replace("-", "_")
        sections = self._sections()
        if topic and topic not in (*sections, ALL):
            names = ", ".join(_dashed(name) for name in sections)
            self.error(f"No help for {given!r}; give {names} or {ALL}")
        print(self._help_text(topic), end="")
        self.exit()

    def _help_text(self, topic: str) -> str:
        """The help of one section, of all, or the overview (an empty topic)."""
        formatter = self._get_formatter()
        sections = self._sections()
        if topic in ("", ALL):
            formatter.add_usage(self.usage, self._actions, [])
            formatter.add_text(self.description)
            options = self.visible()
            own = [name for name in options if "." not in name]
            if not topic:
                hidden = {"print_config", *_SETTINGS}.difference(self.shown)
                own = [name for name in own if name not in hidden]
                own += [name for name in self.shown if name not in own]
            formatter.start_section("options")
            formatter.add_arguments([options[name] for name in own])
            formatter.end_section()
        for name, title in sections.items():
            if topic in (name, ALL):
                formatter.start_section(f"{_dashed(name)}: {title}")
                formatter.add_arguments(
                    [one for key, one in self.visible().items() if key.startswith(f"{name}.")]
                )
                formatter.end_section()
        text = str(formatter.format_help())
        if topic:
            return text
        rows = {**sections, ALL: "All of the above"}
        lines = [f"  {_dashed(name):<22}{title}" for name, title in rows.items()]
        return "\n".join([text, f"more options, with {self.prog} --help SECTION:", *lines, ""])

    def _sections(self) -> dict[str, str]:
        """Sections of the config by name, with their titles."""
        groups = self.groups or {}
        return {name: str(groups[name].title) for name in _SETTINGS if name in groups}


def _dashed(name: str) -> str:
    return name.replace("_", "-")


def new_train_parser(command: str, description: str, usage: str) -> TrainParser:
    """Create a parser with ``--config``; `add_settings` follows the command's own options."""
    jsonargparse.set_parsing_settings(docstring_parse_attribute_docstrings=True)
    new = make_parser(TrainParser, command, description, usage)
    new.add_argument("--config", action="config", metavar="FILE", help="YAML file with settings")
    return new


def add_settings(parser: TrainParser, shown: Sequence[str]) -> None:
    """Add every field of `TrainConfig`; ``--help`` without a section shows a few of them."""
    parser.add_class_arguments(TrainConfig)
    parser.shown = shown
    options = parser.visible()
    options["print_config"].metavar = ""
    options["print_config"].help = "print all settings as YAML, options included, and exit"
    for name, action in options.items():
        if name in _VALUES:
            action.metavar = _VALUES[name]
        elif action.metavar == "[ITEM,...]":  # jsonargparse's, of a list
            action.metavar = "VALUE"


_VALUES = {
    "run_folder": "FOLDER",
    "init_from": "MODEL",
    "data.images": "FOLDER",
    "data.train_annotations": "FILE",
    "data.val_annotations": "FILE",
    "data.karpathy_split": "FILE",
    "data.features": "FOLDER",
    "data.shards": "FOLDER",
    "data.styles": "STYLE",
    "data.val_styles": "STYLE",
    "data.repeats": "N",
    "distillation.models": "MODEL",
    "distillation.guidance": "X",
    "distillation.rare_words": "X",
    "encoder.mean": "[R,G,B]",
    "encoder.std": "[R,G,B]",
    "encoder.finetune_from": "STAGE",
    "training.trackers": "TRACKER",
    "search.forced_words": "WORDS",
    "search.banned_words": "WORDS",
}
"""Placeholders of values in the help, where the name of the setting is not clear enough."""


def parse_with_model(parser: Parser, argv: Sequence[str]) -> jsonargparse.Namespace:
    """Parse arguments; search options that are not given come from the model of ``init_from``."""
    arguments = parser.parse(argv)
    if not arguments.init_from:
        return arguments
    from captioner.inference.folder import read_search

    try:
        held, _ = read_search(arguments.init_from)
    except ModelError:  # reported when the model is loaded
        return arguments
    values = {f"search.{name}": value for name, value in dataclasses.asdict(held).items()}
    before = {name: parser.get_default(name) for name in values}
    parser.set_defaults(values)
    try:
        return parser.parse(argv)
    finally:
        parser.set_defaults(before)


def read_train_config(
    parser: Parser, arguments: jsonargparse.Namespace
) -> tuple[TrainConfig, dict[str, Any]]:
    """Return the training config and the command's own options."""
    try:
        settings = parser.instantiate(arguments.clone(with_meta=False)).as_dict()
    except OptionError as error:
        raise ConfigError(error.spelled(lambda name: f"search.{name}")) from error
    own = {name: settings.pop(name) for name in [*settings] if name not in _SETTINGS}
    return TrainConfig(**settings), own
