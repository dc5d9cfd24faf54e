"""Memory of the process and the GPU: how much it takes, and a clear error if it runs out.

torch is imported inside functions, since the command line imports this module at startup.
"""

from __future__ import annotations

import ctypes
import os
import re
import resource
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from captioner.errors import CaptionerError

if TYPE_CHECKING:
    import torch


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
