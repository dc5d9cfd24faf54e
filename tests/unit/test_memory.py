"""Freed memory, and errors if memory runs out."""

from __future__ import annotations

import os
import platform
import subprocess
import sys

import pytest
import torch

from captioner.errors import CaptionerError
from captioner.memory import memory_errors

FAULTS = """
import ctypes, resource, threading
from captioner.memory import keep_freed_memory
import numpy as np
# Pages of 4 KiB whatever the machine's setting: huge ones would be too few to count.
ctypes.CDLL(None).prctl(41, 1, 0, 0, 0)  # PR_SET_THP_DISABLE
{setting}
def work():
    np.ones(100_000_000, dtype=np.uint8)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(4):
        np.ones(100_000_000, dtype=np.uint8)
    print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
{run}
"""
THREAD = "thread = threading.Thread(target=work); thread.start(); thread.join()"


def faults(setting: str, run: str = "work()", **environment: str) -> int:
    """Page faults when memory is allocated again after it was freed."""
    own = {key: value for key, value in os.environ.items() if not key.startswith("MALLOC_")}
    done = subprocess.run(
        [sys.executable, "-c", FAULTS.format(setting=setting, run=run)],
        capture_output=True, text=True, check=True, env=own | environment,
    )  # fmt: skip
    return int(done.stdout)


@pytest.mark.slow
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library")
def test_freed_memory_is_kept() -> None:
    assert faults("keep_freed_memory()") < 500 < faults("")
    assert faults("keep_freed_memory(threads=True)", THREAD) < 500 < faults("", THREAD)
    assert faults("keep_freed_memory()", MALLOC_TRIM_THRESHOLD_="131072") > 500  # the user's


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (None, r"out of memory \(tried to allocate 4611686018427387904 bytes\); lower it"),
        (MemoryError(), "out of memory; lower it"),
        (
            torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has"),
            r"out of memory \(tried to allocate 2.00 GiB\); lower it",
        ),
    ],
)
def test_exhausted_memory_is_one_line_with_advice(error, expected) -> None:
    with (
        pytest.raises(CaptionerError, match=f"^captioner ran {expected}$"),
        memory_errors("lower it"),
    ):
        raise error if error else torch.empty(1 << 62, dtype=torch.uint8)


def test_other_errors_are_not_about_memory() -> None:
    with pytest.raises(RuntimeError, match="shapes"), memory_errors("lower it"):
        raise RuntimeError("shapes differ")
