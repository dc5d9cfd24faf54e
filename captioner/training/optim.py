"""Updates of the weights: optimizer, learning rate, gradient clipping and averages."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

from captioner.model.caption_model import CaptionModel
from captioner.options import TrainingConfig


def make_optimizer(model: CaptionModel, config: TrainingConfig) -> torch.optim.AdamW:
    """Build AdamW with separate peak learning rates for the encoder and the rest of the model.

    Weight decay applies to matrices only. The trainer sets ``lr`` from ``peak_lr`` at every step.
    """
    groups = []
    modules: list[tuple[nn.Module, float]] = [
        (model.encoder, config.encoder_lr),
        (model.decoder, config.lr),
    ]
    if model.reading is not None:
        modules.append((model.reading, config.lr))
    for module, lr in modules:
        trainable = [p for p in module.parameters() if p.requires_grad]
        for decay, members in (
            (config.weight_decay, [p for p in trainable if p.ndim > 1]),
            (0.0, [p for p in trainable if p.ndim < 2]),
        ):
            if members:
                groups.append({"params": members, "lr": lr, "peak_lr": lr, "weight_decay": decay})
    return torch.optim.AdamW(groups, fused=True)


def warmup_steps(config: TrainingConfig, total_steps: int) -> int:
    """Return the length of the warm-up in steps, at most a fifth of the run."""
    return min(config.warmup_steps, int(0.2 * total_steps))


def lr_factor(step: int, warmup_steps: int, total_steps: int) -> float:
    """Return the factor of the peak learning rate at a step, counted from 0.

    The factor rises linearly during the warm-up, and then falls to 0 along half a cosine.
    """
    if step < warmup_steps:
        return (step + 1) / (warmup_steps + 1)
    progress = (step - warmup_steps) / max(1, total_steps - warmup_steps)
    return 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))


def clip_gradients(
    optimizer: torch.optim.Optimizer, factor: torch.Tensor, max_norm: float
) -> torch.Tensor:
    """Multiply the gradients by a factor, clip their norm, and return the norm before clipping."""
    trained = [p for group in optimizer.param_groups for p in group["params"]]
    torch._foreach_mul_([p.grad for p in trained if p.grad is not None], factor)
    return nn.utils.clip_grad_norm_(trained, max_norm)


class RunningAverage(AveragedModel):
    """Exponential moving average of the weights.

        average <- d average + (1 - d) weights,   d = min(decay, (1 + n) / (10 + n))

    n is the number of updates so far. The first update copies the weights. Early on, d is small, so
    that the average soon forgets the first weights, which are nearly random. n stays on the CPU:
    torch's own update moves it to the GPU, and reading it there would make every step wait.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        super().__init__(model)
        self.decay = decay

    @torch.no_grad()
    def update_parameters(self, model: nn.Module) -> None:
        """Update the average with the model's weights, and copy the buffers."""
        n = int(self.n_averaged)
        decay = min(self.decay, (1 + n) / (10 + n)) if n else 0.0
        averages: list[torch.Tensor] = list(self.module.parameters())
        weights: list[torch.Tensor] = list(model.parameters())
        if n:
            torch._foreach_lerp_(averages, weights, 1 - decay)
        else:
            torch._foreach_copy_(averages, weights)
        for mine, theirs in zip(self.module.buffers(), model.buffers(), strict=True):
            mine.copy_(theirs)
        self.n_averaged += 1


def mean_weights(
    states: Sequence[Mapping[str, torch.Tensor]], shares: Sequence[float]
) -> dict[str, torch.Tensor]:
    """Return the weighted mean of several models' weights. The shares sum to 1."""
    return {
        name: sum(
            (share * state[name].double() for state, share in zip(states, shares, strict=True)),
            start=torch.zeros((), dtype=torch.float64, device=value.device),
        ).to(value.dtype)
        if value.is_floating_point()
        else value
        for name, value in states[0].items()
    }
