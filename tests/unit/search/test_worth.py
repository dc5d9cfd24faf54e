"""Rewards compared with a reference in plain Python, the grammar, and words left out."""

from __future__ import annotations

import math
from itertools import product

import numpy as np
import pytest
from table_stepper import END, TableStepper, constant_table, prefix_table, random_table

from captioner.options import SearchOptions
from captioner.search import worth as w
from captioner.search.grammar import Grammar
from captioner.search.left_out import continuations
from captioner.search.search import search
from captioner.search.worth import FUNCTION_WORD, UNKNOWN_WORD, Worth
from captioner.text import vocabulary as vocabulary_tokens
from captioner.text.vocabulary import UNKNOWN, Vocabulary

pytestmark = pytest.mark.usefixtures("array_library")

A, CAT, CATS, DOG, ODD = range(1, 6)
"""A function word, two forms of one stem, another stem, and a content word that is not read."""
ROWS = np.array([FUNCTION_WORD, FUNCTION_WORD, 0, 0, 1, UNKNOWN_WORD])
SIZE = len(ROWS)


def grammar(
    endings: dict[int, float] | None = None,
    not_ending: tuple[tuple[int, int], ...] = (),
    not_following: tuple[tuple[int, int], ...] = (),
    not_third: tuple[tuple[int, int, int], ...] = (),
) -> Grammar:
    shares = np.zeros(SIZE, np.float32)
    for token, share in (endings or {}).items():
        shares[token] = share
    not_ending, not_following = (
        np.array(sorted(one * SIZE + two for one, two in pairs), np.int64)
        for pairs in (not_ending, not_following)
    )
    triples = sorted((one * SIZE + two) * SIZE + three for one, two, three in not_third)
    return Grammar(shares, not_ending, not_following, np.array(triples, np.int64))


def score(table, caption, truths, rules: Grammar | None, certainty: float) -> float:
    """Compute the score of a caption, which ends unless it has the maximum length of 4 tokens."""
    weight, least = (w.WEIGHT, certainty) if certainty else (w.WHOLE_WEIGHT, w.WHOLE_CERTAINTY)
    total, said = 0.0, set()
    if certainty and not caption:
        return -math.inf
    for place, word in enumerate((*caption, END)[:4]):
        prefix = caption[:place]
        log_probs = table(prefix).astype(np.float64)
        own = log_probs[word]
        if certainty and word != END and own < log_probs.max() - w.PLAUSIBLE:
            total -= w.PENALTY
        row = ROWS[word]
        if row != FUNCTION_WORD:
            reward = max(weight * math.log(truths[row] / least), w.LEAST_WORTH)
            implausible = own < log_probs.max() - w.PLAUSIBLE
            if reward > 0 and (row in said or implausible):
                reward = 0.0
            own += reward
            said.add(row)
        if rules is not None and prefix:
            if prefix[-1] * SIZE + word in rules.not_following:
                return -math.inf
            if prefix[1:] and (prefix[-2] * SIZE + prefix[-1]) * SIZE + word in rules.not_third:
                return -math.inf
            if word == END and certainty:
                share = rules.endings[prefix[-1]]
                pair = prefix[-2] * SIZE + prefix[-1] if len(prefix) > 1 else -1
                if share and pair not in rules.not_ending:
                    own = max(own, math.log(share) + w.ENDING_GAIN)
                elif own <= w.SURE_ENDING:
                    return -math.inf
                own -= w.TOO_SHORT * max(w.ENOUGH - len(said), 0)
        total += own
    return total


@pytest.mark.parametrize("certainty", [0.0, 0.5, 0.9])
@pytest.mark.parametrize("seed", range(4))
def test_a_wide_beam_finds_the_best_score_of_all_captions(seed: int, certainty: float) -> None:
    rng = np.random.default_rng(seed)
    truths = rng.random((2, 3)).astype(np.float32)
    rules = None
    if seed % 2:
        triples = (A, DOG, END), (CAT, A, CAT), (CAT, A, DOG), (DOG, ODD, A)
        rules = grammar({CAT: 0.4, DOG: 0.1}, ((A, CAT),), ((A, CATS),), triples)
    tables = [random_table(seed, SIZE), random_table(seed + 100, SIZE)]
    # All captions are wanted, so that the search does not stop at the first good one.
    options = SearchOptions(beam_size=5**4, num_captions=5**4, max_length=4, certainty=certainty)

    found = search(TableStepper(tables), options, worth=Worth(truths, ROWS, rules))

    for table, of_photo, (best, *_) in zip(tables, truths, found, strict=True):
        # Row -2 (UNKNOWN_WORD) is the last column.
        known = {0: of_photo[0], 1: of_photo[1], UNKNOWN_WORD: of_photo[2]}
        captions = [
            words for length in range(5) for words in product(range(1, SIZE), repeat=length)
        ]
        expected = max(score(table, words, known, rules, certainty) for words in captions)
        assert score(table, tuple(best.tokens), known, rules, certainty) == pytest.approx(expected)


def test_the_log_probability_of_a_caption_stays_the_decoders() -> None:
    table = constant_table(0.3, 0.1, 0.3, 0.1, 0.1, 0.1)
    truths = np.array([[0.99, 0.1, 0.1]], np.float32)

    ((best,),) = search(
        TableStepper([table]), SearchOptions(beam_size=3), worth=Worth(truths, ROWS)
    )

    assert best.tokens == [CAT]
    assert best.log_prob == pytest.approx(2 * math.log(0.3), abs=1e-5)


