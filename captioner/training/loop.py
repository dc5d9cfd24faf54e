"""The training loop: train, validate, save.

    for every epoch:
        for every batch:    loss, backward, clip, step, log    (and every save_every steps, save)
        caption the validation photos
        save the best model (training.select), and stop early if validations do not improve

The module ``objectives`` computes the loss of a batch. The loss for cross-entropy is

    features = model.to_features(batch.images)       once per photo
    memory = model.decoder.memory(features)
    loss = caption_losses(model.decoder, memory, batch.tokens).total(config.training)

A run that was interrupted and resumed yields the same model as a run without interruption. For
this, ``TrainingState`` contains everything that changes, and every random choice depends only on
the seed and the step.

On a GPU, the CPU does not wait for the result of a step, except when captions are sampled. Losses
and gradient norms are summed on the GPU until ``collect`` reads them.
"""

from __future__ import annotations

import copy
import math
import sys
import time
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from tqdm import tqdm

from captioner.data.batches import Batch
from captioner.data.sources import open_source
from captioner.errors import CheckpointError
from captioner.hardware import autocast, float32_precision, pick_precision
from captioner.inference.captioner import Captioner
from captioner.inference.card import write_card
from captioner.inference.folder import save_model
from captioner.inference.names import CARD
from captioner.inference.stored_model import StoredModel
from captioner.memory import memory_errors
from captioner.messages import first_line
from captioner.model.caption_model import CaptionModel
from captioner.training.checks import setting_warnings
from captioner.training.names import METRICS, STEPS
from captioner.training.objectives import Objective, build_objective
from captioner.training.optim import (
    RunningAverage,
    clip_gradients,
    lr_factor,
    make_optimizer,
    mean_weights,
    warmup_steps,
)
from captioner.training.processes import Processes, Sums
from captioner.training.run_folder import RunFolder, stop_signals
from captioner.training.setup import SMALLER, Setup
from captioner.training.state import (
    EPOCH_SUMS,
    Progress,
    TrainingState,
    flatten,
    means,
    resume_settings,
)
from captioner.training.validation import (
    Sentence,
    decode,
    describe,
    describe_scores,
    describe_selection,
    score_sentences,
    selection_score,
    summary,
)

COLLECT_EVERY = 20
"""Number of steps after which losses and gradient norms are read from a GPU. Each read waits for
the GPU. On a CPU, they are read at every step."""

MIN_SCALE = 2.0**-14
"""Smallest factor for the loss in fp16. If gradients overflow even with this factor, the run has
diverged."""


class Forward(nn.Module):
    """A module that computes the loss of a batch in the run's precision, such as bf16.

    It is a module, because DistributedDataParallel, which averages the gradients of several
    processes, can only wrap modules.
    """

    def __init__(self, objective: Objective, model: CaptionModel, precision: str) -> None:
        super().__init__()
        self.objective, self.model, self.precision = objective, model, precision

    def forward(self, batch: Batch) -> tuple[Tensor, int]:
        """Return the loss of a batch, summed over its words, and the number of words."""
        with autocast(self.precision, next(self.model.parameters()).device):
            return self.objective(self.model, batch)


