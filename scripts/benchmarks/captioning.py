"""Compare the size, start-up, memory and speed of models in PyTorch, as ONNX graphs and in 8 bits.

    python scripts/benchmarks/captioning.py shipped:fp32 shipped:bf16 small shipped \
        --photos photos/ [--count 64] [--runtime small-venv/bin/python]

In every round, each model captions the same files. It also runs only its encoder on the same
prepared batches, which shows the upper limit of its speed. The speed ratio compares a model with
the first model. It is a median over the rounds.

To measure start-up and peak memory, each model captions one photo in a new process. For the column
"peak, N photos", a new process captions all photos. With --runtime, exported models start in an
environment without torch.
"""

from __future__ import annotations

import os
import re
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from measuring import Rows, clock, measure, parser, print_table, ratios

from captioner.data.folders import find_images
from captioner.data.images import open_image
from captioner.inference.captioner import Captioner, load
from captioner.inference.engine import Prepared
from captioner.inference.find_model import find_model
from captioner.inference.folder import load_model
from captioner.inference.names import GRAPHS, WEIGHTS
from captioner.inference.open_models import runs_graphs
from captioner.memory import keep_freed_memory

START = """
import sys
from captioner.cli.main import main
code = main(["caption", *sys.argv[3:], "--model", sys.argv[1], "--precision", sys.argv[2]])
print(*(line for line in open("/proc/self/status") if line.startswith("VmHWM")))
sys.exit(code)
"""
"""Program that captions photos in a new process, and prints the peak memory of the process."""
STARTS = 3
"""Number of measured starts of each model, after a start that fills the system's file cache."""
BATCH = 32
"""Number of photos in a batch."""


def main() -> None:
    """Measure the models, and print a row for each model."""
    given = parser(__doc__)
    given.add_argument(
        "models",
        nargs="+",
        help="exported model folders, or MODEL:fp32 and MODEL:bf16 for a model in PyTorch",
    )
    given.add_argument("--photos", required=True, help="folder with the photos")
    given.add_argument("--count", type=int, default=64, help="number of photos to caption")
    given.add_argument(
        "--runtime",
        default=sys.executable,
        help="start exported models with this Python, from an environment without torch",
    )
    options = given.parse_args()
    keep_freed_memory()  # as the command line does
    photos = find_images([options.photos], recursive=True)[: options.count]
    rows: Rows = {}
    texts: dict[str, list[str]] = {}
    for name in options.models:
        folder, precision = parsed(name)
        graphs = runs_graphs(load_model(folder), "auto", precision)
        files = [find_model(folder) / part for part in (GRAPHS if graphs else (WEIGHTS,))]
        python = options.runtime if graphs else sys.executable
        start = partial(cold_start, python, folder, precision, options.processor_time)
        seconds, peaks = zip(*[start(photos[:1]) for _ in range(STARTS + 1)][1:], strict=True)
        rows[name] = {
            "MB": sum(path.stat().st_size for path in files) / 1e6,
            "cold start (s)": median(seconds),
            "peak (MB)": median(peaks),
            f"peak, {len(photos)} photos (MB)": start(photos)[1],
        }
    jobs: dict[str, Callable[[], object]] = {}
    for name in options.models:
        folder, precision = parsed(name)
        model = load(folder, precision=precision)
        jobs[name] = partial(caption, model, photos, texts.setdefault(name, []))
        jobs[f"{name}, encoder"] = partial(encode, model, prepared(model, photos))
    times = measure(jobs, options.rounds, clock=clock(options))
    first = options.models[0]
    for name, row in rows.items():
        speeds = ratios(times, name, first)
        equal = sum(a == b for a, b in zip(texts[first], texts[name], strict=True))
        row |= {
            "photos/s": len(photos) / median(times[name]),
            "speed ratio": f"{median(speeds):.2f} ({min(speeds):.2f} to {max(speeds):.2f})",
            "of the encoder": median(ratios(times, name, f"{name}, encoder")),
            "same captions": f"{equal} of {len(photos)}",
        }
    print_table("model", rows)


def parsed(name: str) -> tuple[str, Any]:
    """Split a name such as ``shipped:fp32`` into the model and the precision (default: auto)."""
    model, _, precision = name.rpartition(":")
    return (model, precision) if precision in ("fp32", "bf16") else (name, "auto")


def caption(model: Captioner, photos: Sequence[Path], texts: list[str]) -> None:
    """Caption the files, and store the captions in ``texts``."""
    found = model.stream(photos, batch_size=BATCH)
    texts[:] = [result.captions[0].text for result in found]


def prepared(model: Captioner, photos: Sequence[Path]) -> list[list[Prepared]]:
    """Prepare the photos for the encoder, in batches."""
    found = [model.prepare(open_image(photo)) for photo in photos]
    return [found[start : start + BATCH] for start in range(0, len(found), BATCH)]


def encode(model: Captioner, batches: Sequence[Sequence[Prepared]]) -> None:
    """Run only the encoder, on prepared batches."""
    for batch in batches:
        model.ensemble.encode(batch)


def cold_start(
    python: str, model: str, precision: str, processor_time: bool, photos: Sequence[Path]
) -> tuple[float, float]:
    """Return the seconds and the peak memory (MB) of a new process that captions photos.

    Args:
        python: The Python program that runs the process.
        model: The model folder.
        precision: The precision of the model.
        processor_time: Measure processor time instead of real time.
        photos: The photos.
    """
    unwanted = ("PYTHONPATH", "PYTHONDONTWRITEBYTECODE") if python != sys.executable else ()
    environment = {name: value for name, value in os.environ.items() if name not in unwanted}

    def now() -> float:
        """Return the time in seconds, or the processor time of all child processes."""
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        return used.ru_utime + used.ru_stime if processor_time else time.monotonic()

    started = now()
    command = [python, "-c", START, model, precision, *map(str, photos)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    [peak] = re.findall(r"VmHWM:\s*(\d+) kB", done.stdout)
    return now() - started, int(peak) * 1024 / 1e6


if __name__ == "__main__":
    main()
