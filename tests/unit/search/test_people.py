"""Neutral words for people: merged inside the search, so that no caption names a sex or age."""

from __future__ import annotations

import numpy as np
import pytest
from reference_search import Task, assert_same_captions, brute_force
from table_stepper import Prefix, TableStepper, constant_table, random_table

from captioner.errors import OptionError
from captioner.options import SearchOptions
from captioner.search.search import search
from captioner.search.words import (
    PeopleTokens,
    SearchTokens,
    encode_search_words,
    neutral_caption,
    people_tokens,
)
from captioner.text.vocabulary import Subwords, Vocabulary

NEUTRAL = SearchOptions(beam_size=3**4, num_captions=5, max_length=4, neutral=True)
WORDS = ["a", "man", "dog", "person", "woman", "old", "boy", "elderly", "his", "their"]


@pytest.mark.parametrize("seed", range(4))
def test_a_wide_beam_is_brute_force_on_merged_probabilities(seed) -> None:
    people = PeopleTokens(groups=((1, 3),))
    table = random_table(seed, 4)

    def merged(prefix: Prefix) -> np.ndarray:
        log_probs = table(prefix).copy()
        log_probs[1] = np.logaddexp(log_probs[1], log_probs[3])
        log_probs[3] = -np.inf
        return log_probs

    (found,) = search(TableStepper([table]), NEUTRAL, SearchTokens(people=people))

    plain = SearchOptions(beam_size=3**4, num_captions=5, max_length=4)
    assert_same_captions(found, brute_force(merged, Task(plain)))


def test_ages_do_not_precede_people() -> None:
    people = PeopleTokens(ages=(1,), not_after_ages=(2,))
    table = constant_table(0.1, 0.5, 0.3, 0.1)

    (found,) = search(TableStepper([table]), NEUTRAL, SearchTokens(people=people))

    assert found
    assert not any((1, 2) in zip(h.tokens, h.tokens[1:], strict=False) for h in found)


def test_words_of_a_vocabulary() -> None:
    vocabulary = Vocabulary(WORDS)

    found = people_tokens(vocabulary)

    groups = [vocabulary.decode(group) for group in found.groups]
    assert groups == [["person", "man", "woman"], ["their", "his"]]
    assert vocabulary.decode(found.never) == ["elderly", "boy"]  # the vocabulary lacks child
    assert vocabulary.decode(found.ages) == ["old"]
    assert vocabulary.decode(found.not_after_ages) == ["person"]
    assert encode_search_words(SearchOptions(neutral=True), vocabulary).people == found
    assert encode_search_words(SearchOptions(), vocabulary).people == PeopleTokens()


def test_forced_words_with_a_sex_are_refused() -> None:
    options = SearchOptions(neutral=True, forced_words=("woman",))

    with pytest.raises(OptionError, match="woman"):
        encode_search_words(options, Vocabulary(WORDS))


def test_models_of_pieces_are_refused() -> None:
    subwords = Subwords.train(["a man"] * 5, 10, 1)

    with pytest.raises(OptionError, match="pieces"):
        encode_search_words(SearchOptions(neutral=True), Vocabulary(subwords.pieces, (), subwords))


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("A man and his dog", "a person and their dog"),
        ("Two elderly women with old trees", "two people with old trees"),
        ("An old man near a young girl.", "a person near a young child"),
        ("An elderly couple", "a couple"),
    ],
)
def test_references_are_treated_word_by_word(given, expected) -> None:
    assert neutral_caption(given) == expected
