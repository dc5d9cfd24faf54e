"""The folder of a run, and the signals that stop it.

config.yaml        every setting, resolved
metrics.jsonl      one line per validation
steps.jsonl        training curves: one line every training.log_every steps
tensorboard/       the numbers in both files, as curves for TensorBoard
samples/epoch_001/ captions of a few validation photos with their references and attention
state.safetensors  training state (for --resume)
best/              the best model so far, ready for `captioner caption --model`. Its card,
                   README.md, is added at the end of the run.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from threading import Event
from typing import Any

import yaml
from tqdm import tqdm

from captioner.drawing.figure import overlay
from captioner.errors import CheckpointError
from captioner.files import atomic_write, json_values, write_lock
from captioner.inference.names import BEST, RUN_CONFIG
from captioner.options import TrainConfig
from captioner.training.names import METRICS, SAMPLES, STATE, STEPS, TENSORBOARD
from captioner.training.validation import Sentence


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Read the rows of a metrics.jsonl or steps.jsonl file, oldest first.

    The result is empty if the file does not exist. An incomplete last row is left out. Values that
    could not be computed are None.

    Raises:
        CheckpointError: A row is not valid JSON.
    """
    if not path.exists():
        return []
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    try:  # a line without its end is incomplete, because the process was killed
        rows = [json.loads(line) for line in lines if line.endswith("\n")]
    except ValueError as error:
        raise CheckpointError(
            f"{path} is damaged ({error}); repair the file or remove it"
        ) from error
    return [*map(json_values, rows)]  # earlier versions wrote NaN


class RunFolder:
    """The folder of one run, with methods that write the files in it."""

    def __init__(self, folder: str | Path, config: TrainConfig) -> None:
        self.path = Path(folder)
        self.state = self.path / STATE
        self.best = self.path / BEST
        self.settings = dataclasses.asdict(config)

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Create the folder, and keep other runs out of it within the context.

        Raises:
            CheckpointError: The folder cannot be created.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            reason = f"cannot create {self.path} ({error.strerror})"
            raise CheckpointError(
                f"{reason}; check its permissions, or set --run-folder to a different folder"
            ) from error
        with write_lock(self.path):
            yield

    def open(self, epoch: int, step: int = 0, *, fresh: bool = False) -> None:
        """Write config.yaml, and delete all results that the run will produce again.

        Args:
            epoch: Number of completed epochs. The metrics and samples of later epochs are deleted.
            step: Number of completed steps. Later points of the training curves are deleted.
            fresh: Start over: also delete the best model and TensorBoard's files.
        """
        stale = [self.best, self.path / TENSORBOARD] if fresh else []
        for folder in (self.path / SAMPLES).glob("epoch_[0-9]*"):
            if int(folder.name.removeprefix("epoch_")) > epoch:
                stale.append(folder)
        for folder in stale:
            shutil.rmtree(folder, ignore_errors=True)
        settings = yaml.safe_dump(self.settings, sort_keys=False, allow_unicode=True)
        atomic_write(self.path / RUN_CONFIG, settings)
        for name, key, done in ((METRICS, "epoch", epoch), (STEPS, "step", step)):
            if (path := self.path / name).exists():
                rows = [row for row in read_rows(path) if row[key] <= done]
                atomic_write(path, "".join(json.dumps(row) + "\n" for row in rows))

    def append(self, name: str, row: dict[str, Any]) -> None:
        """Append a row to metrics.jsonl or steps.jsonl, the file ``name``. NaN becomes null."""
        with (self.path / name).open("a", encoding="utf-8") as file:
            file.write(json.dumps(json_values(row)) + "\n")

    def add_samples(self, epoch: int, sentences: Sequence[Sentence]) -> dict[str, Path]:
        """Save validation captions of an epoch, and draw the attention of each caption.

        Returns:
            Paths of the figures, by the name of the photo without its suffix. If photos from
            different folders have the same name, a number is added.
        """
        folder = self.path / SAMPLES / f"epoch_{epoch:03d}"
        folder.mkdir(parents=True, exist_ok=True)
        lines = (
            "\t".join([one.photo.path.name, one.caption.text, *one.photo.captions]) + "\n"
            for one in sentences
        )
        atomic_write(folder / "captions.txt", "".join(lines))
        figures: dict[str, Path] = {}
        for sentence in sentences:
            stem = name = sentence.photo.path.stem
            while name in figures:
                name = f"{stem}_{len(figures) + 1}"
            figures[name] = folder / f"{name}.png"
            overlay(sentence.photo.path, sentence.caption, panel_size=240).save(figures[name])
        return figures


@contextmanager
def stop_signals() -> Iterator[Event]:
    """Turn SIGINT and SIGTERM into an event, so that the run can save its state before it stops.

    The training loop checks the event between two steps. Outside the main thread, Python cannot
    handle signals, and the event is never set.
    """
    stop = Event()

    def request(number: int, frame: object) -> None:
        """Ask the run to stop after its current step, or stop at once at the second Ctrl-C."""
        del frame
        # A second Ctrl-C stops at once. A second SIGTERM does not, because launchers forward it to
        # processes that have already received it from the system.
        if stop.is_set() and number == signal.SIGINT:
            raise KeyboardInterrupt
        stop.set()
        tqdm.write(
            "stopping after the state is saved; press Ctrl-C again to stop now", file=sys.stderr
        )

    try:
        old = {s: signal.signal(s, request) for s in (signal.SIGINT, signal.SIGTERM)}
    except ValueError:  # not in the main thread, where signals cannot be handled
        yield stop
        return
    try:
        yield stop
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)
