"""What must not be said: every rule against all sentences there are, and words by their text."""

from __future__ import annotations

import itertools

import array_api_compat.torch
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from slow_search import Task, assert_same, brute_force, puzzles, slow_beam_search
from table_stepper import (
    END,
    Prefix,
    Table,
    TableStepper,
    assert_true_to_its_path,
    constant_table,
    random_table,
)

from captioner.config import SearchOptions
from captioner.decoding.rules import Rules
from captioner.decoding.search import search
from captioner.decoding.words import SearchTokens, encode_search_words
from captioner.errors import ConfigError
from captioner.vocabulary import BAD_ENDINGS, Vocabulary
from captioner.vocabulary import END as END_OF_VOCABULARY

# What each rule asks, in options and numbers of words.
RULES = {
    "min_length 1": ({"min_length": 1}, {}),
    "min_length 3": ({"min_length": 3}, {}),
    "block_ngrams 1": ({"block_ngrams": 1}, {}),
    "block_ngrams 2": ({"block_ngrams": 2}, {}),
    "block_ngrams 3": ({"block_ngrams": 3}, {}),
    "one banned": ({"banned_words": ("w1",)}, {"banned": (1,)}),
    "two banned": ({"banned_words": ("w1", "w3")}, {"banned": (1, 3)}),
    "one ending": ({"guard_endings": True}, {"bad_endings": (2,)}),
    "no repeats": ({"block_repeats": True}, {}),
    "two may repeat": ({"block_repeats": True}, {"repeatable": (1, 2)}),
    "two endings": ({"guard_endings": True}, {"bad_endings": (1, 2)}),
}
PAIRS = [(one,) for one in RULES] + [
    pair
    for pair in itertools.combinations(RULES, 2)
    if not set(RULES[pair[0]][0]) & set(RULES[pair[1]][0])
]

pytestmark = pytest.mark.usefixtures("array_library")


def task_of(names: tuple[str, ...], **given: object) -> Task:
    """Several rules together."""
    options, numbers = dict(given), {}
    for name in names:
        options |= RULES[name][0]
        numbers |= RULES[name][1]
    return Task(SearchOptions(**options), SearchTokens(**numbers))  # type: ignore[arg-type]


@pytest.mark.parametrize("names", PAIRS, ids=" and ".join)
@pytest.mark.parametrize("penalty", [0.0, 1.0])
def test_a_wide_beam_is_brute_force_over_the_sentences_that_keep_the_rules(names, penalty) -> None:
    tables = [random_table(seed, 4, forbidden) for seed, forbidden in ((0, 0), (1, 0), (2, 0.3))]
    task = task_of(names, beam_size=4**4, num_captions=40, max_length=4, length_penalty=penalty)

    found = search(TableStepper(tables), *task)

    for table, hypotheses in zip(tables, found, strict=True):
        assert_same(hypotheses, brute_force(table, task))


@pytest.mark.slow
@settings(max_examples=200)
@given(puzzles(("beam",)))
def test_narrow_beams_under_rules_are_the_slow_search(puzzle) -> None:
    task, tables = puzzle

    found = search(TableStepper(tables), *task)

    for table, hypotheses in zip(tables, found, strict=True):
        assert_same(hypotheses, slow_beam_search(table, task))
        for hypothesis in hypotheses:
            assert_true_to_its_path(hypothesis, table)


@pytest.mark.parametrize("min_length", range(5))
def test_the_end_waits_for_the_fewest_words(min_length) -> None:
    options = SearchOptions(beam_size=1, min_length=min_length, max_length=5)

    ((found,),) = search(TableStepper([constant_table(0.8, 0.2)]), options)

    assert len(found.tokens) == min_length
    assert found.ended
    assert found.log_prob == pytest.approx(np.log(0.8) + min_length * np.log(0.2), rel=1e-5)


@pytest.mark.parametrize(
    ("size", "expected"),
    [
        (0, [1] * 8),
        (1, [1, 2, 3]),
        (2, [1, 1, 2, 1, 3, 1]),  # 11 12 21 13 31: every word after 1 has been said
        (3, [1, 1, 1, 2, 1, 1, 3, 1]),
    ],
)
def test_no_phrase_stands_twice(size, expected) -> None:
    """A greedy sentence, worked out by hand: the likeliest word that completes no old phrase."""
    options = SearchOptions(beam_size=1, block_ngrams=size, max_length=8)

    ((found,),) = search(TableStepper([constant_table(1e-9, 0.6, 0.3, 0.1)]), options)

    assert found.tokens == expected


