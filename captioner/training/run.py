"""The folder of a run and the training state in it.

    config.yaml        every setting, resolved
    metrics.jsonl      one line per validation
    steps.jsonl        training curves: one line every training.log_every steps
    tensorboard/       both as curves
    samples/epoch_001/ captions of a few validation photos with their attention
    state.safetensors  training state (for --resume)
    best/              the best model so far, ready for `captioner caption --model`; at the end of
                       the run with its card, README.md
    kept/epoch_001/    the best models (training.keep_best above 1)
    average/           the mean of their weights

The state is one safetensors file, written atomically and never pickled: weights, running average,
optimizer moments and progress. It holds no random state: every random choice of a run is a function
of the seed and the step.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import yaml
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor, nn

from captioner.drawing import overlay
from captioner.errors import CheckpointError
from captioner.files import atomic_write
from captioner.options import TrainConfig
from captioner.training.validation import Sentence

FORMAT_VERSION = 3
"""Of the training state."""

METRICS = "metrics.jsonl"
STEPS = "steps.jsonl"


def read_metrics(run: Path) -> list[dict[str, Any]]:
    """All validations of a run, oldest first; empty if there are none yet."""
    return _read_rows(run / METRICS)


def read_steps(run: Path) -> list[dict[str, Any]]:
    """The training curves of a run, oldest point first; empty if there are none yet."""
    return _read_rows(run / STEPS)


def _read_rows(path: Path) -> list[dict[str, Any]]:
    if not path.exists():
        return []
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    # A line without its end was being written when the process was killed.
    return [json.loads(line) for line in lines if line.endswith("\n")]


class RunFolder:
    """Paths and writers of one run."""

    def __init__(self, folder: str | Path, config: TrainConfig) -> None:
        self.path = Path(folder)
        self.config = self.path / "config.yaml"
        self.metrics = self.path / METRICS
        self.steps = self.path / STEPS
        self.state = self.path / "state.safetensors"
        self.best = self.path / "best"
        self.average = self.path / "average"
        self.settings = dataclasses.asdict(config)

    def open(self, epoch: int, step: int = 0, *, fresh: bool = False) -> None:
        """Write the settings and delete what a resumed run will write again.

        Args:
            epoch: Completed epochs; later metrics and samples are deleted.
            step: Completed steps; later points of the training curves are deleted.
            fresh: Start over: delete the models of an earlier run too.
        """
        if fresh:
            for folder in (self.best, self.path / "kept"):
                shutil.rmtree(folder, ignore_errors=True)
        shutil.rmtree(self.average, ignore_errors=True)
        atomic_write(
            self.config, yaml.safe_dump(self.settings, sort_keys=False, allow_unicode=True)
        )
        _write_rows(self.metrics, [row for row in self.rows() if row["epoch"] <= epoch])
        if self.steps.exists():
            _write_rows(self.steps, [row for row in read_steps(self.path) if row["step"] <= step])
        shutil.rmtree(self.path / "tensorboard", ignore_errors=True)
        for folder in (self.path / "samples").glob("epoch_[0-9]*"):
            if int(folder.name.removeprefix("epoch_")) > epoch:
                shutil.rmtree(folder)

    def rows(self) -> list[dict[str, Any]]:
        """See ``read_metrics``."""
        return read_metrics(self.path)

    def add_metrics(self, row: dict[str, Any]) -> None:
        """Append one validation to the metrics."""
        _write_rows(self.metrics, [*self.rows(), row])

    def add_steps(self, row: dict[str, Any]) -> None:
        """Append one point to the training curves."""
        with self.steps.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")

    def kept(self, epoch: str | int) -> Path:
        """The folder of a kept model."""
        return self.path / "kept" / f"epoch_{int(epoch):03d}"

    def prune(self, best: Iterable[str]) -> None:
        """Delete the kept models of all other epochs."""
        keep = {self.kept(epoch) for epoch in best}
        for folder in (self.path / "kept").glob("epoch_[0-9]*"):
            if folder not in keep:
                shutil.rmtree(folder)

    def add_samples(self, epoch: int, sentences: Sequence[Sentence]) -> dict[str, Path]:
        """Save figures of captions with their attention; return them by the photo's name."""
        folder = self.path / "samples" / f"epoch_{epoch:03d}"
        folder.mkdir(parents=True, exist_ok=True)
        lines = []
        figures: dict[str, Path] = {}
        for sentence in sentences:
            stem = name = sentence.image.path.stem
            while name in figures:  # photos of the same name from different folders
                name = f"{stem}_{len(figures) + 1}"
            figures[name] = folder / f"{name}.png"
            overlay(sentence.image.path, sentence.caption, panel_size=240).save(figures[name])
            lines.append(f"{sentence.image.path.name}\t{sentence.caption.text}\n")
        atomic_write(folder / "captions.txt", "".join(lines))
        return figures


