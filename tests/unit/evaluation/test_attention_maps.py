"""Statistics of attention maps: known answers, bounds and invariants."""

from __future__ import annotations

import math
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from captioner.evaluation.attention import entropy, movement

Array = NDArray[np.float64]


@st.composite
def maps(draw: st.DrawFn, words: int = 1) -> Array:
    """(T, Gh, Gw) with at least ``words`` words; some regions may be 0."""
    shape = draw(st.tuples(st.integers(words, 5), st.integers(1, 3), st.integers(1, 4)))
    seed = draw(st.integers(0, 1000))
    generator = np.random.default_rng(seed)
    sharpness = draw(st.sampled_from([0.0, 1.0, 30.0]))
    weights = np.exp(sharpness * generator.normal(size=shape)) * generator.integers(2, size=shape)
    weights[:, 0, 0] += 1e-9  # no map may be all zeros
    return weights / weights.sum(axis=(1, 2), keepdims=True)


# --- Entropy -------------------------------------------------------------------------------------


def test_entropy_known_answers() -> None:
    one, half, even = [1, 0, 0, 0], [0.5, 0, 0, 0.5], [0.25] * 4

    found = entropy([one, half, even])

    assert found.dtype == np.float64
    np.testing.assert_allclose(found, [0, math.log(2), math.log(4)], atol=1e-15)


@given(maps())
def test_entropy_bounds(array: Array) -> None:
    found = entropy(array)

    assert found.shape == array.shape[:1]
    assert (found >= -1e-12).all()
    assert (found <= math.log(array[0].size) + 1e-12).all()


# --- Movement ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("array", "expected"),
    [
        pytest.param([[0.2, 0.8]] * 3, 0.0, id="one map for all words"),
        pytest.param([[1, 0, 0], [0, 1, 0], [0, 0, 1]], 1.0, id="no region in common"),
        pytest.param([[1, 0], [0.5, 0.5]], 0.5, id="half moved"),
        pytest.param([[1, 0], [1, 0], [0, 1]], 2 / 3, id="two pairs of three"),
        pytest.param([[[0.5, 0.5], [0, 0]], [[0.25, 0], [0.25, 0.5]]], 0.75, id="on a grid"),
    ],
)
def test_movement_known_answers(array: list[object], expected: float) -> None:
    assert movement(array) == pytest.approx(expected)


@given(maps(words=2))
def test_movement_is_the_mean_over_all_pairs_of_words(array: Array) -> None:
    pairs = [np.abs(one - two).sum() / 2 for one, two in combinations(array, 2)]

    assert movement(array) == pytest.approx(sum(pairs) / len(pairs), abs=1e-12)
    assert -1e-12 <= movement(array) <= 1 + 1e-12


# --- Short captions ------------------------------------------------------------------------------


def test_one_word_has_an_entropy_and_no_movement() -> None:
    array = np.full((1, 2, 3), 1 / 6)

    np.testing.assert_allclose(entropy(array), [math.log(6)])
    assert math.isnan(movement(array))


def test_a_caption_without_words_has_neither() -> None:
    array = np.zeros((0, 2, 3))  # ``Caption.alphas`` of an empty caption

    assert entropy(array).shape == (0,)
    assert math.isnan(movement(array))
