"""Captions and their text."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import numpy as np
import pytest
from cutting import cut
from hypothesis import given
from hypothesis import strategies as st

from captioner.caption_types import Caption, CropBox, Keyword, as_written, join_words, phrases_of
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


@pytest.mark.parametrize(
    ("typed", "pieces"),
    [
        ('My Dog, "Rex"!', ("My ", 'Dog, "', 'Rex"!')),
        ("  my dog rex", ("  my ", "dog ", "rex")),
        ("My dog’s Rex", ("My ", "dog’s ", "Rex")),
        ("My cat Rex", ()),  # other words: nothing changes
        ("", ()),
    ],
)
def test_a_text_as_a_person_wrote_it(typed, pieces) -> None:
    zeros = np.zeros(3, np.float32)
    caption = Caption(("my", "dog", "rex"), zeros, np.zeros((3, 2, 3), np.float32), zeros, -1.5)

    written = as_written(caption, typed)

    assert written.pieces == pieces
    assert written.text == (typed.strip() if pieces else "my dog rex")


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


# --- truth and left-out words --------------------------------------------------------------------

NAN = math.nan


def sitting_cat() -> Caption:
    words = ("a", "cat", "is", "sitting", "in", "a", "kitchen")
    count = len(words)
    alphas = np.arange(count * 6, dtype=np.float32).reshape(count, 2, 3)
    log_probs = np.log(np.linspace(0.2, 0.8, count, dtype=np.float32))
    gates = np.linspace(0, 1, count, dtype=np.float32)
    return Caption(words, log_probs, alphas, gates, -4.5, confidence=0.72)


TRUTH = [NAN, 0.45, NAN, 0.62, NAN, NAN, 0.31]


def test_left_out_words_follow_the_caption() -> None:
    caption = sitting_cat()
    said = cut(caption, 2, TRUTH)

    assert (str(said), said.left_out.text) == ("a cat", "is sitting in a kitchen")
    assert repr(said) == "<Caption 'a cat', log_prob -4.50, confidence 0.72>"
    whole = said.whole()
    assert (whole.text, whole.left_out, whole.log_prob) == (caption.text, None, said.log_prob)
    for name in ("log_probs", "alphas", "gates"):
        np.testing.assert_array_equal(getattr(whole, name), getattr(caption, name))
    np.testing.assert_array_equal(whole.truth, np.float32(TRUTH))
    assert caption.whole() is caption
    pieces = ("a", " c", "at", " is", " sitting")
    spelled = replace(caption, words=("a", "c", "at", "is", "sitting"), pieces=pieces)
    assert cut(spelled, 3, TRUTH[:5]).left_out.text == "is sitting"
    assert cut(spelled, 3, TRUTH[:5]).whole().text == "a cat is sitting"


def test_truth_and_left_out_words_as_json() -> None:
    said = cut(sitting_cat(), 2, TRUTH)

    data = json.loads(json.dumps(said.to_dict(), allow_nan=False))

    assert (data["text"], data["truth"]) == ("a cat", [None, 0.45])
    assert data["phrases"] == [{"text": "a cat", "truth": 0.45}]
    rest = data["left_out"]
    assert rest.keys() == {"text", "words", "log_probs", "truth", "phrases"}
    assert rest["truth"] == [None, 0.62, None, None, 0.31]
    assert [one["truth"] for one in rest["phrases"]] == [0.62, 0.31]
    maps = said.to_dict(attention=True)["left_out"]
    assert maps["alphas"] == said.left_out.alphas.tolist()
    assert len(maps["gates"]) == 5
    plain = sitting_cat().to_dict(attention=True)
    assert not plain.keys() & {"truth", "phrases", "left_out"}


def test_doubtful_words_by_truth_or_else_by_probability() -> None:
    caption = sitting_cat()
    assert caption.doubtful == (0,)
    assert replace(caption, truth=np.float32(TRUTH)).doubtful == (1, 6)


@pytest.mark.parametrize(
    ("text", "phrases"),
    [
        ("a black and white cat is in a kitchen", "a black and white cat|is in a kitchen"),
        ("two dogs and a man 's hat on top of it", "two dogs|and a man's hat|on top of it"),
        ("people", "people"),
        ("", ""),
    ],
)
def test_phrases_begin_at_function_words_after_content_words(text, phrases) -> None:
    words = tuple(text.split())
    found = phrases_of(words, (), np.linspace(0.9, 0.1, len(words), dtype=np.float32))

    assert "|".join(one.text for one in found) == phrases
    assert [one.truth for one in found] == sorted([one.truth for one in found], reverse=True)


def test_a_phrase_is_true_if_all_of_its_words_are() -> None:
    found = phrases_of(("a", "black", "cat", "is"), (), np.float32([NAN, 0.2, 0.9, NAN]))

    assert found[0] == ("a black cat", pytest.approx(0.18))
    assert found[1].text == "is"
    assert math.isnan(found[1].truth)


def test_keywords_have_neither_truth_nor_left_out_words() -> None:
    keyword = Keyword("cat", 0.9, np.ones((2, 3), np.float32))
    keywords = replace(cut(sitting_cat(), 2, TRUTH), keywords=(keyword,)).of_keywords()

    assert (keywords.truth, keywords.left_out, keywords.text) == (None, None, "cat")