def _write_rows(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    atomic_write(path, "".join(json.dumps(row) + "\n" for row in rows))


@dataclass
class Progress:
    """How far a run has come. The field names are part of the file format."""

    epoch: int = 0
    """Current epoch, from 0."""
    batch: int = 0
    """Completed batches of the current epoch."""
    step: int = 0
    """Optimizer steps since the start of the run."""
    best: float = -1.0
    """Best validation score so far, see ``validation.selection_score``."""
    best_epoch: int = -1
    """Epoch of the best score, from 0; -1: no validation yet."""
    sums: dict[str, float] = field(default_factory=dict)
    """Sums over the current epoch; see ``objectives.EPOCH_SUMS``."""
    lr_scale: float = 1.0
    """Factor of the learning rate, halved on every plateau."""
    plateau: int = 0
    """Validations without a better score since the learning rate was last halved."""
    kept: dict[str, float] = field(default_factory=dict)
    """Scores of the kept models, by epoch from 1 (text, as JSON keys are)."""
    settings: dict[str, Any] = field(default_factory=dict)
    """Settings that must match when resuming; see ``resume_settings``."""
    seconds: float = 0.0
    """Training time, over all sessions."""
    curve: dict[str, float] = field(default_factory=dict)
    """``sums`` since the last point of the training curves, and the step of that point."""
    scaler: dict[str, float] = field(default_factory=dict)
    """State of the scale of the loss (``torch.amp.GradScaler``); empty except in fp16."""


def save_state(
    path: Path,
    progress: Progress,
    model: nn.Module,
    average: nn.Module | None,
    optimizer: torch.optim.Optimizer,
) -> None:
    """Save the training state atomically: the old file is replaced by a complete new one.

    Raises:
        CheckpointError: It cannot be written (disk full, permission denied).
    """
    tensors = {f"model.{k}": v for k, v in model.state_dict().items()}
    if average is not None:
        tensors |= {f"average.{k}": v for k, v in average.state_dict().items()}
    for number, moments in optimizer.state_dict()["state"].items():
        tensors |= {f"optimizer.{number}.{k}": v for k, v in moments.items()}
    metadata = {
        "format_version": str(FORMAT_VERSION),
        "progress": json.dumps(dataclasses.asdict(progress)),
    }
    contiguous = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    try:
        atomic_write(path, save(contiguous, metadata))
    except OSError as error:
        raise CheckpointError(
            f"cannot save {path} ({error.strerror}); the previous checkpoint is unchanged; free "
            "some disk space and continue with --resume"
        ) from error


def read_progress(path: Path) -> Progress:
    """Read how far the run of a training state is.

    Raises:
        CheckpointError: The file is missing, damaged or of another version.
    """
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"cannot read {path} ({error}); start over with --force") from error
    try:
        if metadata.get("format_version") == str(FORMAT_VERSION):
            return Progress(**json.loads(metadata["progress"]))
    except (ValueError, KeyError, TypeError):
        pass  # written by a later release, or by another program
    raise CheckpointError(
        f"{path} is not a checkpoint of this version of captioner; start over with --force"
    )


def load_state(
    path: Path,
    model: nn.Module,
    average: nn.Module | None,
    optimizer: torch.optim.Optimizer,
) -> Progress:
    """Load a training state into model, average and optimizer.

    Raises:
        CheckpointError: The file is missing, damaged, or from a run with other settings.
    """
    progress = read_progress(path)
    try:
        with safe_open(path, framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"cannot read {path} ({error}); start over with --force") from error
    try:
        model.load_state_dict(_part(tensors, "model."))
        if average is not None:
            average.load_state_dict(_part(tensors, "average."))
        moments: dict[int, dict[str, Tensor]] = {}
        for name, tensor in _part(tensors, "optimizer.").items():
            number, key = name.split(".", 1)
            moments.setdefault(int(number), {})[key] = tensor
        _load_moments(optimizer, moments)
    except (RuntimeError, ValueError, KeyError, TypeError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[-1].strip()
        raise CheckpointError(
            f"{path} is from a run with other settings ({reason}); use the settings of that run, "
            "or another --run-folder"
        ) from error
    return progress


def _part(tensors: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {k.removeprefix(prefix): v for k, v in tensors.items() if k.startswith(prefix)}


def _load_moments(optimizer: torch.optim.Optimizer, moments: dict[int, dict[str, Tensor]]) -> None:
    """Load the moments of each parameter, in the parameter's memory layout.

    AdamW's fused step pairs weights and moments by memory offset: with another layout it would
    silently use the moments of other weights.
    """
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    if moments and (
        len(moments) != len(parameters)
        or any(moments[n]["exp_avg"].shape != p.shape for n, p in enumerate(parameters))
    ):
        raise ValueError("other parameters were trained")
    groups = optimizer.state_dict()["param_groups"]
    optimizer.load_state_dict({"state": moments, "param_groups": groups})
    for parameter, state in optimizer.state.items():
        for key, moment in state.items():
            if moment.shape == parameter.shape:
                state[key] = torch.empty_like(parameter).copy_(moment)
