"""Finding words in a caption, and combining maps."""

from __future__ import annotations

import numpy as np
import pytest

from captioner.drawing.maps import combine_maps, ease, find, interpolate, mean_map
from captioner.errors import ConfigError

WORDS = ("a", "brown", "dog", "near", "a", "man", "'s", "hat")


@pytest.mark.parametrize(
    ("query", "positions"),
    [
        ("dog", [(2,)]),
        ("Dog", [(2,)]),
        ("a", [(0,), (4,)]),
        ("brown dog", [(1, 2)]),
        ("  brown   dog ", [(1, 2)]),
        ("a man's hat", [(4, 5, 6, 7)]),
        ("man's", [(5, 6)]),
        ("3", [(2,)]),
        ("2-4", [(1, 2, 3)]),
        ("2 – 4", [(1, 2, 3)]),
        ("1-8", [tuple(range(8))]),
        ("8-8", [(7,)]),
    ],
)
def test_find(query: str, positions: list[tuple[int, ...]]) -> None:
    assert find(WORDS, query) == positions


@pytest.mark.parametrize("query", ["cat", "dog brown", "brown near", "do", "hat a", "", " "])
def test_a_missing_word_lists_the_words(query: str) -> None:
    with pytest.raises(ConfigError, match=r"is not in the caption: 1 a 2 brown 3 dog") as raised:
        find(WORDS, query)
    assert repr(query) in str(raised.value)


@pytest.mark.parametrize("query", ["0", "9", "3-9", "4-2", "0-1", "99999999999999999999"])
def test_a_missing_position_lists_the_words(query: str) -> None:
    with pytest.raises(
        ConfigError, match=rf"position '{query}' is not in the caption: 1 a 2 brown"
    ):
        find(WORDS, query)


def test_an_empty_caption_has_no_words_to_find() -> None:
    with pytest.raises(ConfigError, match="no words"):
        find((), "dog")


ALPHAS = np.array([[[0.7, 0.3, 0.0]], [[0.1, 0.3, 0.6]], [[0.2, 0.8, 0.0]]], dtype=np.float32)


def test_mean_and_max_of_maps() -> None:
    np.testing.assert_allclose(combine_maps(ALPHAS, (0, 1)), [[0.4, 0.3, 0.3]], rtol=1e-6)
    np.testing.assert_allclose(combine_maps(ALPHAS, (0, 2), "max"), [[0.7, 0.8, 0.0]], rtol=1e-6)
    np.testing.assert_array_equal(combine_maps(ALPHAS, (1,)), ALPHAS[1])
    np.testing.assert_array_equal(combine_maps(ALPHAS, (1,), "max"), ALPHAS[1])


def test_mean_map() -> None:
    np.testing.assert_allclose(mean_map(ALPHAS), [[1.0 / 3, 1.4 / 3, 0.2]], rtol=1e-6)
    assert mean_map(ALPHAS).sum() == pytest.approx(1)


def test_interpolate() -> None:
    start, end = ALPHAS[:2]
    np.testing.assert_array_equal(interpolate(start, end, 0.0), start)
    np.testing.assert_array_equal(interpolate(start, end, 1.0), end)
    np.testing.assert_allclose(interpolate(start, end, 0.5), (start + end) / 2, rtol=1e-6)
    for part in np.linspace(0, 1, 9):
        assert interpolate(start, end, part).sum() == pytest.approx(1)


def test_ease_is_slow_at_both_ends() -> None:
    values = [ease(part) for part in np.linspace(0, 1, 101)]
    steps = np.diff(values)
    assert (steps > 0).all()
    assert max(steps[0], steps[-1]) < 0.05 * steps.max()
    assert (ease(-1), ease(2)) == (0, 1)
