"""The static site's search (search.js) against the Python search."""

from __future__ import annotations

import dataclasses
from itertools import product
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from reference_search import Task, searches
from table_stepper import END, START, Prefix, Table, TableStepper, encode_prefix, random_table

from captioner.options import SearchOptions
from captioner.search.grammar import Grammar
from captioner.search.left_out import continuations
from captioner.search.search import Hypothesis, search
from captioner.search.words import PeopleTokens, SearchTokens
from captioner.search.worth import FUNCTION_WORD, UNKNOWN_WORD, Worth
from captioner.serving.site.writer import reading_rows, worth_config

pytestmark = pytest.mark.slow

_SEARCH = """async ({table, options, words, alternatives, worth, truths, caption, start, end}) => {
    const {continuation, search} = await import("/search.js");
    const {Rewards} = await import("/worth.js");
    const width = table[""].logProbs.length;
    const stepper = {
        startToken: start, endToken: end, prefixes: null,
        async advance(tokens) {
            this.prefixes = this.prefixes === null ? [[]]
                : this.prefixes.map((prefix, k) => [...prefix, tokens[k]]);
            // Nonsense after the end must not matter.
            const steps = this.prefixes.map((prefix) => prefix.includes(end)
                ? {logProbs: Array(width).fill(7), alphas: [0, 0]} : table[prefix.join()]);
            const number = (value) => value ?? -Infinity;
            return {
                logProbs: Float32Array.from(steps.flatMap(({logProbs}) => logProbs.map(number))),
                alphas: Float32Array.from(steps.flatMap(({alphas}) => alphas)),
                gates: Float32Array.from(steps.map(({alphas}) => alphas[1] / 2)),
            };
        },
        reorder(parents) { this.prefixes = parents.map((k) => this.prefixes[k]); },
    };
    const rewards = worth && new Rewards(worth, options, truths.map((truth) => truth ?? NaN));
    const wanted = {alternatives, rewards};
    const found = caption === null ? await search(stepper, options, words, wanted)
        : [await continuation(stepper, caption, options, words)].filter((one) => one !== null);
    return found.map((one) => ({...one, alphas: one.alphas.map((alphas) => [...alphas])}));
}"""


def javascript_search(
    tab: Any,
    table: Table,
    task: Task,
    *,
    alternatives: int = 0,
    worth: Worth | None = None,
    caption: list[int] | None = None,
) -> list[Any]:
    """Return the captions of a table, or the continuation of ``caption`` if it is passed."""
    size = len(table(()))
    words = range(1, size)
    prefixes: list[Prefix] = [
        prefix for n in range(task.options.max_length) for prefix in product(words, repeat=n)
    ]

    def step(prefix: Prefix) -> dict[str, Any]:
        values = [value if np.isfinite(value) else None for value in table(prefix).tolist()]
        return {"logProbs": values, "alphas": encode_prefix(prefix)}

    given = {
        "table": {",".join(map(str, prefix)): step(prefix) for prefix in prefixes},
        "options": dataclasses.asdict(task.options),
        "words": task.tokens._asdict() | {"people": task.tokens.people._asdict()},
        "alternatives": alternatives,
        "worth": worth and site_config(worth, size),
        "truths": worth and [*worth.truths[0].tolist(), None],
        "caption": caption,
        "start": START,
        "end": END,
    }
    found: list[Any] = tab.evaluate(_SEARCH, given)
    return found


def site_config(worth: Worth, size: int) -> dict[str, Any]:
    return {
        "worth": worth_config(worth.grammar, worth.wide),
        "reading": {"rows": reading_rows(worth.rows, worth.truths.shape[1] - 1)},
        "tokens": {"end": END, "first_word": 0},
        "vocabulary": [""] * size,
    }


def hypothesis(one: dict[str, Any]) -> Hypothesis:
    return Hypothesis(
        tokens=one["tokens"],
        token_log_probs=np.array(one["logProbs"], np.float32),
        alphas=np.array(one["alphas"], np.float32),
        gates=np.array(one["gates"], np.float32),
        log_prob=one.get("logProb", sum(one["logProbs"])),
        ended=one.get("ended", True),
    )


def same_arrays(one: Hypothesis, other: Hypothesis) -> bool:
    pairs = [
        (one.token_log_probs, other.token_log_probs),
        (one.alphas.ravel(), other.alphas.ravel()),
        (one.gates, other.gates),
    ]
    return all(np.allclose(left, right, rtol=1e-4, atol=1e-5) for left, right in pairs)


