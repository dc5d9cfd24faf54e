"""Vocabularies: counting words, encoding and special tokens; the sub-word tokenizer."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from captioner.errors import ConfigError
from captioner.text.vocabulary import (
    BLANK,
    END,
    PAD,
    SPACE,
    SPECIAL_NAMES,
    START,
    UNKNOWN,
    Subwords,
    Vocabulary,
)

CAPTIONS = [["a", "dog", "and", "a", "cat"], ["a", "dog"], ["the", "cat"]]


def test_rare_words_are_excluded() -> None:
    assert Vocabulary.count(CAPTIONS, threshold=1).words == ("a", "cat", "dog", "and", "the")
    assert Vocabulary.count(CAPTIONS, threshold=2).words == ("a", "cat", "dog")
    assert Vocabulary.count(CAPTIONS, threshold=3).words == ("a",)
    assert Vocabulary.count(CAPTIONS, threshold=4).words == ()
    assert Vocabulary.count(iter(CAPTIONS), threshold=3) == Vocabulary(["a"])


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


def test_similar_words_are_suggested_for_unknown_words() -> None:
    with pytest.raises(ConfigError, match=r"grass.*\bdog$"):
        Vocabulary(["a", "dog", "grass"]).known_words("a dogg on grass")


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
    with pytest.raises(ConfigError, match="contains 'dog' twice"):
        Vocabulary(["a", "dog", "cat", "dog"])


def test_equality_compares_words_in_order() -> None:
    assert Vocabulary(["a", "b"]) == Vocabulary(("a", "b"))
    assert Vocabulary(["a", "b"]) != Vocabulary(["b", "a"])
    assert Vocabulary(["a"]) != ("a",)


# --- sub-words -----------------------------------------------------------------------------------

ENGLISH = ["A dog runs .", "The dog's ball.", "Ein Hund läuft über Gras"] * 2


def join(pieces: list[str]) -> str:
    return "".join(pieces).replace(SPACE, " ").strip()


@pytest.mark.parametrize(
    "text", ["A dog runs .", "  A\t dog's  Hund. ", "Gras", "dog A", "la\u0308uft", "", " "]
)
def test_pieces_join_to_the_text(text: str) -> None:
    pieces = Subwords.train(ENGLISH, 60, 2).tokenize(text)
    assert join(pieces) == " ".join(text.split()).replace("a\u0308", "ä")


def test_frequent_words_are_single_pieces_and_unseen_characters_round_trip() -> None:
    subwords = Subwords.train(ENGLISH, 60, 2)
    assert subwords.tokenize("The dog's Hund.") == ["▁The", "▁dog's", "▁Hund", "."]
    assert subwords.tokenize("dog 狗") == ["▁dog", SPACE, "狗"]
    assert "狗" not in subwords.pieces


def test_the_threshold_excludes_rare_pieces() -> None:
    assert Subwords.train(["abcd"], 100, 2).tokenize("abcd") == [SPACE, "a", "b", "c", "d"]


def test_text_without_spaces_is_split_into_short_pieces() -> None:
    subwords = Subwords.train(["一只狗在草地上奔跑，两个人在散步。"] * 9, 999, 2)
    pieces = subwords.tokenize("一只狗在草地上奔跑，两个人在散步。")
    assert "，" in pieces
    assert pieces[-1] == "。"
    assert 1 < max(map(len, pieces)) <= 6
    assert not any(SPACE in piece for piece in pieces)


def test_training_is_deterministic() -> None:
    assert Subwords.train(ENGLISH, 60, 2).data == Subwords.train(ENGLISH, 60, 2).data


def test_a_vocabulary_of_pieces() -> None:
    subwords = Subwords.train(["a dog on the grass", "a zebra"] * 5, 60, 5)
    vocabulary = Vocabulary(subwords.pieces, (), subwords)
    tokens = vocabulary.encode(vocabulary.tokenize("the dog"))
    assert vocabulary.pieces(tokens) == (" the", " dog")
    assert vocabulary.shown(tokens) == ("the", "dog")
    assert vocabulary.shown(vocabulary.encode([SPACE])) == (BLANK,)
    assert vocabulary.decode(vocabulary.whole_words({"the", "on", "unknown"})) == ["▁on", "▁the"]
    assert vocabulary != Vocabulary(subwords.pieces)
