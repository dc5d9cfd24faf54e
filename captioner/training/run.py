"""The folder of a run and the training state in it.

    config.yaml        every setting, resolved
    metrics.jsonl      one line per validation
    tensorboard/       the same as curves
    samples/epoch_001/ captions of a few validation photos with their attention
    state.safetensors  training state (for --resume)
    best/              the best model so far, ready for `captioner caption --model`
    kept/epoch_001/    the best models (training.keep_best above 1)
    average/           the mean of their weights

The state is one safetensors file, written atomically and never pickled: weights, running average,
optimizer moments and progress. It holds no random state: every random choice of a run is a function
of the seed and the step.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import yaml
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor, nn

from captioner.config import TrainConfig
from captioner.data.shards import read_manifest
from captioner.errors import CheckpointError
from captioner.files import atomic_write
from captioner.training.build import Setup
from captioner.training.validation import Sentence
from captioner.visualization import overlay

FORMAT_VERSION = 3
"""Of the training state."""

METRICS = "metrics.jsonl"


def read_metrics(run: Path) -> list[dict[str, Any]]:
    """All validations of a run, oldest first; empty if there are none yet."""
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
        """Write the settings and delete what a resumed run will write again.

        Args:
            epoch: Completed epochs; later metrics and samples are deleted.
            fresh: Start over: delete the models of an earlier run too.
        """
        if fresh:
            for folder in (self.best, self.path / "kept"):
                shutil.rmtree(folder, ignore_errors=True)
        shutil.rmtree(self.average, ignore_errors=True)
        atomic_write(
            self.config, yaml.safe_dump(self.settings, sort_keys=False, allow_unicode=True)
        )
        self._write_rows([row for row in self.rows() if row["epoch"] <= epoch])
        shutil.rmtree(self.path / "tensorboard", ignore_errors=True)
        for folder in (self.path / "samples").glob("epoch_[0-9]*"):
            if int(folder.name.removeprefix("epoch_")) > epoch:
                shutil.rmtree(folder)

    def rows(self) -> list[dict[str, Any]]:
        """See ``read_metrics``."""
        return read_metrics(self.path)

    def add_metrics(self, row: dict[str, Any]) -> None:
        """Append one validation to the metrics."""
        self._write_rows([*self.rows(), row])

    def _write_rows(self, rows: list[dict[str, Any]]) -> None:
        atomic_write(self.metrics, "".join(json.dumps(row) + "\n" for row in rows))

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
    """Best validation CIDEr so far."""
    best_epoch: int = -1
    """Epoch of the best CIDEr, from 0."""
    sums: dict[str, float] = field(default_factory=dict)
    """Sums over the current epoch; see ``objectives.EPOCH_SUMS``."""
    lr_scale: float = 1.0
    """Factor of the learning rate, to_float16 on every plateau."""
    plateau: int = 0
    """Validations without a better CIDEr since the learning rate was last to_float16."""
    kept: dict[str, float] = field(default_factory=dict)
    """CIDEr of the kept models, by epoch from 1 (text, as JSON keys are)."""
    settings: dict[str, Any] = field(default_factory=dict)
    """Settings that must match when resuming; see ``resume_settings``."""
    seconds: float = 0.0
    """Training time, over all sessions."""


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
            "some disk space and continue with --resume auto"
        ) from error


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
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"cannot read {path} ({error}); start over with --force") from error
    if metadata.get("format_version") != str(FORMAT_VERSION):
        raise CheckpointError(
            f"{path} is not a checkpoint of this version of captioner; start over with --force"
        )
    try:
        model.load_state_dict(_part(tensors, "model."))
        if average is not None:
            average.load_state_dict(_part(tensors, "average."))
        moments: dict[int, dict[str, Tensor]] = {}
        for name, tensor in _part(tensors, "optimizer.").items():
            number, key = name.split(".", 1)
            moments.setdefault(int(number), {})[key] = tensor
        _load_moments(optimizer, moments)
        return Progress(**json.loads(metadata["progress"]))
    except (RuntimeError, ValueError, KeyError, TypeError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[-1].strip()
        raise CheckpointError(
            f"{path} is from a run with other settings ({reason}); use the settings of that run, "
            "or another --run-folder"
        ) from error


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


def resume_settings(setup: Setup, processes: int) -> dict[str, Any]:
    """Settings that must match when resuming.

    They decide which photos and captions a step contains and what is learned from them. Others,
    such as the number of epochs or the learning rate, may change.
    """
    config, data = setup.config, setup.config.data
    settings: dict[str, Any] = {
        "photos": len(setup.train),
        "batch_size": config.training.batch_size,
        "training.seed": config.training.seed,
        "training.objective": config.training.objective,
        "data.max_captions": data.max_captions,
        "data.max_words": data.max_words,
        "data.horizontal_flip": data.horizontal_flip,
        "data.min_crop": data.min_crop,
        "data.color_jitter": data.color_jitter,
        "data.bucket_batches": data.bucket_batches,
        "training captions": _fingerprint(setup),
        "shards": "none",
    }
    if data.shards:  # they are distributed over processes and workers
        settings |= {"data.workers": data.workers, "processes": processes}
        settings["shards"] = read_manifest(data.shards).digest
    return settings


def _fingerprint(setup: Setup) -> str:
    """Hash of the training captions and of the vocabulary, which decides the token ids."""
    digest = hashlib.sha256(" ".join(setup.stored.vocabulary.words).encode())
    for photo in setup.train:
        digest.update(f"{photo.image.image_id} {photo.tokens}".encode())
    return digest.hexdigest()[:12]


def check_resume(checkpoint: Path, held: Mapping[str, Any], given: Mapping[str, Any]) -> None:
    """Compare the ``resume_settings`` of the run that saved a checkpoint with those of this run.

    Raises:
        CheckpointError: They differ.
    """
    for name, new in given.items():
        if held.get(name) != new:
            raise CheckpointError(
                f"{checkpoint} was trained with {name} {held.get(name)}, but now it is {new}; use "
                "the settings and data of that run, or another --run-folder"
            )