def test_phrases_that_overlap_are_two() -> None:
    options = SearchOptions(beam_size=1, block_ngrams=2, max_length=4)

    ((found,),) = search(TableStepper([constant_table(0.01, 0.99)]), options)

    assert found.tokens == [1, 1]  # the third would say "1 1" again
    assert found.ended


def test_a_sentence_that_is_cut_does_not_end_badly_either() -> None:
    table = constant_table(0, 0.9, 0.1)  # no end: every sentence is cut
    options = SearchOptions(beam_size=2, num_captions=2, max_length=3, guard_endings=True)

    (found,) = search(TableStepper([table]), options, SearchTokens(bad_endings=(1,)))

    assert [h.tokens for h in found] == [[1, 1, 2], [2, 1, 2]]


def test_no_words_are_no_bad_ending() -> None:
    options = SearchOptions(beam_size=1, guard_endings=True)

    ((found,),) = search(
        TableStepper([constant_table(0.9, 0.1)]), options, SearchTokens(bad_endings=(1,))
    )

    assert (found.tokens, found.ended) == ([], True)


@pytest.mark.parametrize("rule", [{"block_ngrams": 1}, {"min_length": 3}])
def test_rules_that_leave_no_sentence_give_none(rule) -> None:
    options = SearchOptions(beam_size=2, max_length=4, **rule)
    numbers = SearchTokens(banned=(1,) if "min_length" in rule else ())
    table = constant_table(0.9, 0.1) if numbers.banned else constant_table(0, 1.0)

    assert search(TableStepper([table]), options, numbers) == [[]]


def test_a_rule_changes_no_other_number() -> None:
    log_probs = torch.randn(2, 3, 5).log_softmax(dim=-1)
    tokens = torch.tensor([[[1, 2, 1], [2, 2, 2], [3, 4, 1]], [[4, 4, 3], [1, 3, 3], [2, 1, 4]]])
    options = SearchOptions(min_length=2, max_length=9, block_ngrams=2, guard_endings=True)
    rules = Rules(
        options, SearchTokens((), (3,), (1,)), END, array_api_compat.torch, torch.device("cpu")
    )

    ruled = log_probs.clone()
    rules.forbid(ruled, tokens)

    forbidden = ruled.isneginf()
    assert torch.equal(ruled[~forbidden], log_probs[~forbidden])
    assert [[row.nonzero().flatten().tolist() for row in photo] for photo in forbidden] == [
        [[0, 2, 3], [2, 3], [0, 3]],
        [[3], [3], [3]],
    ]


# --- Words by their text -------------------------------------------------------------------------

VOCABULARY = Vocabulary(["a", "dog", "t-shirt", "the", "of", "n't", "runs"])


def numbers_of(**options: object) -> SearchTokens:
    return encode_search_words(SearchOptions(**options), VOCABULARY)  # type: ignore[arg-type]


def test_words_get_the_numbers_of_the_vocabulary() -> None:
    found = numbers_of(forced_words=("dog", "runs"), banned_words=("t-shirt",), guard_endings=True)

    assert VOCABULARY.decode(found.forced) == ["dog", "runs"]
    assert VOCABULARY.decode(found.banned) == ["t-shirt"]
    assert VOCABULARY.decode(found.bad_endings) == ["a", "the", "of"]
    assert numbers_of() == SearchTokens()


def test_endings_are_guarded_only_where_it_is_asked_for() -> None:
    assert numbers_of(guard_endings=False).bad_endings == ()
    assert set(VOCABULARY.decode(numbers_of(guard_endings=True).bad_endings)) <= BAD_ENDINGS


def test_function_words_may_repeat() -> None:
    found = numbers_of(block_repeats=True)

    assert VOCABULARY.decode(found.repeatable) == ["a", "the", "of", "n't"]


def test_words_are_read_as_captions_are() -> None:
    assert VOCABULARY.decode(numbers_of(forced_words="Dog, T-shirt").forced) == ["dog", "t-shirt"]
    assert VOCABULARY.decode(numbers_of(banned_words=["DOG."]).banned) == ["dog"]


