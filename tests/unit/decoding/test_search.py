"""Beam search against brute force, and narrow beams against a slow search in plain Python.

The tables below give the next word's log-probabilities for a photo and the whole sentence so far,
so that a beam that lost track of its own past is found out.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from captioner.config import SearchOptions
from captioner.decoding.search import Advance, Hypothesis, search

START, END = 99, 0  # the start token need not be a word
Prefix = tuple[int, ...]
Table = Callable[[Prefix], np.ndarray]
Sentence = tuple[Prefix, float, bool]
"""Words without the end token, log-probability with it, whether it ended."""


def random_table(seed: int, vocabulary: int, forbidden: float = 0.0) -> Table:
    """Random log-probabilities; a share of the words, the end too, is forbidden anywhere."""

    @cache
    def table(prefix: Prefix) -> np.ndarray:
        rng = np.random.default_rng([seed, len(prefix), *prefix])
        logits = 2 * rng.normal(size=vocabulary)
        log_probs = logits - np.log(np.exp(logits).sum())
        log_probs[rng.random(vocabulary) < forbidden] = -np.inf
        return log_probs.astype(np.float32)

    return table


def code(prefix: Prefix) -> list[float]:
    """Tells a prefix apart from all others: the attention of the table."""
    return [len(prefix), sum((word + 1) * 10**place for place, word in enumerate(prefix))]


class TableStepper:
    """A stepper over tables, one a photo; it checks what it is asked as it goes."""

    device = torch.device("cpu")
    start_token, end_token = START, END

    def __init__(self, tables: list[Table]) -> None:
        self.tables = list(tables)
        self.prefixes: list[list[Prefix]] = [[()] for _ in tables]
        self.kept: list[int] = []
        self.started = False

    @property
    def batch_size(self) -> int:
        return len(self.tables)

    def advance(self, tokens: Tensor) -> Advance:
        assert tokens.shape == (len(self.tables), len(self.prefixes[0]))
        if self.started:
            grown = zip(self.prefixes, tokens.tolist(), strict=True)
            self.prefixes = [
                [(*prefix, word) for prefix, word in zip(prefixes, words, strict=True)]
                for prefixes, words in grown
            ]
        else:
            assert (tokens == START).all()
            self.started = True
        told = [
            [self._tell(table, prefix) for prefix in prefixes]
            for table, prefixes in zip(self.tables, self.prefixes, strict=True)
        ]
        codes = torch.tensor([[code(prefix) for prefix in beams] for beams in self.prefixes])
        return Advance(torch.from_numpy(np.array(told)), codes, codes[..., 1] / 2)

    def _tell(self, table: Table, prefix: Prefix) -> np.ndarray:
        if END in prefix:  # nonsense after the end must not matter
            return np.full_like(table(()), 7.0)
        return table(prefix)

    def reorder(self, parents: Tensor) -> None:
        rows = zip(self.prefixes, parents.tolist(), strict=True)
        self.prefixes = [[prefixes[k] for k in row] for prefixes, row in rows]

    def keep(self, rows: Tensor) -> None:
        self.kept.append(len(rows))
        self.tables = [self.tables[row] for row in rows.tolist()]
        self.prefixes = [self.prefixes[row] for row in rows.tolist()]


# --- two slow searches ---------------------------------------------------------------------------


def rank(sentence: Sentence, penalty: float) -> float:
    words, log_prob, ended = sentence
    return log_prob / (len(words) + ended) ** penalty


def all_sentences(table: Table, max_length: int, prefix: Prefix = (), so_far: float = 0.0):
    """Every sentence there is: those that end, and those cut at the greatest length."""
    for word, log_prob in enumerate(table(prefix).tolist()):
        score = so_far + log_prob
        if score == -np.inf:
            continue
        if word == END:
            yield prefix, score, True
        elif len(prefix) + 1 == max_length:
            yield (*prefix, word), score, False
        else:
            yield from all_sentences(table, max_length, (*prefix, word), score)


def brute_force(table: Table, options: SearchOptions) -> list[Sentence]:
    found = all_sentences(table, options.max_length)
    found = sorted(found, key=lambda sentence: -rank(sentence, options.length_penalty))
    return found[: options.num_captions]


def slow_beam_search(table: Table, options: SearchOptions) -> list[Sentence]:
    """The same rule one sentence at a time: an ended one keeps its place, its score frozen."""
    beams: list[Sentence] = [((), 0.0, False)]
    for _ in range(options.max_length):
        grown: list[Sentence] = []
        for words, score, ended in beams:
            if ended:
                grown.append((words, score, True))
                continue
            for word, log_prob in enumerate(table(words).tolist()):
                if word == END:
                    grown.append((words, score + log_prob, True))
                else:
                    grown.append(((*words, word), score + log_prob, False))
        grown = [sentence for sentence in grown if sentence[1] > -np.inf]
        beams = sorted(grown, key=lambda sentence: -sentence[1])[: options.beam_size]
        ended = sorted((rank(s, options.length_penalty) for s in beams if s[2]), reverse=True)
        hopes = [s[1] / options.max_length**options.length_penalty for s in beams if not s[2]]
        enough = len(ended) >= options.num_captions
        if not hopes or (enough and ended[options.num_captions - 1] >= max(hopes)):
            break
    beams.sort(key=lambda sentence: -rank(sentence, options.length_penalty))
    return beams[: options.num_captions]


def assert_same(found: list[Hypothesis], expected: list[Sentence]) -> None:
    assert [(tuple(h.tokens), h.ended) for h in found] == [(s[0], s[2]) for s in expected]
    scores = [hypothesis.log_prob for hypothesis in found]
    assert scores == pytest.approx([s[1] for s in expected], rel=1e-4, abs=1e-4)


def assert_true_to_its_path(found: Hypothesis, table: Table) -> None:
    """Every word's evidence is that of the sentence it stands in."""
    tokens = tuple(found.tokens)
    prefixes = [tokens[:t] for t in range(len(tokens))]
    assert found.token_log_probs.shape == found.gates.shape == (len(tokens),)
    assert found.alphas.shape == (len(tokens), 2)
    assert found.alphas.tolist() == [code(prefix) for prefix in prefixes]
    assert found.gates.tolist() == [code(prefix)[1] / 2 for prefix in prefixes]
    said = [float(table(p)[w]) for p, w in zip(prefixes, tokens, strict=True)]
    assert found.token_log_probs.tolist() == pytest.approx(said)
    end = float(table(tokens)[END]) if found.ended else 0.0
    assert found.log_prob == pytest.approx(sum(said) + end, rel=1e-4, abs=1e-4)


