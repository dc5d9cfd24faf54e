"""Learning rate over a run."""

from __future__ import annotations

import math


def lr_factor(step: int, warmup_steps: int, total_steps: int, schedule: str = "cosine") -> float:
    """Share of the highest learning rate at a step: a linear rise, then what the schedule says.

    Args:
        step: Steps taken so far, from 0.
        warmup_steps: Length of the rise.
        total_steps: Length of the run.
        schedule: ``cosine``: half a cosine down to 0; ``plateau``: it stays at the highest (the
            trainer halves that when validation stands still).

    Returns:
        0 to 1.
    """
    if step < warmup_steps:
        return (step + 1) / (warmup_steps + 1)
    if schedule == "plateau":
        return 1.0
    progress = (step - warmup_steps) / max(1, total_steps - warmup_steps)
    return 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))
