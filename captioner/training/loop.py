"""The training loop: train, validate, save.

    for every epoch:
        for every batch:    forward, backward, clip, step      (state saved every save_every steps)
        validate: caption the validation photos; save the best model (training.select); stop early
        when validations stop improving

``TrainingState`` holds all that changes, and every random choice is a function of seed and step, so
that an interrupted run resumes exactly. A step is taken in ``step.py``.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import gather_object
from tqdm import tqdm

from captioner.errors import CheckpointError
from captioner.hardware import float32_precision
from captioner.inference.captioner import Captioner
from captioner.inference.card import write_card
from captioner.inference.folder import CARD, StoredModel, save_model
from captioner.training.checks import setting_warnings
from captioner.training.optim import average_models
from captioner.training.run import RunFolder, Stop, stop_signals
from captioner.training.setup import Setup
from captioner.training.state import Progress
from captioner.training.step import Stepper
from captioner.training.sums import means
from captioner.training.trackers import Trackers
from captioner.training.validation import (
    Sentence,
    decode,
    describe,
    describe_scores,
    score_sentences,
    selection_score,
    summary,
)

COLLECT_EVERY = 20
"""Steps between two reads of the sums on a GPU; on a CPU they are read every step."""


class Interrupted(Exception):  # noqa: N818 - not an error: the user stopped the run
    """The run was interrupted; its state is saved."""


class Trainer(Stepper):
    """Trains one model in one run folder."""

    def __init__(self, setup: Setup, folder: RunFolder) -> None:
        """See ``Stepper``; nothing is written yet."""
        super().__init__(setup)
        self.folder = folder

    def run(self) -> Progress:
        """Train to the end.

        Raises:
            Interrupted: By Ctrl-C or a termination signal; the state is saved.
            CheckpointError: The state cannot be saved, or the loss or gradient is not finite.
        """
        progress, config = self.progress, self.training
        ending = progress.ending(config)
        if ending and (not self._several() or self.folder.average.exists()):
            self._write_card()  # missing if it was killed just before its end
            self._print(f"already complete: {ending}")
            return progress
        trackers = Trackers(config.trackers, self.folder, active=self.main)
        self._start()
        bar = tqdm(
            total=self.total_steps,
            initial=progress.step,
            desc="training",
            unit="step",
            disable=not self.main,
            dynamic_ncols=True,
        )
        precision = float32_precision(self.precision, self.device)
        with bar, trackers, stop_signals() as stop, precision:
            while not ending:
                self.model.train()
                self._clock = time.monotonic()
                for batch in self.source.batches(progress.epoch, progress.batch):
                    self.step(batch)
                    progress.batch += 1
                    progress.step += 1
                    bar.update()
                    read = self._log(bar, trackers)
                    # Several processes agree through the device: only where it is waited for.
                    stopping = (read or self.world == 1) and self._any_process(stop)
                    if stopping or progress.step % config.save_every == 0:
                        self.save()
                    if stopping:
                        raise Interrupted
                self.save()  # before validation, which may take long
                if self._any_process(stop):
                    raise Interrupted
                self.validate(trackers)
                ending = progress.ending(config)
                if self._any_process(stop) and not (ending and not self._several()):
                    raise Interrupted
            if progress.epoch < config.epochs:
                self._print(ending)
            if self._several():
                self._save_average()
        self._write_card(replace=True)
        return progress

    def _write_card(self, *, replace: bool = False) -> None:
        """Write the best model's card; ``replace`` one that is there."""
        best = self.folder.best
        if self.main and best.is_dir() and (replace or not (best / CARD).exists()):
            write_card(best)

    def _log(self, bar: Any, trackers: Trackers) -> bool:
        """Update the progress bar and the training curves; return whether the sums were read."""
        progress, every = self.progress, self.training.log_every
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
                self.folder.add_steps(row)
                trackers.log(row, "train/")
        return True

    def _any_process(self, stop: Stop) -> bool:
        """Whether any process should stop: all must stop at the same step."""
        if self.world == 1:
            return stop.requested
        flag = torch.tensor(int(stop.requested), device=self.device)
        return bool(self.accelerator.reduce(flag))

    def _print(self, line: str) -> None:
        """Print a line to stderr, above a progress bar, in the main process."""
        if self.main:
            tqdm.write(line, file=sys.stderr)

    # --- Validation ---

    def validate(self, trackers: Trackers) -> None:
        """End the epoch: validate, report the metrics, save the model and the state."""
        config, progress = self.training, self.progress
        scores, sentences = self._score(self._validated_model())
        row = progress.metrics(self._lr(), self.world, self.objective.signature())
        row |= {**scores, **describe(sentences)}
        better = progress.rank(selection_score(scores, config.select), config)
        if self.main:
            self.folder.add_metrics(row)
            trackers.log(row)
            self._print(summary(row))
            self._save_models(row, better)
        progress.epoch, progress.batch, progress.sums = progress.epoch + 1, 0, {}
        self._save_state()
        if self.main:  # last: a figure that fails loses nothing
            self.folder.prune(progress.kept)
            figures = self.folder.add_samples(progress.epoch, sentences[: config.sample_images])
            trackers.log_images(figures, progress.step)

    def _validated_model(self) -> StoredModel:
        """The model that is validated and saved: the running average if there is one."""
        stored, average = self.setup.stored, self.state.average
        model = stored.model if average is None else average.module
        return StoredModel(model, stored.decoder, stored.vocabulary, stored.search, {})  # type: ignore[arg-type]

    def captioner(self, stored: StoredModel) -> Captioner:
        """The model on the run's device and in its precision, as validation uses it."""
        return Captioner(stored, device=str(self.device), precision=self.precision)

    def _score(self, stored: StoredModel) -> tuple[dict[str, float], list[Sentence]]:
        """Caption the validation photos, distributed over the processes, and score the captions."""
        mine = self.setup.validated[self.rank :: self.world]
        sentences = decode(self.captioner(stored), mine, self.config.search, self.setup.cache)
        if self.world > 1:
            sentences = gather_object(sentences)
        sentences = sorted(sentences, key=lambda sentence: sentence.image.image_id)
        return score_sentences(sentences), sentences

    # --- Saving ---

    def _start(self) -> None:
        """Prepare the run folder, and check that all processes continue from the same step."""
        progress, steps = self.progress, gather_object([self.progress.step])
        if len(set(steps)) > 1:
            raise CheckpointError(
                f"the processes found {self.folder.path} at different steps "
                f"({', '.join(map(str, steps))}); use a --run-folder on a disk that they all share"
            )
        for warning in setting_warnings(self.setup, self.total_steps):
            self._print(f"captioner: warning: {warning}")
        fresh = progress.step == 0
        if fresh:  # before anything else is written or deleted: a killed run can then be resumed
            self._save_state()
        if self.main:
            self.folder.open(progress.epoch, progress.step, fresh=fresh)

    def save(self) -> None:
        """Save the state within an epoch."""
        self.collect()
        self._save_state()

    def _save_state(self) -> None:
        if self.main:
            self.state.save(self.folder.state)
        self.accelerator.wait_for_everyone()

    def _save_models(self, row: dict[str, Any], better: bool) -> None:
        """Save the model if it is the best or one of the kept ones."""
        stored, epoch = self._validated_model(), str(self.progress.epoch + 1)
        photos = {"train_photos": len(self.setup.train), "val_photos": len(self.setup.validated)}
        stored.info = {"training": row | photos}
        stored.frequencies = self.setup.frequencies
        if better:
            save_model(self.folder.best, stored)
        if epoch in self.progress.kept:
            save_model(self.folder.kept(epoch), stored)

    def _several(self) -> bool:
        """Whether there are kept models to average (a run resumed at its end may have none)."""
        return self.training.keep_best > 1 and bool(self.progress.kept)

    def _save_average(self) -> None:
        """Average the kept models' weights into one more model, validate and save it."""
        self.accelerator.wait_for_everyone()
        stored = average_models([self.folder.kept(epoch) for epoch in self.progress.kept])
        scores, _ = self._score(stored)
        if self.main:
            epochs = sorted(map(int, self.progress.kept))
            stored.info = {"training": {"average_of_epochs": epochs, **scores}}
            save_model(self.folder.average, stored)
            self._print(
                f"average of epochs {', '.join(map(str, epochs))}: {describe_scores(scores)}, "
                f"saved to {self.folder.average}"
            )


def start(setup: Setup, folder: Path, resume: bool) -> Progress:
    """Train in a run folder; see ``Trainer.run``."""
    trainer = Trainer(setup, RunFolder(folder, setup.config))
    if resume:
        trainer.state.load(trainer.folder.state)
    return trainer.run()