@settings(max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(example=searches(kinds=["beam"]))
def test_beams_are_those_of_python(javascript, example) -> None:
    task, tables = example
    for table in tables:
        found = [hypothesis(one) for one in javascript_search(javascript, table, task)]

        (expected,) = search(TableStepper([table]), *task)
        assert [(h.tokens, h.ended) for h in found] == [(h.tokens, h.ended) for h in expected]
        assert [h.log_prob for h in found] == pytest.approx([h.log_prob for h in expected])
        assert all(map(same_arrays, found, expected))


PEOPLE = PeopleTokens(groups=((1, 2, 3),), never=(4,), ages=(5,), not_after_ages=(1,))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"rare_words": 0.9, "beam_size": 3, "num_captions": 3}, {}),
        ({"rare_words": 0.9, "length_penalty": 1.0}, {}),
        ({"neutral": True, "beam_size": 4, "num_captions": 4}, {"people": PEOPLE}),
        (
            {"rare_words": 0.5, "neutral": True, "beam_size": 4, "num_captions": 4},
            {"people": PEOPLE},
        ),
    ],
    ids=str,
)
def test_other_tables_are_searched_as_in_python(javascript, options, words) -> None:
    """With rare words and with neutral words for people."""
    wanted = SearchOptions(max_length=5, **options)
    rarity = (1.3, 1.3, 1.5, 1.7, 1.9, 2.0) if wanted.rare_words else ()
    tokens = SearchTokens(rarity=rarity, **words)
    changed = 0
    for seed in range(8):
        table = random_table(seed, 6, forbidden=0.2)

        given = javascript_search(javascript, table, Task(wanted, tokens))

        found = [hypothesis(one) for one in given]
        (expected,) = search(TableStepper([table]), wanted, tokens)
        assert [h.tokens for h in found] == [h.tokens for h in expected]
        assert [h.log_prob for h in found] == pytest.approx([h.log_prob for h in expected])
        assert all(map(same_arrays, found, expected))
        plain = dataclasses.replace(wanted, rare_words=0.0, neutral=False)
        changed += search(TableStepper([table]), plain)[0][0].tokens != expected[0].tokens
    assert changed


def random_worth(seed: int, size: int, *, grammar: bool, wide: bool) -> Worth:
    """Return random truths. The last two words share a stem, and 0 and 1 are function words."""
    rng = np.random.default_rng(seed)
    truths = rng.random((1, 4)).astype(np.float32)
    rows = np.array([FUNCTION_WORD, FUNCTION_WORD, UNKNOWN_WORD, 0, 1, 2, 2])[:size]
    endings = (rng.random(size) * (rng.random(size) < 0.6)).astype(np.float32)
    pairs = rng.permutation(size * size)
    triples = np.sort(rng.permutation(size**3)[:60])
    rules = np.sort(pairs[:6]), np.sort(pairs[6:16]), triples
    counted = Grammar(endings, *rules) if grammar else None
    return Worth(truths, rows, counted, [(4, 3, 5)] if wide else ())


@pytest.mark.parametrize("certainty", [0.0, 0.3, 0.6, 0.95])
@pytest.mark.parametrize("grammar", [False, True])
def test_the_worth_of_words_is_that_of_python(javascript, certainty, grammar) -> None:
    words = SearchTokens(repeatable=(1,))
    changed = 0
    for seed in range(12):
        options = SearchOptions(
            beam_size=3, num_captions=2, max_length=4, length_penalty=0.5,
            certainty=certainty, block_repeats=bool(seed % 2),
        )  # fmt: skip
        table = random_table(seed, 7, forbidden=0.1)
        worth = random_worth(seed, 7, grammar=grammar, wide=seed % 4 > 0)

        task = Task(options, words)
        given = javascript_search(javascript, table, task, worth=worth)

        def python(worth: Worth | None, table=table, task=task) -> list[Hypothesis]:
            return search(TableStepper([table]), *task, worth=worth)[0]

        found, expected = [hypothesis(one) for one in given], python(worth)
        assert [(h.tokens, h.ended) for h in found] == [(h.tokens, h.ended) for h in expected]
        assert [h.log_prob for h in found] == pytest.approx([h.log_prob for h in expected])
        assert all(map(same_arrays, found, expected))
        changed += [h.tokens for h in python(None)] != [h.tokens for h in expected]
    assert changed > 6


def test_left_out_words_are_those_of_python(javascript) -> None:
    continued = 0
    for seed in range(12):
        table = random_table(seed, 6, forbidden=0.1)
        options = SearchOptions(max_length=5, block_repeats=True, neutral=seed % 2 > 0)
        words = SearchTokens(banned=(5,), repeatable=(1,), people=PeopleTokens(((1, 2, 3),)))
        if not options.neutral:
            words = words._replace(people=PeopleTokens())
        caption = [[], [4], [1, 4], [4, 1, 1, 1, 1]][seed % 4]

        given = javascript_search(javascript, table, Task(options, words), caption=caption)

        (expected,) = continuations(TableStepper([table]), [caption], options, words)
        found = [hypothesis(one) for one in given]
        assert [one.tokens for one in found] == ([expected.tokens] if expected else [])
        assert all(same_arrays(one, expected) for one in found)
        continued += len(found)
    assert 4 < continued < 12


def test_alternatives_are_the_most_probable_words_before_rules(javascript) -> None:
    table = random_table(3, 5)
    task = Task(SearchOptions(beam_size=2, min_length=2, max_length=4, block_repeats=True))

    (found,) = javascript_search(javascript, table, task, alternatives=3)

    assert len(found["alternatives"]) == len(found["tokens"]) > 0
    for position, words in enumerate(found["alternatives"]):
        log_probs = table(tuple(found["tokens"][:position]))
        best = np.argsort(-log_probs)[:3]
        assert [word for word, _ in words] == best.tolist()
        assert [value for _, value in words] == pytest.approx(log_probs[best].tolist())
