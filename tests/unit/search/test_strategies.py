"""Beam groups and sampling, against reference searches and distributions."""

from __future__ import annotations

import dataclasses
from collections import Counter

import numpy as np
import pytest
from reference_search import Sentence, Task, sampling_distribution
from table_stepper import TableStepper, assert_identical, constant_table, prefix_table, random_table

from captioner.options import SearchOptions
from captioner.search.search import Hypothesis, search
from captioner.search.words import SearchTokens

pytestmark = pytest.mark.usefixtures("array_library")


def tokens_of(found: list[Hypothesis]) -> list[tuple[int, ...]]:
    return [tuple(hypothesis.tokens) for hypothesis in found]


# --- Sampling ------------------------------------------------------------------------------------


def sample(table, count: int, **given: object) -> list[Hypothesis]:
    options = SearchOptions(**({"beam_size": 1, "num_captions": count} | given))
    (found,) = search(TableStepper([table]), options)
    return found


def assert_sampled_from(found: list[Hypothesis], expected: dict[Sentence, float]) -> None:
    """Apply Pearson's chi-squared test. Sampling is seeded, so it cannot fail by chance."""
    counts = Counter((tuple(h.tokens), h.ended) for h in found)
    probabilities = {(s.words, s.ended): probability for s, probability in expected.items()}
    assert sum(probabilities.values()) == pytest.approx(1.0)
    assert counts.keys() <= probabilities.keys()
    common = {
        key: probability
        for key, probability in probabilities.items()
        if probability * len(found) >= 5
    }
    rare = 1 - sum(common.values())
    observed = [*(counts[key] for key in common), len(found) - sum(counts[key] for key in common)]
    expected_counts = [
        len(found) * probability for probability in (*common.values(), max(rare, 1e-9))
    ]
    statistic = sum(
        (o - e) ** 2 / max(e, 1.0) for o, e in zip(observed, expected_counts, strict=True)
    )
    freedom = len(common)
    assert statistic < freedom + 4 * np.sqrt(2 * freedom) + 4


SAMPLING = [
    {"temperature": 1.0},
    {"temperature": 0.5},
    {"temperature": 3.0},
    {"top_k": 2},
    {"top_p": 0.6},
    {"temperature": 0.7, "top_p": 0.9},
    {"temperature": 1.5, "top_k": 3, "top_p": 0.8},
]


@pytest.mark.parametrize(
    ("forbidden", "given", "tokens"),
    [
        *(
            pytest.param(forbidden, given, {}, marks=pytest.mark.slow)
            for given in SAMPLING
            for forbidden in (0.0, 0.3)
        ),
        (0.0, {"min_length": 2}, {}),
        (0.0, {"block_ngrams": 1}, {}),
        (0.0, {"banned_words": ("w2",)}, {"banned": (2,)}),
        (0.0, {"guard_endings": True}, {"bad_endings": (1,)}),
        (0.0, {"min_length": 1, "guard_endings": True}, {"bad_endings": (1, 2)}),
    ],
    ids=str,
)
def test_sampling_follows_the_tables_distribution(forbidden, given, tokens) -> None:
    """After a rule the remaining words keep their relative probabilities."""
    table = random_table(11, 4, forbidden)
    task = Task(
        SearchOptions(**{"beam_size": 1, "temperature": 1.0, "max_length": 3} | given),
        SearchTokens(**tokens),
    )

    (found,) = search(TableStepper([table]), task.options.changed(num_captions=4000), task.tokens)

    assert_sampled_from(found, sampling_distribution(table, task))


@pytest.mark.parametrize(
    ("sampling", "kept"),
    [
        ({"top_k": 1}, {1}),
        ({"top_k": 3}, {1, 2, 3}),
        ({"top_k": 99}, {1, 2, 3, 4}),
        ({"top_p": 1e-9}, {1}),
        ({"top_p": 0.39}, {1}),
        ({"top_p": 0.41}, {1, 2}),
        ({"top_p": 0.69}, {1, 2}),
        ({"top_p": 0.71}, {1, 2, 3}),
        ({"top_p": 0.91}, {1, 2, 3, 4}),
        ({"top_k": 2, "top_p": 0.56}, {1}),  # of the top two, word 1 has 0.4 / 0.7 = 0.57
        ({"top_k": 2, "top_p": 0.58}, {1, 2}),
    ],
    ids=str,
)
def test_top_k_and_top_p_keep_the_likeliest_words(sampling, kept) -> None:
    table = constant_table(0, 0.4, 0.3, 0.2, 0.1)

    found = sample(table, 500, temperature=1.0, max_length=1, **sampling)

    assert {h.tokens[0] for h in found} == kept


@pytest.mark.parametrize(
    "sampling",
    [
        {"temperature": 1.0, "top_k": 1},
        {"temperature": 5.0, "top_p": 1e-9},
        {"temperature": 1e-4},
        {"temperature": 1e-30},
        {"temperature": 1e-42},
        {"temperature": 1e-300},
    ],
    ids=str,
)
def test_sampling_from_one_word_is_greedy(sampling) -> None:
    tables = [random_table(seed, 5) for seed in range(6)]
    sampled = SearchOptions(beam_size=1, num_captions=2, max_length=6, **sampling)
    (greedy, found) = (
        search(TableStepper(tables), SearchOptions(beam_size=1, max_length=6)),
        search(TableStepper(tables), sampled),
    )

    for (one,), two in zip(greedy, found, strict=True):
        assert_identical([one, one], two)


def test_sampling_depends_on_both_seeds() -> None:
    table = random_table(2, 5)
    options = SearchOptions(beam_size=1, num_captions=8, max_length=5, temperature=1.0)

    def resample(seed: int, photo_seed: int) -> list[Hypothesis]:
        other = dataclasses.replace(options, seed=seed)
        return search(TableStepper([table]), other, seeds=[photo_seed])[0]

    assert_identical(resample(1, 2), resample(1, 2))
    different = {
        str(tokens_of(resample(seed, photo_seed))) for seed in range(4) for photo_seed in range(4)
    }
    assert len(different) == 16  # (1, 2) is not (2, 1) either


def test_sample_without_a_continuation_is_dropped() -> None:
    # Word 1 has no continuation; after word 2 the sentence ends.
    table = prefix_table({(): (0, 0.5, 0.5), (1,): (0, 0, 0)}, (1, 0, 0))

    found = sample(table, 40, temperature=1.0)

    assert set(tokens_of(found)) == {(2,)}
    assert 5 < len(found) < 35
