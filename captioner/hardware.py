"""Device and precision selection, memory settings, and which optional packages are installed.

torch is imported inside functions, since the command line imports this module at startup.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import re
import resource
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Literal, get_args

from captioner.errors import CaptionerError, ConfigError
from captioner.messages import either

if TYPE_CHECKING:
    import torch

Precision = Literal["auto", "fp32", "tf32", "bf16", "fp16"]
"""Of matrix products and convolutions; see `pick_precision`. Softmax, attention scores, losses and
trained weights stay in float32."""


def keep_freed_memory(*, threads: bool = False) -> None:
    """Make glibc keep freed memory instead of returning it to the system.

    The system zeroes each new page, which can take as long as the matrix products. The setting
    affects the whole process, so programs call this and libraries should not. It has no effect with
    another C library or if the user has set any ``MALLOC_...`` variable. ``threads``: if the model
    runs in a thread; a heap per thread would ignore the setting.
    """
    if any(name.startswith(("MALLOC_", "GLIBC_TUNABLES")) for name in os.environ):
        return
    mmap_max, trim_threshold, arena_max = -4, -1, -8  # M_MMAP_MAX etc. in malloc.h
    with suppress(AttributeError, OSError, TypeError):
        libc = ctypes.CDLL(None)
        libc.mallopt(mmap_max, 0)
        libc.mallopt(trim_threshold, 2**31 - 1)
        if threads:
            libc.mallopt(arena_max, 1)


def release_freed_memory() -> None:
    """Return freed memory to the system, also after `keep_freed_memory` (with glibc only)."""
    with suppress(AttributeError, OSError):
        ctypes.CDLL(None).malloc_trim(0)


def pick_device(name: str = "auto") -> torch.device:
    """Return the device of this name; ``auto`` is CUDA, else MPS (Apple), else the CPU.

    Raises:
        ConfigError: The device is unknown or not available.
    """
    import torch

    mps = ["mps"] if torch.backends.mps.is_available() else []
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else (*mps, "cpu")[0])
    try:
        device = torch.device(name)
        torch.zeros(1, device=device).item()  # also refuses "meta"
    except (RuntimeError, AssertionError, TypeError) as error:
        gpus = [f"cuda:{number}" for number in range(torch.cuda.device_count())]
        known = either(["auto", "cpu", *gpus, *mps])
        raise ConfigError(f"device {name!r} is not available; give {known}") from error
    return device


def has_gpu() -> bool:
    """Whether torch is installed and has a GPU; imports it only where a GPU's driver is found."""
    drivers = ("nvidiactl", "nvgpu", "nvhost-gpu", "kfd", "dxg")  # NVIDIA, Jetson, AMD, WSL
    possible = sys.platform != "linux" or any(Path("/dev", name).exists() for name in drivers)
    return possible and is_installed("torch") and pick_device().type != "cpu"


def multiplies_bf16(device: torch.device) -> bool:
    """Whether the hardware multiplies in bf16 without emulation, and faster than in float32."""
    import torch

    if device.type == "cuda":
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    # torch.cpu.get_capabilities exists since torch 2.12
    capabilities: dict[str, object] = getattr(torch.cpu, "get_capabilities", dict)()
    return device.type == "cpu" and bool(
        capabilities.get("amx_bf16") or capabilities.get("avx512_bf16")
    )


def pick_precision(precision: str, device: torch.device) -> Literal["fp32", "tf32", "bf16", "fp16"]:
    """Resolve ``auto``, and what makes no difference on a device.

    ``auto`` is bf16 where the hardware supports it natively, fp16 on other NVIDIA GPUs with tensor
    cores (compute capability 7.0 and 7.5), else fp32. ``tf32`` is fp32 except on NVIDIA GPUs.

    Raises:
        ConfigError: The precision is unknown.
    """
    import torch

    if precision not in get_args(Precision):
        raise ConfigError(f"precision is {precision!r}; give {either(get_args(Precision))}")
    if precision == "auto" and multiplies_bf16(device):
        return "bf16"
    if precision == "auto":  # GPUs without tensor cores can be slower in fp16
        tensor_cores = device.type == "cuda" and torch.cuda.get_device_capability(device) >= (7, 0)
        return "fp16" if tensor_cores else "fp32"
    if precision == "tf32" and device.type != "cuda":
        return "fp32"
    return precision  # type: ignore[return-value]


