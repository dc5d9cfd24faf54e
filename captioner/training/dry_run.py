"""Dry run that checks whether a run can start, and estimates its time, memory and disk space."""

from __future__ import annotations

import math
import statistics
import time
from datetime import timedelta
from itertools import islice
from pathlib import Path

import torch

from captioner.files import require_space
from captioner.memory import memory_errors, peak_memory
from captioner.messages import counted
from captioner.training.checks import setting_warnings
from captioner.training.loop import Trainer
from captioner.training.run_folder import RunFolder
from captioner.training.setup import SMALLER, Setup
from captioner.training.validation import decode

STEPS = 4
"""Number of steps that a dry run times, after one warm-up step."""

PHOTOS = 32
"""Number of validation photos that a dry run captions."""


@memory_errors(SMALLER)
def dry_run(setup: Setup, folder: Path) -> str:
    """Take a few steps and caption a few photos, without writing anything to disk.

    The weights in memory change. Errors that would stop the run at its start are raised here too.

    Returns:
        Text with one estimate or warning per line. The estimates cover time, memory and disk space.
        The warnings come from ``setting_warnings``.

    Raises:
        DataError: The disk does not have enough free space.
    """
    config = setup.config
    trainer = Trainer(setup, RunFolder(folder, config))
    disk = disk_needed(trainer)
    free = require_space(folder, disk)
    step, epochs = _time_step(trainer), config.training.epochs
    some, captioner = setup.validated[:PHOTOS], trainer.captioner(setup.stored)
    started = time.monotonic()
    decode(captioner, some, config.search, setup.cache)
    each = (time.monotonic() - started) / len(some)
    validation = each * math.ceil(len(setup.validated) / trainer.world)
    validations = epochs + (config.init_from is not None)
    steps = trainer.total_steps
    lines = [
        f"{counted(steps, 'step')} ({steps / epochs:.0f} per epoch), {step:.2f} s per step, "
        f"{_duration(steps / epochs * step)} per epoch, {_duration(validation)} per validation",
        f"total time: {_duration(steps * step + validations * validation)}",
        f"memory: {peak_memory(trainer.device) / 1e9:.1f} GB; checkpoints and models: "
        f"{disk / 1e9:.2f} GB ({free / 1e9:.0f} GB free)",
    ]
    return "\n".join(lines + [f"warning: {line}" for line in setting_warnings(setup, steps)])


def _time_step(trainer: Trainer) -> float:
    """Return the median time of ``STEPS`` steps (seconds), including the loading of data."""
    trainer.model.train()
    times, started = [], time.monotonic()
    for batch in islice(trainer.source.batches(0, 0), 1 + STEPS):
        trainer.step(batch)
        if trainer.device.type == "cuda":
            torch.cuda.synchronize()
        times.append(time.monotonic() - started)
        started = time.monotonic()
    trainer.collect()  # raises an error if the loss is NaN
    return statistics.median(times[1:] or times)


def disk_needed(trainer: Trainer) -> int:
    """Return the disk space that a run needs for checkpoints and models (bytes).

    While a file is replaced, the old and the new file both exist. So a run needs space for two
    checkpoints and two models.
    """
    state = trainer.state
    weights = sum(int(tensor.nbytes) for tensor in state.model.state_dict().values())
    groups = state.optimizer.param_groups
    moments = 2 * sum(int(p.nbytes) for group in groups for p in group["params"])
    copies = 1 if state.average is None else 2
    models = 2  # the best model, and the model that is being written, in half precision
    return 2 * (copies * weights + moments) + models * weights // 2


def _duration(seconds: float) -> timedelta:
    return timedelta(seconds=round(seconds))
