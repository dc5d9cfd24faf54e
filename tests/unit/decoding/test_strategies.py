"""Forced words, groups and draws, each against a slow search or all the sentences there are."""

from __future__ import annotations

import dataclasses
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from slow_search import (
    Sentence,
    Task,
    assert_same,
    brute_force,
    drawn_sentences,
    puzzles,
    rank,
    slow_beam_search,
    slow_diverse_beams,
    slow_grid_beam_search,
    tasks,
)
from table_stepper import (
    TableStepper,
    assert_identical,
    assert_true_to_its_path,
    constant_table,
    ending_after,
    random_table,
    written_table,
)

from captioner.config import SearchOptions
from captioner.decoding.search import Hypothesis, search
from captioner.decoding.words import SearchTokens

pytestmark = pytest.mark.usefixtures("array_library")


def said(found: list[Hypothesis]) -> list[tuple[int, ...]]:
    return [tuple(hypothesis.tokens) for hypothesis in found]


# --- Forced words --------------------------------------------------------------------------------


@pytest.mark.parametrize("forced", [(1,), (3,), (2, 1), (3, 1), (1, 2, 3)])
@pytest.mark.parametrize(
    ("rules", "numbers"),
    [
        ({}, {}),
        ({"length_penalty": 1.0}, {}),
        ({"min_length": 3}, {}),
        ({"block_ngrams": 1}, {}),
        ({"block_ngrams": 2}, {}),
        ({"guard_endings": True}, {"bad_endings": (1, 3)}),
        ({"min_length": 2, "block_ngrams": 1}, {}),
        ({"min_length": 3, "guard_endings": True}, {"bad_endings": (3,)}),
        ({"block_ngrams": 2, "guard_endings": True}, {"bad_endings": (2,)}),
    ],
)
def test_forced_words_in_a_wide_beam_are_brute_force(forced, rules, numbers) -> None:
    tables = [random_table(seed, 4, forbidden) for seed, forbidden in ((0, 0), (1, 0), (2, 0.3))]
    options = SearchOptions(beam_size=4**4, num_captions=30, max_length=4, **rules)
    task = Task(options, SearchTokens(forced=forced, **numbers))

    found = search(TableStepper(tables), *task)

    for table, hypotheses in zip(tables, found, strict=True):
        assert_same(hypotheses, brute_force(table, task))
    assert found[0]


def test_a_forced_and_a_banned_word_in_a_wide_beam_are_brute_force() -> None:
    table = random_table(3, 4)
    options = SearchOptions(beam_size=4**4, num_captions=30, max_length=4)
    task = Task(options, SearchTokens(forced=(3,), banned=(1,)))

    (found,) = search(TableStepper([table]), *task)

    assert len(found) > 5
    assert_same(found, brute_force(table, task))


@pytest.mark.slow
@settings(max_examples=200)
@given(puzzles(("forced",)))
def test_forced_words_in_narrow_beams_are_the_slow_search(puzzle) -> None:
    task, tables = puzzle

    found = search(TableStepper(tables), *task)

    for table, hypotheses in zip(tables, found, strict=True):
        assert_same(hypotheses, slow_grid_beam_search(table, task))
        for hypothesis in hypotheses:
            assert set(task.numbers.forced) <= set(hypothesis.tokens)
            assert_true_to_its_path(hypothesis, table)


@pytest.mark.parametrize("beam_size", [1, 2, 5])
def test_unlikely_words_are_said_all_the_same(beam_size) -> None:
    table = constant_table(0.2, 0.8 - 2e-6, 1e-6, 1e-6)
    options = SearchOptions(beam_size=beam_size, num_captions=beam_size, max_length=5)

    (found,) = search(TableStepper([table]), options, SearchTokens(forced=(3, 2)))

    assert len(found) == beam_size
    assert all({2, 3} <= set(hypothesis.tokens) for hypothesis in found)


def test_a_forced_word_fills_the_last_place() -> None:
    options = SearchOptions(beam_size=1, max_length=2)

    ((found,),) = search(
        TableStepper([constant_table(0.1, 0.8, 0.1)]), options, SearchTokens(forced=(2,))
    )

    assert 2 in found.tokens