def product_type(precision: str) -> torch.dtype | None:
    """The type of products' factors in autocast; None: float32."""
    import torch

    return {"bf16": torch.bfloat16, "fp16": torch.float16}.get(precision)


def autocast(precision: str, device: torch.device) -> AbstractContextManager[object]:
    """A context that runs matrix products and convolutions in this precision."""
    precision = pick_precision(precision, device)
    dtype = product_type(precision)
    if dtype is None:
        return float32_precision(precision, device)
    import torch

    return torch.autocast(device.type, dtype)


@contextmanager
def float32_precision(precision: str, device: torch.device) -> Iterator[None]:
    """A context in which a GPU's float32 products and convolutions run in ``tf32`` or ``fp32``.

    By default, torch runs convolutions in TF32 and products in float32. Unlike `autocast`, it may
    surround a backward pass. The settings affect the whole process.
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
    """Copy a CPU tensor to a device without waiting for the work queued there.

    A tensor that is on a device already is moved by ``Tensor.to``.
    """
    if device is None or tensor.device.type != "cpu" or device.type in ("cpu", "mps"):
        return tensor.to(device)  # MPS reads unpinned memory too late for a copy that runs ahead
    if device.type == "cuda":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


def peak_memory(device: torch.device) -> int:
    """Peak memory so far in bytes, of the GPU or else of this process."""
    import torch

    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    status = Path("/proc/self/status")
    if status.exists():  # the maximum of getrusage is inherited from the parent process
        line = next(x for x in status.read_text().splitlines() if x.startswith("VmHWM"))
        return int(line.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # bytes on macOS


@contextmanager
def memory_errors(advice: str) -> Iterator[None]:
    """Raise CaptionerError with advice if the memory of the GPU or of the machine is exhausted."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:  # torch has classes of its own for some
        text = str(error)
        if not (isinstance(error, MemoryError) or re.search("out of memory|alloc", text, re.I)):
            raise
        tried = re.search(r"tried to allocate ([\d.]+ \w+)", text, re.I)
        needed = f" (tried to allocate {tried[1]})" if tried else ""
        raise CaptionerError(f"out of memory{needed}; {advice}") from error


# --- packages ------------------------------------------------------------------------------------

EXTRAS = {
    "torch": ("torch", "torchvision"),
    "serve": (
        "fastapi", "fastapi_offline", "prometheus_client", "starlette", "werkzeug",
        "granian",
    ),
    "train": ("torch", "torchvision", "accelerate"),
    "export": ("torch", "onnx", "onnxscript"),
    "hub": ("huggingface_hub",),
    "ray": ("ray", "pyarrow", "fsspec"),
    "video": ("av",),
}  # fmt: skip
"""Modules by extra. An extra that only one command needs has the command's name."""


def is_installed(module: str) -> bool:
    """Whether a top-level module can be imported; it is not."""
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # from a finder that hides it
        return False


def require_extra(extra: str, needed_by: str | None = None) -> None:
    """Raise ConfigError if modules of an extra are missing, which a command of its name needs.

    Or another thing, which the message names; not every command has an extra.
    """
    absent = [name for name in EXTRAS.get(extra, ()) if not is_installed(name)]
    if absent:
        raise ConfigError(
            f"{needed_by or f'captioner {extra}'} needs {', '.join(absent)}; run: "
            f"pip install 'captioner[{extra}]'"
        )
