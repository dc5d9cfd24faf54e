"""Words that rules name, and searches in other tables. test_search.py has the rules themselves."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from reference_search import Task, assert_same_captions, brute_force
from table_stepper import END, Prefix, Table, TableStepper, constant_table, random_table

from captioner.errors import ConfigError
from captioner.options import SearchOptions
from captioner.search.search import search
from captioner.search.words import (
    PeopleTokens,
    SearchTokens,
    encode_search_words,
    neutral_caption,
    people_tokens,
)
from captioner.text.vocabulary import END as END_OF_VOCABULARY
from captioner.text.vocabulary import Subwords, Vocabulary

pytestmark = pytest.mark.usefixtures("array_library")


# --- Encoding words ------------------------------------------------------------------------------

VOCABULARY = Vocabulary(["a", "dog", "t-shirt", "the", "of", "n't", "runs"])


def encode(**options: object) -> SearchTokens:
    return encode_search_words(SearchOptions(**options), VOCABULARY)  # type: ignore[arg-type]


def test_words_are_encoded_with_the_vocabulary() -> None:
    found = encode(forced_words=("dog", "runs"), banned_words=("t-shirt",), guard_endings=True)

    assert VOCABULARY.decode(found.forced) == ["dog", "runs"]
    assert VOCABULARY.decode(found.banned) == ["t-shirt"]
    assert VOCABULARY.decode(found.bad_endings) == ["a", "the", "of"]
    assert encode() == SearchTokens()


def test_block_repeats_exempts_function_words() -> None:
    found = encode(block_repeats=True)

    assert VOCABULARY.decode(found.repeatable) == ["a", "the", "of", "n't"]


def test_unknown_banned_words_are_ignored() -> None:
    assert encode(banned_words=["zeppelin", "dog"]).banned == tuple(VOCABULARY.encode(["dog"]))
    assert encode(banned_words=["zeppelin"]).banned == ()


def test_unknown_forced_words_raise() -> None:
    with pytest.raises(ConfigError) as caught:
        encode(forced_words=["dog", "zeppelin", "Yeti"])

    assert "forced_words contains zeppelin, yeti, which the model does not know" in str(
        caught.value
    )
    assert "\n" not in str(caught.value)


# --- Another table: rare words -------------------------------------------------------------------

RARITY = np.log(np.array([3.7, 3.7, 4.7, 5.7, 6.7]))


def reweighted(table: Table, strength: float, rarity: np.ndarray) -> Table:
    """Return the table that a search with ``rare_words`` uses, normalized in float64."""

    def reweighted_table(prefix: Prefix) -> np.ndarray:
        scores = table(prefix).astype(np.float64) + strength * rarity
        total = np.exp(scores).sum()
        return (scores - np.log(total) if total > 0 else scores).astype(np.float32)

    return reweighted_table


@pytest.mark.parametrize(
    "more",
    [
        {"beam_size": 1},
        {"beam_size": 3, "num_captions": 3},
        {"beam_size": 4, "beam_groups": 2, "num_captions": 2},
        {"beam_size": 3, "length_penalty": 1.0, "block_ngrams": 2, "min_length": 2},
        {"temperature": 0.7, "top_p": 0.9, "num_captions": 3, "beam_size": 1},
    ],
    ids=str,
)
def test_another_table_is_searched_but_the_models_probabilities_reported(more) -> None:
    tables = [random_table(seed, 5, 0.2) for seed in (3, 4, 5, 6)]
    options = SearchOptions(max_length=6, rare_words=0.8, **more)

    found = search(TableStepper(tables), options, SearchTokens(rarity=tuple(RARITY)))

    others = [reweighted(table, options.rare_words, RARITY) for table in tables]
    without = dataclasses.replace(options, rare_words=0)
    expected, plain = (search(TableStepper(each), without) for each in (others, tables))
    assert [own[0].tokens for own in found] != [own[0].tokens for own in plain]
    for table, captions, searched in zip(tables, found, expected, strict=True):
        assert [own.tokens for own in captions] == [other.tokens for other in searched]
        for own in captions:
            steps = [*own.tokens, END] if own.ended else own.tokens
            log_probs = [float(table(tuple(steps[:t]))[word]) for t, word in enumerate(steps)]
            np.testing.assert_allclose(own.token_log_probs, log_probs[: len(own.tokens)], atol=1e-6)
            np.testing.assert_allclose(own.log_prob, sum(log_probs), atol=1e-5)


def test_rarity_grows_with_rank_and_is_lowest_for_the_end() -> None:
    rarity = encode(rare_words=0.1).rarity

    assert len(rarity) == len(VOCABULARY)
    first, second, *_ = VOCABULARY.encode(VOCABULARY.words)
    assert rarity[END_OF_VOCABULARY] == rarity[first] == pytest.approx(np.log(3.7))
    assert rarity[second] == pytest.approx(np.log(4.7))
    assert encode().rarity == ()


# --- Neutral words for people, merged inside the search -------------------------------------------

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


@pytest.mark.parametrize(
    ("options", "expected"),
    [({"neutral": True, "forced_words": ("woman",)}, "woman"), ({"style": "shy"}, "no style")],
)
def test_what_a_model_cannot_do_is_refused(options, expected) -> None:
    with pytest.raises(ConfigError, match=expected):
        encode_search_words(SearchOptions(**options), Vocabulary(WORDS))


def test_models_of_pieces_are_refused() -> None:
    subwords = Subwords.train(["a man"] * 5, 10, 1)

    with pytest.raises(ConfigError, match="pieces"):
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