class Trainer:
    """A run that trains one model and writes to one run folder."""

    def __init__(self, setup: Setup, folder: RunFolder) -> None:
        """Build optimizer, data source and objective, without writing anything."""
        config = self.config = setup.config
        self.setup, self.training, self.folder = setup, config.training, folder
        self.processes = Processes(folder.path, self.training.trackers)
        self.device, self.world = self.processes.device, self.processes.count
        self.rank, self.main = self.processes.rank, self.processes.main
        self.precision = pick_precision(self.training.precision, self.device)
        self.model: CaptionModel = setup.stored.model.to(self.device)
        self.initial = copy.deepcopy(self.model.state_dict()) if self.training.initial_share else {}
        decay = self.training.ema_decay
        self.state = TrainingState(
            self.model,
            RunningAverage(self.model, decay) if decay else None,
            make_optimizer(self.model, self.training),
            # Otherwise small gradients would be 0 in fp16. It does nothing in other precisions.
            torch.amp.GradScaler(self.device.type, enabled=self.precision == "fp16"),
            Progress(settings=resume_settings(setup)),
        )
        self.objective = build_objective(config, setup.train, setup.stored)
        forward = Forward(self.objective, self.model, self.precision)
        self.loss_of = self.processes.share(forward)
        self.sums = Sums(EPOCH_SUMS, self.processes)
        given = config, setup.train, self.model.preprocessing, setup.cache
        self.source = open_source(*given, rank=self.rank, world=self.world)
        self.total_steps = sum(map(self.source.batches_in, range(self.training.epochs)))
        self.warmup_steps = warmup_steps(self.training, self.total_steps)
        self._clock = time.monotonic()

    @property
    def progress(self) -> Progress:
        """The progress of the run: epoch, step and scores."""
        return self.state.progress

    def run(self) -> Progress:
        """Train until all epochs are done or the run stops early.

        Raises:
            KeyboardInterrupt: Ctrl-C or a termination signal stopped the run. Its state is saved.
            CheckpointError: The state cannot be saved, or the loss or gradient is not finite.
        """
        progress, training, folder = self.progress, self.training, self.folder
        if ending := progress.ending(training):
            self._print(f"already complete: {ending}")
        else:
            with self.folder.locked() if self.main else nullcontext():
                self._train()
        # The card is missing if an earlier session was killed just before it ended.
        if self.main and not (folder.best / CARD).exists():
            write_card(folder.best)
        return progress

    def _train(self) -> None:
        """Take all remaining steps of the run, with a validation after each epoch."""
        progress, training = self.progress, self.training
        interrupted = KeyboardInterrupt(f"saved in {self.folder.path}; add resume to continue")
        self._start()
        with (
            tqdm(
                total=self.total_steps,
                initial=progress.step,
                desc="training",
                unit="step",
                disable=not self.main,
                dynamic_ncols=True,
            ) as bar,
            self.processes.tracking(flatten(self.folder.settings), progress.step),
            stop_signals() as stop,
            float32_precision(self.precision, self.device),
        ):
            if self.config.init_from is not None and progress.step == 0 and progress.start is None:
                self._validate_start()
            while not progress.ending(training):
                self.model.train()
                self._clock = time.monotonic()
                for batch in self.source.batches(progress.epoch, progress.batch):
                    self.step(batch)
                    progress.batch += 1
                    progress.step += 1
                    bar.update()
                    has_read = self._log(bar)
                    # Several processes agree to stop through the device. They ask only after `_log`
                    # has waited for the device anyway.
                    stopping = (has_read or self.world == 1) and self.processes.any(stop.is_set())
                    if stopping or progress.step % training.save_every == 0:
                        self.collect()
                        self.save()
                    if stopping:
                        raise interrupted
                self.collect()
                self.save()  # before validation, which may take long
                if self.processes.any(stop.is_set()):
                    raise interrupted
                self.validate()  # the next epoch begins
                if self.processes.any(stop.is_set()) and not progress.ending(training):
                    raise interrupted
        if progress.epoch < training.epochs:
            self._print(progress.ending(training))
        if progress.start is not None and progress.best_epoch < 0:
            self._print(
                "captioner: warning: no epoch is better than the model of init_from "
                f"({describe_selection(training.select, progress.start)}), so {self.folder.best} "
                "contains that model; lower training.lr"
            )

    def _start(self) -> None:
        """Prepare the run folder, and check that all processes start from the same step."""
        progress, steps = self.progress, self.processes.gather([self.progress.step])
        if len(set(steps)) > 1:
            raise CheckpointError(
                f"the processes found {self.folder.path} at different steps "
                f"({', '.join(map(str, steps))}); use a --run-folder on a disk that they all share"
            )
        for warning in setting_warnings(self.setup, self.total_steps):
            self._print(f"captioner: warning: {warning}")
        fresh = progress.step == 0
        if fresh:  # before anything else is written, so that a killed run can be resumed
            self.save()
        if self.main:
            self.folder.open(progress.epoch, progress.step, fresh=fresh)

    def _print(self, line: str) -> None:
        """Print a line to stderr, above a progress bar, in the main process."""
        if self.main:
            tqdm.write(line, file=sys.stderr)

    # --- A step ---

    def step(self, batch: Batch) -> None:
        """Take one optimizer step on the part of a batch that this process trains on."""
        training, state, step = self.training, self.state, self.progress.step
        optimizer, scaler = state.optimizer, state.scaler
        # Sampling and dropout depend only on seed, step and process, so a resumed run repeats them.
        torch.manual_seed((training.seed * 1_000_003 + step) * self.world + self.rank)
        for group in optimizer.param_groups:
            group["lr"] = group["peak_lr"] * self._lr_factor(step)
        parts, words = batch.parts(training.micro_batch), 0
        # Losses are divided by the words of all parts and processes. The number of sampled words is
        # known only after the forward passes. So losses are first divided by the reference words,
        # to keep fp16 gradients in range, and the gradients are corrected afterwards.
        reference_words = self._total(batch.words)
        for part in parts:
            with self.processes.exchanging(self.loss_of, now=part is parts[-1]):
                loss, of_part = self.loss_of(part)
                # backward sums the parts, and DistributedDataParallel averages the processes.
                scaler.scale(loss * self.world / reference_words).backward()
            words += of_part
        scaler.unscale_(optimizer)
        correction = reference_words / self._total(words)
        norm = clip_gradients(optimizer, correction, training.clip_norm)
        scaler.step(optimizer)  # no effect if a gradient has overflowed in fp16
        scaler.update()
        optimizer.zero_grad(set_to_none=True)
        if state.average is not None:
            state.average.update_parameters(self.model)
        if scaler.is_enabled():
            norm = norm.nan_to_num(0, 0, 0)  # an overflow is normal
        # Sums are added over processes. All have the same norm, so only one adds it.
        self.sums.add({**self.objective.sums(), **({"gradient_norm": norm} if self.main else {})})

    def _total(self, words: int) -> Tensor:
        """Return the number of words in all processes, at least 1, as a scalar on the device."""
        return self.processes.total(torch.tensor(float(words))).clamp(min=1)

    def _lr_factor(self, step: int) -> float:
        return lr_factor(step, self.warmup_steps, self.total_steps)

    def _lr(self) -> float:
        """Return the decoder's learning rate at the last step."""
        return self.training.lr * self._lr_factor(self.progress.step - 1)

    # --- Log ---

    def _log(self, bar: tqdm[Any]) -> bool:
        """Update the progress bar and the training curves if their next update is due.

        Returns:
            Whether the sums were read from the device, so that the CPU waited for it.
        """
        progress = self.progress
        every = min(self.training.log_every, self.total_steps // self.training.epochs)
        due = every > 0 and progress.step % every == 0
        if not (due or self.device.type == "cpu" or progress.step % COLLECT_EVERY == 0):
            return False
        self.collect()
        found = means(progress.sums)
        name = "reward" if "reward" in found else "loss"
        bar.set_postfix({"epoch": progress.epoch + 1, name: f"{found[name]:.3f}"})
        if due:
            row = progress.curve_point(self._lr())
            if self.main:
                self.folder.append(STEPS, row)
                self.processes.log(row, "train/")
        return True

    def collect(self) -> None:
        """Move the sums from the device to ``progress``, and add the time since the last call.

        Raises:
            CheckpointError: The loss or the gradient norm is not finite.
        """
        now, scaler = time.monotonic(), self.state.scaler
        added = self.sums.read()
        if scaler.is_enabled() and scaler.get_scale() < MIN_SCALE:
            added["gradient_norm"] = math.inf  # a smaller scale of the loss would not help
        self.progress.add(added, now - self._clock)
        self._clock = now
        for name, what in (("loss", "loss"), ("gradient_norm", "gradient norm")):
            if not math.isfinite(value := self.progress.sums[name]):
                raise CheckpointError(
                    f"the {what} is {value} by step {self.progress.step} of {self.total_steps} "
                    f"(learning rate {self._lr():.1e}, clip_norm {self.training.clip_norm}); the "
                    "last checkpoint is from before that: lower training.lr, raise "
                    "training.warmup_steps or set training.precision to fp32, and continue with "
                    "--resume"
                )

    # --- Validate and save ---

    def validate(self) -> None:
        """End the epoch: validate, report the metrics, and save the state.

        If the score is the best so far, the model is saved too.
        """
        training, progress, folder, setup = self.training, self.progress, self.folder, self.setup
        average, stored = self.state.average, setup.stored
        model = stored.model if average is None else average.module
        if share := training.initial_share:
            now, model = model.state_dict(), copy.deepcopy(model)
            # The initial model may lack a reading.
            reading = {n: part for n, part in now.items() if n.startswith("reading.")}
            states = now, self.initial | reading
            model.load_state_dict(mean_weights(states, (1 - share, share)))
        validated = StoredModel(model, stored.decoder, stored.vocabulary, stored.search)  # type: ignore[arg-type]
        validated.reading = stored.reading
        scores, sentences = self._score(validated)
        row = progress.metrics(self._lr(), self.objective.signature())
        row |= {**scores, **describe(sentences)}
        score = selection_score(scores, training.select)
        better = progress.add_score(score, training)
        progress.epoch, progress.batch, progress.sums = progress.epoch + 1, 0, {}
        if self.main:
            folder.append(METRICS, row)
            self.processes.log(row)
            start, worse = progress.start, ""
            if start is not None and score < start:
                worse = f"; worse than at the start ({describe_selection(training.select, start)})"
            self._print(f"{summary(row)}{worse}")
            photos = {"train_photos": len(setup.train), "val_photos": len(setup.validated)}
            validated.info = {"training": row | photos}
            validated.frequencies = setup.frequencies
            if better:
                save_model(folder.best, validated)
        self.save()
        if self.main:  # at the end, so that an error in a figure loses nothing
            self._add_samples(sentences[: training.sample_images])

    def _add_samples(self, sentences: Sequence[Sentence]) -> None:
        """Draw figures of validation captions. If drawing fails, warn and continue."""
        try:
            figures = self.folder.add_samples(self.progress.epoch, sentences)
            self.processes.log_images(figures, self.progress.step)
        except Exception as error:
            problem = f"({type(error).__name__}: {first_line(error)})"
            self._print(
                f"captioner: warning: samples of epoch {self.progress.epoch} cannot be drawn "
                f"{problem}; training continues"
            )

    def _validate_start(self) -> None:
        """Validate the model of ``init_from``, which is the best model until an epoch is better."""
        progress, setup, select = self.progress, self.setup, self.training.select
        stored = setup.stored
        scores, _ = self._score(stored)
        progress.start = progress.best = selection_score(scores, select)
        if self.main:
            self._print(f"start: {describe_scores(scores)}")
            initial = StoredModel(stored.model, stored.decoder, stored.vocabulary, stored.search)
            initial.info, initial.frequencies = stored.info, setup.frequencies
            initial.reading = stored.reading
            save_model(self.folder.best, initial)
        self.save()

    def captioner(self, stored: StoredModel) -> Captioner:
        """Return a captioner that validates a model on the run's device and in its precision."""
        return Captioner(stored, device=str(self.device), precision=self.precision)

    def _score(self, stored: StoredModel) -> tuple[dict[str, float], list[Sentence]]:
        """Caption the validation photos, and score the captions.

        Each process captions a part of the photos. Every process returns the scores and sentences
        of all photos, sorted by image id.
        """
        mine = self.setup.validated[self.rank :: self.world]
        sentences = decode(self.captioner(stored), mine, self.config.search, self.setup.cache)
        if self.world > 1:
            sentences = self.processes.gather(sentences)
        sentences = sorted(sentences, key=lambda sentence: sentence.photo.image_id)
        return score_sentences(sentences), sentences

    def save(self) -> None:
        """Save the state in the main process, while the other processes wait."""
        if self.main:
            self.state.save(self.folder.state)
        self.processes.wait()


@memory_errors(SMALLER)
def start(setup: Setup, folder: Path, resume: bool) -> Progress:
    """Train in a run folder, and return the progress at the end of the run.

    With ``resume``, training continues from the checkpoint in the folder. ``Trainer.run`` lists the
    errors.
    """
    trainer = Trainer(setup, RunFolder(folder, setup.config))
    if resume:
        trainer.state.load(trainer.folder.state)
    return trainer.run()
