"""Reference searches in plain Python, written from the help texts of the options.

None of them stops early or works on masks: each sentence is extended by one word, checked as a
whole, and dropped if it breaks a rule. ``Task`` holds the options of one search.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import strategies as st
from table_stepper import END, Prefix, Table, random_table

from captioner.options import SearchOptions
from captioner.search.search import Hypothesis
from captioner.search.words import SearchTokens


class Task(NamedTuple):
    """Search options, and the token ids of the words in them."""

    options: SearchOptions
    tokens: SearchTokens = SearchTokens()


class Sentence(NamedTuple):
    words: Prefix
    """Without the end token."""
    log_prob: float
    """Includes the end token's."""
    ended: bool


EMPTY = Sentence((), 0.0, False)


# --- rules ---------------------------------------------------------------------------------------


def breaks_a_rule(sentence: Sentence, task: Task) -> bool:
    """Whether the sentence breaks a rule that no continuation can repair."""
    options, words = task.options, sentence.words
    finished = sentence.ended or len(words) == options.max_length
    size = options.block_ngrams
    content = [word for word in words if word not in task.tokens.repeatable]
    phrases = [words[i : i + size] for i in range(len(words) - size + 1)] if size else []
    return (
        bool(set(words) & set(task.tokens.banned))
        or (sentence.ended and len(words) < options.min_length)
        or (finished and words[-1:] in [(word,) for word in task.tokens.bad_endings])
        or len(set(phrases)) < len(phrases)
        or (options.block_repeats and len(set(content)) < len(content))
    )


def contains_forced_words(sentence: Sentence, task: Task) -> bool:
    return set(task.tokens.forced) <= set(sentence.words)


def extend(table: Table, sentence: Sentence, task: Task) -> Iterator[tuple[int, Sentence]]:
    """Yield each next token and the extended sentence; token -1 keeps an ended sentence."""
    if sentence.ended:
        yield -1, sentence
        return
    words, so_far, _ = sentence
    for word, log_prob in enumerate(table(words).tolist()):
        score = so_far + log_prob
        if word == END:
            extended = Sentence(words, score, True)
        else:
            extended = Sentence((*words, word), score, False)
        if score > -np.inf and not breaks_a_rule(extended, task):
            yield word, extended


def by_rank(sentences: Sequence[Sentence], options: SearchOptions) -> list[Sentence]:
    def rank(one: Sentence) -> float:
        return one.log_prob / (len(one.words) + one.ended) ** options.length_penalty

    return sorted(sentences, key=rank, reverse=True)


# --- searches ------------------------------------------------------------------------------------


def all_sentences(table: Table, max_length: int, start: Sentence = EMPTY) -> Iterator[Sentence]:
    """Every complete sentence: those that end, and those truncated at ``max_length``."""
    for _, extended in extend(table, start, Task(SearchOptions(max_length=max_length))):
        if extended.ended or len(extended.words) == max_length:
            yield extended
        else:
            yield from all_sentences(table, max_length, extended)


def brute_force(table: Table, task: Task) -> list[Sentence]:
    """The best of all sentences that the options allow, by exhaustive enumeration."""
    found = [
        sentence
        for sentence in all_sentences(table, task.options.max_length)
        if not breaks_a_rule(sentence, task) and contains_forced_words(sentence, task)
    ]
    return by_rank(found, task.options)[: task.options.num_captions]


def reference_beam_search(table: Table, task: Task) -> list[Sentence]:
    """Beam search; an ended sentence stays in the beam with its score frozen.

    One beam per number of forced words used so far; a sentence may end only with all of them.
    """
    forced = set(task.tokens.forced)
    banks: list[list[Sentence]] = [[EMPTY]]
    for _ in range(task.options.max_length):
        extended: list[list[Sentence]] = [[] for _ in range(len(forced) + 1)]
        for sentence in (sentence for bank in banks for sentence in bank):
            for _, new in extend(table, sentence, task):
                if not new.ended or contains_forced_words(new, task):
                    extended[len(forced & set(new.words))].append(new)
        banks = [
            sorted(bank, key=lambda new: -new.log_prob)[: task.options.beam_size]
            for bank in extended
        ]
    return by_rank(banks[-1], task.options)[: task.options.num_captions]