def test_a_forced_word_that_cannot_be_said_gives_nothing_and_spares_the_others() -> None:
    options, never = SearchOptions(beam_size=3, max_length=4), constant_table(0.5, 0.5, 0)

    found = search(
        TableStepper([never, constant_table(0.4, 0.3, 0.3)]), options, SearchTokens(forced=(2,))
    )

    assert found[0] == []
    assert said(found[1]) == [(2,)]


# --- Groups --------------------------------------------------------------------------------------


@pytest.mark.slow
@settings(max_examples=200)
@given(puzzles(("groups",)))
def test_groups_are_the_slow_search(puzzle) -> None:
    task, tables = puzzle

    found = search(TableStepper(tables), *task)

    for table, hypotheses in zip(tables, found, strict=True):
        assert_same(hypotheses, slow_diverse_beams(table, task))
        assert len(set(said(hypotheses))) == len(hypotheses)
        for hypothesis in hypotheses:
            assert_true_to_its_path(hypothesis, table)


@settings(max_examples=60)
@given(data=st.data(), seed=st.integers(0, 10_000), vocabulary=st.integers(2, 5))
def test_groups_that_give_all_they_hold_are_the_slow_search(data, seed, vocabulary) -> None:
    """So many captions that no photo is finished before all its sentences are."""
    task = data.draw(tasks(vocabulary, ("groups",)))
    task = task._replace(
        options=dataclasses.replace(task.options, num_captions=task.options.beam_size)
    )
    table = random_table(seed, vocabulary)

    (found,) = search(TableStepper([table]), *task)

    assert_same(found, slow_diverse_beams(table, task))


def test_one_group_is_a_beam() -> None:
    tables = [random_table(seed, 5) for seed in range(4)]
    task = Task(SearchOptions(beam_size=4, num_captions=4, max_length=5))

    found = search(TableStepper(tables), *task)

    for table, hypotheses in zip(tables, found, strict=True):
        assert_same(hypotheses, slow_diverse_beams(table, task))
        assert_same(hypotheses, slow_beam_search(table, task))


@pytest.mark.parametrize("penalty", [0.0, 1.0])
def test_groups_that_do_not_shun_each_other_are_one_beam_of_their_size(penalty) -> None:
    tables = [random_table(seed, 5) for seed in range(8)]
    small = SearchOptions(beam_size=3, num_captions=3, max_length=5, length_penalty=penalty)
    alike = dataclasses.replace(small, beam_size=9, num_captions=9, beam_groups=3, diversity=0.0)

    groups = search(TableStepper(tables), alike)
    beams = search(TableStepper(tables), small)

    for together, alone in zip(groups, beams, strict=True):
        assert_identical(together, alone)


@pytest.mark.parametrize(
    ("groups", "diversity", "expected"),
    [
        (2, 0.4, [(1,)]),
        (2, 0.6, [(1,), (2,)]),
        (3, 0.4, [(1,), (2,)]),
        (3, 1.7, [(1,), (2,), (3,)]),
    ],
)
def test_a_group_takes_another_word_when_the_earlier_groups_word_costs_too_much(
    groups, diversity, expected
) -> None:
    # Word 1 is log 0.5 - log 0.3 = 0.51 nats better than word 2, and log 5 = 1.61 than word 3. The
    # third group pays twice where both groups before it took word 1.
    table = written_table({(): (0, 0.5, 0.3, 0.1, 0.1)}, (1, 0, 0, 0, 0))
    options = SearchOptions(
        beam_size=groups,
        num_captions=groups,
        beam_groups=groups,
        diversity=diversity,
        max_length=3,
    )

    (found,) = search(TableStepper([table]), options)

    assert said(found)[:2] == expected[:2]
    assert len(found) == len(expected)
    own = [np.log({1: 0.5, 2: 0.3}.get(h.tokens[0], 0.1)) for h in found]
    assert [h.log_prob for h in found] == pytest.approx(own, rel=1e-5)  # the score pays nothing


def test_the_end_costs_the_groups_after_as_a_word_does() -> None:
    table = written_table({(): (0.5, 0.3, 0.2)}, (1, 0, 0))
    options = SearchOptions(beam_size=2, num_captions=2, beam_groups=2, diversity=1.0, max_length=3)

    (found,) = search(TableStepper([table]), options)

    assert said(found) == [(), (1,)]


