"""Sums over the steps of an epoch. They stay on the device, so that no step waits for it."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from captioner.hardware import upload

REWARD_SUMS = ("reward", "baseline", "samples", "bad_endings", "waited")
"""Of sampled captions: rewards, baselines, number of samples, number of bad endings, seconds spent
waiting for rewards."""

EPOCH_SUMS = ("loss", "words", "gradient_norm", *REWARD_SUMS)
"""Of every epoch: cross-entropy (nats), words, gradient norms, and ``REWARD_SUMS``."""


def means(sums: Mapping[str, float]) -> dict[str, float]:
    """Mean loss of a word and, if there are samples, mean baseline and reward of a sample."""
    found = {"loss": sums["loss"] / max(1, sums["words"])}
    if sums["samples"]:
        found |= {name: sums[name] / sums["samples"] for name in ("baseline", "reward")}
    return found


class Sums:
    """``EPOCH_SUMS`` of one process or of all, on the device."""

    def __init__(self, device: torch.device) -> None:
        self.values = torch.zeros(len(EPOCH_SUMS), dtype=torch.float64, device=device)

    def step(self, loss: Tensor, norm: Tensor | None, counted: Mapping[str, float]) -> Tensor:
        """The sums of one step of this process, to be added up over the processes.

        Args:
            loss: Sum over the words, nats.
            norm: Of the gradient; None in all processes but one, as they have the same.
            counted: The other sums by name, those that there are.
        """
        values = torch.tensor([counted.get(name, 0.0) for name in EPOCH_SUMS], dtype=torch.float64)
        sums = upload(values, self.values.device)
        sums[EPOCH_SUMS.index("loss")] += loss
        if norm is not None:
            sums[EPOCH_SUMS.index("gradient_norm")] += norm
        return sums

    def collect(self) -> dict[str, float]:
        """The sums since the last call; waits for the device."""
        found = dict(zip(EPOCH_SUMS, self.values.tolist(), strict=True))
        self.values.zero_()
        return found
