"""The bootstrap: known answers and invariants."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from captioner.evaluation.bootstrap import compare, interval, resample_weights

# --- resample_weights ----------------------------------------------------------------------------


@given(count=st.integers(1, 40), resamples=st.integers(1, 30), seed=st.integers(0, 99))
def test_every_row_sums_to_the_number_of_images(count, resamples, seed) -> None:
    rows = resample_weights(count, resamples, seed)

    assert rows.shape == (resamples, count)
    assert rows.dtype == np.float64
    assert (rows.sum(axis=1) == count).all()
    assert (rows >= 0).all()
    assert (rows == np.round(rows)).all()


def test_every_image_is_sampled_once_on_average() -> None:
    rows = resample_weights(20, 4000)

    # The variance is 1 - 1/20; the standard error over 4000 rows is about 0.015.
    np.testing.assert_allclose(rows.mean(axis=0), 1, atol=0.08)
    np.testing.assert_allclose(rows.var(axis=0), 0.95, rtol=0.15)


def test_more_resamples_keep_the_first_ones() -> None:
    np.testing.assert_array_equal(resample_weights(7, 3), resample_weights(7, 10)[:3])


# --- interval ------------------------------------------------------------------------------------


def test_interval_known_answer() -> None:
    assert interval(range(1001)) == (25, 975)


def test_interval_ignores_nan() -> None:
    values = [math.nan, *range(1001), math.nan]

    assert interval(values) == (25, 975)
    assert np.isnan(interval([math.nan])).all()
    assert np.isnan(interval([])).all()


def test_interval_of_a_mean_is_the_normal_approximation() -> None:
    """The mean lies within 1.96 standard errors in 95% of the resamples."""
    scores = np.random.default_rng(1).normal(size=400)

    low, high = interval(resample_weights(400, 2000) @ scores / 400)

    error = scores.std() / 20
    assert low == pytest.approx(scores.mean() - 1.96 * error, abs=0.2 * error)
    assert high == pytest.approx(scores.mean() + 1.96 * error, abs=0.2 * error)


# --- compare -------------------------------------------------------------------------------------


def test_p_value_by_hand() -> None:
    # 999 differences: 30 below 0, 10 of exactly 0, 959 above: twice (1 + 40) / (1 + 999).
    differences = np.array([*range(-30, 0), *[0] * 10, *range(1, 960)])

    found = compare(60, 10, differences + 7, np.full(999, 7))

    assert found.difference == 50
    assert found.p_value == pytest.approx(0.082)
    assert (found.low, found.high) == pytest.approx((-5.05, 934.05))
    assert not found.significant


def test_a_p_value_is_never_0() -> None:
    found = compare(2.0, 1.0, np.full(1000, 2.0), np.full(1000, 1.0))

    assert found == (1, 1, 1, pytest.approx(2 / 1001), True)
    assert type(found.significant) is bool
    assert all(type(value) is float for value in found[:4])


@given(seed=st.integers(0, 200))
def test_swapping_the_systems_flips_the_sign(seed) -> None:
    generator = np.random.default_rng(seed)
    first, second = generator.normal(0.1, 1, 41), generator.normal(0, 1, 41)

    there, back = compare(1, 2, first, second), compare(2, 1, second, first)

    assert there.difference == -back.difference
    assert (there.low, there.high) == pytest.approx((-back.high, -back.low))
    assert (there.p_value, there.significant) == (back.p_value, back.significant)


def test_nan_resamples_are_ignored() -> None:
    found = compare(1, 0, [math.nan, 1, 1, 1], [0, 0, math.nan, 0])

    assert found == (1, 1, 1, pytest.approx(2 / 3), True)
    nothing = compare(math.nan, 0, [math.nan], [0])
    assert math.isnan(nothing.p_value)
    assert not nothing.significant


def test_false_positive_rate_is_about_5_percent() -> None:
    """Of 200 pairs of equally good systems."""
    rows = resample_weights(60, 400)
    generator = np.random.default_rng(5)
    significant = 0
    for _ in range(200):
        first, second = generator.normal(size=(2, 60))
        found = compare(first.mean(), second.mean(), rows @ first / 60, rows @ second / 60)
        significant += found.significant
    assert 2 <= significant <= 22