def test_the_best_of_every_group_comes_before_any_second() -> None:
    # Group 1 holds "1" (0.5) and "2" (0.3), group 2, which shuns both, "3" and "4".
    table = written_table({(): (0, 0.5, 0.3, 0.15, 0.05)}, (1, 0, 0, 0, 0))
    options = SearchOptions(
        beam_size=4, num_captions=4, beam_groups=2, diversity=50.0, max_length=3
    )

    (found,) = search(TableStepper([table]), options)

    assert said(found) == [(1,), (3,), (2,), (4,)]


def test_groups_that_meet_give_no_sentence_before_it_has_ended() -> None:
    # Both groups end at once (0.6) as their best; word 1 (0.4) goes on and ends one word later.
    table = written_table({(): (0.6, 0.4), (1,): (0.1, 0.9)}, (1, 0))
    options = SearchOptions(beam_size=4, num_captions=2, beam_groups=2, diversity=0.0, max_length=5)

    (found,) = search(TableStepper([table]), options)

    assert_same(found, [Sentence((), np.log(0.6), True), Sentence((1, 1), np.log(0.36), True)])


# --- Draws ---------------------------------------------------------------------------------------


def draws_of(table, count: int, seed: int = 0, **given: object) -> list[Hypothesis]:
    numbers = given.pop("numbers", SearchTokens())
    options = SearchOptions(**({"beam_size": 1, "num_captions": count, "seed": seed} | given))
    (found,) = search(TableStepper([table]), options, numbers)
    return found


def assert_drawn_as(found: list[Hypothesis], expected: dict[Sentence, float]) -> None:
    """Pearson's test; the draws are the same on every run, so that it never fails by chance."""
    counts = Counter((tuple(h.tokens), h.ended) for h in found)
    shares = {(s.words, s.ended): share for s, share in expected.items()}
    assert sum(shares.values()) == pytest.approx(1.0)
    assert counts.keys() <= shares.keys()
    usual = {key: share for key, share in shares.items() if share * len(found) >= 5}
    rare = 1 - sum(usual.values())
    seen = [*(counts[key] for key in usual), len(found) - sum(counts[key] for key in usual)]
    hoped = [len(found) * share for share in (*usual.values(), max(rare, 1e-9))]
    statistic = sum((s - h) ** 2 / max(h, 1.0) for s, h in zip(seen, hoped, strict=True))
    freedom = len(usual)
    assert statistic < freedom + 4 * np.sqrt(2 * freedom) + 4


@pytest.mark.slow
@pytest.mark.parametrize(
    "how",
    [
        {"temperature": 1.0},
        {"temperature": 0.5},
        {"temperature": 3.0},
        {"temperature": 1.0, "top_k": 2},
        {"temperature": 1.0, "top_p": 0.6},
        {"temperature": 0.7, "top_p": 0.9},
        {"temperature": 1.5, "top_k": 3, "top_p": 0.8},
    ],
    ids=str,
)
@pytest.mark.parametrize("forbidden", [0.0, 0.3])
def test_sentences_are_drawn_with_the_probabilities_of_the_table(how, forbidden) -> None:
    table = random_table(11, 4, forbidden)

    found = draws_of(table, 4000, max_length=3, **how)

    options = SearchOptions(beam_size=1, max_length=3, **how)
    assert_drawn_as(found, drawn_sentences(table, Task(options)))


@pytest.mark.parametrize(
    ("rules", "numbers"),
    [
        ({"min_length": 2}, {}),
        ({"block_ngrams": 1}, {}),
        ({"banned_words": ("w2",)}, {"banned": (2,)}),
        ({"guard_endings": True}, {"bad_endings": (1,)}),
        ({"min_length": 1, "guard_endings": True}, {"bad_endings": (1, 2)}),
    ],
    ids=str,
)
def test_draws_share_what_a_rule_takes(rules, numbers) -> None:
    """What is left at a word is drawn in proportion."""
    table, numbered = random_table(5, 4), SearchTokens(**numbers)

    found = draws_of(table, 3000, temperature=1.0, max_length=3, numbers=numbered, **rules)

    options = SearchOptions(beam_size=1, temperature=1.0, max_length=3, **rules)
    assert_drawn_as(found, drawn_sentences(table, Task(options, numbered)))


@pytest.mark.parametrize(
    ("how", "kept"),
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
        ({"top_k": 2, "top_p": 0.56}, {1}),  # of the two, word 1 has 0.4 / 0.7 = 0.57
        ({"top_k": 2, "top_p": 0.58}, {1, 2}),
    ],
    ids=str,
)
def test_the_words_that_are_kept(how, kept) -> None:
    table = constant_table(0, 0.4, 0.3, 0.2, 0.1)

    found = draws_of(table, 500, temperature=1.0, max_length=1, **how)

    assert {h.tokens[0] for h in found} == kept


