"""``captioner train``: train a model."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from captioner.cli.main import FAILED, INTERRUPTED, OK
from captioner.cli.own_data import (
    OwnData,
    add_own_data_options,
    own_data,
    prepared,
    spell_captions,
)
from captioner.cli.train_options import (
    TrainParser,
    add_settings,
    new_train_parser,
    parse_with_model,
    read_train_config,
)
from captioner.errors import counted
from captioner.options import TrainConfig
from captioner.training.api import check_run_folder, why_useless

if TYPE_CHECKING:  # importing torch takes a second
    from captioner.training.setup import Setup
    from captioner.training.state import Progress

SHOWN = (
    "run_folder",
    "init_from",
    "data.images",
    "data.train_annotations",
    "data.val_annotations",
    "encoder.weights",
    "encoder.image_size",
    "training.epochs",
    "training.batch_size",
    "training.lr",
    "search.beam_size",
)
"""The settings that a first run may need; ``--help SECTION`` shows the others."""


@functools.cache
def parser() -> TrainParser:
    """Options of ``train``: every field of ``TrainConfig`` and its own."""
    new = new_train_parser(
        "train",
        "Train a model. Settings come from the config file; options override them.",
        "[CONFIG.yaml] [options]",
    )
    new.add_argument(
        "--dry-run",
        action="store_true",
        help="check settings, data and disk space, run a few steps, estimate time and memory, and "
        "write nothing",
    )
    new.add_argument(
        "--resume",
        nargs="?",
        const="auto",
        choices=["auto"],
        metavar="auto",
        help="continue the run in the run folder, or start one if there is none",
    )
    new.add_argument(
        "--force", action="store_true", help="start over and replace the run in the run folder"
    )
    add_own_data_options(new)
    add_settings(new, SHOWN)
    return new


class TrainFlags(NamedTuple):
    """Options of the command that are not part of the config."""

    resume: bool
    force: bool
    dry_run: bool
    data: OwnData | None = None


def read(argv: Sequence[str]) -> tuple[TrainConfig, TrainFlags]:
    """Parse the command line."""
    new = parser()
    config, own = read_train_config(new, parse_with_model(new, spell_captions(argv)))
    flags = TrainFlags(own["resume"] is not None, own["force"], own["dry_run"], own_data(own))
    return config, flags


def main(argv: Sequence[str]) -> int:
    """Train to the end, or until interrupted; fails if the best model captions nothing."""
    config, flags = read(argv)
    folder = Path(config.run_folder)
    resume = check_run_folder(folder, resume=flags.resume, force=flags.force or flags.dry_run)
    main_process = os.environ.get("RANK", "0") == "0"  # set by torchrun; only one process prints
    write = main_process and not flags.dry_run
    with prepared(
        config, flags.data, resume=resume, write=write, quiet=not main_process
    ) as complete:
        return _train(complete, flags, resume=resume, main_process=main_process)


def _train(config: TrainConfig, flags: TrainFlags, *, resume: bool, main_process: bool) -> int:
    from captioner.training.loop import Interrupted, start
    from captioner.training.setup import prepare

    folder = Path(config.run_folder)
    setup = prepare(config)
    if main_process:
        print(
            f"{counted(len(setup.train), 'training photo')}, "
            f"{counted(len(setup.val), 'validation photo')}, "
            f"{len(setup.stored.vocabulary)} words, run folder {folder}",
            file=sys.stderr,
        )
    if flags.dry_run:
        from captioner.training.checks import dry_run

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
                f"{folder / 'config.yaml'} --resume",
                file=sys.stderr,
            )
        return INTERRUPTED
    return _report(setup, folder, progress) if main_process else OK


def _report(setup: Setup, folder: Path, progress: Progress) -> int:
    """Print the best model and, if it is of no use, why; return the exit code."""
    from captioner.training.run import read_metrics
    from captioner.training.validation import describe_selection

    best = describe_selection(setup.config.training.select, progress.best)
    print(f"best {best} in epoch {progress.best_epoch + 1}: {folder / 'best'}")
    if problem := why_useless(setup, progress, read_metrics(folder)):
        print(f"captioner: {problem}", file=sys.stderr)
        return FAILED
    return OK
