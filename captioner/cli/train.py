"""``captioner train``: train a model."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from captioner.cli.arguments import command
from captioner.cli.main import FAILED, INTERRUPTED, OK
from captioner.cli.outputs import warn
from captioner.data.importers import detect_layout, find_source
from captioner.errors import ConfigError, DataError, counted
from captioner.option_fields import File, Shown
from captioner.options import TrainConfig
from captioner.training.api import build_config, check_run_folder, why_useless
from captioner.training.own_data import OwnDataOptions, check_replaced, prepared


@dataclass(frozen=True, kw_only=True)
class ConfigOptions:
    """The training config."""

    settings: Annotated[str, Shown("CONFIG.yaml", positional=True)] | None = None
    """YAML file with settings, which options override."""
    config: File | None = None
    """The same as an option."""
    print_config: bool = False
    """Print all settings as YAML, options included, and exit."""

    def read(self, given: dict[str, Any]) -> TrainConfig:
        """Read the settings, with those given on the command line; print them if requested."""
        if self.settings and self.config:
            raise ConfigError(f"unexpected argument {self.settings}; give one config file")
        if path := self.settings or self.config:
            check_config_file(path)
        config = build_config(path, **given)
        if self.print_config:
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


@dataclass(frozen=True, kw_only=True)
class TrainOptions(OwnDataOptions, ConfigOptions):
    """Train a model. Settings come from the config file; options override them."""

    dry_run: bool = False
    """Check settings, data and disk space, run a few steps, estimate time and memory, and write
    nothing."""
    resume: bool = False
    """Continue the run in the run folder, or start one if there is none."""
    force: bool = False
    """Start over and replace the run in the run folder."""


SHOWN = [
    "data.images", "data.train_annotations", "data.val_annotations", "encoder.weights",
    "encoder.image_size", "training.epochs", "training.batch_size", "training.lr",
    "search.beam_size",
]  # fmt: skip


def read(argv: Sequence[str]) -> tuple[TrainConfig, TrainOptions]:
    """Parse the command line."""
    options, given = train.parser().parse(argv)
    return options.read(given), options


@command("train", "[CONFIG.yaml] [options]", TrainOptions, TrainConfig, shown=SHOWN)
def train(options: TrainOptions, given: dict[str, Any]) -> int:
    """Train to the end, or until interrupted; fails if the best model captions nothing."""
    check_replaced(options, given)
    config = options.read(given)
    folder = Path(config.run_folder)
    resume = check_run_folder(folder, resume=options.resume, force=options.force or options.dry_run)
    with prepared(config, options, resume=resume, dry_run=options.dry_run) as complete:
        return _train(complete, options, resume=resume)


def _train(config: TrainConfig, options: TrainOptions, *, resume: bool) -> int:
    from captioner.training.loop import Interrupted, start
    from captioner.training.run import METRICS, read_rows
    from captioner.training.setup import prepare
    from captioner.training.validation import describe_selection

    main_process = os.environ.get("RANK", "0") == "0"  # set by torchrun; only one process prints
    folder, setup = Path(config.run_folder), prepare(config)
    if main_process:
        print(
            f"{counted(len(setup.train), 'training photo')}, "
            f"{counted(len(setup.val), 'validation photo')}, "
            f"{len(setup.stored.vocabulary)} words, run folder {folder}",
            file=sys.stderr,
        )
    if options.dry_run:
        from captioner.training.checks import dry_run

        found = dry_run(setup, folder)
        if main_process:
            print(found)
        return OK
    try:
        progress = start(setup, folder, resume=resume)
    except Interrupted:
        if main_process:
            again = f"captioner train --config {folder / 'config.yaml'} --resume"
            warn(f"interrupted; state saved, resume with: {again}")
        return INTERRUPTED
    if not main_process:
        return OK
    best = describe_selection(setup.config.training.select, progress.best)
    print(f"best {best} in epoch {progress.best_epoch + 1}: {folder / 'best'}")
    if problem := why_useless(setup, progress, read_rows(folder / METRICS)):
        warn(problem)
        return FAILED
    return OK
