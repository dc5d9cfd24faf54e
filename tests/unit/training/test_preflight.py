"""Warnings about settings that cannot work with the data."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from captioner.options import TrainingConfig
from captioner.training.build import Setup, prepare
from captioner.training.dry_run import dry_run
from captioner.training.loop import start
from captioner.training.optim import warmup_steps
from captioner.training.preflight import setting_warnings


def warnings_of(setup: Setup, steps: int = 1000, **training: Any) -> list[str]:
    for name, value in training.items():
        setattr(setup.config.training, name, value)
    return setting_warnings(setup, steps)


@pytest.fixture
def setup(configure: Any) -> Setup:
    """Eight photos for training and twenty-four for validation."""
    setup = prepare(configure())
    setup.val = setup.val * 3
    return setup


def test_good_settings_give_no_warning(setup: Setup):
    assert warnings_of(setup) == []


def test_the_warm_up_is_at_most_a_fifth_of_the_run(setup: Setup):
    assert warmup_steps(TrainingConfig(warmup_steps=50), 40) == 8
    assert warmup_steps(TrainingConfig(warmup_steps=50), 4) == 0
    [warning] = warnings_of(setup, 40, warmup_steps=50)
    assert warning == (
        "training.warmup_steps is 50, but it is at most a fifth of the "
        "run (40 steps in total); 8 will be used"
    )


@pytest.mark.parametrize(
    ("warmup", "steps"), [(300, 3236), (50, 1880), (50, 1128), (1000, 35420), (20, 300)]
)
def test_schedules_of_the_shipped_configs_are_unchanged(warmup: int, steps: int):
    assert warmup_steps(TrainingConfig(warmup_steps=warmup), steps) == warmup


def test_a_batch_larger_than_the_data_set(setup: Setup):
    [warning] = warnings_of(setup, batch_size=9)
    assert "training.batch_size is 9, but there are only 8 training photos" in warning


def test_patience_that_ends_within_the_warm_up(setup: Setup):
    [warning] = warnings_of(setup, 300, epochs=30, patience=2, warmup_steps=40)
    assert "training.patience 2 can end the run within the warm-up of 40 steps (10 steps" in warning
    assert warnings_of(setup, 300, patience=0) == []


def test_few_validation_photos(setup: Setup):
    [warning] = warnings_of(setup, limit_val=6)
    assert "only 6 validation photos" in warning
    assert "training.select loss, which is steadier" in warning
    [warning] = warnings_of(setup, select="loss")
    assert "steadier" not in warning
    [warning] = warnings_of(setup, limit_val=1, select="CIDEr")
    assert "the CIDEr of a single validation photo is always 0" in warning


def test_a_loss_that_self_critical_training_raises(setup: Setup):
    [warning] = warnings_of(setup, select="loss", objective="self_critical")
    assert "training.select loss prefers models without self_critical training" in warning


def test_a_vocabulary_that_excludes_many_words(configure: Any):
    setup = prepare(configure(data={"vocabulary_threshold": 5}))
    setup.val = setup.val * 3
    [warning] = warnings_of(setup)
    assert warning == (
        "data.vocabulary_threshold 5 leaves out 33% of the words in the training captions (2 words "
        "are left); lower it"
    )
    setup.config.init_from = "runs/first/best"
    [warning] = warnings_of(setup)
    assert warning.startswith("the vocabulary of runs/first/best lacks 33% of the words")


def test_captions_that_are_truncated(configure: Any):
    setup = prepare(configure(data={"max_words": 2}))
    setup.val = setup.val * 3
    [warning] = warnings_of(setup)
    assert warning == "data.max_words 2 truncates 100% of the training captions; raise it"


def test_a_dry_run_reports_them(configure: Any, tmp_path: Path):
    found = dry_run(prepare(configure(training={"batch_size": 9})), tmp_path / "run")
    lines = str(found).splitlines()
    assert lines[-2].startswith("warning: training.batch_size is 9, but there are only 8 training")
    assert lines[-1].startswith("warning: scores of only 8 validation photos depend on chance")


def test_a_run_prints_them(configure: Any, tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    config = configure(training={"warmup_steps": 50, "epochs": 4})
    start(prepare(config), tmp_path / "run", resume=False)
    found = capfd.readouterr().err
    assert "captioner: warning: training.warmup_steps is 50, but it is at most a fifth" in found
    first = json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[0])
    assert first["lr"] == config.training.lr  # warm-up of two steps: the third has the full rate
