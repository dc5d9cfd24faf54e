"""The bootstrap: known answers and invariants."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from captioner.evaluation.bootstrap import compare, interval, resample_weights, resampled_means


@given(count=st.integers(1, 40), resamples=st.integers(1, 30), seed=st.integers(0, 99))
def test_every_row_sums_to_the_number_of_images(count, resamples, seed) -> None:
    rows = resample_weights(count, resamples, seed)

    assert rows.shape == (resamples, count)
    assert (rows.sum(axis=1, dtype=int) == count).all()


def test_interval_ignores_nan() -> None:
    assert interval([math.nan, *range(1001), math.nan]) == [25, 975]
    assert interval([math.nan]) is None


def test_interval_of_a_mean_is_the_normal_approximation() -> None:
    """In 95% of the resamples, the mean is within 1.96 standard errors."""
    scores = np.random.default_rng(1).normal(size=400)

    low, high = interval(resample_weights(400, 2000) @ scores / 400)

    error = scores.std() / 20
    assert low == pytest.approx(scores.mean() - 1.96 * error, abs=0.2 * error)
    assert high == pytest.approx(scores.mean() + 1.96 * error, abs=0.2 * error)


def test_means_need_values_of_enough_photos() -> None:
    values = np.r_[np.arange(30.0), np.full(10, math.nan)]
    columns = {"enough": values, "few": np.r_[math.nan, values[1:]]}

    found = resampled_means(range(40), range(40), columns)

    weights = resample_weights(40)[:, :30]
    assert found["enough"] == pytest.approx(weights @ values[:30] / weights.sum(axis=1))
    assert len(found["few"]) == 0


def test_p_value_by_hand() -> None:
    # 999 differences: 30 below 0, 10 of exactly 0, 959 above: twice (1 + 40) / (1 + 999).
    found = compare(np.array([*range(-30, 0), *[0] * 10, *range(1, 960)], float))

    assert found == (pytest.approx([-5.05, 934.05]), pytest.approx(0.082), False)
    # A p-value is never 0, and NaN is ignored.
    always = compare(np.array([math.nan, *[1.0] * 1000]))
    assert always == ([1, 1], pytest.approx(2 / 1001), True)
    assert type(always.significant) is bool
    assert compare(-np.ones(1000)) == ([-1, -1], pytest.approx(2 / 1001), True)
    assert compare(np.array([math.nan])) == (None, None, None)


@given(seed=st.integers(0, 200))
def test_swapping_the_systems_flips_the_sign(seed) -> None:
    differences = np.random.default_rng(seed).normal(0.1, 1, 41)

    there, back = compare(differences), compare(-differences)

    assert there.interval == pytest.approx([-end for end in back.interval[::-1]])
    assert there[1:] == back[1:]
