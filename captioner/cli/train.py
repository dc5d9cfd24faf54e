"""``captioner train``: train a model."""

from __future__ import annotations

import dataclasses
import json
import os
import shlex
import sys
from pathlib import Path
from typing import Any

from captioner.cli.arguments import command
from captioner.cli.console import hint, warn
from captioner.cli.main import FAILED, OK
from captioner.data.importers import detect_layout, find_source
from captioner.errors import ConfigError, DataError
from captioner.options import TrainConfig
from captioner.training.api import STATE, build_config, run
from captioner.training.own_data import IS_MAIN, ConfigOptions, TrainOptions, check_replaced


def read_config(options: ConfigOptions, given: dict[str, Any]) -> TrainConfig:
    """Read the settings, with those given on the command line; print them if requested."""
    if options.settings and options.config:
        raise ConfigError(f"unexpected argument {options.settings}; give one config file")
    if path := options.settings or options.config:
        check_config_file(path)
    config = build_config(path, **given)
    if options.print_config:
        import yaml

        plain = json.loads(json.dumps(dataclasses.asdict(config)))  # tuples as lists
        print(yaml.safe_dump(plain, sort_keys=False, allow_unicode=True), end="")
        sys.exit(OK)
    return config


def check_config_file(path: str) -> None:
    """Raise ConfigError if a file is no config: captions, or a folder of photos."""
    file = Path(path)
    try:
        detect_layout(find_source(file))
    except DataError as error:
        if file.is_dir():
            raise ConfigError(
                f"{path} is a folder, not a config file; to train on its photos, give their "
                f"captions too: captioner train --data captions.csv --images {path} "
                "--init-from shipped"
            ) from error
        return
    images = "" if file.is_dir() else " --images FOLDER"
    raise ConfigError(
        f"{path} holds captions, not settings; train on it with: captioner train --data {path}"
        f"{images} --init-from shipped (or convert it with captioner prepare dataset)"
    )


SHOWN = [
    "data.images", "data.train_annotations", "data.val_annotations", "encoder.weights",
    "encoder.image_size", "training.epochs", "training.batch_size", "training.lr",
    "search.beam_size",
]  # fmt: skip


@command("train", "[CONFIG.yaml] [options]", TrainOptions, TrainConfig, shown=SHOWN)
def train(options: TrainOptions, given: dict[str, Any]) -> int:
    """Train to the end, or until interrupted; fails if the best model captions nothing."""
    check_replaced(options, given)
    config = read_config(options, given)
    state = Path(config.run_folder, STATE)
    saved = f"the state is saved in {state.parent}"
    with hint(lambda: saved if IS_MAIN and state.exists() else "", "with --resume"):
        found = run(config, options)
    if not IS_MAIN:
        return OK
    if isinstance(found, str):
        print(found)
        return OK

    from captioner.training.validation import describe_selection

    best = describe_selection(config.training.select, found.score)
    where = f"in epoch {found.epoch}" if found.epoch else "before training"
    print(f"best {best} {where}: {found.model_folder}")
    if found.problem:
        warn(found.problem)
        # torchrun would print a traceback about a run that has finished.
        return OK if "TORCHELASTIC_RUN_ID" in os.environ else FAILED
    print(f"to use it: captioner caption PHOTOS --model {shlex.quote(config.run_folder)}")
    return OK
