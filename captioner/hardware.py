"""The device that a model runs on, and its precision.

The command line imports this module at startup, so torch is imported inside functions.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Literal, get_args

from captioner.errors import ConfigError
from captioner.extras import is_installed
from captioner.messages import either

if TYPE_CHECKING:
    import torch

Precision = Literal["auto", "fp32", "tf32", "bf16", "fp16"]
"""Precision of matrix products and convolutions (see `pick_precision`). Softmax, attention scores,
losses and trained weights stay in float32."""


def pick_device(name: str = "auto") -> torch.device:
    """Return the device with this name. ``auto`` selects CUDA, or else MPS (Apple) or the CPU.

    Raises:
        ConfigError: The device is unknown or not available.
    """
    import torch

    mps = ["mps"] if torch.backends.mps.is_available() else []
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else (*mps, "cpu")[0])
    try:
        device = torch.device(name)
        torch.zeros(1, device=device).item()  # also fails for "meta"
    except (RuntimeError, AssertionError, TypeError) as error:
        gpus = [f"cuda:{number}" for number in range(torch.cuda.device_count())]
        known = either(["auto", "cpu", *gpus, *mps])
        raise ConfigError(f"device {name!r} is not available; use {known}") from error
    return device


def has_gpu() -> bool:
    """Return whether torch is installed and can use a GPU.

    To save time, torch is imported only if a GPU driver is found.
    """
    drivers = ("nvidiactl", "nvgpu", "nvhost-gpu", "kfd", "dxg")  # NVIDIA, Jetson, AMD, WSL
    possible = sys.platform != "linux" or any(Path("/dev", name).exists() for name in drivers)
    return possible and is_installed("torch") and pick_device().type != "cpu"


def multiplies_bf16(device: torch.device) -> bool:
    """Return whether the hardware multiplies in bf16 natively, and faster than in float32."""
    import torch

    if device.type == "cuda":
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    # torch.cpu.get_capabilities exists since torch 2.12
    capabilities: dict[str, object] = getattr(torch.cpu, "get_capabilities", dict)()
    return device.type == "cpu" and bool(
        capabilities.get("amx_bf16") or capabilities.get("avx512_bf16")
    )


def pick_precision(precision: str, device: torch.device) -> Literal["fp32", "tf32", "bf16", "fp16"]:
    """Return the precision that a device uses for a precision setting, such as ``auto``.

    ``auto`` selects bf16 if the hardware supports it natively. Other NVIDIA GPUs with tensor cores
    (compute capability 7.0 and 7.5) use fp16, and all other devices use fp32. ``tf32`` becomes fp32
    on devices other than NVIDIA GPUs.

    Raises:
        ConfigError: The precision is unknown.
    """
    import torch

    if precision not in get_args(Precision):
        raise ConfigError(f"precision is {precision!r}; use {either(get_args(Precision))}")
    if precision == "auto" and multiplies_bf16(device):
        return "bf16"
    if precision == "auto":  # GPUs without tensor cores can be slower in fp16
        tensor_cores = device.type == "cuda" and torch.cuda.get_device_capability(device) >= (7, 0)
        return "fp16" if tensor_cores else "fp32"
    if precision == "tf32" and device.type != "cuda":
        return "fp32"
    return precision  # type: ignore[return-value]


def product_type(precision: str) -> torch.dtype | None:
    """Return the type that autocast uses for matrix products, or None for float32."""
    import torch

    return {"bf16": torch.bfloat16, "fp16": torch.float16}.get(precision)


def autocast(precision: str, device: torch.device) -> AbstractContextManager[object]:
    """Return a context manager that sets the precision of matrix products and convolutions."""
    precision = pick_precision(precision, device)
    dtype = product_type(precision)
    if dtype is None:
        return float32_precision(precision, device)
    import torch

    return torch.autocast(device.type, dtype)


@contextmanager
def float32_precision(precision: str, device: torch.device) -> Iterator[None]:
    """Make a GPU compute float32 products and convolutions in tf32 or fp32 during the block.

    By default, torch computes convolutions in tf32 and products in float32. The block may contain a
    backward pass, unlike a block with torch's autocast. Settings of the whole process are changed
    and then restored.
    """
    if device.type != "cuda" or precision not in ("tf32", "fp32"):
        yield
        return
    import torch

    products, convolutions = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    torch.set_float32_matmul_precision("high" if precision == "tf32" else "highest")
    torch.backends.cudnn.allow_tf32 = precision == "tf32"
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(products)
        torch.backends.cudnn.allow_tf32 = convolutions


def upload(tensor: torch.Tensor, device: torch.device | None) -> torch.Tensor:
    """Copy a CPU tensor to a device without waiting for the device to finish earlier work.

    A tensor that is not on the CPU is copied by ``Tensor.to``, which may wait.
    """
    if device is None or tensor.device.type != "cpu" or device.type in ("cpu", "mps"):
        return tensor.to(device)  # a non-blocking copy to MPS could read memory that has changed
    if device.type == "cuda":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)
