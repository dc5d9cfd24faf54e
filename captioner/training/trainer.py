"""The training loop: step, validate, keep the best, save, go on.

    for every epoch:
        for every batch:    forward, backward, clip, step      (state saved now and then)
        validate by real decoding; the best CIDEr is kept as a model folder; stop when it is stale

Everything the loop counts is in ``Progress``; every random choice is a function of seed and step.
A run that was stopped anywhere therefore goes on as if it had not been. On a GPU nothing in a step
waits for the device (but to draw words, which the next ones depend on): sums are kept there and
looked at now and then.
"""

from __future__ import annotations

import math
import sys
import time
from contextlib import nullcontext
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator, PartialState
from accelerate.utils import gather_object
from torch import nn
from tqdm import tqdm

from captioner.api import Captioner
from captioner.config import TrainConfig
from captioner.data.batches import Batch
from captioner.data.sources import open_source
from captioner.errors import CheckpointError
from captioner.evaluation.frequencies import DocumentFrequencies
from captioner.evaluation.statistics import describe_texts
from captioner.hardware import pick_precision
from captioner.model_folder import StoredModel, save_model
from captioner.models.captioner import CaptionModel
from captioner.models.losses import Losses
from captioner.models.packing import upload
from captioner.training.objectives import DRAWN, SUMS, Task, build_objective
from captioner.training.resume_checks import check_resume, resume_settings
from captioner.training.run_folder import RunFolder
from captioner.training.schedule import lr_factor
from captioner.training.setup import Setup, average_models, make_average, make_optimizer
from captioner.training.signals import Stop, stop_signals
from captioner.training.state import Progress, load_state, save_state
from captioner.training.trackers import Trackers
from captioner.training.validation import Sentence, decode, score_sentences

LOOK_EVERY = 20
"""Steps between two looks at what a GPU has summed up; on a CPU every step is looked at."""


class Interrupted(Exception):  # noqa: N818 - not an error: someone asked the run to stop
    """The run was asked to stop; its state is saved."""


class _Taught(nn.Module):
    """The model as a step calls it, and as several processes share it."""

    def __init__(self, model: CaptionModel) -> None:
        super().__init__()
        self.model = model

    def forward(self, task: Task, label_smoothing: float) -> Losses:
        """Losses of a task."""
        return self.model(  # type: ignore[no-any-return]
            task.images,
            task.tokens,
            label_smoothing,
            inputs=task.inputs,
            advantages=task.advantages,
        )


