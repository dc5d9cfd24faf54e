"""Consensus against CIDEr-D, its formula and a search that returns every candidate."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from table_stepper import TableStepper, random_table

from captioner.options import SearchOptions
from captioner.search.consensus import by_consensus
from captioner.search.search import search
from captioner.search.words import SearchTokens

CAPTIONS = st.lists(st.lists(st.integers(0, 4), max_size=6), min_size=1, max_size=6)


@pytest.mark.parametrize(("share", "first"), [(0.9, 0), (1.1, 3)])
def test_rare_words_add_the_mean_and_the_highest_rarity(share, first) -> None:
    """Two captions agree only with themselves, in unigrams and bigrams, which scores 10 / 4 * 2.

    With weights of 3/5 and 2/5, the first caption is ahead by 1. The second is rarer by
    (2 + 3) - (1 + 1).
    """
    captions, rarity = [[0, 1]] * 3 + [[2, 3]] * 2, (1.0, 1.0, 1.0, 3.0)

    order = by_consensus(captions, [1.0] * 5, rarity, rare_words=share / 3)

    assert order[0] == first


@given(CAPTIONS, st.randoms(use_true_random=False), st.floats(0.01, 100))
def test_the_best_score_does_not_depend_on_order_or_scale(captions, random, scale) -> None:
    distinct = [list(tokens) for tokens in dict.fromkeys(map(tuple, captions))]
    weights = [0.3 + 0.01 * sum(tokens) + 0.1 * len(tokens) for tokens in distinct]
    rarity = (0.11, 0.27, 0.53, 0.91, 1.7)
    shuffled = random.sample(range(len(distinct)), len(distinct))

    best = by_consensus(distinct, weights, rarity)[0]
    again = by_consensus(
        [distinct[i] for i in shuffled], [scale * weights[i] for i in shuffled], rarity
    )[0]

    ciders = scores_of(distinct, weights, rarity)
    assert ciders[shuffled[again]] == pytest.approx(ciders[best], abs=1e-9)
    assert ciders[best] == pytest.approx(max(ciders), abs=1e-9)


def scores_of(captions, weights, rarity) -> list[float]:
    """Compute the formula of the docstring word by word."""

    def vector(tokens: list[int], size: int) -> dict[tuple[int, ...], float]:
        grams = [tuple(tokens[i : i + size]) for i in range(len(tokens) - size + 1)]
        return {gram: grams.count(gram) * sum(rarity[t] for t in gram) for gram in grams}

    def cider(one: list[int], reference: list[int]) -> float:
        total = 0.0
        for size in (1, 2, 3, 4):
            left, right = vector(one, size), vector(reference, size)
            norm = math.hypot(*left.values()) * math.hypot(*right.values())
            shared = sum(min(left[g], right[g]) * right[g] for g in left.keys() & right.keys())
            total += shared / norm if norm else 0.0
        return 10 / 4 * total * math.exp(-((len(one) - len(reference)) ** 2) / 72)

    return [
        sum(w * cider(one, other) for w, other in zip(weights, captions, strict=True))
        / sum(weights)
        for one in captions
    ]


SEARCHES = {
    "beam": {"beam_size": 6},
    "samples": {"beam_size": 1, "temperature": 1.3, "seed": 2},
}


@pytest.mark.parametrize("rare_words", [0.0, 0.4])
@pytest.mark.parametrize("kind", SEARCHES)
def test_a_search_returns_the_candidates_that_agree_most(kind, rare_words) -> None:
    tables = [random_table(seed, 6, 0.2) for seed in (3, 4, 5)]
    options = SearchOptions(
        max_length=5, candidates=6, num_captions=2, rare_words=rare_words, **SEARCHES[kind]
    )
    every = dataclasses.replace(options, candidates=0, num_captions=6, rare_words=0.0)
    words = SearchTokens(rarity=(1.3, 1.3, 1.5, 1.7, 1.9, 2.6))

    def run(searched: SearchOptions):
        return search(TableStepper(tables), searched, words)

    kept = 5 if options.temperature else 6  # the fifth of the samples that ranks lowest is dropped
    for found, all_found in zip(run(options), run(every), strict=True):
        candidates = all_found[:kept]
        likely = [math.exp(each.log_prob / 2) for each in candidates]
        weights = [1.0] * kept if options.temperature else likely
        tokens = [each.tokens for each in candidates]
        order = by_consensus(tokens, weights, words.rarity, rare_words)
        others = [each.tokens for each in all_found[kept:]]  # if too few are different
        ranked = dict.fromkeys(map(tuple, [*(tokens[i] for i in order), *others]))
        assert [tuple(each.tokens) for each in found] == list(ranked)[:2]
        for each, index in zip(found, order, strict=False):
            assert each.log_prob == candidates[index].log_prob
            np.testing.assert_array_equal(each.alphas, candidates[index].alphas)
