"""A dry run: check that a run can start; estimate its time, memory and disk space."""

from __future__ import annotations

import math
import statistics
import time
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import torch

from captioner.errors import ConfigError
from captioner.files import free_space
from captioner.hardware import peak_memory
from captioner.training.build import Setup
from captioner.training.loop import Trainer
from captioner.training.preflight import setting_warnings
from captioner.training.run import RunFolder
from captioner.training.trackers import Trackers
from captioner.training.validation import decode

STEPS = 4
"""Steps that are timed, after one warm-up step."""

PHOTOS = 32
"""Validation photos to caption."""


@dataclass(frozen=True)
class DryRun:
    """Estimates of a dry run."""

    steps: int
    """Steps of the run."""
    epochs: int
    step: float
    """Seconds per training step, data loading included."""
    validation: float
    """Seconds per validation, without scoring and figures."""
    memory: int
    """Peak of this process, or of its GPU if it has one (bytes)."""
    disk: int
    """Peak size of checkpoints and models, while old ones still exist (bytes)."""
    free: int
    """Free space on the disk of the run folder (bytes)."""
    warnings: tuple[str, ...] = ()
    """Settings that do not suit the data; see ``preflight.setting_warnings``."""

    @property
    def seconds(self) -> float:
        """Duration of the run."""
        return self.steps * self.step + self.epochs * self.validation

    def __str__(self) -> str:
        epoch = self.steps / self.epochs
        return "\n".join(
            (self._estimates(epoch), *(f"warning: {warning}" for warning in self.warnings))
        )

    def _estimates(self, epoch: float) -> str:
        return (
            f"{self.steps} steps ({epoch:.0f} per epoch), {self.step:.2f} s per step, "
            f"{duration(epoch * self.step)} per epoch, {duration(self.validation)} per validation\n"
            f"total time: {duration(self.seconds)}\n"
            f"memory: {self.memory / 1e9:.1f} GB; checkpoints and models: "
            f"{self.disk / 1e9:.2f} GB ({self.free / 1e9:.0f} GB free)"
        )


def dry_run(setup: Setup, folder: Path) -> DryRun:
    """Take a few steps and caption a few photos; weights change, but nothing is written.

    Raises:
        ConfigError: There is not enough disk space.
        CaptionerError: Any other error that would stop the run at its start.
    """
    config, run = setup.config, RunFolder(folder, setup.config)
    Trackers(config.training.trackers, run)
    trainer = Trainer(setup, run)
    disk, free = _disk(trainer), free_space(folder)
    if disk > free:
        raise ConfigError(
            f"the run needs {disk / 1e9:.2f} GB in {folder}, but only {free / 1e9:.2f} GB are "
            "free; free some disk space, or use another --run-folder"
        )
    step = _time_steps(trainer)
    images = setup.validated
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
        tuple(setting_warnings(setup, trainer.total_steps)),
    )


def _time_steps(trainer: Trainer) -> float:
    """Median seconds of a few steps, data loading included."""
    model, optimizer = trainer.prepare()
    trainer.model.train()
    times, started = [], time.monotonic()
    for batch in islice(trainer.source.batches(0, 0), 1 + STEPS):
        trainer.step(model, optimizer, batch)
        if trainer.device.type == "cuda":
            torch.cuda.synchronize()
        times.append(time.monotonic() - started)
        started = time.monotonic()
    trainer.collect_sums()  # fail now if the loss is NaN
    return statistics.median(times[1:] or times)


def _disk(trainer: Trainer) -> int:
    """Bytes of two checkpoints (one is being replaced by the other) and of the models."""
    weights = sum(int(tensor.nbytes) for tensor in trainer.model.state_dict().values())
    groups = trainer.optimizer.param_groups
    moments = 2 * sum(int(p.nbytes) for group in groups for p in group["params"])
    copies = 1 if trainer.average is None else 2
    kept = trainer.config.training.keep_best
    models = 2 if kept == 1 else kept + 3  # best and one being written; kept ones and average
    return 2 * (copies * weights + moments) + models * weights // 2


def duration(seconds: float) -> str:
    """Format a duration: ``42 s``, ``12 min``, ``3 h 25 min``, ``4 d 3 h``."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    if minutes < 90:
        return f"{minutes} min"
    hours, minutes = divmod(minutes, 60)
    if hours < 48:
        return f"{hours} h {minutes} min"
    return f"{hours // 24} d {hours % 24} h"
