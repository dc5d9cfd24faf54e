"""The function ``captioner.train``, which does the same as the command ``captioner train``."""

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
from captioner.hints import hinted
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
    """The result of a finished run."""

    model_folder: Path
    """Folder of the best model, for ``captioner.load``."""
    score: float
    """Validation score of the best model, where a higher score is better. ``training.select``
    chooses the score: by default CIDEr, where 1.0 is 100 points, or the loss with a minus sign."""
    epoch: int
    """Epoch of the best model, from 1, or 0 if no epoch was better than the model of
    ``init_from``."""
    metrics: list[dict[str, Any]]
    """Results of the validations, oldest first: the rows of ``metrics.jsonl`` in the run folder.
    Values that could not be computed are None."""
    problem: str = ""
    """Reason why the best model is useless, with a remedy, or an empty string if it is usable. A
    model is useless if its captions are empty or have nothing in common with the references."""

    def __repr__(self) -> str:
        found = f"{self.problem}; " if self.problem else ""
        return (
            f"<TrainingResult {found}score {self.score:.4f}, epoch {self.epoch} of "
            f"{len(self.metrics)}, {self.model_folder}>"
        )


@hinted
def train(
    config: TrainConfig | Mapping[str, Any] | str | Path | None = None,
    *,
    resume: bool = False,
    force: bool = False,
    progress: bool = True,
    **changes: Any,
) -> TrainingResult:
    """Train a model, and save the best model of the run in a folder.

    If even the best model is useless, a warning is logged (see ``TrainingResult.problem``).

    Args:
        config: Settings: a YAML file, a dictionary with the same structure, or a ``TrainConfig``.
            Missing settings have their defaults, or the values of the model of ``init_from``.
        resume: Continue from the checkpoint in the run folder. If it has no checkpoint, start a
            new run.
        force: Start over and replace the run in the run folder.
        progress: Show progress and validations on standard error.
        **changes: Settings that replace settings of ``config``, such as ``run_folder="runs/mine"``
            or, for a part of a section, ``training={"epochs": 3}``. To train on a file of captions,
            add fields of ``OwnDataOptions``: ``captions="captions.csv", images="photos"``.

    Raises:
        CaptionerError: Settings, data or weights cannot be used. Or the run folder already contains
            a run, and neither ``resume`` nor ``force`` is set. Or the state cannot be saved.
        KeyboardInterrupt: Ctrl-C or a termination signal stopped the run. ``resume`` continues it.
    """
    require_extra("train")  # also contains the YAML parser
    own = {"resume": resume, "force": force, **taken(changes, OwnDataOptions)}
    options = build_options(TrainOptions, own)
    settings = build_config(config, **changes)
    check_replaced(options, changes)
    with Path(os.devnull).open("w") as null, contextlib.ExitStack() as stack:
        if not progress or sys.stderr is None:  # as under pythonw
            stack.enter_context(contextlib.redirect_stderr(null))
        result = run(settings, options)
    assert isinstance(result, TrainingResult)
    if result.problem:
        logging.getLogger(__name__).warning("%s", result.problem)
    return result


def run(config: TrainConfig, options: TrainOptions) -> TrainingResult | str:
    """Train a model and return the result, or return the estimates of a dry run as text.

    `train` and the command ``captioner train`` share this function.
    """
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
    """Return why the best model is useless, with a remedy, or an empty string if it is usable."""
    from captioner.training.state import NO_SCORE

    config, epoch = setup.config.training, progress.best_epoch + 1
    row = next((row for row in metrics if row["epoch"] == epoch), {})
    photos = len(setup.validated)
    if row.get("empty_captions") == 1:
        problem = f"all captions of the {photos} validation photos are empty"
    elif config.select != "loss" and progress.best < NO_SCORE:
        problem = (
            f"captions of the {photos} validation photos have nothing in common with their "
            "references"
        )
    else:
        return ""
    if photos == 1 and config.select == "CIDEr":
        return (
            "no model could be selected: the CIDEr of a single validation photo is always 0; "
            "validate on more photos, or set training.select to loss"
        )
    return (
        f"the best model is useless: {problem}; raise training.epochs or training.lr, or set "
        "init_from"
    )


def _resumes(folder: Path, options: TrainOptions) -> bool:
    """Return whether to resume from the checkpoint in a run folder.

    Raises:
        ConfigError: The folder contains a run that the options neither continue nor replace.
    """
    resuming = options.resume and (folder / STATE).exists()
    used = any((folder / name).exists() for name in RUN_FILES)
    if used and not (resuming or options.force or options.dry_run):
        raise ConfigError(
            f"{folder} already contains a run; add --resume to continue it, add --force to start "
            "over, or choose another --run-folder"
        )
    return resuming
