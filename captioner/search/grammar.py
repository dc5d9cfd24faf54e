"""Grammar counted in human captions: where captions end, and which words never follow each other.

The search needs it for two reasons. A search that ends captions early would otherwise write *a cat
sitting on top*. A search that rewards true words would write *a umbrella* or *a red and a banana*.

Notation: V tokens of the vocabulary, without the start tokens of styles, P pairs, Q triples.
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
"""A caption may end after a word if at least this share of the word's occurrences end a caption."""

RARELY = 0.04
"""A pair or triple is absent if it occurs less often than this share of the expected number."""

FEWEST_PAIRS, FEWEST_TRIPLES = 2, 3
"""Fewest expected occurrences from which the absence of a pair, or of a triple, means something."""

ARTICLES = ("a", "an")
OTHER_ARTICLE = 0.25
"""A word does not follow an article that makes up less than this share of the word's articles."""


@dataclass(frozen=True)
class Grammar:
    """The grammar of the training captions, over one vocabulary.

    A pair of tokens is stored as the number first * V + second. A triple is stored as
    (first * V + second) * V + third. All arrays of pairs and triples are sorted.
    """

    endings: NDArray[np.float32]
    """Share of each token's occurrences that end a caption, (V,).

    0 if captions rarely end there, or if the token is a function word or a number.
    """
    not_ending: NDArray[np.int64]
    """Pairs such as "a snow", (P,). Captions do not end after the pair, although they end after its
    second token elsewhere."""
    not_following: NDArray[np.int64]
    """Pairs of tokens that do not follow each other, such as "a umbrella" or "large of", (P,)."""
    not_third: NDArray[np.int64]
    """Triples such as "red and a", (Q,). The third token does not follow the first two, although it
    follows the second elsewhere. The third token may be the end token."""

    @classmethod
    def count(cls, captions: Iterable[Sequence[int]], vocabulary: Vocabulary) -> Grammar:
        """Count the grammar in captions, given as token ids without start and end tokens."""
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
        words[UNKNOWN] = ends[UNKNOWN] = 0  # the search never writes the unknown word
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
        # People do write "very very", but a search would repeat the word without end.
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
    """Return the pairs of tokens that should occur by chance, but hardly ever do.

    Args:
        words: Number of occurrences of each token, (V,).
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
    """Return pairs of an article and a word that takes the other article, such as "a umbrella"."""
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
    """Return the triples that the frequency of their pairs predicts, but that hardly ever occur.

    Args:
        words: Number of occurrences of each token, (V,).
        ends: Number of captions that end with each token, (V,).
        pairs: Number of occurrences of each pair.
        triples: Number of occurrences of each triple. Its third token may be the end token.
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
