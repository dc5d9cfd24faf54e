"""A dry run: whether a run can begin, how long it would take, and what it would need."""

from __future__ import annotations

import math
import shutil
import statistics
import time
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import torch

from captioner.config import TrainConfig
from captioner.errors import ConfigError
from captioner.hardware import peak_memory
from captioner.training.run_folder import RunFolder
from captioner.training.setup import Setup
from captioner.training.trackers import Trackers
from captioner.training.trainer import Trainer
from captioner.training.validation import decode

STEPS = 4
"""Steps that are timed, after one that warms up."""

PHOTOS = 32
"""Validation photos that are captioned."""


@dataclass(frozen=True)
class DryRun:
    """What a dry run has found."""

    steps: int
    """In the whole run."""
    epochs: int
    step: float
    """One training step, reading included (seconds)."""
    validation: float
    """One validation, without scoring and drawing (seconds)."""
    memory: int
    """Peak of this process; of its GPU where it has one (bytes)."""
    disk: int
    """Checkpoint and models at their most, the old ones still there (bytes)."""
    free: int
    """Room where the run folder lies (bytes)."""

    @property
    def seconds(self) -> float:
        """The whole run."""
        return self.steps * self.step + self.epochs * self.validation

    def __str__(self) -> str:
        epoch = self.steps / self.epochs
        return (
            f"{self.steps} steps, {epoch:.0f} an epoch; {self.step:.2f} s a step, "
            f"{duration(epoch * self.step)} an epoch, {duration(self.validation)} a validation\n"
            f"the whole run: {duration(self.seconds)}\n"
            f"memory: {self.memory / 1e9:.1f} GB; checkpoint and models: {self.disk / 1e9:.2f} GB "
            f"of {self.free / 1e9:.0f} GB free"
        )


def dry_run(config: TrainConfig, setup: Setup, folder: Path) -> DryRun:
    """Take some steps and caption some photos; nothing is written.

    Args:
        config: The whole experiment.
        setup: Photos and model; the model's weights change.
        folder: Where the run would be kept.

    Raises:
        ConfigError: The disk has too little room.
        CaptionerError: Whatever would stop the run at its beginning.
    """
    run = RunFolder(folder, config)
    Trackers(config.training.trackers, run)
    trainer = Trainer(config, setup, run)
    disk, free = _disk(trainer), _free(folder)
    if disk > free:
        raise ConfigError(
            f"the run needs {disk / 1e9:.2f} GB in {folder} and {free / 1e9:.2f} GB are free; make "
            "room, or give another --run-folder"
        )
    step = _time_steps(trainer)
    images = setup.val[: config.training.limit_val or None]
    some = images[:PHOTOS]
    captioner = trainer.captioner(setup.stored)
    started = time.monotonic()
    decode(captioner, some, config.search, setup.cache)
    each = (time.monotonic() - started) / len(some)
    return DryRun(
        trainer.total_steps,
        config.training.epochs,
        step,
        each * math.ceil(len(images) / trainer.world),
        peak_memory(trainer.device),
        disk,
        free,
    )


def _time_steps(trainer: Trainer) -> float:
    """Seconds of a step, the median of a few; photos are read as in the run."""
    model, optimizer = trainer.prepare()
    trainer.model.train()
    times, started = [], time.monotonic()
    for batch in islice(trainer.source.batches(0, 0), 1 + STEPS):
        trainer.step(model, optimizer, batch)
        if trainer.device.type == "cuda":
            torch.cuda.synchronize()
        times.append(time.monotonic() - started)
        started = time.monotonic()
    trainer.look()  # a loss that is no number is told now
    return statistics.median(times[1:] or times)


def _disk(trainer: Trainer) -> int:
    """Bytes of two checkpoints (the old one stays until the new one is whole) and the models."""
    weights = sum(int(tensor.nbytes) for tensor in trainer.model.state_dict().values())
    groups = trainer.optimizer.param_groups
    moments = 2 * sum(int(p.nbytes) for group in groups for p in group["params"])
    copies = 1 if trainer.average is None else 2
    kept = trainer.config.training.keep_best
    models = 2 if kept == 1 else kept + 3  # best, one being written; kept ones and their average
    return 2 * (copies * weights + moments) + models * weights // 2


def _free(folder: Path) -> int:
    there = next(
        parent for parent in (folder.absolute(), *folder.absolute().parents) if parent.exists()
    )
    return shutil.disk_usage(there).free


def duration(seconds: float) -> str:
    """Such as ``42 s``, ``12 min``, ``3 h 25 min``, ``4 d 3 h``."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    if minutes < 90:
        return f"{minutes} min"
    hours, minutes = divmod(minutes, 60)
    if hours < 48:
        return f"{hours} h {minutes} min"
    return f"{hours // 24} d {hours % 24} h"
