"""Compare models that run with torch, exported models and 8-bit ones, in one run.

    python scripts/benchmark_exported.py shipped:fp32 shipped:bf16 small shipped \
        --photos photos/ [--runtime small-venv/bin/python]

In every round each model captions the same photos; the ratio to the first model is the median over
the rounds. Cold starts are processes of their own; with --runtime, exported models start in the
environment without torch. On a machine that is busy with other work, give --cpu: processor time of
one core differs little from that on an idle machine.
"""

from __future__ import annotations

import argparse
import os
import re
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

from captioner.data.folders import find_images
from captioner.inference.captioner import Captioner, load
from captioner.inference.folder import GRAPHS, WEIGHTS, find_model, load_model, runs_graphs

COLD_START = """
import sys
from captioner.cli.main import main
code = main(["caption", sys.argv[1], "--model", sys.argv[2], "--precision", sys.argv[3]])
# Not of getrusage, which counts the parent process too.
print(*(line for line in open("/proc/self/status") if line.startswith("VmHWM")))
sys.exit(code)
"""

PRECISIONS = ("fp32", "bf16")
STARTS = 3
"""Cold starts of each model, after one that fills the system's cache."""


def main() -> None:
    """Print a row per model."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("models", nargs="+", help="folders, exported or MODEL:fp32, MODEL:bf16")
    parser.add_argument("--photos", required=True, help="folder of photos")
    parser.add_argument("--count", type=int, default=64, help="photos to caption")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--runtime", default=sys.executable, help="Python of an environment without torch"
    )
    parser.add_argument("--cpu", action="store_true", help="measure processor time, one thread")
    options = parser.parse_args()
    clock = time.process_time if options.cpu else time.monotonic
    if options.cpu:
        os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported
    photos = find_images([options.photos], recursive=True)[: options.count]

    cold: dict[str, list[tuple[float, float]]] = {}
    models = {}
    for name in options.models:
        model, precision = parsed(name)
        python = options.runtime if _files(model, precision) == GRAPHS else sys.executable
        starts = [cold_start(python, model, precision, photos[0]) for _ in range(STARTS + 1)]
        cold[name] = [(one.cpu if options.cpu else one.wall, one.megabytes) for one in starts[1:]]
    for name in options.models:
        model, precision = parsed(name)
        models[name] = load(model, precision=precision)
    seconds: dict[str, list[float]] = {name: [] for name in models}
    texts: dict[str, list[str]] = {}
    for round_number in range(options.rounds + 1):
        for name, model in models.items():
            started = clock()
            texts[name] = captions(model, photos)
            if round_number:  # the first warms up
                seconds[name].append(clock() - started)

    first = options.models[0]
    print("| model | MB | photos/s | speed ratio | same captions | cold start (s) | peak (MB) |")
    print("|---|---|---|---|---|---|---|")
    for name in options.models:
        ratios = [a / b for a, b in zip(seconds[first], seconds[name], strict=True)]
        equal = sum(a == b for a, b in zip(texts[first], texts[name], strict=True))
        print(
            f"| {name} ({models[name].precision}) | {megabytes(*parsed(name)):.1f} "
            f"| {len(photos) / statistics.median(seconds[name]):.1f} "
            f"| {statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f}) "
            f"| {equal} of {len(photos)} "
            f"| {statistics.median(one[0] for one in cold[name]):.2f} "
            f"| {statistics.median(one[1] for one in cold[name]):.0f} |"
        )


def parsed(name: str) -> tuple[str, Any]:
    """A model and its precision: ``shipped:fp32``; without one it is ``auto``."""
    model, _, precision = name.rpartition(":")
    return (model, precision) if precision in PRECISIONS else (name, "auto")


def captions(model: Captioner, photos: list[Path]) -> list[str]:
    """The captions of readable photos."""
    return [result.captions[0].text for result in model.stream(photos, batch_size=16)]


class Start(NamedTuple):
    """What a process takes that captions one photo."""

    wall: float
    """Seconds."""
    cpu: float
    """Seconds of processor time."""
    megabytes: float
    """Peak memory."""


def cold_start(python: str, model: str, precision: str, photo: Path) -> Start:
    """Caption a photo in a new process."""
    command = [python, "-c", COLD_START, str(photo), model, precision]
    unwanted = ("PYTHONPATH", "PYTHONDONTWRITEBYTECODE") if python != sys.executable else ()
    environment = {name: value for name, value in os.environ.items() if name not in unwanted}
    started, used = time.monotonic(), children_cpu()
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    wall, cpu = time.monotonic() - started, children_cpu() - used
    found = re.search(r"VmHWM:\s*(\d+) kB", done.stdout)
    assert found is not None
    return Start(wall, cpu, int(found[1]) / 1024)


def children_cpu() -> float:
    """Seconds of processor time of the processes that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def megabytes(model: str, precision: str) -> float:
    """Size of the files that a model runs from."""
    folder = find_model(model)
    return sum((folder / name).stat().st_size for name in _files(model, precision)) / 1e6


def _files(model: str, precision: str) -> tuple[str, ...]:
    return GRAPHS if runs_graphs(load_model(model), "auto", precision) else (WEIGHTS,)


if __name__ == "__main__":
    main()
