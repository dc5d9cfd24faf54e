"""The learning rate: a linear rise, then half a cosine."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest

from captioner.training.optim import lr_factor


@pytest.mark.parametrize(
    ("step", "expected"),
    [
        (0, 1 / 11),  # the first step already learns
        (4, 5 / 11),
        (9, 10 / 11),
        (10, 1.0),  # the end of the rise
        (35, 0.5 * (1 + math.cos(math.pi / 4))),
        (60, 0.5),  # half way down
        (110, 0.0),
        (500, 0.0),  # a run that goes on for longer than planned
    ],
)
def test_known_answers(step: int, expected: float):
    assert lr_factor(step, warmup_steps=10, total_steps=110) == pytest.approx(expected, abs=1e-12)


def test_it_rises_then_falls():
    factors = [lr_factor(step, 10, 110) for step in range(111)]
    assert all(a < b for a, b in pairwise(factors[:11]))
    assert all(a > b for a, b in pairwise(factors[10:]))
    assert all(0 <= factor <= 1 for factor in factors)


def test_without_a_rise_it_starts_at_the_top():
    assert lr_factor(0, warmup_steps=0, total_steps=10) == 1


@pytest.mark.parametrize("total", [0, 3, 5])
def test_a_run_shorter_than_its_rise(total: int):
    factors = [lr_factor(step, warmup_steps=5, total_steps=total) for step in range(8)]
    assert all(0 <= factor <= 1 for factor in factors)
