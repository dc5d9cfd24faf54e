"""One switch for all that is only fast."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import Tensor

_ENABLED = ContextVar("kernels", default=os.environ.get("CAPTIONER_KERNELS", "1") != "0")
enabled = _ENABLED.get
"""Whether kernels run; otherwise the plain formulas beside them do."""


@contextmanager
def plain_formulas() -> Iterator[None]:
    """Run the plain formulas in this context, as with ``CAPTIONER_KERNELS=0``."""
    before = _ENABLED.set(False)
    try:
        yield
    finally:
        _ENABLED.reset(before)


def for_inference(features: Tensor) -> bool:
    """Whether features are on the CPU, and neither gradients nor a graph are recorded."""
    recorded = torch.is_grad_enabled() or torch.compiler.is_compiling()
    return features.device.type == "cpu" and not recorded
