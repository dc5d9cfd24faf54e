"""A dry run estimates time, memory and disk space, and writes nothing."""

from __future__ import annotations

import shutil
from collections import namedtuple
from pathlib import Path
from typing import Any

import pytest

from captioner.errors import ConfigError
from captioner.training.build import prepare
from captioner.training.dry_run import DryRun, dry_run, duration
from captioner.training.loop import Trainer, start


def test_dry_run_writes_nothing_and_counts_steps(configure: Any, tmp_path: Path):
    config = configure(training={"epochs": 7})
    found = dry_run(prepare(config), tmp_path / "run")
    assert list(tmp_path.iterdir()) == []
    assert (found.steps, found.epochs) == (21, 7)
    assert 0 < found.step < 60
    assert 0 < found.validation < 60
    assert found.memory > 10_000_000
    assert found.free > found.disk > 0


def test_an_earlier_run_is_not_changed(configure: Any, tmp_path: Path):
    (tmp_path / "metrics.jsonl").write_text("kept")
    config = configure()
    dry_run(prepare(config), tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]
    assert (tmp_path / "metrics.jsonl").read_text() == "kept"


@pytest.mark.slow
def test_the_disk_estimate_is_an_upper_bound(configure: Any, tmp_path: Path):
    config = configure(training={"epochs": 3, "keep_best": 2, "ema_decay": 0.5})
    found = dry_run(prepare(config), tmp_path / "run")
    start(prepare(config), tmp_path / "run", resume=False)
    written = sum(file.stat().st_size for file in tmp_path.rglob("*.safetensors"))
    assert found.disk / 3 < written < found.disk


def test_a_full_disk_fails_before_the_first_step(
    configure: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(10, 5, 5000))
    monkeypatch.setattr(Trainer, "step", lambda *given: pytest.fail("a step was taken"))
    config = configure()
    with pytest.raises(
        ConfigError, match=r"needs 0\.\d+ GB in .*, but only 0\.00 GB are free; free some"
    ):
        dry_run(prepare(config), tmp_path / "run")


def test_unknown_trackers_are_refused(configure: Any, tmp_path: Path):
    config = configure(training={"trackers": ["nothing"]})
    with pytest.raises(ConfigError, match=r"training\.trackers: 'nothing' is unknown"):
        dry_run(prepare(config), tmp_path / "run")


def test_duration_is_the_sum_of_steps_and_validations():
    estimate = DryRun(
        steps=1000, epochs=10, step=0.5, validation=30, memory=2 * 10**9, disk=10**9, free=10**11
    )
    assert estimate.seconds == 1000 * 0.5 + 10 * 30
    assert str(estimate).splitlines() == [
        "1000 steps (100 per epoch), 0.50 s per step, 50 s per epoch, 30 s per validation",
        "total time: 13 min",
        "memory: 2.0 GB; checkpoints and models: 1.00 GB (100 GB free)",
    ]


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [(0.4, "0 s"), (89, "89 s"), (90, "2 min"), (5399, "1 h 30 min"), (12_300, "3 h 25 min"),
     (180_000, "2 d 2 h")],
)  # fmt: skip
def test_duration_format(seconds: float, expected: str):
    assert duration(seconds) == expected
