"""Which device and which precision a machine is good at."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Literal

import torch

from captioner.errors import ConfigError

Precision = Literal["auto", "fp32", "bf16"]


def pick_device(name: str = "auto") -> torch.device:
    """The device of this name; ``auto``: a GPU where there is one, else the CPU.

    Raises:
        ConfigError: torch does not know the name, or the device is not there.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ConfigError(f"device {name!r} is not to be had here; give auto, cpu, cuda") from error
    return device


def multiplies_bf16(device: torch.device) -> bool:
    """Whether the hardware has bf16 matrix units (AMX, recent GPUs); emulation does not count."""
    if device.type == "cuda":
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    capabilities: dict[str, object] = getattr(
        torch.cpu, "get_capabilities", dict
    )()  # torch >= 2.12
    return device.type == "cpu" and bool(capabilities.get("amx_bf16", False))


def pick_precision(precision: Precision, device: torch.device) -> Literal["fp32", "bf16"]:
    """Resolve ``auto``: bf16 where it is native, else fp32.

    Raises:
        ConfigError: There is no such precision.
    """
    if precision not in ("auto", "fp32", "bf16"):
        raise ConfigError(f"precision is {precision!r}; give auto, fp32 or bf16")
    if precision == "auto":
        return "bf16" if multiplies_bf16(device) else "fp32"
    return precision


def autocast(precision: Precision, device: torch.device) -> AbstractContextManager[object]:
    """A context in which matrix products and convolutions run in this precision."""
    if pick_precision(precision, device) == "fp32":
        return nullcontext()
    return torch.autocast(device.type, torch.bfloat16)
