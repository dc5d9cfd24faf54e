"""The training loop: train, validate, save.

    for every epoch:
        for every batch:    forward, backward, clip, step      (state saved every save_every steps)
        validate: caption the validation photos; save the best model (training.select); stop early
        when validations stop improving

``Progress`` holds all counters, and every random choice is a function of seed and step, so that an
interrupted run resumes exactly. On a GPU a step does not wait for the device, except to sample
captions: sums stay there and are collected every ``COLLECT_EVERY`` steps.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Mapping
from contextlib import nullcontext
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from torch import nn
from tqdm import tqdm

from captioner.data.batches import Batch
from captioner.data.sources import open_source
from captioner.errors import CheckpointError
from captioner.evaluation.frequencies import DocumentFrequencies
from captioner.evaluation.statistics import describe_texts
from captioner.hardware import autocast, float32_precision, pick_precision, upload
from captioner.inference.batch_captioner import BatchCaptioner
from captioner.inference.card import write_card
from captioner.inference.folder import StoredModel, save_model
from captioner.inference.model_config import CARD
from captioner.model.captioner import CaptionModel
from captioner.model.losses import Losses
from captioner.training.build import Setup
from captioner.training.objectives import EPOCH_SUMS, Task, build_objective
from captioner.training.optim import (
    average_models,
    lr_factor,
    make_average,
    make_optimizer,
    warmup_steps,
)
from captioner.training.preflight import setting_warnings
from captioner.training.resume_checks import check_resume, resume_settings
from captioner.training.run import Progress, RunFolder, load_state, read_progress, save_state
from captioner.training.signals import Stop, stop_signals
from captioner.training.trackers import Trackers
from captioner.training.validation import (
    Sentence,
    decode,
    describe_selection,
    score_sentences,
    selection_score,
)

COLLECT_EVERY = 20
"""Steps between two reads of the sums on a GPU; on a CPU they are read every step."""

MIN_SCALE = 2.0**-14
"""Smallest scale of the loss in fp16; where gradients overflow even so, the run has diverged."""

NO_SCORE = 5e-4
"""A lower CIDEr or BLEU-4 is printed as 0.0 points: the captions have nothing in common with the
references."""


class Interrupted(Exception):  # noqa: N818 - not an error: the user stopped the run
    """The run was interrupted; its state is saved."""


class _TaskLosses(nn.Module):
    """The model with its losses as forward pass, as DistributedDataParallel needs it."""

    def __init__(self, model: CaptionModel, precision: str) -> None:
        super().__init__()
        self.model, self.precision = model, precision

    def forward(self, task: Task, label_smoothing: float) -> Losses:
        """Losses of a task."""
        with autocast(self.precision, task.images.device):
            return self.model(  # type: ignore[no-any-return]
                task.images,
                task.tokens,
                label_smoothing,
                inputs=task.inputs,
                targets=task.targets,
                advantages=task.advantages,
                photo_words=task.photo_words,
            )


class Trainer:
    """Trains one model in one run folder."""

    def __init__(self, setup: Setup, folder: RunFolder) -> None:
        """Move the model to its device and build optimizer, data source and objective.

        Raises:
            CaptionerError: The shards of the config cannot be used.
        """
        config = self.config = setup.config
        self.setup, self.folder = setup, folder
        cpu = not torch.cuda.is_available()
        # The precision is ours: accelerate's fp16 needs a GPU, and its scale cannot be resumed.
        self.accelerator = Accelerator(cpu=cpu, mixed_precision="no")
        self.device = self.accelerator.device
        self.precision = pick_precision(config.training.precision, self.device)
        # Small gradients would be 0 in fp16. Otherwise it does nothing.
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=self.precision == "fp16")
        self.world = self.accelerator.num_processes
        self.model: CaptionModel = setup.stored.model.to(self.device)
        if config.training.compile:
            self.model.decoder.compile_scores()
        self.optimizer = make_optimizer(self.model, config.training)
        self.average = make_average(self.model, config.training.ema_decay)
        self.source = open_source(
            config,
            setup.train,
            self.model.preprocessing,
            setup.cache,
            rank=self.accelerator.process_index,
            world=self.world,
        )
        self.total_steps = sum(map(self.source.batches_in, range(config.training.epochs)))
        self.warmup_steps = warmup_steps(config.training, self.total_steps)
        teachers = [teacher.to(self.device) for teacher in setup.teachers]
        self.objective = build_objective(
            config, setup.train, setup.stored, self.total_steps, teachers
        )
        self.progress = Progress(settings=resume_settings(setup, self.world), curve={"step": 0})
        self._sums = torch.zeros(len(EPOCH_SUMS), dtype=torch.float64, device=self.device)

    def resume(self) -> None:
        """Continue from the checkpoint in the run folder.

        Raises:
            CheckpointError: It cannot be read, or is from a run with other settings.
        """
        path = self.folder.state
        settings = self.progress.settings
        check_resume(path, read_progress(path).settings, settings)  # names what differs
        self.progress = load_state(path, self.model, self.average, self.optimizer)
        if self.progress.scaler:
            self.scaler.load_state_dict(self.progress.scaler)
        # An earlier release saved fewer settings, and no training curves.
        self.progress.settings = settings
        self.progress.curve.setdefault("step", self.progress.step)

    def run(self) -> Progress:
        """Train to the end.

        Raises:
            Interrupted: By Ctrl-C or a termination signal; the state is saved.
            CheckpointError: The state cannot be saved, or the loss or gradient is not finite.
        """
        progress, main = self.progress, self.accelerator.is_main_process
        ending = self._ending()
        if ending and (not self._keeps_several() or self.folder.average.exists()):
            self._write_card(replace=False)  # missing if it was killed just before its end
            _write(main, f"already complete: {ending}")
            return progress
        trackers = Trackers(self.config.training.trackers, self.folder, active=main)
        self._check_processes_agree()
        for warning in setting_warnings(self.setup, self.total_steps):
            _write(main, f"captioner: warning: {warning}")
        fresh = progress.step == 0
        if fresh:  # before anything else is written or deleted: a killed run can then be resumed
            self._save()
        if main:
            self.folder.open(progress.epoch, progress.step, fresh=fresh)
        model, optimizer = self.prepare()
        bar = tqdm(
            total=self.total_steps,
            initial=progress.step,
            desc="training",
            unit="step",
            disable=not main,
            dynamic_ncols=True,
        )
        with (
            bar,
            trackers,
            stop_signals() as stop,
            float32_precision(self.precision, self.device),
        ):
            while not ending:
                self._train_epoch(model, optimizer, bar, trackers, stop)
                self._end_epoch(bar, trackers)
                ending = self._ending()
                complete = ending and not self._keeps_several()
                if self._any_process(stop.requested) and not complete:  # the state is saved
                    raise Interrupted
            if progress.epoch < self.config.training.epochs:
                _write(main, ending)
            if self._keeps_several():
                self._save_average(bar)
        self._write_card(replace=True)
        return progress

    def _write_card(self, *, replace: bool) -> None:
        """Write the best model's card; ``replace`` one that is there."""
        best, main = self.folder.best, self.accelerator.is_main_process
        if main and best.is_dir() and (replace or not (best / CARD).exists()):
            write_card(best)

    def _ending(self) -> str:
        """Why the run is over: all epochs are done, or ``patience`` is; empty if it is not over."""
        config, progress = self.config.training, self.progress
        if progress.epoch >= config.epochs:
            return (
                f"{progress.epoch} of {config.epochs} epochs; to continue, give a larger "
                "--training.epochs"
            )
        since_best = progress.epoch - 1 - progress.best_epoch
        if 0 < config.patience <= since_best and progress.epoch > 0:
            best = describe_selection(config.select, progress.best)
            return (
                f"stopped early after epoch {progress.epoch} of {config.epochs}: no better model "
                f"in {since_best} epochs after {best} in epoch {progress.best_epoch + 1}; to "
                f"continue, give a --training.patience above {since_best}, or 0"
            )
        return ""

    def _keeps_several(self) -> bool:
        """Whether there are kept models to average (a run resumed at its end may have none)."""
        return self.config.training.keep_best > 1 and bool(self.progress.kept)

    def _check_processes_agree(self) -> None:
        """Raise CheckpointError unless all processes continue from the same step."""
        steps = gather_object([self.progress.step])
        if len(set(steps)) > 1:
            raise CheckpointError(
                f"the processes found {self.folder.path} at different steps "
                f"({', '.join(map(str, steps))}); use a --run-folder on a disk that they all share"
            )

    def prepare(self) -> tuple[nn.Module, torch.optim.Optimizer]:
        """The model with its losses, ready for several processes, and the optimizer."""
        return self.accelerator.prepare(_TaskLosses(self.model, self.precision)), self.optimizer

    def _train_epoch(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        bar: Any,
        trackers: Trackers,
        stop: Stop,
    ) -> None:
        """Take the remaining steps of the epoch."""
        progress = self.progress
        self.model.train()
        started = time.monotonic()
        for batch in self.source.batches(progress.epoch, progress.batch):
            self.step(model, optimizer, batch)
            progress.batch += 1
            progress.step += 1
            bar.update()
            log_every = self.config.training.log_every
            log = log_every > 0 and progress.step % log_every == 0
            collect = log or self.device.type == "cpu" or progress.step % COLLECT_EVERY == 0
            if collect:
                self.collect_sums()
                bar.set_postfix({"epoch": progress.epoch + 1} | self._epoch_mean())
            if log:
                self._log_step(trackers)
            # Several processes agree through the device: only where that is waited for anyway.
            stopping = (collect or self.world == 1) and self._any_process(stop.requested)
            if stopping or progress.step % self.config.training.save_every == 0:
                self.collect_sums()
                started = self._add_seconds(started)
                self._save()
            if stopping:
                raise Interrupted
        self.collect_sums()
        self._add_seconds(started)
        self._save()  # before validation, which may take long
        if self._any_process(stop.requested):
            raise Interrupted

    def step(self, model: nn.Module, optimizer: torch.optim.Optimizer, batch: Batch) -> None:
        """Take one optimizer step on this process's share of a batch.

        Model and optimizer come from ``prepare``; sums stay on the device until ``collect_sums``.
        """
        config, accelerator = self.config.training, self.accelerator
        # Sampling and dropout depend on seed, step and process alone: a resumed run repeats them.
        torch.manual_seed(
            (config.seed * 1_000_003 + self.progress.step) * self.world + accelerator.process_index
        )
        factor = self._lr_factor(self.progress.step)
        for group in optimizer.param_groups:
            group["lr"] = group["peak_lr"] * factor
        tasks = [task for part in batch.parts(config.micro_batch) for task in self._tasks(part)]
        count = torch.tensor(sum(task.words for task in tasks))
        words = accelerator.reduce(upload(count, self.device))
        loss_sum = torch.zeros((), dtype=torch.float64, device=self.device)
        for number, task in enumerate(tasks, 1):
            last = number == len(tasks)
            with nullcontext() if last else accelerator.no_sync(model):
                losses = model(task, config.label_smoothing)
                # Mean over the words of all processes and parts, however unequal (gradients are
                # averaged over processes).
                loss = task.scale * losses.objective(config)
                loss = loss * self.world / words.clamp(min=1)
                accelerator.backward(self.scaler.scale(loss))
                if task.words:
                    loss_sum += losses.cross_entropy.detach()
        self.scaler.unscale_(optimizer)
        norm = accelerator.clip_grad_norm_(
            [p for group in optimizer.param_groups for p in group["params"]], config.clip_norm
        )
        self.scaler.step(optimizer)  # without effect if a gradient has overflowed in fp16
        self.scaler.update()
        optimizer.zero_grad(set_to_none=True)
        if self.average is not None:
            self.average.update_parameters(self.model)
        counted = {"words": float(count), **self.objective.sums()}
        values = torch.tensor([counted.get(name, 0.0) for name in EPOCH_SUMS], dtype=torch.float64)
        step_sums = upload(values, self.device)
        sums = dict(zip(EPOCH_SUMS, step_sums, strict=True))  # views
        sums["loss"] += loss_sum
        if norm is not None and accelerator.is_main_process:  # all processes have the same
            overflow_is_normal = self.scaler.is_enabled()
            sums["gradient_norm"] += norm.nan_to_num(0, 0, 0) if overflow_is_normal else norm
        self._sums += accelerator.reduce(step_sums)

    def _tasks(self, part: Batch) -> list[Task]:
        images = upload(part.images, self.device)
        with autocast(self.precision, self.device):
            return self.objective.tasks(self.model, part, images, self.progress.step)

    def _lr_factor(self, step: int) -> float:
        config = self.config.training
        factor = lr_factor(step, self.warmup_steps, self.total_steps, config.schedule)
        return factor * self.progress.lr_scale

    def collect_sums(self) -> None:
        """Move the sums from the device to the progress.

        Raises:
            CheckpointError: The loss or the gradient norm is not finite.
        """
        sums, curve = self.progress.sums, self.progress.curve
        for name, value in zip(EPOCH_SUMS, self._sums.tolist(), strict=True):
            sums[name] = sums.get(name, 0.0) + value
            curve[name] = curve.get(name, 0.0) + value
        self._sums.zero_()
        if self.scaler.is_enabled() and self.scaler.get_scale() < MIN_SCALE:
            sums["gradient_norm"] = math.inf  # not only because the scale was too large
        for name in ("loss", "gradient_norm"):
            if math.isfinite(sums[name]):
                continue
            config, step = self.config.training, self.progress.step
            first = 1 if self.device.type == "cpu" else max(1, step - COLLECT_EVERY + 1)
            where = f"step {step}" if self.device.type == "cpu" else f"steps {first} to {step}"
            lr = config.lr * self._lr_factor(step - 1)
            raise CheckpointError(
                f"the {name.replace('_', ' ')} is {sums[name]} at {where} of {self.total_steps} "
                f"(epoch {self.progress.epoch + 1}, learning rate {lr:.1e}, clip_norm "
                f"{config.clip_norm}); the last checkpoint is from before that: lower training.lr, "
                "raise training.warmup_steps or set training.precision fp32, and continue with "
                "--resume"
            )

    def _log_step(self, trackers: Trackers) -> None:
        """Add a point to the training curves: means over the steps since the last one."""
        progress, sums = self.progress, self.progress.curve
        progress.curve = {"step": progress.step}
        if not self.accelerator.is_main_process:
            return
        row: dict[str, Any] = {
            "epoch": progress.epoch + 1,
            "step": progress.step,
            "loss": sums["loss"] / max(1, sums["words"]),
            "lr": self.config.training.lr * self._lr_factor(progress.step - 1),
            "gradient_norm": sums["gradient_norm"] / (progress.step - sums["step"]),
        }
        if sums["samples"]:
            row |= {name: sums[name] / sums["samples"] for name in ("reward", "baseline")}
        self.folder.add_steps(row)
        trackers.log_step(row)

    def _epoch_mean(self) -> dict[str, Any]:
        """Mean loss or reward of the epoch so far, for the progress bar."""
        sums = self.progress.sums
        if sums["samples"]:
            return {"reward": f"{sums['reward'] / sums['samples']:.3f}"}
        return {"loss": f"{sums['loss'] / max(1, sums['words']):.3f}"}

    def _any_process(self, flag: bool) -> bool:
        """Whether the flag is set in any process: all must stop at the same step."""
        if self.world == 1:
            return flag
        return bool(self.accelerator.reduce(torch.tensor(int(flag), device=self.device)))

    def _add_seconds(self, started: float) -> float:
        now = time.monotonic()
        self.progress.seconds += now - started
        sums = self.progress.sums
        sums["seconds"] = sums.get("seconds", 0.0) + now - started
        return now

    def _end_epoch(self, bar: Any, trackers: Trackers) -> None:
        """Validate, report the metrics, save the model and the state."""
        config, progress = self.config.training, self.progress
        main = self.accelerator.is_main_process
        scores, sentences = self._validate(self._validated_model())
        lr = config.lr * self._lr_factor(progress.step - 1)  # before it may be halved
        better = self._update_best(selection_score(scores, config.select))
        if main:
            row = self._metrics(scores, sentences, lr)
            self.folder.add_metrics(row)
            trackers.log(row)
            bar.write(_summary(row), file=sys.stderr)
            self._save_models(row, better)
        progress.epoch, progress.batch, progress.sums = progress.epoch + 1, 0, {}
        self._save()
        if main:  # last: a figure that fails loses nothing
            self.folder.prune(progress.kept)
            figures = self.folder.add_samples(progress.epoch, sentences[: config.sample_images])
            trackers.log_images(figures, progress.step)

    def _validated_model(self) -> StoredModel:
        """The model that is validated and saved: the running average if there is one."""
        stored = self.setup.stored
        model = stored.model if self.average is None else self.average.module
        return StoredModel(model, stored.decoder, stored.vocabulary, stored.search, {})  # type: ignore[arg-type]

    def captioner(self, stored: StoredModel) -> BatchCaptioner:
        """The model on the run's device and in its precision, as validation uses it."""
        return BatchCaptioner(stored, device=str(self.device), precision=self.precision)

    def _validate(self, stored: StoredModel) -> tuple[dict[str, float], list[Sentence]]:
        """Caption the validation photos, distributed over the processes, and score the captions."""
        images = self.setup.validated
        mine = images[self.accelerator.process_index :: self.world]
        sentences = decode(self.captioner(stored), mine, self.config.search, self.setup.cache)
        if self.world > 1:
            sentences = gather_object(sentences)
        sentences = sorted(sentences, key=lambda sentence: sentence.image.image_id)
        return score_sentences(sentences), sentences

    def _update_best(self, score: float) -> bool:
        """Update best score, plateau and kept epochs; return whether the model is the best.

        As long as no model scores, the newest one is the best: patience starts at the first score.
        """
        progress, config = self.progress, self.config.training
        first = progress.best_epoch < 0
        no_score = config.select != "loss" and max(score, progress.best) < NO_SCORE
        better = first or no_score or score > progress.best
        if better:
            progress.best, progress.best_epoch = score, progress.epoch
        progress.plateau = 0 if better else progress.plateau + 1
        if config.schedule == "plateau" and progress.plateau >= config.plateau_patience:
            progress.lr_scale, progress.plateau = progress.lr_scale / 2, 0
        if config.keep_best > 1:
            progress.kept[str(progress.epoch + 1)] = score
            best = sorted(progress.kept, key=lambda epoch: -progress.kept[epoch])
            progress.kept = {epoch: progress.kept[epoch] for epoch in best[: config.keep_best]}
        return better

    def _metrics(
        self, scores: dict[str, float], sentences: list[Sentence], lr: float
    ) -> dict[str, Any]:
        """The epoch's row in metrics.jsonl."""
        progress, sums = self.progress, self.progress.sums
        row: dict[str, Any] = {
            "epoch": progress.epoch + 1,
            "step": progress.step,
            "loss": sums["loss"] / max(1, sums["words"]),
            "lr": lr,
            "seconds": progress.seconds,
        }
        if sums["samples"]:
            row |= {name: sums[name] / sums["samples"] for name in ("reward", "baseline")}
            row |= {
                "sampled_bad_endings": sums["bad_endings"] / sums["samples"],
                "seconds_waiting_for_rewards": sums["waited"] / self.world,
                "seconds_of_epoch": sums["seconds"],
                "reward_signature": self._reward_signature,
            }
        endings = describe_texts(sentence.caption.text for sentence in sentences)["bad_endings"]
        empty = sum(not sentence.caption.words for sentence in sentences) / len(sentences)
        return row | {**scores, "bad_endings": endings, "empty_captions": empty}

    @cached_property
    def _reward_signature(self) -> str:
        return self.objective.signature()

    def _save_models(self, row: dict[str, Any], better: bool) -> None:
        """Save the model if it is the best or one of the kept ones."""
        stored = self._validated_model()
        photos = {"train_photos": len(self.setup.train), "val_photos": len(self.setup.validated)}
        stored.info = {"training": row | photos}
        stored.frequencies = self._frequencies
        if better:
            save_model(self.folder.best, stored)
        epoch = str(self.progress.epoch + 1)
        if epoch in self.progress.kept:
            save_model(self.folder.kept(epoch), stored)

    @cached_property
    def _frequencies(self) -> bytes:
        """Document frequencies of the training captions, stored with the model."""
        captions = {photo.image.image_id: photo.image.captions for photo in self.setup.train}
        return DocumentFrequencies.from_references(captions).to_bytes()

    def _save_average(self, bar: Any) -> None:
        """Average the kept models' weights into one more model, validate and save it."""
        self.accelerator.wait_for_everyone()
        stored = average_models([self.folder.kept(epoch) for epoch in self.progress.kept])
        scores, _ = self._validate(stored)
        if self.accelerator.is_main_process:
            epochs = sorted(map(int, self.progress.kept))
            stored.info = {"training": {"average_of_epochs": epochs, **scores}}
            save_model(self.folder.average, stored)
            bar.write(
                f"average of epochs {', '.join(map(str, epochs))}: {_validated(scores)}, saved to "
                f"{self.folder.average}",
                file=sys.stderr,
            )

    def _save(self) -> None:
        self.progress.scaler = self.scaler.state_dict()
        if self.accelerator.is_main_process:
            save_state(self.folder.state, self.progress, self.model, self.average, self.optimizer)
        self.accelerator.wait_for_everyone()


