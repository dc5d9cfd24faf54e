"""One optimizer step: forward, backward, clip, step.

Every random choice is a function of seed and step. On a GPU a step does not wait for the device,
except to sample captions: its sums stay there until ``collect``.

accelerate connects the processes of a run (torchrun). The precision is ours: accelerate's fp16
needs a GPU, and its scale cannot be resumed.
"""

from __future__ import annotations

import math
import time
from contextlib import nullcontext

import torch
from accelerate import Accelerator
from torch import nn

from captioner.data.batches import Batch
from captioner.data.sources import open_source
from captioner.errors import CheckpointError
from captioner.hardware import autocast, pick_precision, upload
from captioner.model.captioner import CaptionModel
from captioner.model.kernels import compile_scores
from captioner.model.losses import Losses
from captioner.training.objectives import Task, build_objective
from captioner.training.optim import RunningAverage, lr_factor, make_optimizer, warmup_steps
from captioner.training.setup import Setup
from captioner.training.state import Progress, TrainingState, resume_settings
from captioner.training.sums import Sums

MIN_SCALE = 2.0**-14
"""Smallest scale of the loss in fp16; where gradients overflow even so, the run has diverged."""


class _Forward(nn.Module):
    """The losses of a task as a forward pass, which DistributedDataParallel wraps."""

    def __init__(self, model: CaptionModel, precision: str, label_smoothing: float) -> None:
        super().__init__()
        self.model, self.precision, self.label_smoothing = model, precision, label_smoothing

    def forward(self, task: Task) -> Losses:
        with autocast(self.precision, task.images.device):
            return task.losses(self.model, self.label_smoothing)


class Stepper:
    """Model, optimizer, data and objective of a run, and the steps that it takes."""

    def __init__(self, setup: Setup) -> None:
        """Move the model to its device and build optimizer, data source and objective.

        Raises:
            CaptionerError: The shards of the config cannot be used.
        """
        config = self.config = setup.config
        self.setup, self.training = setup, config.training
        self.accelerator = Accelerator(cpu=not torch.cuda.is_available(), mixed_precision="no")
        self.device, self.world = self.accelerator.device, self.accelerator.num_processes
        self.rank, self.main = self.accelerator.process_index, self.accelerator.is_main_process
        self.precision = pick_precision(self.training.precision, self.device)
        self.model: CaptionModel = setup.stored.model.to(self.device)
        if self.training.compile:
            compile_scores(self.model.decoder.embedding.weight)
        decay = self.training.ema_decay
        self.state = TrainingState(
            self.model,
            RunningAverage(self.model, decay) if decay else None,
            make_optimizer(self.model, self.training),
            # Small gradients would be 0 in fp16; otherwise it does nothing.
            torch.amp.GradScaler(self.device.type, enabled=self.precision == "fp16"),
            Progress(settings=resume_settings(setup, self.world)),
        )
        forward = _Forward(self.model, self.precision, self.training.label_smoothing)
        self.forward: nn.Module = self.accelerator.prepare(forward)
        self.source = open_source(
            config,
            setup.train,
            self.model.preprocessing,
            setup.cache,
            rank=self.rank,
            world=self.world,
        )
        self.total_steps = sum(map(self.source.batches_in, range(self.training.epochs)))
        self.warmup_steps = warmup_steps(self.training, self.total_steps)
        teachers = [teacher.to(self.device) for teacher in setup.teachers]
        self.objective = build_objective(
            config, setup.train, setup.stored, self.total_steps, teachers
        )
        self.sums = Sums(self.device)
        self._clock = time.monotonic()

    @property
    def progress(self) -> Progress:
        """How far the run has come."""
        return self.state.progress

    def step(self, batch: Batch) -> None:
        """Take one optimizer step on this process's share of a batch.

        Sums stay on the device until ``collect``.
        """
        accelerator, config, step = self.accelerator, self.training, self.progress.step
        average, optimizer, scaler = self.state.average, self.state.optimizer, self.state.scaler
        # Sampling and dropout depend on seed, step and process alone: a resumed run repeats them.
        torch.manual_seed((config.seed * 1_000_003 + step) * self.world + self.rank)
        for group in optimizer.param_groups:
            group["lr"] = group["peak_lr"] * self._lr_factor(step)
        tasks = [task for part in batch.parts(config.micro_batch) for task in self._tasks(part)]
        count = torch.tensor(sum(task.words for task in tasks))
        words = accelerator.reduce(upload(count, self.device))
        loss_sum = torch.zeros((), dtype=torch.float64, device=self.device)
        for task in tasks:
            with nullcontext() if task is tasks[-1] else accelerator.no_sync(self.forward):
                losses = self.forward(task)
                # Mean over the words of all processes and parts, however unequal (gradients are
                # averaged over processes).
                loss = task.scale * losses.objective(config)
                loss = loss * self.world / words.clamp(min=1)
                scaler.scale(loss).backward()
                if task.words:
                    loss_sum += losses.cross_entropy.detach()
        scaler.unscale_(optimizer)
        trained = [p for group in optimizer.param_groups for p in group["params"]]
        norm = accelerator.clip_grad_norm_(trained, config.clip_norm)
        scaler.step(optimizer)  # without effect if a gradient has overflowed in fp16
        scaler.update()
        optimizer.zero_grad(set_to_none=True)
        if average is not None:
            average.update_parameters(self.model)
        if norm is not None and scaler.is_enabled():
            norm = norm.nan_to_num(0, 0, 0)  # an overflow is normal
        counted = {"words": float(count), **self.objective.sums()}
        step_sums = self.sums.step(loss_sum, norm if self.main else None, counted)
        self.sums.values += accelerator.reduce(step_sums)

    def _tasks(self, part: Batch) -> list[Task]:
        images = upload(part.images, self.device)
        with autocast(self.precision, self.device):
            return self.objective.tasks(self.model, part, images, self.progress.step)

    def _lr_factor(self, step: int) -> float:
        factor = lr_factor(step, self.warmup_steps, self.total_steps, self.training.schedule)
        return factor * self.progress.lr_scale

    def collect(self) -> None:
        """Move the sums from the device to the progress, and count the time.

        Raises:
            CheckpointError: The loss or the gradient norm is not finite.
        """
        now, scaler, added = time.monotonic(), self.state.scaler, self.sums.collect()
        if scaler.is_enabled() and scaler.get_scale() < MIN_SCALE:
            added["gradient_norm"] = math.inf  # not only because the scale was too large
        self.progress.add(added, now - self._clock)
        self._clock = now
        if problem := self.progress.problem():
            raise CheckpointError(
                f"{problem} of {self.total_steps} (learning rate {self._lr():.1e}, clip_norm "
                f"{self.training.clip_norm}); the last checkpoint is from before that: lower "
                "training.lr, raise training.warmup_steps or set training.precision fp32, and "
                "continue with --resume"
            )

    def _lr(self) -> float:
        """Learning rate of the last step."""
        return self.training.lr * self._lr_factor(self.progress.step - 1)