# --- tests ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("penalty", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("num_captions", [1, 4])
@pytest.mark.parametrize("forbidden", [0.0, 0.3])
def test_a_wide_beam_is_brute_force(penalty, num_captions, forbidden) -> None:
    tables = [random_table(seed, 3, forbidden) for seed in range(4)]
    options = SearchOptions(
        beam_size=3**4, num_captions=num_captions, max_length=4, length_penalty=penalty
    )

    found = search(TableStepper(tables), options)

    for table, hypotheses in zip(tables, found, strict=True):
        assert_same(hypotheses, brute_force(table, options))


def test_a_wide_beam_gives_every_sentence_once_and_no_more() -> None:
    table = random_table(5, 2)
    options = SearchOptions(beam_size=50, num_captions=50, max_length=4)

    (found,) = search(TableStepper([table]), options)

    assert len(found) == 5  # ended after 0 to 3 words, or cut after 4
    assert_same(found, brute_force(table, options))
    assert sum(np.exp(h.log_prob) for h in found) == pytest.approx(1.0)


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
def test_narrow_beams_are_the_slow_search(
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
        assert_same(hypotheses, slow_beam_search(table, options))
        for hypothesis in hypotheses:
            assert_true_to_its_path(hypothesis, table)
            assert len(hypothesis.tokens) <= max_length
            assert END not in hypothesis.tokens
        ranks = [rank((tuple(h.tokens), h.log_prob, h.ended), penalty) for h in hypotheses]
        assert all(one >= other for one, other in pairwise(ranks))


def test_a_beam_of_one_takes_the_likeliest_word_every_time() -> None:
    tables = [random_table(seed, 5) for seed in range(6)]

    found = search(TableStepper(tables), SearchOptions(beam_size=1, max_length=7))

    for table, (hypothesis,) in zip(tables, found, strict=True):
        words: Prefix = ()
        while len(words) < 7 and (word := int(table(words).argmax())) != END:
            words = (*words, word)
        assert tuple(hypothesis.tokens) == words
        assert hypothesis.ended == (len(words) < 7)


@pytest.mark.parametrize("penalty", [0.0, 1.0])
def test_a_batch_is_its_photos_one_by_one(penalty) -> None:
    tables = [random_table(seed, 5) for seed in range(8)]
    options = SearchOptions(beam_size=3, num_captions=2, max_length=8, length_penalty=penalty)
    stepper = TableStepper(tables)

    together = search(stepper, options)

    assert stepper.kept  # some photo finished before the others
    for table, hypotheses in zip(tables, together, strict=True):
        (alone,) = search(TableStepper([table]), options)
        assert len(alone) == len(hypotheses) == 2
        for one, other in zip(alone, hypotheses, strict=True):
            assert one.tokens == other.tokens
            assert one.log_prob == other.log_prob
            for name in ("token_log_probs", "alphas", "gates"):
                assert torch.equal(getattr(one, name), getattr(other, name))


def ending_after(words: int, vocabulary: int = 4) -> Table:
    """Sure to end after so many words."""

    def table(prefix: Prefix) -> np.ndarray:
        right = END if len(prefix) == words else 1
        log_probs = np.full(vocabulary, np.log(0.01 / (vocabulary - 1)), dtype=np.float32)
        log_probs[right] = np.log(0.99)
        return log_probs

    return table


def test_finished_photos_leave_the_batch_and_keep_their_place_in_the_answer() -> None:
    tables = [ending_after(n) for n in (3, 0, 9, 1, 3)]
    stepper = TableStepper(tables)

    found = search(stepper, SearchOptions(beam_size=2, max_length=6))

    assert [len(hypotheses[0].tokens) for hypotheses in found] == [3, 0, 6, 1, 3]
    assert [hypotheses[0].ended for hypotheses in found] == [True, True, False, True, True]
    assert stepper.kept == [4, 3, 1]


def test_the_search_stops_when_every_photo_is_finished() -> None:
    stepper = TableStepper([ending_after(1), ending_after(1)])

    search(stepper, SearchOptions(beam_size=2, max_length=1000))

    assert len(stepper.prefixes[0][0]) == 1


@pytest.mark.parametrize("beam_size", [1, 3])
def test_sentences_that_cannot_end_are_cut(beam_size) -> None:
    def table(prefix: Prefix) -> np.ndarray:
        return np.log(np.array([0.0, 0.5, 0.3, 0.2], dtype=np.float32) + 1e-38) + np.array(
            [-np.inf, 0, 0, 0], dtype=np.float32
        )

    options = SearchOptions(beam_size=beam_size, num_captions=beam_size, max_length=5)
    (found,) = search(TableStepper([table]), options)

    assert len(found) == beam_size
    assert found[0].tokens == [1] * 5
    assert not any(hypothesis.ended for hypothesis in found)
    assert found[0].log_prob == pytest.approx(5 * np.log(0.5), rel=1e-5)


def test_one_word_at_most() -> None:
    table = random_table(3, 4)
    options = SearchOptions(beam_size=9, num_captions=9, max_length=1)

    (found,) = search(TableStepper([table]), options)

    assert_same(found, brute_force(table, options))
    assert sorted(len(hypothesis.tokens) for hypothesis in found) == [0, 1, 1, 1]


def test_ties_give_different_sentences() -> None:
    def table(prefix: Prefix) -> np.ndarray:
        return np.full(4, np.log(0.25), dtype=np.float32)

    options = SearchOptions(beam_size=5, num_captions=5, max_length=3)
    (found,) = search(TableStepper([table]), options)

    assert len({(tuple(h.tokens), h.ended) for h in found}) == 5
    assert found[0].tokens == []  # the only sentence of one decision
    for hypothesis in found:
        assert_true_to_its_path(hypothesis, table)


def test_forbidden_words_are_never_said_even_to_fill_a_wide_beam() -> None:
    def table(prefix: Prefix) -> np.ndarray:
        return np.array([np.log(0.5), -np.inf, np.log(0.5), -np.inf], dtype=np.float32)

    options = SearchOptions(beam_size=10, num_captions=10, max_length=3)
    (found,) = search(TableStepper([table]), options)

    assert len(found) == 4
    assert {word for hypothesis in found for word in hypothesis.tokens} == {2}
    assert all(np.isfinite(hypothesis.log_prob) for hypothesis in found)


def test_a_photo_with_nothing_to_say_gives_nothing_and_spares_the_others() -> None:
    def silent(prefix: Prefix) -> np.ndarray:
        return np.full(3, -np.inf, dtype=np.float32)

    found = search(
        TableStepper([silent, ending_after(2, vocabulary=3)]), SearchOptions(beam_size=2)
    )

    assert found[0] == []
    assert found[1][0].tokens == [1, 1]


def test_a_length_penalty_prefers_the_longer_sentence() -> None:
    # "END" at once: log 0.4; "1 1 END": log 0.6 * 0.7 * 0.9 = log 0.378.
    def table(prefix: Prefix) -> np.ndarray:
        end = {0: 0.4, 1: 0.3}.get(len(prefix), 0.9)
        return np.log(np.array([end, 1 - end], dtype=np.float32))

    said = {}
    for penalty in (0.0, 0.5, 1.0):
        options = SearchOptions(beam_size=4, max_length=3, length_penalty=penalty)
        ((found,),) = search(TableStepper([table]), options)
        said[penalty] = found.tokens

    assert said == {0.0: [], 0.5: [1, 1], 1.0: [1, 1]}


def test_a_length_penalty_waits_for_a_sentence_that_overtakes_late() -> None:
    # "END": log 0.7 = -0.36. "1 1 1 1 END" is worth (log 0.3 + 4 log 0.99) / 5 = -0.25 in the
    # end, but still (log 0.3 + log 0.99) / 2 = -0.61 one word after "END" was found.
    def table(prefix: Prefix) -> np.ndarray:
        end = {0: 0.7, 4: 0.99}.get(len(prefix), 0.01)
        return np.log(np.array([end, 1 - end], dtype=np.float32))

    options = SearchOptions(beam_size=3, max_length=5, length_penalty=1.0)
    ((found,),) = search(TableStepper([table]), options)

    assert found.tokens == [1, 1, 1, 1]
    assert found.ended


def test_no_photos_give_no_captions() -> None:
    options = SearchOptions(max_length=1)

    class Empty(TableStepper):
        def advance(self, tokens: Tensor) -> Advance:
            return Advance(torch.zeros(0, 1, 4), torch.zeros(0, 1, 2), torch.zeros(0, 1))

    assert search(Empty([]), options) == []
