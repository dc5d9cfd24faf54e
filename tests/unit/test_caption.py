"""Captions and their text."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from captioner.caption import Caption, CropBox, join_words
from captioner.text.tokenizer import tokenize


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ([], ""),
        (["dog"], "dog"),
        (["a", "man", "'s", "hat"], "a man's hat"),
        (["they", "'re", "here", "and", "we", "'ve", "left"], "they're here and we've left"),
        (["i", "'ll", "go", ",", "he", "'d", "stay"], "i'll go , he'd stay"),
        (["i", "'m", "sure", "it", "is", "n't"], "i'm sure it isn't"),
        (["dogs", "'", "bowls"], "dogs' bowls"),
        (["'s", "no", "first", "word"], "'s no first word"),
        (["'em", "and", "'n'"], "'em and 'n'"),
        (("t-shirt", "3.5", "$", "5"), "t-shirt 3.5 $ 5"),
    ],
)
def test_join_words_known_answers(words, text) -> None:
    assert join_words(words) == text


WORDS = [
    *("a", "the", "two", "man", "dogs", "is", "was", "do", "can", "not", "on", "jumping"),
    *("t-shirt", "x-ray", "o'clock", "2", "10", "3.5", "1980s", "'80s", "$", "&", "%", "no.", "7"),
    *("mr.", "st.", "u.s.", "can't", "don't", "isn't", "it's", "man's", "dogs'", "they're"),
    *("we've", "i'll", "she'd", "i'm", "let's", "cannot", "gonna", "'em", "rock'n'roll"),
    *(
        "snow-covered",
        "red/white",
        "café",
        "(one",
        "red)",
        "[sign]",
        "that'd",
        "'n'",
        "it,",
        "cat;",
    ),
    *("toys!", "3-2"),
]


@given(st.lists(st.sampled_from(WORDS), max_size=9))
def test_joined_words_tokenize_to_the_same_words(parts) -> None:
    words = tokenize(" ".join(parts))

    assert tokenize(join_words(words)) == words


def test_attributes_of_a_caption() -> None:
    words = ("a", "man", "'s", "hat")
    zeros = np.zeros(4, np.float32)
    caption = Caption(words, zeros, np.zeros((4, 2, 3), np.float32), zeros, -1.5)

    assert caption.text == str(caption) == "a man's hat"
    assert repr([caption]) == '[<Caption "a man\'s hat", log_prob -1.50>]'
    assert caption.crop_box == CropBox() == (0, 0, 1, 1)
    with pytest.raises(AttributeError):
        caption.words = ()
    assert len({caption, caption}) == 1  # compared by identity, hashable
