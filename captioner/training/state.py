"""Training state on disk: one safetensors file, written whole or not at all, never pickled.

It holds the weights, their running average, the optimizer's moments and how far the run has come.
No random state is stored: every random choice of a run is a function of the seed and the step.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor, nn

from captioner.errors import CheckpointError
from captioner.files import atomic_write

FORMAT_VERSION = 3


@dataclass
class Progress:
    """How far a run has come; everything that the loop counts."""

    epoch: int = 0
    """Epoch that is running, from 0."""
    batch: int = 0
    """Batches of it that are done."""
    step: int = 0
    """Optimizer steps in all."""
    best: float = -1.0
    """Best validation CIDEr so far."""
    best_epoch: int = -1
    """Epoch of the best, from 0."""
    sums: dict[str, float] = field(default_factory=dict)
    """Over the epoch so far; see ``objectives.SUMS``."""
    lr_scale: float = 1.0
    """What a plateau has left of the learning rate."""
    plateau: int = 0
    """Validations without a better CIDEr since the learning rate was last lowered."""
    kept: dict[str, float] = field(default_factory=dict)
    """CIDEr of the kept models, by the epoch's number from 1 (as JSON has it: text)."""
    settings: dict[str, Any] = field(default_factory=dict)
    """What must not change on the way; see ``agreement``."""
    seconds: float = 0.0
    """Time spent training, in all sessions."""


def save_state(
    path: Path,
    progress: Progress,
    model: nn.Module,
    average: nn.Module | None,
    optimizer: torch.optim.Optimizer,
) -> None:
    """Write the state of a run; the old file stays whole until the new one is.

    Raises:
        CheckpointError: It cannot be written (a full disk, no permission).
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
            f"{path} could not be saved ({error.strerror}); the checkpoint before it is unchanged; "
            "make room and go on with --resume auto"
        ) from error


def load_state(
    path: Path,
    model: nn.Module,
    average: nn.Module | None,
    optimizer: torch.optim.Optimizer,
) -> Progress:
    """Put a run back where it was.

    Raises:
        CheckpointError: The file is missing, cut, or belongs to other settings.
    """
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise CheckpointError(
            f"{path} cannot be read ({error}); start again with --force"
        ) from error
    if metadata.get("format_version") != str(FORMAT_VERSION):
        raise CheckpointError(f"{path} is not a checkpoint of this captioner; start with --force")
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
            f"{path} belongs to other settings ({reason}); give the run's own, or another "
            "--run-folder"
        ) from error


def _load_moments(optimizer: torch.optim.Optimizer, moments: dict[int, dict[str, Tensor]]) -> None:
    """Give each parameter its moments, laid out in memory as the parameter is.

    AdamW's fused step walks weights and moments by address: another layout would pair each weight
    with another weight's moments, in silence.
    """
    learning = [p for group in optimizer.param_groups for p in group["params"]]
    if moments and (
        len(moments) != len(learning)
        or any(moments[n]["exp_avg"].shape != p.shape for n, p in enumerate(learning))
    ):
        raise ValueError("other parameters learned")
    groups = optimizer.state_dict()["param_groups"]
    optimizer.load_state_dict({"state": moments, "param_groups": groups})
    for parameter, state in optimizer.state.items():
        for key, moment in state.items():
            if moment.shape == parameter.shape:
                state[key] = torch.empty_like(parameter).copy_(moment)


def _part(tensors: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {k.removeprefix(prefix): v for k, v in tensors.items() if k.startswith(prefix)}
