"""Kill a training run at random times, resume it, and compare the result with a normal run.

    python scripts/studies/kill_and_resume.py --kills 20 -- CONFIG.yaml [settings]

Trains once without interruption. Then, --kills times, trains again, kills the run (SIGKILL to all
its processes) at a uniformly random time and resumes it to the end. All results must be equal:
every tensor of the checkpoint and of all models bit for bit, and the metrics except the seconds.
Only CPU training is deterministic.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from safetensors.torch import load_file

TENSORS = ("state.safetensors", "*/model.safetensors", "kept/*/model.safetensors")


def main() -> None:
    """Run, kill, resume, compare."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--work", type=Path, help="folder for the runs; default: a temporary one")
    parser.add_argument("settings", nargs="+", help="arguments of captioner train, after --")
    options = parser.parse_args()
    work = options.work or Path(tempfile.mkdtemp(prefix="kill_and_resume_"))
    straight = work / "straight"
    started = time.monotonic()
    finish(straight, options.settings)
    whole = time.monotonic() - started
    print(f"uninterrupted: {whole:.0f} s", flush=True)
    generator = random.Random(options.seed)
    equal = number = 0
    while number < options.kills:
        folder = work / "killed"
        shutil.rmtree(folder, ignore_errors=True)
        moment = generator.uniform(0, whole)
        if not kill_at(moment, folder, options.settings):
            continue  # the run had already ended
        number += 1
        found = progress_of(folder)["step"] if (folder / TENSORS[0]).exists() else 0
        finish(folder, options.settings)
        wrong = differences(straight, folder)
        equal += not wrong
        result = f"DIFFERENT: {', '.join(wrong)}" if wrong else "equal"
        print(
            f"{number}: killed after {moment:.1f} s, resumed at step {found}: {result}", flush=True
        )
    print(f"{equal} of {options.kills} results equal the uninterrupted run's")
    if options.work is None:
        shutil.rmtree(work)
    sys.exit(equal < options.kills)


def start(folder: Path, settings: list[str]) -> subprocess.Popen[str]:
    """Start training, or continue it if the folder has a checkpoint."""
    run = ["--run-folder", str(folder), "--resume"]
    return subprocess.Popen(
        [sys.executable, "-m", "captioner", "train", *settings, *run],
        stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip


def finish(folder: Path, settings: list[str]) -> None:
    """Train to the end."""
    run = start(folder, settings)
    errors = run.communicate()[1]
    if run.returncode:
        sys.exit(f"the run failed: {errors.strip().splitlines()[-1]}")


def kill_at(moment: float, folder: Path, settings: list[str]) -> bool:
    """Train for ``moment`` seconds; return whether the run was still alive and was killed."""
    run = start(folder, settings)
    try:
        run.communicate(timeout=moment)
    except subprocess.TimeoutExpired:
        os.killpg(run.pid, signal.SIGKILL)
        run.communicate()
        return True
    return False


def differences(one: Path, other: Path) -> list[str]:
    """Names of the parts in which two runs differ."""
    wrong = []
    files = [
        sorted(f.relative_to(run) for t in TENSORS for f in run.glob(t)) for run in (one, other)
    ]
    wrong += [] if files[0] == files[1] else ["the list of models"]
    for name in set(files[0]) & set(files[1]):
        ones, others = load_file(one / name), load_file(other / name)
        same = ones.keys() == others.keys() and all(
            torch.equal(ones[key], others[key]) for key in ones
        )
        wrong += [] if same else [str(name)]
    wrong += [] if metrics_of(one) == metrics_of(other) else ["metrics.jsonl"]
    drop = ("seconds",)
    states = [{k: v for k, v in progress_of(f).items() if k not in drop} for f in (one, other)]
    return wrong + ([] if states[0] == states[1] else ["progress"])


def metrics_of(folder: Path) -> list[dict[str, object]]:
    """Metrics of every validation without the seconds."""
    lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [json.loads(line) for line in lines]
    return [{k: v for k, v in row.items() if not k.startswith("seconds")} for row in rows]


def progress_of(folder: Path) -> dict[str, object]:
    """Training progress stored in the checkpoint."""
    raw = (folder / "state.safetensors").read_bytes()
    header = json.loads(raw[8 : 8 + int.from_bytes(raw[:8], "little")])
    progress: dict[str, object] = json.loads(header["__metadata__"]["progress"])
    return progress


if __name__ == "__main__":
    main()
