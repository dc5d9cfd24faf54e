"""Tables in place of a model: every test of the search knows all that the search can see.

A table gives the next word's log-probabilities for the whole sentence so far, so that a beam that
lost track of its own past is found out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import array_api_compat.torch
import numpy as np
import pytest
import torch

from captioner.decoding.arrays import Array
from captioner.decoding.search import Advance, Hypothesis

START, END = 99, 0  # the start token need not be a word
Prefix = tuple[int, ...]
Table = Callable[[Prefix], np.ndarray]


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


def constant_table(*probabilities: float) -> Table:
    """The same probabilities after whatever was said; the end's come first."""
    with np.errstate(divide="ignore"):
        log_probs = np.log(np.array(probabilities)).astype(np.float32)
    return lambda prefix: log_probs


def written_table(said: dict[Prefix, Sequence[float]], otherwise: Sequence[float]) -> Table:
    """Probabilities after some beginnings, and after all others."""
    tables = {prefix: constant_table(*probabilities) for prefix, probabilities in said.items()}
    rest = constant_table(*otherwise)
    return lambda prefix: tables.get(prefix, rest)(prefix)


def ending_after(words: int, vocabulary: int = 4) -> Table:
    """Sure to end after a number of words."""

    def table(prefix: Prefix) -> np.ndarray:
        right = END if len(prefix) == words else 1
        log_probs = np.full(vocabulary, np.log(0.01 / (vocabulary - 1)), dtype=np.float32)
        log_probs[right] = np.log(0.99)
        return log_probs

    return table


def code(prefix: Prefix) -> list[float]:
    """Tells a prefix apart from all others: the attention of the table."""
    return [len(prefix), sum((word + 1) * 10**place for place, word in enumerate(prefix))]


class TableStepper:
    """A stepper over tables, one a photo; it checks what it is asked as it goes."""

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
            [self._tell(table, prefix) for prefix in prefixes]
            for table, prefixes in zip(self.tables, self.prefixes, strict=True)
        ]
        codes = [[code(prefix) for prefix in beams] for beams in self.prefixes]
        alphas = self.xp.asarray(codes, dtype=self.xp.float64)
        return Advance(self.xp.asarray(np.array(log_probs)), alphas, alphas[..., 1] / 2)

    def _tell(self, table: Table, prefix: Prefix) -> np.ndarray:
        if END in prefix:  # nonsense after the end must not matter
            return np.full_like(table(()), 7.0)
        return table(prefix)

    def reorder(self, parents: Array) -> None:
        rows = zip(self.prefixes, parents.tolist(), strict=True)
        self.prefixes = [[prefixes[k] for k in row] for prefixes, row in rows]

    def keep(self, rows: Array) -> None:
        self.kept.append(len(rows))
        self.tables = [self.tables[row] for row in rows.tolist()]
        self.prefixes = [self.prefixes[row] for row in rows.tolist()]


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


def assert_identical(one: Sequence[Hypothesis], other: Sequence[Hypothesis]) -> None:
    """The same sentences with the same evidence, to the last bit."""
    assert [h.tokens for h in one] == [h.tokens for h in other]
    assert [(h.log_prob, h.ended) for h in one] == [(h.log_prob, h.ended) for h in other]
    for left, right in zip(one, other, strict=True):
        for name in ("token_log_probs", "alphas", "gates"):
            assert np.array_equal(getattr(left, name), getattr(right, name))
