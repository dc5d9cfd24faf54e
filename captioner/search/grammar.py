"""The grammar of human captions: where captions end, and which words do not follow others.

Without it, a search that ends captions early would write *a cat sitting on top*, and a search that
rewards true words would write *a umbrella* or *a red and a banana*.

Notation: V tokens of the vocabulary, without the start tokens of styles; P pairs; Q triples.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from captioner.text.vocabulary import END, FUNCTION_WORDS, NUMBERS, UNKNOWN, Vocabulary

LEAST_SHARE = 0.02
"""A caption may end after a word if at least this share of its occurrences end a human caption."""

RARELY = 0.04
"""Tokens do not follow each other if they do so in less than this share of the expected cases."""

FEWEST_PAIRS, FEWEST_TRIPLES = 2, 3
"""Expected cases below which nothing is concluded from the absence of a pair or a triple."""

ARTICLES = ("a", "an")
OTHER_ARTICLE = 0.25
"""A word does not follow one article if this share of its cases or more follow the other one."""


@dataclass(frozen=True)
class Grammar:
    """The grammar of human captions over one vocabulary, counted in the training captions.

    Pairs of tokens are stored as first * V + second, and triples as (first * V + second) * V +
    third; both are sorted.
    """

    endings: NDArray[np.float32]
    """(V,) share of the occurrences of each token that end a caption; 0 where captions rarely end,
    or the token is a function word."""
    not_ending: NDArray[np.int64]
    """(P,) pairs after which captions do not end, although they end after the second token: "a
    snow"."""
    not_following: NDArray[np.int64]
    """(P,) pairs whose second token does not follow the first: "a umbrella", "large of"."""
    not_third: NDArray[np.int64]
    """(Q,) triples whose third token does not follow the first two, although it follows the second:
    "red and a". The third may be the end token."""

    @classmethod
    def count(cls, captions: Iterable[Sequence[int]], vocabulary: Vocabulary) -> Grammar:
        """Count in captions, each a sequence of tokens of the vocabulary, without start and end."""
        size = len(vocabulary)
        words, ends = np.zeros(size), np.zeros(size)
        pairs: Counter[int] = Counter()
        ended: Counter[int] = Counter()
        triples: Counter[int] = Counter()
        for tokens in captions:
            np.add.at(words, list(tokens), 1)
            ends[tokens[-1:]] += 1
            keys = [one * size + two for one, two in pairwise(tokens)]
            pairs.update(keys)
            ended.update(keys[-1:])
            thirds = [*tokens[2:], END]
            triples.update(key * size + third for key, third in zip(keys, thirds, strict=True))
        words[UNKNOWN] = ends[UNKNOWN] = 0  # the search never writes it
        for counter in pairs, triples:
            for key in [key for key in counter if UNKNOWN in _tokens(key, size)]:
                del counter[key]
        shares = ends / (words + 10)  # a rare word may end captions by chance
        shares[vocabulary.whole_words(FUNCTION_WORDS | NUMBERS)] = 0.0
        shares[shares < LEAST_SHARE] = 0.0
        not_ending = [
            key
            for key, count in pairs.items()
            if (share := shares[key % size])
            and (ended[key] + 8 * share) / (count + 8) < min(LEAST_SHARE, share / 3)
        ]
        not_following = absent_pairs(words, pairs) | wrong_articles(pairs, vocabulary)
        # People do write "very very", but a search would go on and on.
        not_following |= {token * size + token for token in np.flatnonzero(words).tolist()}
        not_third = absent_triples(words, ends, pairs, triples)
        return cls(
            shares.astype(np.float32),
            *(np.array(sorted(keys), np.int64) for keys in (not_ending, not_following, not_third)),
        )


def _tokens(key: int, size: int) -> tuple[int, ...]:
    """Return the tokens of a stored pair or triple, the last one first."""
    return key % size, key // size % size, key // size**2


def absent_pairs(words: NDArray[np.float64], pairs: Counter[int]) -> set[int]:
    """Return the pairs of tokens that captions should have by chance, but do not have.

    Args:
        words: (V,) number of occurrences of each token.
        pairs: Number of occurrences of each pair.
    """
    size, total = len(words), max(words.sum(), 1)
    return {
        key
        for first in np.flatnonzero(words).tolist()
        for second in np.flatnonzero(words * (words[first] / total) >= FEWEST_PAIRS).tolist()
        if pairs[key := first * size + second] < RARELY * words[first] * words[second] / total
    }


def wrong_articles(pairs: Counter[int], vocabulary: Vocabulary) -> set[int]:
    """Return the pairs of an article and a word that takes the other article."""
    size = len(vocabulary)
    articles = vocabulary.whole_words(ARTICLES)
    if len(articles) < len(ARTICLES):
        return set()
    return {
        one * size + word
        for one, other in (articles, reversed(articles))
        for word in range(size)
        if pairs[one * size + word] * (1 / OTHER_ARTICLE - 1) < pairs[other * size + word]
    }


def absent_triples(
    words: NDArray[np.float64],
    ends: NDArray[np.float64],
    pairs: Counter[int],
    triples: Counter[int],
) -> set[int]:
    """Return the triples that captions should have by the frequency of their pairs, but do not.

    Args:
        words: (V,) number of occurrences of each token.
        ends: (V,) number of captions that each token ends.
        pairs: Number of occurrences of each pair.
        triples: Number of occurrences of each triple, the third token of which may be the end.
    """
    size = len(words)
    followers: dict[int, list[tuple[int, float]]] = {}
    for key, count in pairs.items():
        followers.setdefault(key // size, []).append((key % size, count / words[key // size]))
    for token in np.flatnonzero(ends).tolist():
        followers.setdefault(token, []).append((END, ends[token] / words[token]))
    return {
        triple
        for key, count in pairs.items()
        for third, share in followers.get(key % size, ())
        if count * share >= FEWEST_TRIPLES
        and triples[triple := key * size + third] < RARELY * count * share
    }
