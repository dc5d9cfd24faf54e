"""The sub-word tokenizer: training, splitting and joining."""

from __future__ import annotations

import pytest

from captioner.text.subwords import SPACE, Subwords, piece_text
from captioner.text.vocabulary import BLANK, Vocabulary

ENGLISH = ["A dog runs .", "The dog's ball.", "Ein Hund läuft über Gras"] * 2


def join(pieces: list[str]) -> str:
    return "".join(map(piece_text, pieces)).strip()


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
