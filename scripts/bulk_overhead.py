#!/usr/bin/env python
"""Photos per second with ``--engine ray``, and its overhead over the plain command.

    OMP_NUM_THREADS=1 python scripts/bulk_overhead.py assets/examples --photos 640 --rounds 1

Copies of the photos are captioned by the plain command, and by Ray with one worker and with two, in
turns. The second half of the photos is timed, so that starting Python, Ray and the model, which a
large job does once, is left out. On a shared machine the elapsed time says little; the processor
seconds are those of all processes of the command, Ray's own included.
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
from typing import NamedTuple

PARTS = 4  # of whole batches: a batch never spans two parts
COMMAND = [sys.executable, "-m", "captioner", "caption"]


class Measured(NamedTuple):
    """The second half of a run."""

    elapsed: float
    """Seconds."""
    processor: float
    """Seconds of all processes."""
    captioning: float
    """Processor seconds of those that caption."""
    memory: int
    """Peak of the largest process that captions (bytes)."""


def main() -> None:
    """Measure in turns and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--photos", type=int, default=640, help=f"a multiple of {32 * PARTS}")
    parser.add_argument("--workers", type=int, nargs="+", default=[0, 1, 2], help="0: plain")
    parser.add_argument("--rounds", type=int, default=1)
    options = parser.parse_args()
    found: dict[int, list[Measured]] = {count: [] for count in options.workers}
    with tempfile.TemporaryDirectory() as folder:
        photos = copies(options.folder, Path(folder, "photos"), options.photos)
        for _ in range(options.rounds):
            for workers in options.workers:
                found[workers].append(measure(photos, Path(folder, "out"), workers))
                print(workers, found[workers][-1], flush=True)
    half = options.photos / 2
    print("| | photos/s | processor s / 1000 photos | of these captioning | memory of a worker |")
    print("|---|---|---|---|---|")
    for workers, runs in found.items():
        middle = Measured(*(statistics.median(values) for values in zip(*runs, strict=True)))
        print(
            f"| {f'Ray, workers: {workers}' if workers else 'plain'} "
            f"| {half / middle.elapsed:.1f} | {1000 * middle.processor / half:.1f} "
            f"| {1000 * middle.captioning / half:.1f} | {middle.memory / 1e6:.0f} MB |"
        )


def copies(source: Path, folder: Path, count: int) -> Path:
    """Fill a folder with copies of the source's photos."""
    folder.mkdir()
    found = sorted(source.glob("*.jpg"))
    for number in range(count):
        shutil.copy(found[number % len(found)], folder / f"{number}.jpg")
    return folder


def measure(photos: Path, out: Path, workers: int) -> Measured:
    """Caption the photos with Ray, or with the plain command (0 workers)."""
    count = len(list(photos.iterdir()))
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir()
    if workers:
        arguments = ["-o", str(out / "parts"), "--engine", "ray", "--workers", str(workers)]
        arguments += ["--part-photos", str(count // PARTS)]
    else:
        arguments = ["-o", str(out / "captions.jsonl")]
    begun: tuple[float, dict[int, float]] | None = None
    now, seconds, captioning, memory = time.monotonic(), {}, set(), 0
    with subprocess.Popen([*COMMAND, str(photos), *arguments], stderr=subprocess.DEVNULL) as run:
        while run.poll() is None:
            done = finished(out, count)
            if done >= count:
                break
            now = time.monotonic()
            seconds = {pid: processor_seconds(pid) for pid in (run.pid, *descendants(run.pid))}
            captioning = {pid for pid in seconds if not workers or captions(pid)}
            memory = max([memory, *map(peak_memory, captioning)])
            if begun is None and done >= count / 2:
                begun = now, seconds
            time.sleep(0.1)
        run.wait()
    assert begun is not None, "the command failed"
    start, before = begun
    spent = {pid: value - before.get(pid, 0.0) for pid, value in seconds.items()}
    return Measured(now - start, sum(spent.values()), sum(spent[pid] for pid in captioning), memory)


def finished(out: Path, count: int) -> int:
    """Photos with a caption."""
    if (out / "parts").exists():
        return len(list((out / "parts").glob("part-*"))) * (count // PARTS)
    path = next((path for path in out.iterdir() if "captions.jsonl" in path.name), None)
    return 0 if path is None else path.read_bytes().count(b"\n")


def descendants(pid: int) -> list[int]:
    """Processes that a process has started, and theirs."""
    listed = subprocess.run(
        ["ps", "-e", "-o", "pid=,ppid="], stdout=subprocess.PIPE, text=True, check=True
    )
    pairs = [tuple(map(int, line.split())) for line in listed.stdout.splitlines()]
    found, waiting = [], [pid]
    while waiting:
        parent = waiting.pop()
        new = [child for child, its_parent in pairs if its_parent == parent]
        found += new
        waiting += new
    return found


def processor_seconds(pid: int) -> float:
    """User and system time of a process; 0 if it has ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def captions(pid: int) -> bool:
    """Whether a process is a worker that captions."""
    try:
        return b"_PartWriter" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


def peak_memory(pid: int) -> int:
    """Peak resident memory (bytes)."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return 0
    return int(status.partition("VmHWM:")[2].split()[0]) * 1024


if __name__ == "__main__":
    main()
