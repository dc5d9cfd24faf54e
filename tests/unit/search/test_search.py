"""Beam search against brute force and a reference search; batching and ties."""

from __future__ import annotations

import dataclasses
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from reference_search import (
    Sentence,
    Task,
    assert_same_captions,
    breaks_a_rule,
    brute_force,
    by_rank,
    contains_forced_words,
    rank,
    reference_beam_search,
    tasks,
)
from table_stepper import (
    END,
    TableStepper,
    assert_identical,
    assert_matches_table,
    constant_table,
    ending_after,
    prefix_table,
    random_table,
)
from torch import Tensor

from captioner.options import SearchOptions
from captioner.search.search import Advance, search
from captioner.search.words import SearchTokens

pytestmark = pytest.mark.usefixtures("array_library")


@pytest.mark.parametrize("penalty", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("num_captions", [1, 4])
@pytest.mark.parametrize("forbidden", [0.0, 0.3])
def test_wide_beam_equals_brute_force(penalty, num_captions, forbidden) -> None:
    tables = [random_table(seed, 3, forbidden) for seed in range(4)]
    options = SearchOptions(
        beam_size=3**4, num_captions=num_captions, max_length=4, length_penalty=penalty
    )

    found = search(TableStepper(tables), options)

    for table, hypotheses in zip(tables, found, strict=True):
        assert_same_captions(hypotheses, brute_force(table, Task(options)))


@settings(max_examples=150)
@given(
    seed=st.integers(0, 10_000),
    vocabulary=st.integers(2, 5),
    photos=st.integers(1, 3),
    beam_size=st.integers(1, 6),
    fewer=st.integers(0, 5),
    max_length=st.integers(1, 6),
    penalty=st.sampled_from([0.0, 0.5, 1.0]),
    forbidden=st.sampled_from([0.0, 0.4]),
)
def test_narrow_beams_equal_the_reference_search(
    *, seed, vocabulary, photos, beam_size, fewer, max_length, penalty, forbidden
) -> None:
    tables = [random_table(seed + photo, vocabulary, forbidden) for photo in range(photos)]
    options = SearchOptions(
        beam_size=beam_size,
        num_captions=max(1, beam_size - fewer),
        max_length=max_length,
        length_penalty=penalty,
    )

    found = search(TableStepper(tables), options)

    assert len(found) == photos
    for table, hypotheses in zip(tables, found, strict=True):
        assert_same_captions(hypotheses, reference_beam_search(table, Task(options)))
        for hypothesis in hypotheses:
            assert_matches_table(hypothesis, table)
            assert len(hypothesis.tokens) <= max_length
            assert END not in hypothesis.tokens
        ranks = [rank(Sentence(tuple(h.tokens), h.log_prob, h.ended), options) for h in hypotheses]
        assert all(one >= other for one, other in pairwise(ranks))


def test_ties_yield_distinct_sentences() -> None:
    table = constant_table(0.25, 0.25, 0.25, 0.25)
    options = SearchOptions(beam_size=5, num_captions=5, max_length=3)
    (found,) = search(TableStepper([table]), options)

    assert len({(tuple(h.tokens), h.ended) for h in found}) == 5
    assert found[0].tokens == []  # the only sentence of a single token
    for hypothesis in found:
        assert_matches_table(hypothesis, table)


def test_empty_batch() -> None:
    options = SearchOptions(max_length=1)

    class Empty(TableStepper):
        def advance(self, tokens: Tensor) -> Advance:
            return Advance(torch.zeros(0, 1, 4), torch.zeros(0, 1, 2), torch.zeros(0, 1))

    assert search(Empty([]), options) == []


# --- Every strategy ------------------------------------------------------------------------------

FORCED = SearchTokens(forced=(1,))
STRATEGIES = {
    "beam": (SearchOptions(beam_size=2, num_captions=2, max_length=6), SearchTokens()),
    "groups": (
        SearchOptions(beam_size=4, num_captions=2, max_length=6, beam_groups=2),
        SearchTokens(),
    ),
    "forced": (SearchOptions(beam_size=2, num_captions=2, max_length=6), FORCED),
    "sampling": (
        SearchOptions(beam_size=1, num_captions=2, max_length=6, temperature=0.1),
        SearchTokens(),
    ),
}
every_strategy = pytest.mark.parametrize(
    ("options", "tokens"), STRATEGIES.values(), ids=STRATEGIES.keys()
)


@pytest.mark.slow
@settings(max_examples=250)
@given(data=st.data(), seed=st.integers(0, 10_000), vocabulary=st.integers(2, 5))
def test_any_options_batch_equals_single_photos_and_rules_hold(data, seed, vocabulary) -> None:
    task = data.draw(tasks(vocabulary))
    photos, forbidden = data.draw(st.integers(1, 3)), data.draw(st.sampled_from([0.0, 0.3]))
    options, tokens = task
    tables = [random_table(seed + photo, vocabulary, forbidden) for photo in range(photos)]
    seeds = [7 * seed + photo for photo in range(photos)]

    together = search(TableStepper(tables), options, tokens, seeds)

    assert len(together) == photos
    for table, photo_seed, found in zip(tables, seeds, together, strict=True):
        (alone,) = search(TableStepper([table]), options, tokens, [photo_seed])
        assert_identical(alone, found)
        assert len(found) <= options.num_captions
        sentences = [Sentence(tuple(h.tokens), h.log_prob, h.ended) for h in found]
        for hypothesis, sentence in zip(found, sentences, strict=True):
            assert_matches_table(hypothesis, table)
            assert np.isfinite(hypothesis.log_prob)
            assert END not in sentence.words
            assert sentence.ended or len(sentence.words) == options.max_length
            assert not breaks_a_rule(sentence, task)
            assert contains_forced_words(sentence, task)
        if options.temperature == 0:
            assert len({sentence.words for sentence in sentences}) == len(sentences)
        if options.beam_groups == 1:
            assert sentences == by_rank(sentences, options)


@every_strategy
def test_every_strategy_drops_finished_photos_and_keeps_order(options, tokens) -> None:
    stepper = TableStepper([ending_after(n) for n in (3, 1, 9, 2, 3)])

    found = search(stepper, dataclasses.replace(options, num_captions=1), tokens)

    assert [len(hypotheses[0].tokens) for hypotheses in found] == [3, 1, 6, 2, 3]
    assert [hypotheses[0].ended for hypotheses in found] == [True, True, False, True, True]
    assert stepper.kept[0] < 5
    assert stepper.kept[-1] == 1
    assert stepper.kept == sorted(set(stepper.kept), reverse=True)


@every_strategy
def test_every_strategy_isolates_photos_without_captions(options, tokens) -> None:
    impossible, dead_end = constant_table(0, 0, 0), prefix_table({(): (0, 1, 0)}, (0, 0, 0))
    normal = ending_after(2, vocabulary=3)

    found = search(TableStepper([impossible, normal, dead_end]), options, tokens)

    assert found[0] == found[2] == []
    assert found[1][0].tokens == [1, 1]


@pytest.mark.parametrize("kind", STRATEGIES)
@pytest.mark.parametrize("max_length", [1, 2, 3])
def test_fewer_sentences_than_beams(kind, max_length) -> None:
    table, tokens = random_table(4, 2), STRATEGIES[kind][1]
    options = {
        "beam": SearchOptions(beam_size=40, num_captions=40, max_length=max_length),
        "groups": SearchOptions(
            beam_size=40, num_captions=40, max_length=max_length, beam_groups=2
        ),
        "forced": SearchOptions(beam_size=40, num_captions=40, max_length=max_length),
        "sampling": SearchOptions(
            beam_size=1, num_captions=40, max_length=max_length, temperature=1.0
        ),
    }[kind]

    (found,) = search(TableStepper([table]), options, tokens)

    wide = SearchOptions(beam_size=40, num_captions=40, max_length=max_length)
    every = brute_force(table, Task(wide, tokens))
    if kind == "sampling":
        assert len(found) == 40
        assert {tuple(h.tokens) for h in found} <= {sentence.words for sentence in every}
    elif kind == "groups":  # in the order of their groups
        assert sorted(tuple(h.tokens) for h in found) == sorted(s.words for s in every)
    else:
        assert_same_captions(found, every)


@every_strategy
def test_every_strategy_returns_complete_sentences_on_ties(options, tokens) -> None:
    table = constant_table(0.25, 0.25, 0.25, 0.25)

    (found,) = search(TableStepper([table]), options, tokens)

    assert len(found) == 2
    for hypothesis in found:
        assert hypothesis.ended or len(hypothesis.tokens) == 6
        assert_matches_table(hypothesis, table)


@pytest.mark.parametrize("penalty", [0.0, 1.0])
@pytest.mark.parametrize("first", [1, 2])
def test_equal_score_never_returns_an_unfinished_sentence(penalty, first) -> None:
    # Words 1 and 2 tie. After one of them the end is certain; after the other, word 1 is, forever.
    sure = prefix_table({(): (0, 0.5, 0.5), (first,): (1, 0, 0)}, (0, 1, 0))
    options = SearchOptions(beam_size=2, max_length=5, length_penalty=penalty)

    ((found,),) = search(TableStepper([sure]), options)

    assert found.ended or len(found.tokens) == 5
