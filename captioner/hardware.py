"""Which device and which precision a machine is good at; what memory is kept for the next step.

torch is imported where it is needed: the command line looks in here before anything heavy.
"""

from __future__ import annotations

import ctypes
import os
import sys
from contextlib import AbstractContextManager, nullcontext, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from captioner.errors import ConfigError

if TYPE_CHECKING:
    import torch

Precision = Literal["auto", "fp32", "bf16"]


def keep_freed_memory(*, threads: bool = False) -> None:
    """Let the C library keep what is freed, for the next step that needs as much.

    glibc asks the system for every block of some megabytes anew, and the system clears each page
    as it is first touched, which takes as long as many a product. The setting is the whole
    process's, so programs make it and libraries do not; the command line does.
    Another C library, or a user's own ``MALLOC_...`` settings, are left alone.

    Args:
        threads: Threads that are started from now on share the main one's heap. Else each has one
            of its own, which asks the system for every large block whatever the settings say: for
            programs whose model runs in a thread.
    """
    if any(name.startswith(("MALLOC_", "GLIBC_TUNABLES")) for name in os.environ):
        return
    mmap_max, trim_threshold, arena_max = -4, -1, -8  # malloc.h: M_MMAP_MAX and so on
    with suppress(AttributeError, OSError, TypeError):
        libc = ctypes.CDLL(None)
        libc.mallopt(mmap_max, 0)
        libc.mallopt(trim_threshold, 2**31 - 1)
        if threads:
            libc.mallopt(arena_max, 1)


def pick_device(name: str = "auto") -> torch.device:
    """The device of this name; ``auto``: a GPU where there is one, else the CPU.

    Raises:
        ConfigError: torch does not know the name, or the device is not there.
    """
    import torch

    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.zeros(1, device=device).item()  # "meta" has a place for numbers and none of them
    except (RuntimeError, AssertionError, TypeError) as error:
        raise ConfigError(f"device {name!r} is not to be had here; give auto, cpu, cuda") from error
    return device


def multiplies_bf16(device: torch.device) -> bool:
    """Whether the hardware has bf16 matrix units (AMX, recent GPUs); emulation does not count."""
    import torch

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
    import torch

    return torch.autocast(device.type, torch.bfloat16)


def peak_memory(device: torch.device) -> int:
    """The most memory that was in use so far, bytes: of the GPU, or else of this process."""
    import torch

    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    status = Path("/proc/self/status")
    if status.exists():  # getrusage's maximum would be inherited from the process that started us
        line = next(x for x in status.read_text().splitlines() if x.startswith("VmHWM"))
        return int(line.split()[1]) * 1024
    import resource  # not on Windows

    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
