"""``captioner train``: train a model."""

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
from captioner.training.api import check_run_folder


@functools.cache
def parser() -> Parser:
    """Options of ``train``: every field of ``TrainConfig`` and its own."""
    new = new_train_parser(
        "train",
        "Train a model. Options on the command line override those in the config file.",
        "[CONFIG.yaml] [--resume auto] [--force] [--dry-run] [--training.epochs 20 ...]",
    )
    new.add_argument(
        "--resume",
        choices=["auto"],
        help="auto: resume from the checkpoint in the run folder, or start if there is none",
    )
    new.add_argument(
        "--force", action="store_true", help="start over and replace the run in the run folder"
    )
    new.add_argument(
        "--dry-run",
        action="store_true",
        help="check options, data and disk space, run a few steps and estimate duration and "
        "memory; writes nothing",
    )
    new.add_class_arguments(TrainConfig)
    return new


class TrainFlags(NamedTuple):
    """Options of the command that are not part of the config."""

    resume: bool
    force: bool
    dry_run: bool


def read(argv: Sequence[str]) -> tuple[TrainConfig, TrainFlags]:
    """Parse the command line."""
    new = parser()
    config, own = read_train_config(new, new.parse(argv))
    return config, TrainFlags(own["resume"] is not None, own["force"], own["dry_run"])


def main(argv: Sequence[str]) -> int:
    """Train to the end, or until interrupted."""
    config, flags = read(argv)
    folder = Path(config.run_folder)
    resume = check_run_folder(folder, resume=flags.resume, force=flags.force or flags.dry_run)
    from captioner.training.build import prepare
    from captioner.training.loop import Interrupted, start

    setup = prepare(config)
    main_process = os.environ.get("RANK", "0") == "0"  # set by torchrun; only one process prints
    if main_process:
        print(
            f"{len(setup.train)} training photos, {len(setup.val)} validation photos, "
            f"{len(setup.stored.vocabulary)} words, run folder {folder}",
            file=sys.stderr,
        )
    if flags.dry_run:
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
                f"captioner: interrupted; state saved, resume with: captioner train --config "
                f"{folder / 'config.yaml'} --resume auto",
                file=sys.stderr,
            )
        return INTERRUPTED
    if main_process:
        best = f"best CIDEr {100 * progress.best:.1f} in epoch {progress.best_epoch + 1}"
        print(f"{best}: {folder / 'best'}")
    return OK
