"""``captioner train``: train a model."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

from captioner.cli.arguments import command, settings_help
from captioner.cli.console import hint, warn
from captioner.cli.main import OK, SOME_FAILED
from captioner.data.importers import detect_layout, find_source
from captioner.errors import ConfigError, DataError
from captioner.inference.names import RUN_CONFIG
from captioner.options import TrainConfig
from captioner.schema import Shown
from captioner.training.api import run
from captioner.training.config import build_config, parse_yaml
from captioner.training.names import STATE
from captioner.training.options import TrainOptions
from captioner.training.own_data import IS_MAIN, check_replaced


@dataclass(frozen=True, kw_only=True)
class ConfigOptions:
    """Settings of the run."""

    settings: Annotated[list[str], Shown("CONFIG.yaml|SECTION.NAME=VALUE", positional=True)] = (
        field(default_factory=list)
    )
    """Read settings from a YAML file, and replace single settings with SECTION.NAME=VALUE, such as
    training.lr=1e-4. Write values as in YAML. Quote lists: "data.images=[a, b]"."""
    list_settings: Annotated[bool, Shown(flags=("--settings",))] = False
    """List all settings with their defaults, and exit."""


@dataclass(frozen=True, kw_only=True)
class TrainCommandOptions(TrainOptions, ConfigOptions):
    """Train a model.

    Settings come from a YAML file. On the command line, SECTION.NAME=VALUE replaces a setting:
    captioner train config.yaml training.lr=1e-4 "data.images=[a, b]". To list all settings, run
    captioner train --settings.
    """


def read_changes(options: ConfigOptions, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings on the command line by name, with a dictionary for each section.

    Raises:
        ConfigError: A value is not valid YAML, or a setting is set twice.
    """
    changes = dict(given)
    for text in filter(_is_setting, options.settings):
        name, _, value = text.partition("=")
        section, _, last = name.rpartition(".")
        settings = changes.setdefault(section, {}) if section else changes
        parsed = parse_yaml(os.path.expanduser(value), name)  # noqa: PTH111 - not only paths
        if last in settings:
            raise ConfigError(
                f"{name} is set twice; set it once, and write a list as {name}=[a, b]"
            )
        settings[last] = parsed
    return changes


def read_config(options: ConfigOptions, changes: Mapping[str, Any]) -> TrainConfig:
    """Return the config file, with the changes from the command line.

    With ``--settings``, print the list of settings and exit.
    """
    if options.list_settings:
        print(settings_help(TrainConfig), end="")
        sys.exit(OK)
    files = [text for text in options.settings if not _is_setting(text)]
    if len(files) > 1:
        raise ConfigError(
            f"{files[1]!r} is a second config file; pass one file, and write settings as "
            "SECTION.NAME=VALUE"
        )
    for path in files:
        check_config_file(path)
    return build_config(*files, **changes)


def _is_setting(text: str) -> bool:
    name, equals, _ = text.partition("=")
    return bool(equals) and "/" not in name


def check_config_file(path: str) -> None:
    """Raise an error if a path leads to captions or photos instead of a config file.

    Raises:
        ConfigError: The path leads to captions or photos. The message shows how to train on them.
    """
    file = Path(path)
    if (file / RUN_CONFIG).is_file():
        raise ConfigError(
            f"{path} is a run folder, not a config file; to continue the run, run captioner train "
            f"--run-folder {path} --resume"
        )
    try:
        detect_layout(find_source(file))
    except DataError as error:
        if file.is_dir():
            raise ConfigError(
                f"{path} is a folder, not a config file; to train on its photos, run "
                f"captioner train --data captions.csv --images {path} --init-from shipped"
            ) from error
        return
    images = "" if file.is_dir() else " --images FOLDER"
    raise ConfigError(
        f"{path} contains captions, not settings; to train on them, run captioner train "
        f"--data {path}{images} --init-from shipped"
    )


@command(
    "train", "[CONFIG.yaml] [SECTION.NAME=VALUE ...] [options]", TrainCommandOptions, TrainConfig
)
def train(options: TrainCommandOptions, given: dict[str, Any]) -> int:
    """Train a model until the last epoch, or until interrupted.

    The exit code is 1 if the best model writes no captions.
    """
    changes = read_changes(options, given)
    check_replaced(options, changes)
    if options.resume and options.captions is None and all(map(_is_setting, options.settings)):
        saved_config = Path(changes.get("run_folder", TrainConfig.run_folder), RUN_CONFIG)
        if saved_config.is_file():
            options = replace(options, settings=[str(saved_config), *options.settings])
        elif not options.settings:
            raise ConfigError(
                f"{saved_config.parent} contains no run to continue; set --run-folder to a folder "
                "with a run"
            )
    config = read_config(options, changes)
    state = Path(config.run_folder, STATE)
    saved = f"the training state is saved in {state.parent}"
    with hint(lambda: saved if IS_MAIN and state.exists() else "", "with --resume"):
        found = run(config, options)
    if not IS_MAIN:
        return OK
    if isinstance(found, str):
        print(found)
        return OK

    from captioner.training.validation import describe_selection

    best = describe_selection(config.training.select, found.score)
    where = f"epoch {found.epoch}" if found.epoch else "before training"
    print(f"the best model ({best}, {where}) is in {found.model_folder}")
    if found.problem:
        warn(found.problem)
        # With an exit code of 1, torchrun would print a traceback, although the run has finished.
        return OK if "TORCHELASTIC_RUN_ID" in os.environ else SOME_FAILED
    print(
        f"to use the model, run: captioner caption PHOTOS --model {shlex.quote(config.run_folder)}"
    )
    return OK
