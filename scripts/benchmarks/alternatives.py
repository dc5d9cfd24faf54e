"""Compare captioner with four captioning models from transformers, on one processor thread.

    pip install '.[torch]' 'transformers>=5'
    python scripts/benchmarks/alternatives.py --photos photos/ [--count 9] [--rounds 3] \
        [--runtime small-venv/bin/python]

No weights are downloaded. The four models have their published sizes but random weights, because
speed and memory do not depend on the values of the weights. Their captions mean nothing. Every
model captions the same photos one by one, with three beams and exactly ten decoder steps.

Each measurement runs in a new process. The process starts when the machine is idle, or after
--patience seconds. Start-up and speed are measured in processor time. The table shows medians over
the rounds. With --runtime, captioner's 8-bit model runs in an environment without torch.

If optimum is installed, ViT-GPT2 is also measured as ONNX graphs. optimum needs an older version of
transformers, in which GIT encodes the photo again at every word. So measure the ONNX graphs in a
separate environment, with ``pip install '.[torch]' 'optimum-onnx[onnxruntime]'`` and ``--only
ViT-GPT2``.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

from alternative_models import ONNX, PEERS, WORDS, build, export
from measuring import print_table

from captioner.data.folders import find_images

CHILD = Path(__file__).with_name("alternative_models.py")
"""Script that measures one model."""
IDLE = 0.2
"""The machine counts as idle if other programs use fewer processor cores than this."""


def main() -> None:
    """Build the models, measure each of them in every round, and print a table."""
    given = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    given.add_argument("--photos", required=True, help="folder with the photos")
    given.add_argument(
        "--count",
        type=int,
        default=9,
        help="number of photos; the first photo is used only to measure the start-up time",
    )
    given.add_argument("--rounds", type=int, default=3, help="number of measurements of each model")
    given.add_argument(
        "--only", nargs="+", default=["captioner", *PEERS], help="measure only these models"
    )
    given.add_argument("--work", type=Path, help="keep the built models in this folder")
    given.add_argument(
        "--patience",
        type=float,
        default=30,
        help="wait at most this many seconds until the machine is idle",
    )
    given.add_argument("--tiny", action="store_true", help="build tiny models, to test this script")
    given.add_argument(
        "--runtime",
        default=sys.executable,
        help="run captioner's 8-bit model with this Python, from an environment without torch",
    )
    options = given.parse_args()
    photos = find_images([options.photos], recursive=True)[: options.count]
    with tempfile.TemporaryDirectory() as folder:
        runs = prepare(options.only, options.work or Path(folder), options.tiny)
        found: dict[tuple[str, str], list[dict[str, Any]]] = {run: [] for run in runs}
        busy: list[float] = []
        for number in range(options.rounds):
            for name, form in runs:
                busy.append(wait_until_idle(options.patience))
                python = (
                    options.runtime if (name, form) == ("captioner", "int8") else sys.executable
                )
                figures = measured(python, name, form, runs[name, form], photos)
                found[name, form].append(figures)
                print(f"round {number + 1}: {name}, {form}: {figures}", file=sys.stderr)
    print_table("model", {f"{n}, {form}": row(rounds) for (n, form), rounds in found.items()})
    print(
        f"\n{len(photos) - 1} photos, {WORDS} decoder steps, {options.rounds} rounds. "
        f"Other programs used {median(busy):.1f} of {os.cpu_count()} cores before a run (median)."
    )


def prepare(names: list[str], work: Path, tiny: bool) -> dict[tuple[str, str], Path]:
    """Build the models that are missing in the folder ``work``.

    Returns:
        The folder of each model, by the name of the model and its form (float32, int8, ONNX float32
        or ONNX int8). Forms that cannot be built are reported and left out.
    """
    runs = {}
    for name in names:
        folder = work / name
        if name == "captioner":
            runs |= {(name, form): folder for form in ("int8", "float32")}
            continue
        try:
            if not folder.is_dir():
                build(name, folder, tiny=tiny)
            runs |= {(name, form): folder for form in ("float32", "int8")}
            if name in ONNX:
                graphs, int8 = work / f"{name}-onnx", work / f"{name}-onnx-int8"
                if not int8.is_dir():
                    export(folder, graphs, int8)
                runs |= {(name, "ONNX float32"): graphs, (name, "ONNX int8"): int8}
        except (ImportError, ValueError) as problem:
            print(
                f"{name} is measured without the forms that cannot be built: {problem}",
                file=sys.stderr,
            )
    return runs


def measured(python: str, name: str, form: str, folder: Path, photos: list[Path]) -> dict[str, Any]:
    """Run a model in a new process, and return the measured figures by name.

    Args:
        python: The Python program that runs the process.
        name: Name of the model.
        form: Form of the model, such as int8 (see `prepare`).
        folder: Folder of the model.
        photos: The photos. The first is used only for the start-up.

    Raises:
        ValueError: A caption did not have `WORDS` decoder steps.
    """
    unwanted = () if python == sys.executable else ("PYTHONPATH", "PYTHONDONTWRITEBYTECODE")
    environment = {key: value for key, value in os.environ.items() if key not in unwanted}
    environment |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"}
    command = [python, str(CHILD), name, form, str(folder), *map(str, photos)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, env=environment)
    figures: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    if figures["steps"] != [WORDS]:
        raise ValueError(
            f"{name} ({form}) made captions of {figures['steps']} steps; {WORDS} "
            "steps were expected"
        )
    return figures


def row(rounds: list[dict[str, Any]]) -> dict[str, float | str | None]:
    """Return a row of the table, with the median of each figure over the rounds."""
    middle = {key: median(one[key] for one in rounds) for key in rounds[0] if key != "steps"}
    return {
        "model (MB)": middle["size"],
        "packages (MB)": middle["packages"],
        "start (s)": middle["start"],
        "peak memory (MB)": middle["peak"],
        "photos/s": middle["speed"],
    }


def wait_until_idle(patience: float) -> float:
    """Wait until other programs use fewer than `IDLE` cores, but at most ``patience`` seconds.

    Returns:
        The number of cores in use at the end.
    """
    until = time.monotonic() + patience
    while True:
        before = busy_seconds()
        time.sleep(1.0)
        cores = busy_seconds() - before
        if cores < IDLE or time.monotonic() > until:
            return cores


def busy_seconds() -> float:
    """Return the processor seconds that all programs have used since the machine started."""
    first = Path("/proc/stat").read_text().splitlines()[0].split()[1:]
    user, nice, system, _idle, _waiting, interrupts, soft = (int(ticks) for ticks in first[:7])
    return (user + nice + system + interrupts + soft) / os.sysconf("SC_CLK_TCK")


if __name__ == "__main__":
    main()