def reference_diverse_beam_search(table: Table, task: Task) -> list[Sentence]:
    """The best of each group, then the second of each group, ...; without duplicates."""
    options = task.options
    size = options.beam_size // options.beam_groups
    groups = [[EMPTY] for _ in range(options.beam_groups)]
    for _ in range(options.max_length):
        taken: Counter[int] = Counter()  # words chosen by earlier groups at this step
        for number, group in enumerate(groups):
            extended = [pair for sentence in group for pair in extend(table, sentence, task)]
            penalized = {
                new: new.log_prob - options.diversity * (taken[word] if word >= 0 else 0)
                for word, new in extended
            }
            kept = sorted(extended, key=lambda pair: -penalized[pair[1]])[:size]
            groups[number] = [new for _, new in kept]
            taken.update(word for word, _ in kept if word >= 0)
    ranked = [by_rank(group, options) for group in groups]
    tiers = [[group[n] for group in ranked if n < len(group)] for n in range(size)]
    in_order = [sentence for tier in tiers for sentence in by_rank(tier, options)]
    return list(dict.fromkeys(in_order))[: options.num_captions]


def next_step_distribution(table: Table, task: Task, sentence: Sentence) -> dict[Sentence, float]:
    """Sampling probability of each continuation: temperature, then top_k, then top_p."""
    options = task.options
    extended = [new for _, new in extend(table, sentence, task)]
    extended.sort(key=lambda new: -new.log_prob)
    own = [np.exp((new.log_prob - sentence.log_prob) / options.temperature) for new in extended]
    if options.top_k:
        own = own[: options.top_k]
    probabilities = np.array(own) / sum(own)
    kept = 1  # the smallest set with a total of at least top_p
    while probabilities[:kept].sum() < options.top_p and kept < len(probabilities):
        kept += 1
    probabilities = probabilities[:kept] / probabilities[:kept].sum()
    return dict(zip(extended, probabilities.tolist(), strict=False))


def sampling_distribution(
    table: Table, task: Task, start: Sentence = EMPTY, probability: float = 1.0
) -> dict[Sentence, float]:
    """The probability of sampling each complete sentence."""
    if start.ended or len(start.words) == task.options.max_length:
        return {start: probability}
    found: dict[Sentence, float] = {}
    for extended, part in next_step_distribution(table, task, start).items():
        found |= sampling_distribution(table, task, extended, probability * part)
    return found


def assert_same_captions(found: Sequence[Hypothesis], expected: Sequence[Sentence]) -> None:
    assert [(tuple(h.tokens), h.ended) for h in found] == [(s.words, s.ended) for s in expected]
    scores = [hypothesis.log_prob for hypothesis in found]
    assert scores == pytest.approx([s.log_prob for s in expected], rel=1e-4, abs=1e-4)


# --- random searches -----------------------------------------------------------------------------

KINDS = ("beam", "groups", "forced", "sampling")


@st.composite
def tasks(draw: st.DrawFn, vocabulary: int, kinds: Sequence[str] = KINDS) -> Task:
    """Random valid options, small enough for the reference searches."""
    kind = draw(st.sampled_from([kind for kind in kinds if kind != "forced" or vocabulary > 1]))
    words = draw(st.permutations(range(1, vocabulary)))
    forced = draw(st.integers(1, min(3, len(words)))) if kind == "forced" else 0
    max_length = draw(st.integers(forced + 1, max(6, forced + 1)))
    fields: dict[str, object] = {
        "max_length": max_length,
        "length_penalty": draw(st.sampled_from([0.0, 0.5, 1.0])),
        "min_length": draw(st.integers(0, max_length - 1)),
        "block_ngrams": draw(st.integers(0, 3)),
        "block_repeats": draw(st.booleans()),
    }
    repeatable = tuple(words[: draw(st.integers(0, 2))])
    banned = tuple(words[forced : forced + draw(st.integers(0, 1))])
    endings = tuple(sorted(words)[: draw(st.integers(0, 2))])
    if kind == "sampling":
        fields |= {
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
        fields |= {
            "beam_size": beam_size,
            "num_captions": draw(st.integers(1, beam_size)),
            "beam_groups": groups,
        }
        if kind == "groups":
            fields["diversity"] = draw(st.sampled_from([0.0, 0.5, 3.0]))
    options = SearchOptions(
        **fields,  # type: ignore[arg-type]
        forced_words=tuple(f"w{word}" for word in words[:forced]),
        banned_words=tuple(f"w{word}" for word in banned),
        guard_endings=bool(endings),
    )
    return Task(options, SearchTokens(tuple(words[:forced]), banned, endings, repeatable))


@st.composite
def searches(draw: st.DrawFn, kinds: Sequence[str] = KINDS) -> tuple[Task, list[Table]]:
    """A task, and tables for one to three photos."""
    vocabulary, seed = draw(st.integers(2, 5)), draw(st.integers(0, 10_000))
    forbidden, photos = draw(st.sampled_from([0.0, 0.3])), draw(st.integers(1, 3))
    tables = [random_table(seed + photo, vocabulary, forbidden) for photo in range(photos)]
    return draw(tasks(vocabulary, kinds)), tables
