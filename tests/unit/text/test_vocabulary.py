"""Vocabularies: counting words, encoding and special tokens."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from captioner.errors import ConfigError
from captioner.text.vocabulary import END, PAD, SPECIAL_NAMES, START, UNKNOWN, Vocabulary

CAPTIONS = [["a", "dog", "and", "a", "cat"], ["a", "dog"], ["the", "cat"]]


def test_rare_words_are_excluded() -> None:
    assert Vocabulary.count(CAPTIONS, threshold=1).words == ("a", "cat", "dog", "and", "the")
    assert Vocabulary.count(CAPTIONS, threshold=2).words == ("a", "cat", "dog")
    assert Vocabulary.count(CAPTIONS, threshold=3).words == ("a",)
    assert Vocabulary.count(CAPTIONS, threshold=4).words == ()
    assert Vocabulary.count(iter(CAPTIONS), threshold=3) == Vocabulary(["a"])


@given(st.data())
def test_the_order_of_the_captions_does_not_matter(data) -> None:
    words = st.sampled_from(["a", "b", "c", "dog", "é"])
    captions = data.draw(st.lists(st.lists(words, max_size=5), max_size=8))
    shuffled = data.draw(st.permutations(captions))

    first = Vocabulary.count(captions, threshold=2)

    assert Vocabulary.count(shuffled, threshold=2).words == first.words


@given(st.lists(st.text(min_size=1), unique=True))
def test_decode_undoes_encode(words) -> None:
    vocabulary = Vocabulary(words)

    numbers = vocabulary.encode(words)

    assert vocabulary.decode(numbers) == words
    assert numbers == list(range(4, 4 + len(words)))
    assert len(vocabulary) == 4 + len(words)
    assert all(word in vocabulary for word in words)


def test_other_words_are_encoded_as_unknown() -> None:
    vocabulary = Vocabulary(["a", "dog"])

    assert vocabulary.encode(["a", "zebra", "dog", "A"]) == [4, UNKNOWN, 5, UNKNOWN]
    assert "zebra" not in vocabulary


@pytest.mark.parametrize("text", ["A dog on a zeppelin.", "", "..."])
def test_texts_with_other_words_or_none_are_refused(text) -> None:
    with pytest.raises(ConfigError, match=r"does not know zeppelin|no words"):
        Vocabulary(["a", "dog", "on"]).known_words(text)


def test_special_tokens_have_the_first_ids() -> None:
    assert [PAD, START, END, UNKNOWN] == [0, 1, 2, 3]
    assert Vocabulary([]).decode([0, 1, 2, 3]) == ["<pad>", "<start>", "<end>", "<unk>"]


@pytest.mark.parametrize("name", SPECIAL_NAMES)
def test_the_text_of_a_special_token_is_an_ordinary_word(name) -> None:
    assert Vocabulary(["a"]).encode([name]) == [UNKNOWN]

    vocabulary = Vocabulary.count([["a", name], ["a", name]], threshold=2)

    (number,) = vocabulary.encode([name])
    assert number >= len(SPECIAL_NAMES)
    assert vocabulary.decode([number]) == [name]


def test_repeated_words_raise() -> None:
    with pytest.raises(ConfigError, match="repeats 'dog'"):
        Vocabulary(["a", "dog", "cat", "dog"])


def test_equality_compares_words_in_order() -> None:
    assert Vocabulary(["a", "b"]) == Vocabulary(("a", "b"))
    assert Vocabulary(["a", "b"]) != Vocabulary(["b", "a"])
    assert Vocabulary(["a"]) != ("a",)
