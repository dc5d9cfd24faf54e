"""Photos per second with ``--engine ray``, and its overhead over the plain command.

    OMP_NUM_THREADS=1 python scripts/benchmarks/bulk.py assets/examples --photos 640 --rounds 1

Copies of the photos are captioned by the plain command, and by Ray with one worker and with two, in
turns. The second half of the photos is timed, so that starting Python, Ray and the model, which a
large job does once, is left out. The processor seconds are those of all processes of the command,
Ray's own included.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

import psutil
from measuring import Rows, median, memory, parser, print_table

WORKERS = (0, 1, 2)  # 0: the plain command
PARTS = 4  # of whole batches: a batch never spans two parts
COMMAND = [sys.executable, "-m", "captioner", "caption"]


def main() -> None:
    """Measure in turns and print a table."""
    given = parser(__doc__)
    given.add_argument("folder", type=Path)
    given.add_argument("--photos", type=int, default=640, help=f"a multiple of {32 * PARTS}")
    given.add_argument("--rounds", type=int, default=1)
    options = given.parse_args()
    found: dict[int, list[tuple[float, ...]]] = {count: [] for count in WORKERS}
    with tempfile.TemporaryDirectory() as folder:
        photos = Path(folder, "photos")
        photos.mkdir()
        files = sorted(options.folder.glob("*.jpg"))
        for number in range(options.photos):
            shutil.copy(files[number % len(files)], photos / f"{number}.jpg")
        for _ in range(options.rounds):
            for workers, runs in found.items():
                runs.append(measure(photos, options.photos, Path(folder, "out"), workers))
    half = options.photos / 2
    rows: Rows = {}
    for workers, runs in found.items():
        elapsed, processor, peak = map(median, zip(*runs, strict=True))
        rows[f"Ray, workers: {workers}" if workers else "plain"] = {
            "photos/s": half / elapsed,
            "processor s / 1000 photos": 1000 * processor / half,
            "memory of a worker, MB": peak,
        }
    print_table("", rows)


def measure(photos: Path, count: int, out: Path, workers: int) -> tuple[float, ...]:
    """Caption the photos with Ray, or with the plain command (0 workers).

    Returns:
        Of the second half: seconds and processor seconds of all processes; and the peak memory of
        the largest that captions, in MB.
    """
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir()
    arguments = ["-o", str(out / "captions.jsonl")]
    if workers:
        arguments = ["-o", str(out / "parts"), "--engine", "ray", "--workers", str(workers)]
        arguments += ["--part-photos", str(count // PARTS)]
    halfway: tuple[float, dict[int, float]] | None = None
    now, spent, peak = time.monotonic(), dict[int, float](), 0.0
    with subprocess.Popen([*COMMAND, str(photos), *arguments], stderr=subprocess.DEVNULL) as run:
        while run.poll() is None and (done := finished(out, count)) < count:
            now = time.monotonic()
            command = psutil.Process(run.pid)
            for process in (command, *command.children(recursive=True)):
                with suppress(psutil.NoSuchProcess, OSError):
                    spent[process.pid] = sum(process.cpu_times()[:2])
                    if not workers or "WritePart" in " ".join(process.cmdline()):
                        peak = max(peak, memory(process=process.pid))
            if halfway is None and done >= count / 2:
                halfway = now, dict(spent)
            time.sleep(0.1)
    assert halfway is not None, "the command failed"
    start, before = halfway
    used = sum(seconds - before.get(pid, 0.0) for pid, seconds in spent.items())
    return now - start, used, peak


def finished(out: Path, count: int) -> int:
    """Photos with a caption."""
    if (out / "parts").exists():
        return len(list((out / "parts").glob("part-*"))) * (count // PARTS)
    lines = (path.read_bytes().count(b"\n") for path in out.glob("*captions.jsonl*"))
    return max(lines, default=0)


if __name__ == "__main__":
    main()
