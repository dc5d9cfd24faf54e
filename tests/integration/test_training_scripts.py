"""The training scripts on a small scale."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from PIL import Image

pytestmark = pytest.mark.slow

SCRIPTS = Path(__file__).parents[2] / "scripts"


def run(script: str, *arguments: object) -> str:
    """Run a script and return its stdout."""
    command = [sys.executable, str(SCRIPTS / script), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1800, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_both_steps_of_the_benchmark_agree() -> None:
    small = ("--sizes", 6, 8, 5, 40, "--photos", 4, "--captions", 2, "--rounds", 1)
    output = run("benchmarks/training_step.py", *small, "--precision", "fp32")
    differences = re.search(r"difference of loss: (\S+), of gradients: (\S+)", output)
    assert differences is not None
    assert float(differences[1]) < 1e-5
    assert float(differences[2]) < 1e-4
    assert re.search(r"^\| textbook \| [\d.,]+ \| 1 \| [\d,]+ \|", output, re.MULTILINE)
    assert re.search(r"^\| fp32 \| [\d.,]+ \| [\d.]+ \| [\d,]+ \|", output, re.MULTILINE)


def test_plot_metrics(tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        rows = [{"epoch": e, "loss": 1 / e, "CIDEr": 0.1 * e, "Bleu_4": 0.1} for e in (1, 2)]
        (tmp_path / name / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    run(
        "studies/plot_metrics.py", tmp_path / "one", tmp_path / "two", "-o", tmp_path / "curves.png"
    )
    with Image.open(tmp_path / "curves.png") as picture:
        assert picture.width > 3 * picture.height  # three panels side by side


@pytest.mark.stress
def test_a_killed_run_equals_an_uninterrupted_one(
    training_settings: dict[str, Any], tmp_path: Path
) -> None:
    training = {"batch_size": 2, "epochs": 3, "save_every": 1, "keep_best": 2, "select": "loss"}
    training_settings["search"]["min_length"] = 1  # runs with only empty captions fail
    settings = training_settings | {"training": training | {"precision": "fp32"}}
    config = tmp_path / "config.yaml"
    config.write_text(yaml.safe_dump(settings))
    output = run(
        "studies/kill_and_resume.py", "--kills", 1, "--work", tmp_path / "work", "--", config
    )
    assert output.splitlines()[-1] == "1 of 1 results equal the uninterrupted run's"
