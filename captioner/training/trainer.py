"""The training loop: step, validate, keep the best, save, go on.

    for every epoch:
        for every batch:    forward, backward, clip, step      (state saved now and then)
        validate by real decoding; the best CIDEr is kept as a model folder; stop when it is stale

Everything the loop counts is in ``Progress``; every random choice is a function of seed and step.
A run that was stopped anywhere therefore goes on as if it had not been.
"""

from __future__ import annotations

import math
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
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
from captioner.data.batches import Batch, CaptionDataset, EpochSampler, training_loader
from captioner.errors import CheckpointError
from captioner.evaluation.metrics import Scores
from captioner.frequencies import DocumentFrequencies
from captioner.hardware import pick_precision
from captioner.model_folder import StoredModel, save_model
from captioner.models.captioner import CaptionModel
from captioner.training.run_folder import RunFolder
from captioner.training.schedule import lr_factor
from captioner.training.setup import Setup, make_average, make_optimizer
from captioner.training.state import Progress, load_state, save_state
from captioner.training.validation import Sentence, decode, score_sentences


class Interrupted(Exception):  # noqa: N818 - not an error: someone asked the run to stop
    """The run was asked to stop; its state is saved."""


class Trainer:
    """Trains one model in one run folder."""

    def __init__(self, config: TrainConfig, setup: Setup, folder: RunFolder) -> None:
        """Put model and optimizer on their device.

        Args:
            config: The whole experiment.
            setup: Photos and model, from ``setup.prepare``.
            folder: Where the run is kept.
        """
        self.config, self.setup, self.folder = config, setup, folder
        cpu = not torch.cuda.is_available()
        # The device is known before the precision is chosen.
        precision = pick_precision(config.training.precision, PartialState(cpu=cpu).device)
        self.accelerator = Accelerator(
            cpu=cpu, mixed_precision="bf16" if precision == "bf16" else "no"
        )
        self.model: CaptionModel = setup.stored.model.to(self.accelerator.device)
        self.optimizer = make_optimizer(self.model, config.training)
        self.average = make_average(self.model, config.training.ema_decay)
        self.progress = Progress(photos=len(setup.train), batch_size=config.training.batch_size)
        self.sampler = EpochSampler(
            len(setup.train),
            config.training.batch_size,
            config.training.seed,
            self.accelerator.process_index,
            self.accelerator.num_processes,
        )
        self.total_steps = config.training.epochs * self.sampler.batches

    def resume(self) -> None:
        """Go on from the run folder's checkpoint.

        Raises:
            CheckpointError: It cannot be read, or belongs to other settings.
        """
        found = load_state(self.folder.state, self.model, self.average, self.optimizer)
        for name in ("photos", "batch_size"):
            old, new = getattr(found, name), getattr(self.progress, name)
            if old != new:
                raise CheckpointError(
                    f"{self.folder.state} was trained with {name} {old}, now it is {new}; "
                    "give the run's own data and settings, or another --run-folder"
                )
        self.progress = found

    def run(self) -> Progress:
        """Train to the end.

        Returns:
            What the loop counted.

        Raises:
            Interrupted: Ctrl-C or a termination signal; the state is saved.
            CheckpointError: The state cannot be saved.
        """
        config, progress = self.config.training, self.progress
        if progress.epoch >= config.epochs or self._stale():
            return progress
        if self.accelerator.is_main_process:
            self.folder.open(progress.epoch, fresh=progress.step == 0)
        distributed, optimizer = self.accelerator.prepare(self.model, self.optimizer)
        bar = tqdm(
            total=self.total_steps,
            initial=progress.step,
            desc="training",
            unit="step",
            disable=not self.accelerator.is_main_process,
            dynamic_ncols=True,
        )
        with bar, _stop_signals() as stop:
            while progress.epoch < config.epochs and not self._stale():
                self.model.train()
                started = time.monotonic()
                for batch in self._batches():
                    self._step(distributed, optimizer, batch)
                    progress.batch += 1
                    progress.step += 1
                    bar.update()
                    bar.set_postfix(epoch=progress.epoch + 1, loss=f"{self._loss():.3f}")
                    stopping = self._any(stop.requested)
                    if stopping or progress.step % config.save_every == 0:
                        started = self._clock(started)
                        self._save()
                    if stopping:
                        raise Interrupted
                self._clock(started)
                scores, sentences = self._validate()
                cider = scores.corpus["CIDEr"]
                better = cider > progress.best  # known to every process: all stop together
                if better:
                    progress.best, progress.best_epoch = cider, progress.epoch
                if self.accelerator.is_main_process:
                    self._report(scores, better, bar)
                progress.epoch, progress.batch = progress.epoch + 1, 0
                progress.loss, progress.words = 0.0, 0
                self._save()
                if self.accelerator.is_main_process:  # last: a drawing that fails loses nothing
                    self.folder.add_samples(progress.epoch, sentences[: config.sample_images])
        return progress

    def _batches(self) -> Iterator[Batch]:
        """What is left of this epoch."""
        data = self.config.data
        dataset = CaptionDataset(
            self.setup.train,
            self.model.preprocessing,
            max_captions=data.max_captions,
            horizontal_flip=data.horizontal_flip,
            seed=self.config.training.seed,
        )
        self.sampler.epoch, self.sampler.start = self.progress.epoch, self.progress.batch
        yield from training_loader(dataset, self.sampler, data.workers)

    def _step(self, model: nn.Module, optimizer: torch.optim.Optimizer, batch: Batch) -> None:
        config, accelerator = self.config.training, self.accelerator
        # Dropout as a function of seed, step and process: a resumed run drops what it would have.
        torch.manual_seed(
            (config.seed * 1_000_003 + self.progress.step) * accelerator.num_processes
            + accelerator.process_index
        )
        factor = lr_factor(self.progress.step, config.warmup_steps, self.total_steps)
        for group in optimizer.param_groups:
            group["lr"] = group["highest_lr"] * factor
        pixels = batch.pixels.to(accelerator.device, non_blocking=True)
        tokens = batch.tokens.to(accelerator.device, non_blocking=True)
        losses = model(pixels, tokens, config.label_smoothing)
        # Mean over the words of all processes, however unequal (gradients are averaged over them).
        words = accelerator.reduce(losses.words)
        accelerator.backward(losses.objective(config) * accelerator.num_processes / words)
        accelerator.clip_grad_norm_(
            [p for group in optimizer.param_groups for p in group["params"]], config.clip_norm
        )
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if self.average is not None:
            self.average.update_parameters(self.model)
        cross_entropy = float(accelerator.reduce(losses.cross_entropy.detach()))
        if not math.isfinite(cross_entropy):
            raise CheckpointError(
                f"the loss is {cross_entropy} at step {self.progress.step + 1}; lower training.lr "
                "and start again, or go on before it with --resume auto"
            )
        self.progress.loss += cross_entropy
        self.progress.words += int(words)

    def _any(self, here: bool) -> bool:
        """Whether it is so in any process: all must stop at the same step."""
        if self.accelerator.num_processes == 1:
            return here
        flag = torch.tensor(int(here), device=self.accelerator.device)
        return bool(self.accelerator.reduce(flag))

    def _loss(self) -> float:
        """Mean cross-entropy of a word over the epoch so far, nats."""
        return self.progress.loss / max(1, self.progress.words)

    def _clock(self, started: float) -> float:
        now = time.monotonic()
        self.progress.seconds += now - started
        return now

    def _stale(self) -> bool:
        patience = self.config.training.patience
        since = self.progress.epoch - 1 - self.progress.best_epoch
        return patience > 0 and self.progress.epoch > 0 and since >= patience

    def _kept(self) -> StoredModel:
        """The model that is validated and kept: the average where there is one."""
        stored = self.setup.stored
        model = stored.model if self.average is None else self.average.module
        return StoredModel(model, stored.decoder, stored.vocabulary, stored.search, {})  # type: ignore[arg-type]

    def _validate(self) -> tuple[Scores, list[Sentence]]:
        """Caption the validation photos, shared among the processes, and score them."""
        images = self.setup.val[: self.config.training.limit_val or None]
        rank, world = self.accelerator.process_index, self.accelerator.num_processes
        captioner = Captioner(
            self._kept(),
            device=str(self.accelerator.device),
            precision=pick_precision(self.config.training.precision, self.accelerator.device),
        )
        sentences = decode(captioner, images[rank::world], self.config.search)
        if world > 1:
            sentences = sorted(gather_object(sentences), key=lambda s: s.image.image_id)
        return score_sentences(sentences), sentences

    def _report(self, scores: Scores, better: bool, bar: Any) -> None:
        """Write the metrics; keep the model when it is the best so far."""
        progress, config = self.progress, self.config.training
        row = {
            "epoch": progress.epoch + 1,
            "step": progress.step,
            "loss": self._loss(),
            "lr": config.lr * lr_factor(progress.step - 1, config.warmup_steps, self.total_steps),
            "seconds": progress.seconds,
            **scores.corpus,
        }
        self.folder.add_metrics(row)
        bar.write(
            f"epoch {row['epoch']}: loss {row['loss']:.3f}, CIDEr {100 * row['CIDEr']:.1f}, "
            f"BLEU-4 {100 * row['Bleu_4']:.1f}",
            file=sys.stderr,
        )
        if better:
            stored = self._kept()
            stored.info = {"training": row | {"train_photos": len(self.setup.train)}}
            stored.frequencies = self._frequencies
            save_model(self.folder.best, stored)

    @cached_property
    def _frequencies(self) -> bytes:
        """The training captions' document frequencies; they are kept with the model."""
        captions = {number: one.image.captions for number, one in enumerate(self.setup.train)}
        return DocumentFrequencies.from_references(captions).to_bytes()

    def _save(self) -> None:
        if self.accelerator.is_main_process:
            save_state(self.folder.state, self.progress, self.model, self.average, self.optimizer)
        self.accelerator.wait_for_everyone()


class _Stop:
    requested = False


@contextmanager
def _stop_signals() -> Iterator[_Stop]:
    """Turns Ctrl-C and termination into a request that the loop sees between two steps."""
    stop = _Stop()

    def request(number: int, frame: object) -> None:
        del number, frame
        if stop.requested:  # asked twice: at once
            raise KeyboardInterrupt
        stop.requested = True
        tqdm.write("stopping after this step; once more to stop without saving", file=sys.stderr)

    try:
        old = {s: signal.signal(s, request) for s in (signal.SIGINT, signal.SIGTERM)}
    except ValueError:  # not in the main thread: nobody sends signals here
        yield stop
        return
    try:
        yield stop
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)


def start(config: TrainConfig, setup: Setup, folder: Path, resume: bool) -> Progress:
    """Train in a run folder; see ``Trainer.run``."""
    trainer = Trainer(config, setup, RunFolder(folder, config))
    if resume:
        trainer.resume()
    return trainer.run()
