"""``captioner.train``: what ``captioner train`` does, as a function."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tqdm import tqdm

from captioner.errors import ConfigError
from captioner.extras import require_extra
from captioner.inference.names import BEST
from captioner.messages import counted
from captioner.options import TrainConfig
from captioner.schema import build_options, taken
from captioner.training.config import build_config
from captioner.training.names import METRICS, RUN_FILES, STATE
from captioner.training.options import OwnDataOptions, TrainOptions
from captioner.training.own_data import IS_MAIN, check_replaced, prepared

if TYPE_CHECKING:  # importing torch takes a second
    from captioner.training.setup import Setup
    from captioner.training.state import Progress


@dataclass(frozen=True)
class TrainingResult:
    """A finished run."""

    model_folder: Path
    """The best model, for ``captioner.load``."""
    score: float
    """Its validation score, which selected it: by default CIDEr, where 1.0 is 100 points; see
    ``training.select``. A loss is negated."""
    epoch: int
    """Its epoch, from 1; 0: no epoch was better than the model of ``init_from``."""
    metrics: list[dict[str, Any]]
    """All validations, oldest first: the rows of ``metrics.jsonl`` in the run folder."""
    problem: str = ""
    """Why the model is of no use, and what to do; empty if it is of use."""

    def __repr__(self) -> str:
        found = f"{self.problem}; " if self.problem else ""
        return (
            f"<TrainingResult {found}score {self.score:.4f}, epoch {self.epoch} of "
            f"{len(self.metrics)}, {self.model_folder}>"
        )


def train(
    config: TrainConfig | Mapping[str, Any] | str | Path | None = None,
    *,
    resume: bool = False,
    force: bool = False,
    progress: bool = True,
    **changes: Any,
) -> TrainingResult:
    """Train a model; a warning is logged if the best one is of no use.

    Args:
        config: Settings: a YAML file, a dictionary of the same form, or a ``TrainConfig``. What is
            left out has its default, or is as in the model of ``init_from``.
        resume: Continue from the checkpoint in the run folder, or start if there is none.
        force: Start over and replace the run in the run folder.
        progress: Show progress and validations on standard error.
        **changes: Settings that replace those of ``config``: ``run_folder="runs/mine"``, or some of
            a section: ``training={"epochs": 3}``. And ``OwnDataOptions``, to train on a file of
            captions: ``captions="captions.csv", images="photos"``.

    Raises:
        CaptionerError: Settings, data or weights cannot be used, the run folder contains a run, or
            the state cannot be saved.
        KeyboardInterrupt: By Ctrl-C or a termination signal; ``resume`` continues.
    """
    own = {"resume": resume, "force": force, **taken(changes, OwnDataOptions)}
    options = build_options(TrainOptions, own)
    settings = build_config(config, **changes)
    check_replaced(options, changes)
    require_extra("train")
    with Path(os.devnull).open("w") as null, contextlib.ExitStack() as stack:
        if not progress or sys.stderr is None:  # as under pythonw
            stack.enter_context(contextlib.redirect_stderr(null))
        result = run(settings, options)
    assert isinstance(result, TrainingResult)
    if result.problem:
        logging.getLogger(__name__).warning("%s", result.problem)
    return result


def run(config: TrainConfig, options: TrainOptions) -> TrainingResult | str:
    """Train for `train` and the command line; of a dry run, return its estimates instead."""
    folder = Path(config.run_folder)
    options = replace(options, resume=_resumes(folder, options))
    with prepared(config, options) as complete:
        from captioner.training.dry_run import dry_run
        from captioner.training.loop import start
        from captioner.training.run_folder import read_rows
        from captioner.training.setup import prepare

        setup = prepare(complete)
        if IS_MAIN:
            tqdm.write(
                f"{counted(len(setup.train), 'training photo')}, "
                f"{counted(len(setup.val), 'validation photo')}, "
                f"{len(setup.stored.vocabulary.words)} words, run folder {folder}",
                file=sys.stderr,
            )
        if options.dry_run:
            return dry_run(setup, folder)
        found = start(setup, folder, options.resume)
    metrics = read_rows(folder / METRICS)
    problem = _why_useless(setup, found, metrics)
    return TrainingResult(folder / BEST, found.best, found.best_epoch + 1, metrics, problem)


def _why_useless(setup: Setup, progress: Progress, metrics: Sequence[Mapping[str, Any]]) -> str:
    """Why the best model of a finished run is of no use, and what to do; empty if it is of use."""
    from captioner.training.state import NO_SCORE

    config, epoch = setup.config.training, progress.best_epoch + 1
    row = next((row for row in metrics if row["epoch"] == epoch), {})
    photos = len(setup.validated)
    if row.get("empty_captions") == 1:
        problem = f"all captions of the {photos} validation photos are empty"
    elif config.select != "loss" and progress.best < NO_SCORE:
        problem = f"captions of the {photos} validation photos have nothing in common with theirs"
    else:
        return ""
    if photos == 1 and config.select == "CIDEr":
        return (
            "no model could be selected: the CIDEr of a single validation photo is always 0; "
            "validate on more photos, or give training.select loss"
        )
    return (
        f"the best model is of no use: {problem}; raise training.epochs or training.lr, or give "
        "init_from"
    )


def _resumes(folder: Path, options: TrainOptions) -> bool:
    """Return whether there is a checkpoint to resume from; refuse to overwrite another run."""
    resuming = options.resume and (folder / STATE).exists()
    used = any((folder / name).exists() for name in RUN_FILES)
    if used and not (resuming or options.force or options.dry_run):
        raise ConfigError(
            f"{folder} already contains a run; give resume to continue it, force to start over, or "
            "another run_folder"
        )
    return resuming
