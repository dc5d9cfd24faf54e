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

    The reading network, which predicts a photo's content words, has the same rate as the decoder.
    Weight decay applies to matrices only, not to biases and norms. At every step, the trainer sets
    ``lr`` of each group from its ``peak_lr``.
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
    """Return the length of the warm-up in steps.

    It is ``training.warmup_steps``, but at most a fifth of the run.
    """
    return min(config.warmup_steps, int(0.2 * total_steps))


def lr_factor(step: int, warmup_steps: int, total_steps: int) -> float:
    """Return the learning rate at a step as a share of its peak (0 to 1).

    Steps are counted from 0. The share rises linearly during the warm-up. Then it falls to 0 along
    half a cosine.
    """
    if step < warmup_steps:
        return (step + 1) / (warmup_steps + 1)
    progress = (step - warmup_steps) / max(1, total_steps - warmup_steps)
    return 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))


def clip_gradients(
    optimizer: torch.optim.Optimizer, factor: torch.Tensor, max_norm: float
) -> torch.Tensor:
    """Multiply the gradients by a factor, and clip the norm of the product.

    Args:
        optimizer: The optimizer with the trained weights.
        factor: The factor, a scalar on the device of the weights.
        max_norm: Largest norm of all gradients together. Larger gradients are scaled down to it.

    Returns:
        The norm before clipping, a scalar on the same device.
    """
    trained = [p for group in optimizer.param_groups for p in group["params"]]
    torch._foreach_mul_([p.grad for p in trained if p.grad is not None], factor)
    return nn.utils.clip_grad_norm_(trained, max_norm)


class RunningAverage(AveragedModel):
    """Exponential moving average of the weights.

        average <- d average + (1 - d) weights,   d = min(decay, (1 + n) / (10 + n))

    n is the number of updates so far, and ``decay`` is the setting ``training.ema_decay``. The
    first update copies the weights. Early on, d is small, so that the average soon forgets the
    first weights, which are nearly random. n stays on the CPU. torch's own update moves it to the
    GPU, and reading it there would make every step wait.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        super().__init__(model)
        self.decay = decay

    @torch.no_grad()
    def update_parameters(self, model: nn.Module) -> None:
        """Update the average with a model's weights, and copy its buffers unaveraged."""
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
    """Return the weighted mean of several models' weights.

    Args:
        states: The ``state_dict()`` of each model, with the same names and shapes.
        shares: The share of each model in the mean. The shares sum to 1.

    Returns:
        The mean weights by name. Integer tensors cannot be averaged and come from the first model.
    """
    return {
        name: sum(
            (share * state[name].double() for state, share in zip(states, shares, strict=True)),
            start=torch.zeros((), dtype=torch.float64, device=value.device),
        ).to(value.dtype)
        if value.is_floating_point()
        else value
        for name, value in states[0].items()
    }
