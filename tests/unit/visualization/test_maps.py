"""What of a caption is drawn: places found by word, phrase and number; maps combined by hand."""

from __future__ import annotations

import numpy as np
import pytest

from captioner.errors import ConfigError
from captioner.visualization.maps import between, combined, coverage, ease, find

WORDS = ("a", "brown", "dog", "near", "a", "man", "'s", "hat")


@pytest.mark.parametrize(
    ("what", "places"),
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
def test_find(what: str, places: list[tuple[int, ...]]) -> None:
    assert find(WORDS, what) == places


@pytest.mark.parametrize("what", ["cat", "dog brown", "brown near", "do", "hat a", "", " "])
def test_what_is_not_there_names_the_words(what: str) -> None:
    with pytest.raises(ConfigError, match=r"is not in the caption: 1 a 2 brown 3 dog") as raised:
        find(WORDS, what)
    assert repr(what) in str(raised.value)


@pytest.mark.parametrize("what", ["0", "9", "3-9", "4-2", "0-1", "99999999999999999999"])
def test_a_place_that_is_not_there(what: str) -> None:
    with pytest.raises(ConfigError, match=rf"no place '{what}' in the caption: 1 a 2 brown"):
        find(WORDS, what)


def test_an_empty_caption_has_nothing() -> None:
    with pytest.raises(ConfigError, match="it has no words"):
        find((), "dog")


ALPHAS = np.array([[[0.7, 0.3, 0.0]], [[0.1, 0.3, 0.6]], [[0.2, 0.8, 0.0]]], dtype=np.float32)


def test_mean_and_greatest_by_hand() -> None:
    np.testing.assert_allclose(combined(ALPHAS, (0, 1)), [[0.4, 0.3, 0.3]], rtol=1e-6)
    np.testing.assert_allclose(combined(ALPHAS, (0, 2), "max"), [[0.7, 0.8, 0.0]], rtol=1e-6)
    np.testing.assert_array_equal(combined(ALPHAS, (1,)), ALPHAS[1])
    np.testing.assert_array_equal(combined(ALPHAS, (1,), "max"), ALPHAS[1])
    with pytest.raises(ConfigError, match="combine is 'sum'; give mean or max"):
        combined(ALPHAS, (0, 1), "sum")  # type: ignore[arg-type]


def test_coverage_is_the_mean_of_all_words() -> None:
    np.testing.assert_allclose(coverage(ALPHAS), [[1.0 / 3, 1.4 / 3, 0.2]], rtol=1e-6)
    assert coverage(ALPHAS).sum() == pytest.approx(1)


def test_between_two_maps() -> None:
    start, end = ALPHAS[:2]
    np.testing.assert_array_equal(between(start, end, 0.0), start)
    np.testing.assert_array_equal(between(start, end, 1.0), end)
    np.testing.assert_allclose(between(start, end, 0.5), (start + end) / 2, rtol=1e-6)
    for part in np.linspace(0, 1, 9):
        assert between(start, end, part).sum() == pytest.approx(1)


def test_it_leaves_and_arrives_gently() -> None:
    way = [ease(part) for part in np.linspace(0, 1, 101)]
    steps = np.diff(way)
    assert (steps > 0).all()
    assert max(steps[0], steps[-1]) < 0.05 * steps.max()
    assert (ease(-1), ease(2)) == (0, 1)