@pytest.mark.parametrize(
    "how",
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
def test_draws_without_a_choice_are_greedy(how) -> None:
    tables = [random_table(seed, 5) for seed in range(6)]
    drawn = SearchOptions(beam_size=1, num_captions=2, max_length=6, **how)
    (greedy, found) = (
        search(TableStepper(tables), SearchOptions(beam_size=1, max_length=6)),
        search(TableStepper(tables), drawn),
    )

    for (one,), two in zip(greedy, found, strict=True):
        assert_identical([one, one], two)


def test_a_great_temperature_draws_evenly_and_never_what_is_forbidden() -> None:
    found = draws_of(constant_table(0, 0.98, 0.01, 0.01, 0), 3000, temperature=1e30, max_length=1)

    counts = Counter(h.tokens[0] for h in found)
    assert counts.keys() == {1, 2, 3}
    assert all(abs(count - 1000) < 110 for count in counts.values())


def test_draws_are_the_same_again_and_others_with_another_seed_or_key() -> None:
    table = random_table(2, 5)
    options = SearchOptions(beam_size=1, num_captions=8, max_length=5, temperature=1.0)

    def drawn(seed: int, key: int) -> list[Hypothesis]:
        other = dataclasses.replace(options, seed=seed)
        return search(TableStepper([table]), other, seeds=[key])[0]

    assert_identical(drawn(1, 2), drawn(1, 2))
    different = {str(said(drawn(seed, key))) for seed in range(4) for key in range(4)}
    assert len(different) == 16  # (1, 2) is not (2, 1) either


def test_draws_do_not_depend_on_the_photos_beside_them() -> None:
    tables = [ending_after(1), random_table(1, 4), random_table(2, 4), ending_after(3)]
    keys = [5, 6, 7, 8]
    options = SearchOptions(beam_size=1, num_captions=6, max_length=6, temperature=0.7)
    stepper = TableStepper(tables)

    together = search(stepper, options, seeds=keys)
    turned = search(TableStepper(tables[::-1]), options, seeds=keys[::-1])[::-1]

    assert stepper.kept  # some photo left before the others
    for table, key, one, two in zip(tables, keys, together, turned, strict=True):
        assert_identical(one, two)
        assert_identical(one, search(TableStepper([table]), options, seeds=[key])[0])


def test_photos_of_one_key_and_table_draw_the_same() -> None:
    options = SearchOptions(beam_size=1, num_captions=6, max_length=6, temperature=1.0)

    one, two, three = search(TableStepper([random_table(1, 4)] * 3), options, seeds=[3, 4, 3])

    assert_identical(one, three)
    assert said(one) != said(two)


def test_more_draws_hold_the_fewer() -> None:
    table = random_table(9, 5)

    few, many = (draws_of(table, n, max_length=5, temperature=1.0) for n in (3, 30))

    assert not Counter(said(few)) - Counter(said(many))


@pytest.mark.parametrize("penalty", [0.0, 1.0])
def test_draws_come_best_first_with_the_models_own_probabilities(penalty) -> None:
    table = random_table(6, 4)

    found = draws_of(
        table, 50, max_length=5, temperature=0.4, top_k=3, top_p=0.9, length_penalty=penalty
    )

    options = SearchOptions(length_penalty=penalty)
    ranks = [rank(Sentence(tuple(h.tokens), h.log_prob, h.ended), options) for h in found]
    assert ranks == sorted(ranks, reverse=True)
    for hypothesis in found:
        assert_true_to_its_path(hypothesis, table)


def test_all_draws_are_given_though_they_agree() -> None:
    found = draws_of(ending_after(2), 7, temperature=0.1)

    assert said(found) == [(1, 1)] * 7


def test_a_draw_that_cannot_go_on_is_left_out() -> None:
    # After word 1 nothing may follow; after word 2 the sentence ends.
    table = written_table({(): (0, 0.5, 0.5), (1,): (0, 0, 0)}, (1, 0, 0))

    found = draws_of(table, 40, temperature=1.0)

    assert set(said(found)) == {(2,)}
    assert 5 < len(found) < 35
