"""The folder of a run.

config.yaml        every setting, resolved
metrics.jsonl      one line a validation
tensorboard/       the same as curves
samples/epoch_001/ captions of a few validation photos with their attention
state.safetensors  where the run is (for --resume auto)
best/              the best model so far, ready for `captioner caption --model`
"""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Sequence
from pathlib import Path

import yaml

from captioner.config import TrainConfig
from captioner.files import atomic_write
from captioner.training.validation import Sentence
from captioner.visualization import overlay


class RunFolder:
    """Paths and writers of one run."""

    def __init__(self, folder: str | Path, config: TrainConfig) -> None:
        self.path = Path(folder)
        self.config = self.path / "config.yaml"
        self.metrics = self.path / "metrics.jsonl"
        self.state = self.path / "state.safetensors"
        self.best = self.path / "best"
        self._settings = dataclasses.asdict(config)

    def open(self, epoch: int, *, fresh: bool = False) -> None:
        """Write the settings and drop what this run will do again or another run has left.

        Args:
            epoch: Epochs that are done.
            fresh: The run starts over: the state and the best model of another one go too.
        """
        if fresh:
            self.state.unlink(missing_ok=True)  # first: nothing may resume what is half removed
            shutil.rmtree(self.best, ignore_errors=True)
        atomic_write(
            self.config, yaml.safe_dump(self._settings, sort_keys=False, allow_unicode=True)
        )
        rows = [row for row in self.rows() if row["epoch"] <= epoch]
        self._write_rows(rows)
        shutil.rmtree(self.path / "tensorboard", ignore_errors=True)
        for row in rows:
            self._add_curves(row)
        for folder in (self.path / "samples").glob("epoch_[0-9]*"):
            if int(folder.name.removeprefix("epoch_")) > epoch:
                shutil.rmtree(folder)

    def rows(self) -> list[dict[str, float]]:
        """Every validation so far."""
        if not self.metrics.exists():
            return []
        return [json.loads(line) for line in self.metrics.read_text(encoding="utf-8").splitlines()]

    def add_metrics(self, row: dict[str, float]) -> None:
        """Append one validation to the metrics and to TensorBoard."""
        self._write_rows([*self.rows(), row])
        self._add_curves(row)

    def _add_curves(self, row: dict[str, float]) -> None:
        from torch.utils.tensorboard import SummaryWriter

        writer = SummaryWriter(str(self.path / "tensorboard"))
        for name, value in row.items():
            if name not in ("epoch", "step"):
                writer.add_scalar(name, value, int(row["step"]))
        writer.close()

    def add_samples(self, epoch: int, sentences: Sequence[Sentence]) -> None:
        """Draw captions with their attention."""
        folder = self.path / "samples" / f"epoch_{epoch:03d}"
        folder.mkdir(parents=True, exist_ok=True)
        lines = []
        used: set[str] = set()
        for sentence in sentences:
            stem = name = sentence.image.path.stem
            while name in used:  # photos of one name from different folders
                name = f"{stem}_{len(used) + 1}"
            used.add(name)
            overlay(sentence.image.path, sentence.caption, panel_size=240).save(
                folder / f"{name}.png"
            )
            lines.append(f"{sentence.image.path.name}\t{sentence.caption.text}\n")
        atomic_write(folder / "captions.txt", "".join(lines))

    def _write_rows(self, rows: list[dict[str, float]]) -> None:
        atomic_write(self.metrics, "".join(json.dumps(row) + "\n" for row in rows))
