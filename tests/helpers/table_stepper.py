"""A stepper whose "model" is a table, so that a test knows everything that the search can see.

A table maps the whole prefix to the next token's log-probabilities, so that a beam with the wrong
history is detected.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import array_api_compat.torch
import numpy as np
import pytest
import torch

from captioner.search.arrays import Array
from captioner.search.search import Advance, Hypothesis

START, END = 99, 0  # the start token need not be a word
Prefix = tuple[int, ...]
Table = Callable[[Prefix], np.ndarray]


def random_table(seed: int, vocabulary: int, forbidden: float = 0.0) -> Table:
    """Random log-probabilities; each token, even the end, is forbidden with a given probability."""

    @cache
    def table(prefix: Prefix) -> np.ndarray:
        rng = np.random.default_rng([seed, len(prefix), *prefix])
        logits = 2 * rng.normal(size=vocabulary)
        log_probs = logits - np.log(np.exp(logits).sum())
        log_probs[rng.random(vocabulary) < forbidden] = -np.inf
        return log_probs.astype(np.float32)

    return table


def constant_table(*probabilities: float) -> Table:
    """The same probabilities after every prefix; the end token's comes first."""
    with np.errstate(divide="ignore"):
        log_probs = np.log(np.array(probabilities)).astype(np.float32)
    return lambda prefix: log_probs


def prefix_table(by_prefix: dict[Prefix, Sequence[float]], default: Sequence[float]) -> Table:
    """Probabilities for the given prefixes, and a default for all others."""
    tables = {prefix: constant_table(*probabilities) for prefix, probabilities in by_prefix.items()}
    rest = constant_table(*default)
    return lambda prefix: tables.get(prefix, rest)(prefix)


def ending_after(words: int, vocabulary: int = 4) -> Table:
    """A table whose likeliest sentence ends after the given number of words."""

    def table(prefix: Prefix) -> np.ndarray:
        likeliest = END if len(prefix) == words else 1
        log_probs = np.full(vocabulary, np.log(0.01 / (vocabulary - 1)), dtype=np.float32)
        log_probs[likeliest] = np.log(0.99)
        return log_probs

    return table


def encode_prefix(prefix: Prefix) -> list[float]:
    """Two numbers unique to the prefix, which the stepper reports as its attention weights."""
    return [len(prefix), sum((word + 1) * 10**position for position, word in enumerate(prefix))]


class TableStepper:
    """A stepper over one table per photo, which checks the tokens it is given."""

    xp: Any = array_api_compat.torch
    device: Any = torch.device("cpu")
    start_token, end_token = START, END

    def __init__(self, tables: Sequence[Table]) -> None:
        self.tables = list(tables)
        self.prefixes: list[list[Prefix]] = [[()] for _ in tables]
        self.kept: list[int] = []
        self.started = False

    @property
    def batch_size(self) -> int:
        return len(self.tables)

    def advance(self, tokens: Array) -> Advance:
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
        log_probs = [
            [self._log_probs(table, prefix) for prefix in prefixes]
            for table, prefixes in zip(self.tables, self.prefixes, strict=True)
        ]
        codes = [[encode_prefix(prefix) for prefix in beams] for beams in self.prefixes]
        alphas = self.xp.asarray(codes, dtype=self.xp.float64)
        return Advance(self.xp.asarray(np.array(log_probs)), alphas, alphas[..., 1] / 2)

    def _log_probs(self, table: Table, prefix: Prefix) -> np.ndarray:
        if END in prefix:  # the search must ignore what follows the end
            return np.full_like(table(()), 7.0)
        return table(prefix)

    def reorder(self, parents: Array) -> None:
        rows = zip(self.prefixes, parents.tolist(), strict=True)
        self.prefixes = [[prefixes[k] for k in row] for prefixes, row in rows]

    def keep(self, rows: Array) -> None:
        self.kept.append(len(rows))
        self.tables = [self.tables[row] for row in rows.tolist()]
        self.prefixes = [self.prefixes[row] for row in rows.tolist()]


def assert_matches_table(found: Hypothesis, table: Table, tolerance: float = 1e-12) -> None:
    """Check every word's attention, gate and log-probability; ``tolerance`` is of one near 0."""
    tokens = tuple(found.tokens)
    prefixes = [tokens[:t] for t in range(len(tokens))]
    assert found.token_log_probs.shape == found.gates.shape == (len(tokens),)
    assert found.alphas.shape == (len(tokens), 2)
    assert found.alphas.tolist() == [encode_prefix(prefix) for prefix in prefixes]
    assert found.gates.tolist() == [encode_prefix(prefix)[1] / 2 for prefix in prefixes]
    expected = [float(table(p)[w]) for p, w in zip(prefixes, tokens, strict=True)]
    assert found.token_log_probs.tolist() == pytest.approx(expected, abs=tolerance)
    end = float(table(tokens)[END]) if found.ended else 0.0
    assert found.log_prob == pytest.approx(sum(expected) + end, rel=1e-4, abs=1e-4)


def assert_identical(one: Sequence[Hypothesis], other: Sequence[Hypothesis]) -> None:
    """Check that tokens, scores and attention are equal bit for bit."""
    assert [h.tokens for h in one] == [h.tokens for h in other]
    assert [(h.log_prob, h.ended) for h in one] == [(h.log_prob, h.ended) for h in other]
    for left, right in zip(one, other, strict=True):
        for name in ("token_log_probs", "alphas", "gates"):
            assert np.array_equal(getattr(left, name), getattr(right, name))
