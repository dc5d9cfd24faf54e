"""Memory use of the process and the GPU, and a clear error when memory runs out.

The command line imports this module at startup, so torch is imported inside functions.
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

    The system fills each new page of memory with zeros, which can take as long as the matrix
    products of the model. The setting affects the whole process, so programs should call this
    function and libraries should not. It has no effect with another C library, or if the user has
    set a ``MALLOC_...`` variable.

    Args:
        threads: Use the same heap for all threads. Set this if the model runs in a thread, because
            the separate heap of a thread would ignore the setting.
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
    """Return freed memory to the system, even after `keep_freed_memory` (with glibc only)."""
    with suppress(AttributeError, OSError):
        ctypes.CDLL(None).malloc_trim(0)


def peak_memory(device: torch.device) -> int:
    """Return the peak memory use so far, in bytes, of the GPU or of this process on a CPU."""
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
    """Report out-of-memory errors of the GPU or the machine as one line with advice.

    Raises:
        CaptionerError: The block ran out of memory.
    """
    try:
        yield
    except (MemoryError, RuntimeError) as error:  # torch's classes are RuntimeErrors
        text = str(error)
        if not (isinstance(error, MemoryError) or re.search("out of memory|alloc", text, re.I)):
            raise
        tried = re.search(r"tried to allocate ([\d.]+ \w+)", text, re.I)
        needed = f" (tried to allocate {tried[1]})" if tried else ""
        raise CaptionerError(f"captioner ran out of memory{needed}; {advice}") from error
