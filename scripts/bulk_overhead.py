#!/usr/bin/env python
"""Overhead of ``captioner caption --engine ray`` with one worker over the plain command.

    python scripts/bulk_overhead.py assets/examples --photos 960 --pairs 3

Copies of the photos are captioned by both, in turns. The time between the 480th photo and the last
is compared, so that starting Python, Ray and the model, which a large job does once, is left out
and printed apart. On a shared machine only the ratio of neighbouring runs means something: the
median of the pairs is printed, with their range.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

PART = 480
COMMAND = [sys.executable, "-m", "captioner", "caption"]


def main() -> None:
    """Time both in turns and print the ratio of each pair."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--photos", type=int, default=960, help="a multiple of 480, at least 960")
    parser.add_argument("--pairs", type=int, default=3)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        photos = copies(options.folder, Path(folder, "photos"), options.photos)
        ratios = []
        for pair in range(options.pairs):
            plain, plain_start = time_plain(photos, options.photos)
            ray, ray_start, memory = time_ray(photos, Path(folder, f"out{pair}"), options.photos)
            ratios.append(ray / plain)
            rate = (options.photos - PART) / plain
            print(
                f"plain {plain:.1f} s ({rate:.1f} photos/s), ray {ray:.1f} s: ratio "
                f"{ratios[-1]:.3f}; until photo {PART}: plain {plain_start:.1f} s, ray "
                f"{ray_start:.1f} s; worker {memory / 1e6:.0f} MB",
                flush=True,
            )
    print(f"median {statistics.median(ratios):.3f}, from {min(ratios):.3f} to {max(ratios):.3f}")


def copies(source: Path, folder: Path, count: int) -> Path:
    """Fill a folder with copies of the source's photos."""
    folder.mkdir()
    found = sorted(source.glob("*.jpg"))
    for number in range(count):
        shutil.copy(found[number % len(found)], folder / f"{number}.jpg")
    return folder


def time_plain(photos: Path, count: int) -> tuple[float, float]:
    """Seconds from photo 480 to the last, and until photo 480."""
    start = time.monotonic()
    arguments = [str(photos), "--format", "jsonl"]
    with subprocess.Popen([*COMMAND, *arguments], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        times = [time.monotonic() for _ in process.stdout]
    assert len(times) == count
    return times[-1] - times[PART - 1], times[PART - 1] - start


def time_ray(photos: Path, out: Path, count: int) -> tuple[float, float, int]:
    """The same, and the worker's peak memory (bytes)."""
    arguments = [str(photos), "-o", str(out), "--engine", "ray", "--workers", "1"]
    threads = os.environ.get("OMP_NUM_THREADS", str(os.cpu_count()))
    arguments += ["--part-photos", str(PART), "--worker-cpus", threads]
    start, memory = time.time(), 0
    with subprocess.Popen([*COMMAND, *arguments], stderr=subprocess.DEVNULL) as process:
        while process.poll() is None:
            memory = max(memory, worker_memory())
            time.sleep(0.5)
    times = sorted(path.stat().st_mtime for path in out.glob("part-*"))
    assert len(times) * PART == count
    return times[-1] - times[0], times[0] - start, memory


def worker_memory() -> int:
    """Peak resident memory of the largest worker that runs now (bytes)."""
    found = 0
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if b"_PartWriter" in (folder / "cmdline").read_bytes():
                status = (folder / "status").read_text()
                found = max(found, int(status.partition("VmHWM:")[2].split()[0]) * 1024)
        except (OSError, IndexError, ValueError):
            continue
    return found


if __name__ == "__main__":
    main()
