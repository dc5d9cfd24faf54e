"""State of a run, saved in its checkpoint: everything that training steps change.

The checkpoint also contains the settings that must stay the same when the run is resumed.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor, nn

from captioner.errors import CheckpointError
from captioner.files import atomic_write, check_same
from captioner.inference.folder import fingerprint
from captioner.inference.weights import unshared
from captioner.options import MAY_CHANGE, TrainConfig, TrainingConfig
from captioner.schema import OptionField, option_fields
from captioner.training.optim import RunningAverage
from captioner.training.setup import Setup

NO_SCORE = 5e-4
"""Smallest CIDEr or BLEU-4 that counts as above 0, where 1.0 is 100 points. Below it, messages show
0.0 points, and the captions have practically nothing in common with the references."""

EPOCH_SUMS = (
    "loss", "words", "gradient_norm", "reward", "baseline", "samples", "bad_endings",
)  # fmt: skip
"""Names of the values that are summed over the steps of an epoch.

``loss`` is the cross-entropy (nats), ``words`` the number of words that it covers, and
``gradient_norm`` the norm before clipping. The remaining names are for sampled captions only:
their rewards, the baselines of the rewards, the number of samples, and the number of samples with a
last word that cannot end a caption.
"""


@dataclass
class Progress:
    """The progress of a run. The field names are keys in the checkpoint and must not change."""

    epoch: int = 0
    """Current epoch, counted from 0, so also the number of completed epochs."""
    batch: int = 0
    """Completed batches of the current epoch."""
    step: int = 0
    """Optimizer steps since the start of the run."""
    best: float = -1.0
    """Best validation score so far. Higher is better (see ``validation.selection_score``)."""
    best_epoch: int = -1
    """Epoch with the best score, counted from 0. It is -1 before the first validation, and while no
    epoch is better than ``start``."""
    start: float | None = None
    """Score of the model of ``init_from`` before the first step, or None without such a model."""
    sums: dict[str, float] = field(default_factory=dict)
    """Values of ``EPOCH_SUMS`` for the current epoch."""
    settings: dict[str, Any] = field(default_factory=dict)
    """Settings that must match when resuming (see ``resume_settings``)."""
    seconds: float = 0.0
    """Training time without validations (seconds), added up over all sessions of a resumed run."""
    curve: dict[str, float] = field(default_factory=lambda: {"step": 0})
    """Values of ``EPOCH_SUMS`` since the last row of steps.jsonl, and the step of that row."""

    def add(self, sums: Mapping[str, float], seconds: float) -> None:
        """Add sums over some steps, such as the loss, and the time of these steps (seconds)."""
        for held in (self.sums, self.curve):
            held |= {name: held.get(name, 0.0) + value for name, value in sums.items()}
        self.seconds += seconds

    def curve_point(self, lr: float) -> dict[str, Any]:
        """Return the next row of steps.jsonl, with means over the steps since the last row.

        The sums for the following row start at 0.
        """
        sums, self.curve = self.curve, {"step": self.step}
        norm = sums["gradient_norm"] / (self.step - sums["step"])
        return {**self._position(sums), "lr": lr, "gradient_norm": norm}

    def metrics(self, lr: float, reward_signature: str) -> dict[str, Any]:
        """Return the training part of a row of metrics.jsonl, without the validation scores.

        Args:
            lr: Learning rate of the last step.
            reward_signature: The description from ``Objective.signature``. The row contains it only
                if captions were sampled.
        """
        row = {**self._position(self.sums), "lr": lr, "seconds": self.seconds}
        if samples := self.sums["samples"]:
            row["sampled_bad_endings"] = self.sums["bad_endings"] / samples
            row["reward_signature"] = reward_signature
        return row

    def _position(self, sums: Mapping[str, float]) -> dict[str, Any]:
        """Return the epoch, counted from 1, the step and the means."""
        return {"epoch": self.epoch + 1, "step": self.step, **means(sums)}

    def add_score(self, score: float, config: TrainingConfig) -> bool:
        """Record the score of a validation, and return whether its model is the best so far.

        As long as all metrics are 0 (below ``NO_SCORE``), the newest model counts as the best. So
        ``training.patience`` begins to count only when captions have something in common with the
        references.
        """
        no_score = config.select != "loss" and max(score, self.best) < NO_SCORE
        first = self.best_epoch < 0 and self.start is None
        better = first or no_score or score > self.best
        if better:
            self.best, self.best_epoch = score, self.epoch
        return better

    def ending(self, config: TrainingConfig) -> str:
        """Return why the run has ended, or an empty string if it continues.

        A run ends after all epochs, or after ``training.patience`` epochs without a better model.
        """
        if self.epoch >= config.epochs:
            return (
                f"{self.epoch} of {config.epochs} epochs; to continue, set a larger training.epochs"
            )
        since_best = self.epoch - 1 - self.best_epoch
        if 0 < config.patience <= since_best and self.epoch > 0:
            return (
                f"stopped early after epoch {self.epoch} of {config.epochs}: no better model in "
                f"{since_best} epochs; to continue, set training.patience to a larger number, or 0"
            )
        return ""


def means(sums: Mapping[str, float]) -> dict[str, float]:
    """Return the loss per word (nats), and for sampled captions the mean baseline and reward.

    ``sums`` contains the sums over the steps of an epoch by name, such as the loss and the words.
    """
    found = {"loss": sums["loss"] / max(1, sums["words"])}
    if sums["samples"]:
        found |= {name: sums[name] / sums["samples"] for name in ("baseline", "reward")}
    return found


@dataclass
class TrainingState:
    """Everything that training steps change, saved as one safetensors file without pickling.

    The state of the random number generators is not needed, because every random choice of a run
    depends only on the seed and the step.
    """

    model: nn.Module
    average: RunningAverage | None
    """Running average of the weights, or None without ``training.ema_decay``."""
    optimizer: torch.optim.Optimizer
    scaler: torch.amp.GradScaler
    """Scaling of the loss, which keeps small fp16 gradients above 0. It is disabled in other
    precisions."""
    progress: Progress

    def save(self, path: Path) -> None:
        """Save the state atomically: a complete new file replaces the old one.

        Raises:
            CheckpointError: The file cannot be written.
        """
        tensors = {f"model.{k}": v for k, v in self.model.state_dict().items()}
        if self.average is not None:
            tensors |= {f"average.{k}": v for k, v in self.average.state_dict().items()}
        for number, moments in self.optimizer.state_dict()["state"].items():
            tensors |= {f"optimizer.{number}.{k}": v for k, v in moments.items()}
        metadata = {
            "progress": json.dumps(dataclasses.asdict(self.progress)),
            "scaler": json.dumps(self.scaler.state_dict()),
        }
        try:
            atomic_write(path, save(unshared(tensors), metadata))
        except OSError as error:
            raise CheckpointError(
                f"cannot save {path} ({error.strerror}); the previous checkpoint is unchanged; "
                "free some disk space and continue with --resume"
            ) from error

    def load(self, path: Path) -> None:
        """Load a saved state into the model, the optimizer and the other fields.

        Raises:
            CheckpointError: The file cannot be read, or its ``Progress.settings`` differ from the
                settings of this run.
        """
        try:
            with safe_open(path, framework="pt") as file:
                metadata = file.metadata()
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            held = without_removed(path, json.loads(metadata["progress"]))
            progress = Progress(**held)
            scaler = json.loads(metadata["scaler"])
        except (OSError, SafetensorError, ValueError, KeyError, TypeError) as error:
            raise CheckpointError(
                f"cannot read the checkpoint {path} ({error}); start over with --force"
            ) from error
        progress.settings = without_removed(path, progress.settings)
        check_same(path, progress.settings, self.progress.settings)
        self.progress = progress
        self.model.load_state_dict(_part(tensors, "model."))
        if self.average is not None:
            self.average.load_state_dict(_part(tensors, "average."))
        moments: dict[int, dict[str, Tensor]] = {}
        for name, tensor in _part(tensors, "optimizer.").items():
            number, key = name.split(".", 1)
            moments.setdefault(int(number), {})[key] = tensor
        groups = self.optimizer.state_dict()["param_groups"]
        self.optimizer.load_state_dict({"state": moments, "param_groups": groups})
        # AdamW's fused step pairs weights and moments by memory offset. If their layouts differed,
        # it would silently use the moments of other weights.
        for parameter, state in self.optimizer.state.items():
            for key, moment in state.items():
                if moment.shape == parameter.shape:
                    state[key] = torch.empty_like(parameter).copy_(moment)
        if scaler:
            self.scaler.load_state_dict(scaler)


def _part(tensors: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """Return the tensors with a prefix in their names, by their names without the prefix."""
    return {k.removeprefix(prefix): v for k, v in tensors.items() if k.startswith(prefix)}


# --- Resuming -------------------------------------------------------------------------------------

REMOVED: dict[str, Any] = {
    "distillation.models": "[]",
    "distillation.guidance": "[]",
    "distillation.rare_words": "[]",
    "search.guidance": 0.0,
    "encoder.mean": None,
    "encoder.std": None,
    "self_critical.baseline": "leave_one_out",
    "self_critical.count_end": True,
    "shards": None,
    "lr_scale": 1.0,
}
"""Settings and fields of ``Progress`` that earlier versions had. A checkpoint can be resumed if it
contains no other values than these."""
UNUSED = ("plateau", "kept")
"""Fields of ``Progress`` that earlier versions had, and that are ignored with any value."""


def without_removed(path: Path, given: Mapping[str, Any]) -> dict[str, Any]:
    """Leave out names that this version no longer has from a checkpoint's settings or fields.

    Args:
        path: The checkpoint, for the error message.
        given: The settings, or the fields of ``Progress``, by name.

    Raises:
        CheckpointError: The run depends on a setting that this version does not support.
    """
    for name, value in REMOVED.items():
        if given.get(name, value) != value:
            raise CheckpointError(
                f"{path} is from a run with {name} {given[name]}, which this version does not "
                "support; start over with --force, or continue it with the version that wrote it"
            )
    return {n: value for n, value in given.items() if n not in REMOVED and n not in UNUSED}


def resume_settings(setup: Setup) -> dict[str, Any]:
    """Return the values that must match when resuming: settings, and hashes of data and models.

    Every setting must match unless its annotation has the mark ``MAY_CHANGE``. The paths of the
    data may change, but not the captions in the files.
    """
    options = all_fields(TrainConfig)
    free = {name for name, option in options.items() if MAY_CHANGE in option.marks}
    settings = {
        name: value
        for name, value in flatten(dataclasses.asdict(setup.config)).items()
        if name not in free
    }
    digest = hashlib.sha256(" ".join(setup.stored.vocabulary.words).encode())
    for photo in setup.train:
        digest.update(f"{photo.image_id} {photo.tokens}".encode())
    for image in setup.val:
        digest.update(f"{image.image_id} {image.captions}".encode())
    settings["captions"] = digest.hexdigest()[:12]
    if setup.config.training.initial_share:  # every session reads the initial model
        assert setup.config.init_from is not None
        settings["models"] = fingerprint(setup.config.init_from)
    return settings


def all_fields(config: type, prefix: str = "") -> dict[str, OptionField]:
    """Return the fields of a config and its sections, keyed by names such as ``training.lr``.

    ``prefix`` is put before each name, for the fields of a section.
    """
    found: dict[str, OptionField] = {}
    for name, option in option_fields(config).items():
        if dataclasses.is_dataclass(option.type):
            found |= all_fields(option.type, f"{prefix}{name}.")  # type: ignore[arg-type]
        else:
            found[f"{prefix}{name}"] = option
    return found


def flatten(settings: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Flatten nested settings into one dictionary with keys such as ``training.lr``.

    Lists become JSON text. ``prefix`` is put before each key, for the settings of a section.
    """
    flat: dict[str, Any] = {}
    for name, value in settings.items():
        if isinstance(value, Mapping):
            flat |= flatten(value, f"{prefix}{name}.")
        else:
            scalar = value is None or isinstance(value, (bool, int, float, str))
            flat[f"{prefix}{name}"] = value if scalar else json.dumps(value)
    return flat
