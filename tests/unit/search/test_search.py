"""Searches compared with reference searches, batching and ties."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
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
    reference_beam_search,
    reference_diverse_beam_search,
    searches,
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

from captioner.options import SearchOptions
from captioner.search.search import search
from captioner.search.words import SearchTokens

pytestmark = [
    pytest.mark.usefixtures("array_library"),
    pytest.mark.parametrize("array_library", ["torch", "numpy", "numpy before 2.1"], indirect=True),
]


REFERENCES = {
    "beam": reference_beam_search,
    "forced": reference_beam_search,
    "groups": reference_diverse_beam_search,
}


@pytest.mark.parametrize("kind", ["beam", "forced"])
@settings(max_examples=50)
@given(data=st.data(), seed=st.integers(0, 10_000))
def test_wide_beams_equal_brute_force(kind, data, seed) -> None:
    """Compare all sentences that two words allow, under any rules."""
    options, tokens = data.draw(tasks(3, (kind,)))
    task = Task(dataclasses.replace(options, beam_size=2**7), tokens)
    tables = [random_table(seed, 3), random_table(seed, 3, 0.3)]

    found = search(TableStepper(tables), *task)

    for table, hypotheses in zip(tables, found, strict=True):
        assert_same_captions(hypotheses, brute_force(table, task))


@pytest.mark.parametrize("kind", REFERENCES)
@settings(max_examples=100)
@given(data=st.data())
def test_narrow_beams_equal_the_reference_search(kind, data) -> None:
    task, tables = data.draw(searches((kind,)))

    found = search(TableStepper(tables), *task)

    for table, hypotheses in zip(tables, found, strict=True):
        assert_same_captions(hypotheses, REFERENCES[kind](table, task))
        for hypothesis in hypotheses:
            assert_matches_table(hypothesis, table)


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
def test_every_strategy_returns_complete_sentences_on_ties(options, tokens) -> None:
    table = constant_table(0.25, 0.25, 0.25, 0.25)

    (found,) = search(TableStepper([table]), options, tokens)

    assert len(found) == 2
    if not options.temperature:
        assert len({(tuple(h.tokens), h.ended) for h in found}) == 2
    for hypothesis in found:
        assert hypothesis.ended or len(hypothesis.tokens) == 6
        assert_matches_table(hypothesis, table)


@pytest.mark.parametrize("penalty", [0.0, 1.0])
@pytest.mark.parametrize("first", [1, 2])
def test_equal_score_never_returns_an_unfinished_sentence(penalty, first) -> None:
    # Words 1 and 2 tie. After one of them, the end is certain. After the other, word 1 is certain.
    sure = prefix_table({(): (0, 0.5, 0.5), (first,): (1, 0, 0)}, (0, 1, 0))
    options = SearchOptions(beam_size=2, max_length=5, length_penalty=penalty)

    ((found,),) = search(TableStepper([sure]), options)

    assert found.ended or len(found.tokens) == 5


def test_a_longer_sentence_may_still_overtake_an_ended_one() -> None:
    # The empty sentence ranks better until the other sentence, certain from there on, is longer.
    table = prefix_table({(): (0.6, 0.4), (1,): (0, 1), (1, 1): (0, 1)}, (1, 0))
    options = SearchOptions(beam_size=2, max_length=6, length_penalty=1.0)

    ((found,),) = search(TableStepper([table]), options)

    assert found.tokens == [1, 1, 1]
