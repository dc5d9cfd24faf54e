"""``captioner train``: a config file, changes to it, a run folder."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from captioner.cli.main import INTERRUPTED, OK
from captioner.cli.options import Parser
from captioner.cli.train_options import new_train_parser, read_train_config
from captioner.config import TrainConfig
from captioner.errors import ConfigError

RUN_FILES = (
    "state.safetensors",
    "metrics.jsonl",
    "config.yaml",
    "best",
    "samples",
    "tensorboard",
    "kept",
    "average",
)
"""What starting over in a run folder would replace."""


@functools.cache
def parser() -> Parser:
    """Every setting of ``TrainConfig`` as an option."""
    new = new_train_parser(
        "train",
        "Train a model. Every setting may stand in the file and be changed on the command line.",
        "[CONFIG.yaml] [--resume auto] [--force] [--dry-run] [--training.epochs 20 ...]",
    )
    new.add_argument(
        "--resume",
        choices=["auto"],
        help="auto: go on where the run folder's checkpoint is, or start when there is none",
    )
    new.add_argument("--force", action="store_true", help="start over in a used run folder")
    new.add_argument(
        "--dry-run",
        action="store_true",
        help="check settings, data and disk, take a few steps, and say how long the run would take "
        "and how much memory; nothing is written",
    )
    new.add_class_arguments(TrainConfig)
    return new


class Wish(NamedTuple):
    """What is asked for beside the settings."""

    resume: bool
    force: bool
    dry_run: bool


def read(argv: Sequence[str]) -> tuple[TrainConfig, Wish]:
    """The config, and what is to be done with it."""
    new = parser()
    config, own = read_train_config(new, new.parse(argv))
    return config, Wish(own["resume"] is not None, own["force"], own["dry_run"])


def main(argv: Sequence[str]) -> int:
    """Train to the end, or until interrupted."""
    config, wish = read(argv)
    folder = Path(config.run_folder)
    resume = wish.resume and (folder / "state.safetensors").exists()
    used = any((folder / name).exists() for name in RUN_FILES)
    if used and not (resume or wish.force or wish.dry_run):
        raise ConfigError(
            f"{folder} holds a run or other files of such names; go on with --resume auto, start "
            "over with --force, or give another --run-folder"
        )
    from captioner.training.build import prepare
    from captioner.training.loop import Interrupted, start

    setup = prepare(config)
    main_process = os.environ.get("RANK", "0") == "0"  # torchrun's; the others say nothing
    if main_process:
        print(
            f"{len(setup.train)} training photos, {len(setup.val)} validation photos, "
            f"{len(setup.stored.vocabulary)} words, run folder {folder}",
            file=sys.stderr,
        )
    if wish.dry_run:
        from captioner.training.dry_run import dry_run

        found = dry_run(setup, folder)
        if main_process:
            print(found)
        return OK
    try:
        progress = start(setup, folder, resume=resume)
    except Interrupted:
        if main_process:
            print(
                f"captioner: interrupted; the state is saved, go on with: captioner train --config "
                f"{folder / 'config.yaml'} --resume auto",
                file=sys.stderr,
            )
        return INTERRUPTED
    if main_process:
        best = f"best CIDEr {100 * progress.best:.1f} in epoch {progress.best_epoch + 1}"
        print(f"{best}: {folder / 'best'}")
    return OK
