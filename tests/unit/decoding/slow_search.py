"""Searches in plain Python, one sentence at a time, written from what the options' help says.

None of them stops early and none works step by step on masks: a sentence is grown, looked at as a
whole, and dropped when it breaks a rule. ``Task`` holds what is looked for.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import strategies as st
from table_stepper import END, Prefix, Table, random_table

from captioner.config import SearchOptions
from captioner.decoding.search import Hypothesis
from captioner.decoding.words import SearchTokens


class Task(NamedTuple):
    """Options, and the numbers of their words."""

    options: SearchOptions
    numbers: SearchTokens = SearchTokens()


class Sentence(NamedTuple):
    words: Prefix
    """Without the end token."""
    log_prob: float
    """With it."""
    ended: bool


EMPTY = Sentence((), 0.0, False)


# --- what may be said ----------------------------------------------------------------------------


def breaks_a_rule(sentence: Sentence, task: Task) -> bool:
    """Whether nothing that follows can make this sentence one that the options allow."""
    options, words = task.options, sentence.words
    finished = sentence.ended or len(words) == options.max_length
    size = options.block_ngrams
    content = [word for word in words if word not in task.numbers.repeatable]
    phrases = [words[i : i + size] for i in range(len(words) - size + 1)] if size else []
    return (
        bool(set(words) & set(task.numbers.banned))
        or (sentence.ended and len(words) < options.min_length)
        or (finished and words[-1:] in [(word,) for word in task.numbers.bad_endings])
        or len(set(phrases)) < len(phrases)
        or (options.block_repeats and len(set(content)) < len(content))
    )


def holds_the_words(sentence: Sentence, task: Task) -> bool:
    return set(task.numbers.forced) <= set(sentence.words)


def grow(table: Table, sentence: Sentence, task: Task) -> Iterator[tuple[int, Sentence]]:
    """Every way on, by its word; none is -1: a sentence that has ended goes on as it is."""
    if sentence.ended:
        yield -1, sentence
        return
    words, so_far, _ = sentence
    for word, log_prob in enumerate(table(words).tolist()):
        score = so_far + log_prob
        if word == END:
            grown = Sentence(words, score, True)
        else:
            grown = Sentence((*words, word), score, False)
        if score > -np.inf and not breaks_a_rule(grown, task):
            yield word, grown


def rank(sentence: Sentence, options: SearchOptions) -> float:
    return sentence.log_prob / (len(sentence.words) + sentence.ended) ** options.length_penalty


def best_first(sentences: Sequence[Sentence], options: SearchOptions) -> list[Sentence]:
    return sorted(sentences, key=lambda sentence: -rank(sentence, options))


# --- searches ------------------------------------------------------------------------------------


def all_sentences(table: Table, max_length: int, begun: Sentence = EMPTY) -> Iterator[Sentence]:
    """Every sentence there is: those that end, and those cut at the greatest length."""
    for _, grown in grow(table, begun, Task(SearchOptions(max_length=max_length))):
        if grown.ended or len(grown.words) == max_length:
            yield grown
        else:
            yield from all_sentences(table, max_length, grown)


def brute_force(table: Table, task: Task) -> list[Sentence]:
    """The best of all sentences that the options allow."""
    found = [
        sentence
        for sentence in all_sentences(table, task.options.max_length)
        if not breaks_a_rule(sentence, task) and holds_the_words(sentence, task)
    ]
    return best_first(found, task.options)[: task.options.num_captions]


def slow_beam_search(table: Table, task: Task) -> list[Sentence]:
    """An ended sentence keeps its place, its score frozen."""
    beams = [EMPTY]
    for _ in range(task.options.max_length):
        grown = [new for sentence in beams for _, new in grow(table, sentence, task)]
        beams = sorted(grown, key=lambda new: -new.log_prob)[: task.options.beam_size]
    return best_first(beams, task.options)[: task.options.num_captions]


def slow_grid_beam_search(table: Table, task: Task) -> list[Sentence]:
    """A beam for every number of forced words that are said; all must be, before the end."""
    forced = set(task.numbers.forced)
    banks: list[list[Sentence]] = [[EMPTY]]
    for _ in range(task.options.max_length):
        grown: list[list[Sentence]] = [[] for _ in range(len(forced) + 1)]
        for sentence in (sentence for bank in banks for sentence in bank):
            for _, new in grow(table, sentence, task):
                if not new.ended or holds_the_words(new, task):
                    grown[len(forced & set(new.words))].append(new)
        banks = [
            sorted(bank, key=lambda new: -new.log_prob)[: task.options.beam_size] for bank in grown
        ]
    return best_first(banks[-1], task.options)[: task.options.num_captions]


def slow_groups(table: Table, task: Task) -> list[list[Sentence]]:
    """Every group of a diverse beam search at its end, best first."""
    options = task.options
    size = options.beam_size // options.beam_groups
    groups = [[EMPTY] for _ in range(options.beam_groups)]
    for _ in range(options.max_length):
        taken: Counter[int] = Counter()  # by the groups before, at this place
        for number, group in enumerate(groups):
            grown = [pair for sentence in group for pair in grow(table, sentence, task)]
            worth = {
                new: new.log_prob - options.diversity * (taken[word] if word >= 0 else 0)
                for word, new in grown
            }
            kept = sorted(grown, key=lambda pair: -worth[pair[1]])[:size]
            groups[number] = [new for _, new in kept]
            taken.update(word for word, _ in kept if word >= 0)
    return [best_first(group, options) for group in groups]


def slow_diverse_beams(table: Table, task: Task) -> list[Sentence]:
    """The best of every group, then the second of every group, ...; every sentence once."""
    groups, options = slow_groups(table, task), task.options
    size = options.beam_size // options.beam_groups
    tiers = [[group[place] for group in groups if place < len(group)] for place in range(size)]
    in_order = [sentence for tier in tiers for sentence in best_first(tier, options)]
    return list(dict.fromkeys(in_order))[: options.num_captions]


def drawn_shares(table: Table, task: Task, sentence: Sentence) -> dict[Sentence, float]:
    """How probable the next draw makes each way on: temperature, then top_k, then top_p."""
    options = task.options
    grown = [new for _, new in grow(table, sentence, task)]
    grown.sort(key=lambda new: -new.log_prob)
    own = [np.exp((new.log_prob - sentence.log_prob) / options.temperature) for new in grown]
    if options.top_k:
        own = own[: options.top_k]
    shares = np.array(own) / sum(own)
    kept = 1  # the fewest that hold top_p
    while shares[:kept].sum() < options.top_p and kept < len(shares):
        kept += 1
    shares = shares[:kept] / shares[:kept].sum()
    return dict(zip(grown, shares.tolist(), strict=False))


def drawn_sentences(
    table: Table, task: Task, begun: Sentence = EMPTY, share: float = 1.0
) -> dict[Sentence, float]:
    """The probability with which every sentence is drawn."""
    if begun.ended or len(begun.words) == task.options.max_length:
        return {begun: share}
    found: dict[Sentence, float] = {}
    for grown, part in drawn_shares(table, task, begun).items():
        found |= drawn_sentences(table, task, grown, share * part)
    return found


def assert_same(found: Sequence[Hypothesis], expected: Sequence[Sentence]) -> None:
    assert [(tuple(h.tokens), h.ended) for h in found] == [(s.words, s.ended) for s in expected]
    scores = [hypothesis.log_prob for hypothesis in found]
    assert scores == pytest.approx([s.log_prob for s in expected], rel=1e-4, abs=1e-4)


# --- tasks ---------------------------------------------------------------------------------------

KINDS = ("beam", "groups", "forced", "draws")


@st.composite
def tasks(
    draw: st.DrawFn, vocabulary: int, kinds: Sequence[str] = KINDS, rules: bool = True
) -> Task:
    """Options without contradictions, small enough for the slow searches."""
    kind = draw(st.sampled_from([kind for kind in kinds if kind != "forced" or vocabulary > 1]))
    words = draw(st.permutations(range(1, vocabulary)))
    forced = draw(st.integers(1, min(3, len(words)))) if kind == "forced" else 0
    max_length = draw(st.integers(forced + 1, max(6, forced + 1)))
    some: dict[str, object] = {
        "max_length": max_length,
        "length_penalty": draw(st.sampled_from([0.0, 0.5, 1.0])),
    }
    banned: tuple[int, ...] = ()
    endings: tuple[int, ...] = ()
    if rules:
        some["min_length"] = draw(st.integers(0, max_length - 1))
        some["block_ngrams"] = draw(st.integers(0, 3))
        banned = tuple(words[forced : forced + draw(st.integers(0, 1))])
        endings = tuple(sorted(words)[: draw(st.integers(0, 2))])
    if kind == "draws":
        some |= {
            "beam_size": 1,
            "num_captions": draw(st.integers(1, 6)),
            "temperature": draw(st.sampled_from([0.3, 1.0, 2.0])),
            "top_k": draw(st.integers(0, 3)),
            "top_p": draw(st.sampled_from([0.3, 0.8, 1.0])),
            "seed": draw(st.integers(0, 3)),
        }
    else:
        groups = draw(st.integers(2, 3)) if kind == "groups" else 1
        beam_size = groups * draw(st.integers(1, 6 // groups))
        some |= {
            "beam_size": beam_size,
            "num_captions": draw(st.integers(1, beam_size)),
            "beam_groups": groups,
        }
        if kind == "groups":
            some["diversity"] = draw(st.sampled_from([0.0, 0.5, 3.0]))
    options = SearchOptions(
        **some,  # type: ignore[arg-type]
        forced_words=tuple(f"w{word}" for word in words[:forced]),
        banned_words=tuple(f"w{word}" for word in banned),
        guard_endings=bool(endings),
    )
    return Task(options, SearchTokens(tuple(words[:forced]), banned, endings))


@st.composite
def puzzles(draw: st.DrawFn, kinds: Sequence[str] = KINDS) -> tuple[Task, list[Table]]:
    """A task, and the tables of one to three photos."""
    vocabulary, seed = draw(st.integers(2, 5)), draw(st.integers(0, 10_000))
    forbidden, photos = draw(st.sampled_from([0.0, 0.3])), draw(st.integers(1, 3))
    tables = [random_table(seed + photo, vocabulary, forbidden) for photo in range(photos)]
    return draw(tasks(vocabulary, kinds)), tables