class Trainer:
    """Trains one model in one run folder."""

    def __init__(self, config: TrainConfig, setup: Setup, folder: RunFolder) -> None:
        """Put model and optimizer on their device.

        Args:
            config: The whole experiment.
            setup: Photos and model, from ``setup.prepare``.
            folder: Where the run is kept.

        Raises:
            CaptionerError: Shards that the config names cannot be used.
        """
        self.config, self.setup, self.folder = config, setup, folder
        cpu = not torch.cuda.is_available()
        # The device is known before the precision is chosen.
        precision = pick_precision(config.training.precision, PartialState(cpu=cpu).device)
        self.accelerator = Accelerator(
            cpu=cpu, mixed_precision="bf16" if precision == "bf16" else "no"
        )
        self.device = self.accelerator.device
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
        self.objective = build_objective(
            config, setup.train, setup.stored.vocabulary, self.total_steps
        )
        self.progress = Progress(settings=resume_settings(config, setup, self.world))
        self._told = torch.zeros(len(SUMS), dtype=torch.float64, device=self.device)

    def resume(self) -> None:
        """Go on from the run folder's checkpoint.

        Raises:
            CheckpointError: It cannot be read, or belongs to other settings.
        """
        found = load_state(self.folder.state, self.model, self.average, self.optimizer)
        check_resume(self.folder.state, found.settings, self.progress.settings)
        self.progress = found

    def run(self) -> Progress:
        """Train to the end.

        Returns:
            What the loop counted.

        Raises:
            Interrupted: Ctrl-C or a termination signal; the state is saved.
            CheckpointError: The state cannot be saved, or the loss is no number any more.
        """
        config, progress = self.config.training, self.progress
        main = self.accelerator.is_main_process
        if self._ended() and (not self._averages() or self.folder.average.exists()):
            return progress
        trackers = Trackers(config.trackers, self.folder, active=main)
        self._agree()
        fresh = progress.step == 0
        if fresh:  # before anything else is there or gone: a run that is killed can be resumed
            self._save()
        if main:
            self.folder.open(progress.epoch, fresh=fresh)
        distributed, optimizer = self.prepare()
        bar = tqdm(
            total=self.total_steps,
            initial=progress.step,
            desc="training",
            unit="step",
            disable=not main,
            dynamic_ncols=True,
        )
        with bar, trackers, stop_signals() as stop:
            while not self._ended():
                self._learn(distributed, optimizer, bar, stop)
                self._close_epoch(bar, trackers)
                if self._any(stop.requested):  # it is saved
                    raise Interrupted
            if self._averages():
                self._average_best(bar)
        return progress

    def prepare(self) -> tuple[nn.Module, torch.optim.Optimizer]:
        """Model and optimizer as ``step`` takes them."""
        model, optimizer = self.accelerator.prepare(_Taught(self.model), self.optimizer)
        return model, optimizer

    def _averages(self) -> bool:
        """Whether models were kept for an average: a run that is over kept what it was told to."""
        return self.config.training.keep_best > 1 and bool(self.progress.kept)

    def _agree(self) -> None:
        """Make sure that all processes go on from one place.

        Raises:
            CheckpointError: They do not: the run folder is not the same for all.
        """
        steps = gather_object([self.progress.step])
        if len(set(steps)) > 1:
            raise CheckpointError(
                f"the processes found {self.folder.path} at steps {', '.join(map(str, steps))}; "
                "give a --run-folder on a disk that all of them share"
            )

    def _learn(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, bar: Any, stop: Stop
    ) -> None:
        """What is left of the epoch's steps."""
        progress = self.progress
        self.model.train()
        started = time.monotonic()
        for batch in self.source.batches(progress.epoch, progress.batch):
            self.step(model, optimizer, batch)
            progress.batch += 1
            progress.step += 1
            bar.update()
            looks = self.device.type == "cpu" or progress.step % LOOK_EVERY == 0
            if looks:
                self.look()
                bar.set_postfix({"epoch": progress.epoch + 1} | self._so_far())
            # Processes agree through the device, which would have to be waited for.
            stopping = (looks or self.world == 1) and self._any(stop.requested)
            if stopping or progress.step % self.config.training.save_every == 0:
                self.look()
                started = self._clock(started)
                self._save()
            if stopping:
                raise Interrupted
        self.look()
        self._clock(started)
        self._save()  # validation may take long
        if self._any(stop.requested):
            raise Interrupted

    def _close_epoch(self, bar: Any, trackers: Trackers) -> None:
        """Validate, tell, keep what is good, save."""
        config, progress = self.config.training, self.progress
        main = self.accelerator.is_main_process
        scores, sentences = self._validate(self._kept())
        rate = config.lr * self._lr_factor(progress.step - 1)  # before it may be halved
        better = self._judge(scores)
        if main:
            row = self._row(scores, sentences, rate)
            self.folder.add_metrics(row)
            trackers.log(row)
            bar.write(_line(row), file=sys.stderr)
            self._keep(row, better)
        progress.epoch, progress.batch, progress.sums = progress.epoch + 1, 0, {}
        self._save()
        if main:  # last: a drawing that fails loses nothing
            self.folder.prune(progress.kept)
            drawn = self.folder.add_samples(progress.epoch, sentences[: config.sample_images])
            trackers.show(drawn, progress.step)

    def step(self, model: nn.Module, optimizer: torch.optim.Optimizer, batch: Batch) -> None:
        """Learn one batch; what it gives is summed up on the device.

        Args:
            model: From ``prepare``.
            optimizer: Likewise.
            batch: This process's share.
        """
        config, accelerator = self.config.training, self.accelerator
        # Draws and dropout as a function of seed, step and process: a resumed run has the same.
        torch.manual_seed(
            (config.seed * 1_000_003 + self.progress.step) * self.world + accelerator.process_index
        )
        factor = self._lr_factor(self.progress.step)
        for group in optimizer.param_groups:
            group["lr"] = group["highest_lr"] * factor
        tasks = [task for part in batch.parts(config.micro_batch) for task in self._tasks(part)]
        count = torch.tensor(sum(task.words for task in tasks))
        words = accelerator.reduce(upload(count, self.device))
        sums = torch.zeros_like(self._told)
        for number, task in enumerate(tasks, 1):
            last = number == len(tasks)
            with nullcontext() if last else accelerator.no_sync(model):
                losses = model(task, config.label_smoothing)
                # Mean over the words of all processes and parts, however unequal (gradients are
                # averaged over processes).
                loss = task.scale * losses.objective(config)
                accelerator.backward(loss * self.world / words.clamp(min=1))
                if task.scale == 1:
                    sums[0] += losses.cross_entropy.detach()
        norm = accelerator.clip_grad_norm_(
            [p for group in optimizer.param_groups for p in group["params"]], config.clip_norm
        )
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if self.average is not None:
            self.average.update_parameters(self.model)
        told = self.objective.sums()
        here = [float(count), 0.0, *(told.get(name, 0.0) for name in DRAWN)]
        sums[1:] += upload(torch.tensor(here, dtype=sums.dtype), self.device)
        sums = accelerator.reduce(sums)
        if norm is not None:
            sums[2] += norm  # the same in all processes
        self._told += sums

    def _tasks(self, part: Batch) -> list[Task]:
        images = part.images.to(self.device, non_blocking=True)
        with self.accelerator.autocast():
            return self.objective.tasks(self.model, part, images, self.progress.step)

    def look(self) -> None:
        """Move what the device has summed up into the progress.

        Raises:
            CheckpointError: It is no number.
        """
        for name, value in zip(SUMS, self._told.tolist(), strict=True):
            self.progress.sums[name] = self.progress.sums.get(name, 0.0) + value
        self._told.zero_()
        sums = self.progress.sums
        bad = [name for name in ("loss", "gradient_norm") if not math.isfinite(sums[name])]
        if bad:
            config, step = self.config.training, self.progress.step
            first = 1 if self.device.type == "cpu" else max(1, step - LOOK_EVERY + 1)
            where = f"step {step}" if self.device.type == "cpu" else f"steps {first} to {step}"
            rate = config.lr * self._lr_factor(step - 1)
            raise CheckpointError(
                f"the {bad[0].replace('_', ' ')} is {sums[bad[0]]} at {where} of "
                f"{self.total_steps} (epoch {self.progress.epoch + 1}, learning rate {rate:.1e}, "
                f"clip_norm {config.clip_norm}); the last checkpoint is from before: lower "
                "training.lr, raise training.warmup_steps or give training.precision fp32, and "
                "go on with --resume auto"
            )

    def _so_far(self) -> dict[str, Any]:
        """What the progress bar tells of the epoch."""
        sums = self.progress.sums
        if sums["samples"]:
            return {"reward": f"{sums['reward'] / sums['samples']:.3f}"}
        return {"loss": f"{sums['loss'] / max(1, sums['words']):.3f}"}

    def _any(self, here: bool) -> bool:
        """Whether it is so in any process: all must stop at the same step."""
        if self.world == 1:
            return here
        flag = torch.tensor(int(here), device=self.device)
        return bool(self.accelerator.reduce(flag))

    def _lr_factor(self, step: int) -> float:
        config = self.config.training
        factor = lr_factor(step, config.warmup_steps, self.total_steps, config.schedule)
        return factor * self.progress.lr_scale

    def _clock(self, started: float) -> float:
        now = time.monotonic()
        self.progress.seconds += now - started
        sums = self.progress.sums
        sums["seconds"] = sums.get("seconds", 0.0) + now - started
        return now

    def _ended(self) -> bool:
        """Whether all epochs are done, or too many have brought nothing."""
        config, progress = self.config.training, self.progress
        since = progress.epoch - 1 - progress.best_epoch
        stale = config.patience > 0 and progress.epoch > 0 and since >= config.patience
        return progress.epoch >= config.epochs or stale

    def _judge(self, scores: dict[str, float]) -> bool:
        """Whether this is the best so far; every process comes to the same result."""
        progress, config = self.progress, self.config.training
        cider = scores["CIDEr"]
        better = cider > progress.best
        if better:
            progress.best, progress.best_epoch = cider, progress.epoch
        progress.plateau = 0 if better else progress.plateau + 1
        if config.schedule == "plateau" and progress.plateau >= config.plateau_patience:
            progress.lr_scale, progress.plateau = progress.lr_scale / 2, 0
        if config.keep_best > 1:
            progress.kept[str(progress.epoch + 1)] = cider
            best = sorted(progress.kept, key=lambda epoch: -progress.kept[epoch])
            progress.kept = {epoch: progress.kept[epoch] for epoch in best[: config.keep_best]}
        return better

    def _kept(self) -> StoredModel:
        """The model that is validated and kept: the average where there is one."""
        stored = self.setup.stored
        model = stored.model if self.average is None else self.average.module
        return StoredModel(model, stored.decoder, stored.vocabulary, stored.search, {})  # type: ignore[arg-type]

    def captioner(self, stored: StoredModel) -> Captioner:
        """A model put to use as validation does."""
        precision = pick_precision(self.config.training.precision, self.device)
        return Captioner(stored, device=str(self.device), precision=precision)

    def _validate(self, stored: StoredModel) -> tuple[dict[str, float], list[Sentence]]:
        """Caption the validation photos, shared among the processes, and score them."""
        images = self.setup.val[: self.config.training.limit_val or None]
        captioner = self.captioner(stored)
        mine = images[self.accelerator.process_index :: self.world]
        sentences = decode(captioner, mine, self.config.search, self.setup.cache)
        if self.world > 1:
            sentences = gather_object(sentences)
        sentences = sorted(sentences, key=lambda sentence: sentence.image.image_id)
        return score_sentences(sentences), sentences

    def _row(
        self, scores: dict[str, float], sentences: list[Sentence], rate: float
    ) -> dict[str, Any]:
        """What there is to tell of the epoch."""
        progress, sums = self.progress, self.progress.sums
        row: dict[str, Any] = {
            "epoch": progress.epoch + 1,
            "step": progress.step,
            "loss": sums["loss"] / max(1, sums["words"]),
            "lr": rate,
            "seconds": progress.seconds,
        }
        if sums["samples"]:
            row |= {name: sums[name] / sums["samples"] for name in ("reward", "baseline")}
            row |= {
                "sampled_bad_endings": sums["bad_endings"] / sums["samples"],
                "seconds_waiting_for_rewards": sums["waited"] / self.world,
                "seconds_of_epoch": sums["seconds"],
                "reward_signature": self._signature,
            }
        endings = describe_texts(sentence.caption.text for sentence in sentences)["bad_endings"]
        return row | {**scores, "bad_endings": endings}

    def _keep(self, row: dict[str, Any], better: bool) -> None:
        """Keep the model if it is among the best so far."""
        stored = self._kept()
        stored.info = {"training": row | {"train_photos": len(self.setup.train)}}
        stored.frequencies = self._frequencies
        if better:
            save_model(self.folder.best, stored)
        epoch = str(self.progress.epoch + 1)
        if epoch in self.progress.kept:
            save_model(self.folder.kept(epoch), stored)

    def _average_best(self, bar: Any) -> None:
        """Average the kept models' weights as one more model, and say how good it is."""
        self.accelerator.wait_for_everyone()
        stored = average_models([self.folder.kept(epoch) for epoch in self.progress.kept])
        scores, _ = self._validate(stored)
        if self.accelerator.is_main_process:
            epochs = sorted(map(int, self.progress.kept))
            stored.info = {"training": {"average_of_epochs": epochs, **scores}}
            save_model(self.folder.average, stored)
            bar.write(
                f"average of epochs {', '.join(map(str, epochs))}: CIDEr "
                f"{100 * scores['CIDEr']:.1f}, BLEU-4 {100 * scores['Bleu_4']:.1f}: "
                f"{self.folder.average}",
                file=sys.stderr,
            )

    @cached_property
    def _signature(self) -> str:
        return self.objective.signature()

    @cached_property
    def _frequencies(self) -> bytes:
        """The training captions' document frequencies; they are kept with the model."""
        captions = {photo.image.image_id: photo.image.captions for photo in self.setup.train}
        return DocumentFrequencies.from_references(captions).to_bytes()

    def _save(self) -> None:
        if self.accelerator.is_main_process:
            save_state(self.folder.state, self.progress, self.model, self.average, self.optimizer)
        self.accelerator.wait_for_everyone()


def _line(row: dict[str, Any]) -> str:
    """A row for people."""
    name = "reward" if "reward" in row else "loss"
    return (
        f"epoch {row['epoch']}: {name} {row[name]:.3f}, CIDEr {100 * row['CIDEr']:.1f}, BLEU-4 "
        f"{100 * row['Bleu_4']:.1f}, bad endings {100 * row['bad_endings']:.1f}%"
    )


def start(config: TrainConfig, setup: Setup, folder: Path, resume: bool) -> Progress:
    """Train in a run folder; see ``Trainer.run``."""
    trainer = Trainer(config, setup, RunFolder(folder, config))
    if resume:
        trainer.resume()
    return trainer.run()
