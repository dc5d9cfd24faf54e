"""Shared by the commands that take a training config."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jsonargparse

from captioner.cli.options import ConfigFirst, Parser, new_parser
from captioner.config import TrainConfig
from captioner.errors import ConfigError, OptionError


def new_train_parser(command: str, description: str, usage: str) -> Parser:
    """Create a parser with ``--config``; call ``add_class_arguments(TrainConfig)`` last."""
    jsonargparse.set_parsing_settings(docstring_parse_attribute_docstrings=True)
    new = new_parser(command, description, usage, ConfigFirst)
    new.add_argument("--config", action="config", help="YAML config file")
    return new


def parse_with_model(parser: Parser, argv: Sequence[str]) -> jsonargparse.Namespace:
    """Parse arguments; search options that are not given come from the model of ``init_from``."""
    arguments = parser.parse(argv)
    if not arguments.init_from:
        return arguments
    from captioner.model_folder import read_search

    held = read_search(arguments.init_from)
    if held is None:  # reported when the model is loaded
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
    known = {field.name for field in dataclasses.fields(TrainConfig)}
    own = {name: settings.pop(name) for name in [*settings] if name not in known}
    return TrainConfig(**settings), own
