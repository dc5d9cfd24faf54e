"""The folder of a run.

config.yaml        every setting, resolved
metrics.jsonl      one line a validation
tensorboard/       the same as curves
samples/epoch_001/ captions of a few validation photos with their attention
state.safetensors  where the run is (for --resume auto)
best/              the best model so far, ready for `captioner caption --model`
kept/epoch_001/    the best models (training.keep_best above 1)
average/           the mean of their weights
"""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import yaml

from captioner.config import TrainConfig
from captioner.files import atomic_write
from captioner.training.validation import Sentence
from captioner.visualization import overlay

METRICS = "metrics.jsonl"


def read_metrics(run: Path) -> list[dict[str, Any]]:
    """Every validation of a run; none where the folder has no metrics yet."""
    if not (run / METRICS).exists():
        return []
    lines = (run / METRICS).read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


class RunFolder:
    """Paths and writers of one run."""

    def __init__(self, folder: str | Path, config: TrainConfig) -> None:
        self.path = Path(folder)
        self.config = self.path / "config.yaml"
        self.metrics = self.path / METRICS
        self.state = self.path / "state.safetensors"
        self.best = self.path / "best"
        self.average = self.path / "average"
        self.settings = dataclasses.asdict(config)

    def open(self, epoch: int, *, fresh: bool = False) -> None:
        """Write the settings and drop what this run will do again or another run has left.

        Args:
            epoch: Epochs that are done.
            fresh: The run starts over: the models of another one go too.
        """
        if fresh:
            for folder in (self.best, self.path / "kept"):
                shutil.rmtree(folder, ignore_errors=True)
        shutil.rmtree(self.average, ignore_errors=True)
        atomic_write(
            self.config, yaml.safe_dump(self.settings, sort_keys=False, allow_unicode=True)
        )
        rows = [row for row in self.rows() if row["epoch"] <= epoch]
        self._write_rows(rows)
        shutil.rmtree(self.path / "tensorboard", ignore_errors=True)
        for folder in (self.path / "samples").glob("epoch_[0-9]*"):
            if int(folder.name.removeprefix("epoch_")) > epoch:
                shutil.rmtree(folder)

    def rows(self) -> list[dict[str, Any]]:
        """Every validation so far."""
        return read_metrics(self.path)

    def add_metrics(self, row: dict[str, Any]) -> None:
        """Append one validation to the metrics."""
        self._write_rows([*self.rows(), row])

    def kept(self, epoch: str | int) -> Path:
        """The folder of a kept model."""
        return self.path / "kept" / f"epoch_{int(epoch):03d}"

    def prune(self, best: Iterable[str]) -> None:
        """Drop the kept models of all epochs but these."""
        keep = {self.kept(epoch) for epoch in best}
        for folder in (self.path / "kept").glob("epoch_[0-9]*"):
            if folder not in keep:
                shutil.rmtree(folder)

    def add_samples(self, epoch: int, sentences: Sequence[Sentence]) -> dict[str, Path]:
        """Draw captions with their attention.

        Returns:
            The pictures by the photo's name.
        """
        folder = self.path / "samples" / f"epoch_{epoch:03d}"
        folder.mkdir(parents=True, exist_ok=True)
        lines = []
        drawn: dict[str, Path] = {}
        for sentence in sentences:
            stem = name = sentence.image.path.stem
            while name in drawn:  # photos of one name from different folders
                name = f"{stem}_{len(drawn) + 1}"
            drawn[name] = folder / f"{name}.png"
            overlay(sentence.image.path, sentence.caption, panel_size=240).save(drawn[name])
            lines.append(f"{sentence.image.path.name}\t{sentence.caption.text}\n")
        atomic_write(folder / "captions.txt", "".join(lines))
        return drawn

    def _write_rows(self, rows: list[dict[str, Any]]) -> None:
        atomic_write(self.metrics, "".join(json.dumps(row) + "\n" for row in rows))
