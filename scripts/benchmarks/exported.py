"""Compare models that run with torch, exported models and 8-bit ones, in one run.

    python scripts/benchmarks/exported.py shipped:fp32 shipped:bf16 small shipped \
        --photos photos/ [--runtime small-venv/bin/python]

In every round each model captions the same photos; the ratio to the first model is the median over
the rounds. Cold starts are processes of their own; with --runtime, exported models start in the
environment without torch.
"""

from __future__ import annotations

import os
import re
import resource
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

from measuring import clock, measure, median, parser, print_table, ratios

from captioner.data.folders import find_images
from captioner.inference.captioner import Captioner, load
from captioner.inference.folder import GRAPHS, WEIGHTS, find_model, load_model, runs_graphs

COLD_START = """
import sys
from captioner.cli.main import main
code = main(["caption", sys.argv[1], "--model", sys.argv[2], "--precision", sys.argv[3]])
print(*(line for line in open("/proc/self/status") if line.startswith("VmHWM")))
sys.exit(code)
"""
STARTS = 3
"""Cold starts of each model, after one that fills the system's cache."""


def main() -> None:
    """Print a row per model."""
    given = parser(__doc__, rounds=5)
    given.add_argument("models", nargs="+", help="folders, exported or MODEL:fp32, MODEL:bf16")
    given.add_argument("--photos", required=True, help="folder of photos")
    given.add_argument("--count", type=int, default=64, help="photos to caption")
    given.add_argument(
        "--runtime", default=sys.executable, help="Python of an environment without torch"
    )
    options = given.parse_args()
    photos = find_images([options.photos], recursive=True)[: options.count]
    models, starts, texts = {}, {}, dict[str, list[str]]()
    for name in options.models:
        folder, precision = parsed(name)
        python = options.runtime if files(folder, precision) == GRAPHS else sys.executable
        start = partial(cold_start, python, folder, precision, photos[0], options.processor_time)
        starts[name] = [start() for _ in range(STARTS + 1)][1:]
    for name in options.models:
        folder, precision = parsed(name)
        models[name] = load(folder, precision=precision)

    def caption(name: str, model: Captioner) -> None:
        texts[name] = [found.captions[0].text for found in model.stream(photos, batch_size=16)]

    jobs = {name: partial(caption, name, model) for name, model in models.items()}
    times = measure(jobs, options.rounds, clock=clock(options))
    rows: dict[str, dict[str, float | str | None]] = {}
    for name, model in models.items():
        folder, precision = parsed(name)
        weights = (find_model(folder) / part for part in files(folder, precision))
        speeds = ratios(times, name, options.models[0])
        equal = sum(a == b for a, b in zip(texts[options.models[0]], texts[name], strict=True))
        seconds, peaks = zip(*starts[name], strict=True)
        rows[f"{name} ({model.precision})"] = {
            "MB": sum(path.stat().st_size for path in weights) / 1e6,
            "photos/s": len(photos) / median(times[name]),
            "speed ratio": f"{median(speeds):.2f} ({min(speeds):.2f} to {max(speeds):.2f})",
            "same captions": f"{equal} of {len(photos)}",
            "cold start (s)": median(seconds),
            "peak (MB)": median(peaks),
        }
    print_table("model", rows)


def parsed(name: str) -> tuple[str, Any]:
    """A model and its precision: ``shipped:fp32``; without one it is ``auto``."""
    model, _, precision = name.rpartition(":")
    return (model, precision) if precision in ("fp32", "bf16") else (name, "auto")


def files(model: str, precision: str) -> tuple[str, ...]:
    """The files that a model runs from."""
    return GRAPHS if runs_graphs(load_model(model), "auto", precision) else (WEIGHTS,)


def cold_start(
    python: str, model: str, precision: str, photo: Path, processor_time: bool
) -> tuple[float, float]:
    """Seconds and peak memory (MB) of a process that captions a photo."""
    unwanted = ("PYTHONPATH", "PYTHONDONTWRITEBYTECODE") if python != sys.executable else ()
    environment = {name: value for name, value in os.environ.items() if name not in unwanted}

    def now() -> float:
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        return used.ru_utime + used.ru_stime if processor_time else time.monotonic()

    started = now()
    command = [python, "-c", COLD_START, str(photo), model, precision]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    [peak] = re.findall(r"VmHWM:\s*(\d+) kB", done.stdout)
    return now() - started, int(peak) / 1024


if __name__ == "__main__":
    main()