def _summary(row: dict[str, Any]) -> str:
    """One line per epoch for the terminal."""
    name = "reward" if "reward" in row else "loss"
    styles = [key.removeprefix("CIDEr/") for key in row if key.startswith("CIDEr/")]
    of_styles = (f"; {style}: {_validated(row, f'/{style}')}" for style in styles)
    return (
        f"epoch {row['epoch']}: {name} {row[name]:.3f}, {_validated(row)}, "
        f"bad endings {100 * row['bad_endings']:.1f}%{''.join(of_styles)}"
    )


def _validated(scores: Mapping[str, Any], style: str = "") -> str:
    """Validation results for the terminal; ``style`` is the suffix of their names."""
    loss, perplexity = scores[f"val_loss{style}"], scores[f"perplexity{style}"]
    return (
        f"validation loss {loss:.3f} (perplexity {perplexity:.1f}), CIDEr "
        f"{100 * scores[f'CIDEr{style}']:.1f}, BLEU-4 {100 * scores[f'Bleu_4{style}']:.1f}"
    )


def _write(main: bool, line: str) -> None:
    """Print a line to stderr, above a progress bar, in the main process."""
    if main:
        tqdm.write(line, file=sys.stderr)


def start(setup: Setup, folder: Path, resume: bool) -> Progress:
    """Train in a run folder; see ``Trainer.run``."""
    trainer = Trainer(setup, RunFolder(folder, setup.config))
    if resume:
        trainer.resume()
    return trainer.run()
