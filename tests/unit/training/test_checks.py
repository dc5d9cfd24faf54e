"""Test warnings about settings that do not suit the data."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from captioner.training.checks import setting_warnings
from captioner.training.setup import Setup, prepare


@pytest.fixture
def setup(configure: Any) -> Setup:
    """Return eight training photos and twenty-four other validation photos."""
    setup = prepare(configure())
    setup.val = [replace(image, path=Path("other.png")) for image in setup.val * 3]
    return setup


@pytest.mark.parametrize(
    ("steps", "training", "expected"),
    [
        (1000, {}, None),
        (40, {"warmup_steps": 50}, "a fifth of the run (40 steps in total); 8 will be used"),
        (
            1000,
            {"batch_size": 9},
            "training.batch_size 9 exceeds the number of training photos, 8",
        ),
        (300, {"epochs": 30, "patience": 2, "warmup_steps": 40}, "within the warm-up of 40 steps"),
        (1000, {"limit_val": 6}, "scores of only 6 validation photos depend on chance"),
        (1000, {"select": "loss", "objective": "self_critical"}, "training.select loss compares"),
    ],
)
def test_settings_that_do_not_suit_the_data(
    setup: Setup, steps: int, training: dict[str, Any], expected: str | None
):
    for name, value in training.items():
        setattr(setup.config.training, name, value)
    found = setting_warnings(setup, steps)
    assert len(found) == (expected is not None)
    assert expected is None or expected in found[0]


def test_words_and_captions_that_are_left_out(configure: Any):
    setup = prepare(configure(data={"vocabulary_threshold": 5, "max_words": 2}))
    setup.val = [replace(image, path=Path("other.png")) for image in setup.val * 3]
    unknown, truncated = setting_warnings(setup, 1000)
    assert "data.vocabulary_threshold 5 leaves out 50% of the words" in unknown
    assert truncated.startswith("data.max_words 2 truncates 100% of the training captions")
