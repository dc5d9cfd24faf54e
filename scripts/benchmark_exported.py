"""Compare models that run with torch, exported models and 8-bit ones, in one run.

    python scripts/benchmark_exported.py shipped exported int8 --photos photos/

In every round each model captions the same photos, so that a busy machine slows all of them: the
ratio to the first model is the median over the rounds. Cold starts are processes of their own.
"""

from __future__ import annotations

import argparse
import re
import statistics
import subprocess
import sys
import time
from pathlib import Path

from captioner.api import Captioner, load
from captioner.data.folders import find_images
from captioner.model_config import find_model, read_config, weight_files

COLD_START = """
import resource, sys
from captioner.cli.main import main
code = main(["caption", sys.argv[1], "--model", sys.argv[2]])
print("KB", resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
sys.exit(code)
"""


def main() -> None:
    """Print a row per model."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("models", nargs="+", help="model folders and exported folders")
    parser.add_argument("--photos", required=True, help="folder of photos")
    parser.add_argument("--count", type=int, default=64, help="photos to caption")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    photos = find_images([options.photos], recursive=True)[: options.count]

    cold = {name: [cold_start(name, photos[0]) for _ in range(3)] for name in options.models}
    models = {name: load(name, precision="auto") for name in options.models}
    seconds: dict[str, list[float]] = {name: [] for name in models}
    texts: dict[str, list[str]] = {}
    for round_number in range(options.rounds + 1):
        for name, model in models.items():
            started = time.monotonic()
            texts[name] = captions(model, photos)
            if round_number:  # the first warms up
                seconds[name].append(time.monotonic() - started)

    first = options.models[0]
    print("| model | MB | photos/s | speed ratio | same captions | cold start (s) | peak (MB) |")
    print("|---|---|---|---|---|---|---|")
    for name in options.models:
        ratios = [a / b for a, b in zip(seconds[first], seconds[name], strict=True)]
        equal = sum(a == b for a, b in zip(texts[first], texts[name], strict=True))
        print(
            f"| {name} ({models[name].precision}) | {megabytes(name):.1f} "
            f"| {len(photos) / statistics.median(seconds[name]):.1f} "
            f"| {statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f}) "
            f"| {equal} of {len(photos)} "
            f"| {statistics.median(one[0] for one in cold[name]):.1f} "
            f"| {statistics.median(one[1] for one in cold[name]):.0f} |"
        )


def captions(model: Captioner, photos: list[Path]) -> list[str]:
    """The captions of readable photos."""
    return [result.captions[0].text for result in model.stream(photos, batch_size=16)]


def cold_start(model: str, photo: Path) -> tuple[float, float]:
    """Seconds and peak memory (MB) of a process that captions one photo."""
    command = [sys.executable, "-c", COLD_START, str(photo), model]
    started = time.monotonic()
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    found = re.search(r"KB (\d+)", done.stdout)
    assert found is not None
    return time.monotonic() - started, int(found[1]) / 1024


def megabytes(model: str) -> float:
    """Size of a model's weights."""
    folder = find_model(model)
    names = weight_files(read_config(folder))
    return sum((folder / name).stat().st_size for name in names) / 1e6


if __name__ == "__main__":
    main()