def test_a_wide_word_has_the_probability_of_the_words_that_it_covers() -> None:
    """CAT and DOG are not true enough, and ODD covers both."""
    table = prefix_table({(): (0.01, 0.01, 0.44, 0.01, 0.44, 0.09)}, (0.99, *[0.002] * 5))
    truths = np.array([[0.6, 0.6, 0.99]], np.float32)
    options = SearchOptions(beam_size=3, certainty=0.55)

    found = [
        search(TableStepper([table]), options, worth=Worth(truths, ROWS, None, wide))[0][0]
        for wide in ((), ((ODD, CAT, DOG),))
    ]

    assert [one.tokens[0] for one in found] == [ODD, ODD]
    assert found[0].token_log_probs[0] == pytest.approx(math.log(0.09), abs=1e-4)
    assert found[1].token_log_probs[0] == pytest.approx(math.log(0.97), abs=1e-4)


def test_a_caption_does_not_end_after_a_pair_that_ends_no_human_caption() -> None:
    table = prefix_table(
        {
            (): (0.02, 0.9, 0.02, 0.02, 0.02, 0.02),
            (A,): (0.02, 0.02, 0.9, 0.02, 0.02, 0.02),
            (A, CAT): (0.02, 0.02, 0.02, 0.02, 0.9, 0.02),
        },
        (0.9, *[0.02] * 5),
    )
    worth = Worth(
        np.array([[0.9, 0.3, 0.3]], np.float32), ROWS, grammar({CAT: 0.5, DOG: 0.5}, ((A, CAT),))
    )
    options = SearchOptions(beam_size=3, certainty=0.5)

    ((allowed,),) = search(
        TableStepper([table]), options, worth=worth._replace(grammar=grammar({CAT: 0.5, DOG: 0.5}))
    )
    ((forbidden,),) = search(TableStepper([table]), options, worth=worth)

    assert allowed.tokens == [A, CAT]
    assert forbidden.tokens == [A, CAT, DOG]


def test_samples_do_not_depend_on_the_reading() -> None:
    options = SearchOptions(beam_size=1, temperature=1.0, num_captions=5)
    truths = np.array([[0.9, 0.001, 0.9]], np.float32)

    plain, read = (
        search(TableStepper([random_table(3, SIZE)]), options, worth=worth)[0]
        for worth in (None, Worth(truths, ROWS))
    )

    assert [one.tokens for one in plain] == [one.tokens for one in read]


def test_grammar_is_counted_in_captions() -> None:
    vocabulary = Vocabulary(["a", "an", "cat", "umbrella", "red", "on", "top"])
    a, an, cat, umbrella, red, on, top = range(4, 11)
    captions = [[a, cat], [an, umbrella], [a, red, cat, on, top]] * 300

    found = Grammar.count(captions, vocabulary)

    size = len(vocabulary)
    assert set(np.flatnonzero(found.endings)) == {cat, umbrella}  # "top" is a function word
    assert found.endings[umbrella] == pytest.approx(300 / (300 + 10))
    assert red * size + cat in found.not_ending
    assert a * size + cat not in found.not_ending
    assert {a * size + umbrella, an * size + cat, an * size + red} <= {*found.not_following}
    assert a * size + cat not in found.not_following


def test_absent_triples_are_found_in_captions() -> None:
    """ "a red cat" is missing, although both "a red" and "red cat" are frequent."""
    vocabulary = Vocabulary(["a", "the", "red", "cat", "dog", "is"])
    a, the, red, cat, dog, is_ = range(4, 10)
    captions = [[a, red, dog], [the, red, cat], [the, red, dog], [the, dog, is_, red]] * 30
    captions += [[UNKNOWN, red, cat]] * 30

    found = Grammar.count(captions, vocabulary)

    size, end = len(vocabulary), vocabulary_tokens.END
    keys = ((a, red, cat), (the, red, cat), (is_, red, end), (the, red, end))
    absent = [(one * size + two) * size + three in found.not_third for one, two, three in keys]
    assert absent == [True, False, False, True]
    assert UNKNOWN not in {key // size % size for key in found.not_third.tolist()}


def test_a_word_takes_one_article() -> None:
    vocabulary = Vocabulary(["a", "an", "oven", "cat"])
    a, an, oven, cat = range(4, 8)

    found = Grammar.count([[an, oven]] * 4 + [[a, oven]] + [[a, cat]] * 2, vocabulary)

    size = len(vocabulary)
    assert {a * size + oven, an * size + cat} <= set(found.not_following.tolist())
    assert not {an * size + oven, a * size + cat} & set(found.not_following.tolist())


def test_what_was_left_out_continues_the_caption_greedily() -> None:
    tables = [random_table(seed, SIZE) for seed in (1, 2, 3)]
    captions = [[CAT], [], [DOG, A]]
    options = SearchOptions(beam_size=3, max_length=6)

    found = continuations(TableStepper(tables), captions, options)

    for table, caption, rest in zip(tables, captions, found, strict=True):
        words = tuple(caption)
        while len(words) < 5 and (word := int(table(words).argmax())) != END:
            words += (word,)
        expected = list(words[len(caption) :])
        assert (rest.tokens if rest else []) == expected
        if rest:
            each = [table(words[:n])[words[n]] for n in range(len(caption), len(words))]
            np.testing.assert_allclose(rest.token_log_probs, each, rtol=1e-5)
            np.testing.assert_allclose(rest.alphas[:, 0], range(len(caption), len(words)))
