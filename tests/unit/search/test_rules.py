"""Search rules against brute force over all sentences, and encoding of the words they name."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from reference_search import Task, assert_same_captions, brute_force
from table_stepper import END, Prefix, Table, TableStepper, random_table

from captioner.errors import ConfigError
from captioner.options import SearchOptions
from captioner.search.search import search
from captioner.search.words import SearchTokens, encode_search_words
from captioner.text.vocabulary import END as END_OF_VOCABULARY
from captioner.text.vocabulary import Vocabulary

# Search options and search tokens of each rule.
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
    "one forced": ({}, {"forced": (3,)}),
    "two forced": ({}, {"forced": (2, 1)}),
    "three forced": ({}, {"forced": (1, 2, 3)}),
}
# In test_search.py the narrow beams have any others.
TOGETHER = [
    (),
    *((one,) for one in RULES),
    ("min_length 3", "block_ngrams 2"),
    ("min_length 1", "two banned"),
    ("block_ngrams 1", "two endings"),
    ("one banned", "one ending"),
    ("no repeats", "min_length 3"),
    ("two may repeat", "two endings"),
    ("one forced", "min_length 3"),
    ("two forced", "block_ngrams 1"),
    ("three forced", "one ending"),
]

pytestmark = pytest.mark.usefixtures("array_library")


def task_of(names: tuple[str, ...], **given: object) -> Task:
    """Combine several rules into one task."""
    options, tokens = dict(given), {}
    for name in names:
        options |= RULES[name][0]
        tokens |= RULES[name][1]
    return Task(SearchOptions(**options), SearchTokens(**tokens))  # type: ignore[arg-type]


@pytest.mark.parametrize("names", TOGETHER, ids=" and ".join)
@pytest.mark.parametrize("penalty", [0.0, 0.5])
def test_wide_beam_under_rules_equals_brute_force(names, penalty) -> None:
    tables = [random_table(seed, 4, forbidden) for seed, forbidden in ((0, 0), (1, 0), (2, 0.3))]
    task = task_of(names, beam_size=4**4, num_captions=40, max_length=4, length_penalty=penalty)

    found = search(TableStepper(tables), *task)

    for table, hypotheses in zip(tables, found, strict=True):
        assert_same_captions(hypotheses, brute_force(table, task))


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


# --- Rare words ----------------------------------------------------------------------------------


def reweighted(table: Table, strength: float, rarity: np.ndarray) -> Table:
    """The table that a search with ``rare_words`` sees, normalized in float64."""

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
)
def test_rare_words_reweights_the_search_but_reports_model_probabilities(more) -> None:
    tables = [random_table(seed, 5, forbidden) for seed, forbidden in ((3, 0), (4, 0.3), (5, 0))]
    rarity = np.log(np.array([3.7, 3.7, 4.7, 5.7, 6.7]))
    options = SearchOptions(max_length=6, rare_words=0.8, **more)
    words = SearchTokens(rarity=tuple(rarity))

    found = search(TableStepper(tables), options, words)

    expected = search(
        TableStepper([reweighted(table, 0.8, rarity) for table in tables]),
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


@pytest.mark.parametrize(
    "more",
    [
        {"beam_size": 1},
        {"beam_size": 3, "num_captions": 3},
        {"beam_size": 3, "rare_words": 0.4},
        {"temperature": 0.7, "num_captions": 3, "beam_size": 1},
    ],
)
def test_guidance_searches_in_other_tables_but_reports_model_probabilities(more) -> None:
    """Photos finish at different steps, so the blank ones must leave with them."""
    seeds = (3, 4, 5)
    tables = [random_table(seed, 5, 0.2) for seed in seeds]
    blanks = [random_table(seed + 50, 5, 0.2) for seed in seeds]
    options = SearchOptions(max_length=6, guidance=1.2, **more)
    words = SearchTokens(rarity=(1.3, 1.3, 1.5, 1.7, 1.9) if "rare_words" in more else ())

    found = search(TableStepper(tables), options, words, blank=TableStepper(blanks))

    both = zip(tables, blanks, strict=True)
    guided = [guided_table(table, blank, 1.2) for table, blank in both]
    without = dataclasses.replace(options, guidance=0)
    expected = search(TableStepper(guided), without, words)
    plain = search(TableStepper(tables), without, words)
    assert [own[0].tokens for own in found] != [own[0].tokens for own in plain]
    for table, captions, others in zip(tables, found, expected, strict=True):
        assert [own.tokens for own in captions] == [other.tokens for other in others]
        for own in captions:
            steps = [*own.tokens, END] if own.ended else own.tokens
            log_probs = [float(table(tuple(steps[:t]))[word]) for t, word in enumerate(steps)]
            np.testing.assert_allclose(own.log_prob, sum(log_probs), atol=1e-5)


def guided_table(table: Table, blank: Table, guidance: float) -> Table:
    """The table that a search with ``guidance`` sees, in float64."""

    def guided(prefix: Prefix) -> np.ndarray:
        own, other = table(prefix).astype(np.float64), blank(prefix).astype(np.float64)
        weights, changes = np.exp(own), np.ones(len(own))
        plausible = own >= own.max() + np.log(0.1)
        for word in np.flatnonzero(weights):
            if plausible[word] and np.isfinite(other[word]):
                changes[word] = np.exp(guidance * (own[word] - other[word]))
        changes[~plausible] = changes.min() * np.exp(-20.0)
        weights *= changes
        with np.errstate(divide="ignore"):
            return (np.log(weights) - np.log(max(weights.sum(), 1e-300))).astype(np.float32)

    return guided


def test_rarity_grows_with_rank_and_is_lowest_for_the_end() -> None:
    rarity = encode(rare_words=0.1).rarity

    assert len(rarity) == len(VOCABULARY)
    first, second, *_ = VOCABULARY.encode(VOCABULARY.words)
    assert rarity[END_OF_VOCABULARY] == rarity[first] == pytest.approx(np.log(3.7))
    assert rarity[second] == pytest.approx(np.log(4.7))
    assert encode().rarity == ()
