"""Test dry runs: they write nothing, estimate a run's needs, and fail like the run."""

from __future__ import annotations

import re
import shutil
from collections import namedtuple
from pathlib import Path
from typing import Any

import pytest
from accelerate.state import AcceleratorState

from captioner.errors import ConfigError, DataError
from captioner.training.dry_run import disk_needed, dry_run
from captioner.training.loop import Trainer
from captioner.training.run_folder import RunFolder
from captioner.training.setup import prepare


def test_a_dry_run_writes_nothing_and_reports_estimates_and_warnings(
    configure: Any, tmp_path: Path
):
    (tmp_path / "metrics.jsonl").write_text("kept")
    found = dry_run(prepare(configure(training={"epochs": 7})), tmp_path)
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [
        ("metrics.jsonl", "kept")
    ]
    assert re.match(
        r"21 steps \(3 per epoch\), [0-9.]+ s per step, 0:\d\d:\d\d per epoch, .*\n"
        r"total time: 0:\d\d:\d\d\nmemory: [0-9.]+ GB; checkpoints and models: 0\.",
        found,
    )
    assert "\nwarning: 8 of 8 validation photos are also training photos (first: red.png" in found
    assert "\nwarning: scores of only 8 validation photos depend on chance" in found


@pytest.mark.slow
def test_the_disk_estimate_is_an_upper_bound(configure: Any, tmp_path: Path):
    config = configure(training={"epochs": 3, "ema_decay": 0.5})
    trainer = Trainer(prepare(config), RunFolder(tmp_path, config))
    estimate = disk_needed(trainer)
    trainer.run()
    written = sum(file.stat().st_size for file in tmp_path.rglob("*.safetensors"))
    assert estimate / 3 < written < estimate


def test_a_full_disk_fails_before_the_first_step(
    configure: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(10, 5, 5000))
    monkeypatch.setattr(Trainer, "step", lambda *given: pytest.fail("a step was taken"))
    with pytest.raises(DataError, match=r"[\d,]+ bytes, but only 5,000 are free"):
        dry_run(prepare(configure()), tmp_path / "run")


def test_a_dry_run_names_a_tracker_that_is_not_installed(configure: Any, tmp_path: Path):
    AcceleratorState._reset_state(reset_partial_state=True)  # as in a new process
    setup = prepare(configure(training={"trackers": ["wandb"]}))
    with pytest.raises(ConfigError, match="'wandb' is not installed; run: pip install wandb"):
        dry_run(setup, tmp_path)
