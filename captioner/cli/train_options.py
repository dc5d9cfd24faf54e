"""What the commands that take a training run's settings share."""

from __future__ import annotations

import dataclasses
from typing import Any

import jsonargparse

from captioner.cli.options import ConfigFirst, Parser, new_parser
from captioner.config import TrainConfig


def new_train_parser(command: str, description: str, usage: str) -> Parser:
    """A parser with ``--config``; ``add_class_arguments(TrainConfig)`` comes after its own."""
    jsonargparse.set_parsing_settings(docstring_parse_attribute_docstrings=True)
    new = new_parser(command, description, usage, ConfigFirst)
    new.add_argument("--config", action="config", help="YAML file with settings")
    return new


def read_train_config(
    parser: Parser, arguments: jsonargparse.Namespace
) -> tuple[TrainConfig, dict[str, Any]]:
    """The settings of the run, and the command's own options."""
    settings = parser.instantiate(arguments.clone(with_meta=False)).as_dict()
    known = {field.name for field in dataclasses.fields(TrainConfig)}
    own = {name: settings.pop(name) for name in [*settings] if name not in known}
    return TrainConfig(**settings), own