def test_a_word_given_in_two_spellings_is_one() -> None:
    assert VOCABULARY.decode(numbers_of(forced_words=["Dog", "dog"]).forced) == ["dog"]


def test_a_banned_word_that_the_model_does_not_know_is_no_error() -> None:
    assert numbers_of(banned_words=["zeppelin", "dog"]).banned == tuple(VOCABULARY.encode(["dog"]))
    assert numbers_of(banned_words=["zeppelin"]).banned == ()


def test_unknown_forced_words_are_an_error() -> None:
    with pytest.raises(ConfigError) as caught:
        numbers_of(forced_words=["dog", "zeppelin", "Yeti"])

    assert "forced_words contains zeppelin, yeti, which the model does not know" in str(
        caught.value
    )
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["forced_words", "banned_words"])
@pytest.mark.parametrize(
    ("given", "problem"),
    [("a dog", r"2 words \(a dog\)"), ("don't", r"2 words \(do n't\)"), ("!", "not a word")],
)
def test_what_is_no_single_word_is_refused(name, given, problem) -> None:
    with pytest.raises(ConfigError, match=problem) as caught:
        numbers_of(**{name: [given]})

    message = str(caught.value)
    assert message.startswith(name)
    assert message.endswith("give single words")
    assert repr(given) in message


@pytest.mark.parametrize("name", ["<end>", "<pad>", "<start>", "<unk>"])
def test_a_special_token_is_no_word(name) -> None:
    with pytest.raises(ConfigError):
        numbers_of(forced_words=[name])


# --- Rare words ----------------------------------------------------------------------------------


def favoured(table: Table, strength: float, rarity: np.ndarray) -> Table:
    """The table that a search with ``rare_words`` sees, normalised in float64."""

    def favoured_table(prefix: Prefix) -> np.ndarray:
        scores = table(prefix).astype(np.float64) + strength * rarity
        total = np.exp(scores).sum()
        return (scores - np.log(total) if total > 0 else scores).astype(np.float32)

    return favoured_table


@pytest.mark.parametrize(
    "more",
    [
        {"beam_size": 1},
        {"beam_size": 3, "num_captions": 3},
        {"beam_size": 4, "beam_groups": 2, "num_captions": 2},
        {"beam_size": 3, "length_penalty": 1.0, "block_ngrams": 2, "min_length": 2},
        {"temperature": 0.7, "top_p": 0.9, "num_captions": 3, "beam_size": 1},
    ],
)
def test_rare_words_search_another_table_and_return_the_probabilities_of_the_model(more) -> None:
    tables = [random_table(seed, 5, forbidden) for seed, forbidden in ((3, 0), (4, 0.3), (5, 0))]
    rarity = np.log(np.array([3.7, 3.7, 4.7, 5.7, 6.7]))
    options = SearchOptions(max_length=6, rare_words=0.8, **more)
    words = SearchTokens(rarity=tuple(rarity))

    found = search(TableStepper(tables), options, words)

    expected = search(
        TableStepper([favoured(table, 0.8, rarity) for table in tables]),
        SearchOptions(max_length=6, **more),
    )
    plain = search(TableStepper(tables), SearchOptions(max_length=6, **more))
    assert [own[0].tokens for own in found] != [own[0].tokens for own in plain]
    for table, captions, others in zip(tables, found, expected, strict=True):
        assert [own.tokens for own in captions] == [other.tokens for other in others]
        for own in captions:
            steps = [*own.tokens, END] if own.ended else own.tokens
            log_probs = [float(table(tuple(steps[:t]))[word]) for t, word in enumerate(steps)]
            np.testing.assert_allclose(own.token_log_probs, log_probs[: len(own.tokens)], atol=1e-6)
            np.testing.assert_allclose(own.log_prob, sum(log_probs), atol=1e-5)


def test_rarity_follows_the_rank_of_a_word_and_the_end_counts_as_the_most_frequent() -> None:
    rarity = numbers_of(rare_words=0.1).rarity

    assert len(rarity) == len(VOCABULARY)
    first, second, *_ = VOCABULARY.encode(VOCABULARY.words)
    assert rarity[END_OF_VOCABULARY] == rarity[first] == pytest.approx(np.log(3.7))
    assert rarity[second] == pytest.approx(np.log(4.7))
    assert numbers_of().rarity == ()
