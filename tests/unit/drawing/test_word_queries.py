"""Finding words in a caption."""

from __future__ import annotations

import pytest

from captioner.drawing.word_queries import find
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
