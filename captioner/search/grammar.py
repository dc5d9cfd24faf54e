"""Grammar counted in human captions: where captions end, and which words never follow each other.

The search needs this grammar if it rewards words that are true of the photo (see ``worth``). Such a
search may end captions early. Without the grammar, it would write *a cat sitting on top*. It also
writes true words at places where the decoder would not write them. Without the grammar, it would
write *a umbrella* or *a red and a banana*.

Notation: V tokens in the vocabulary (without the start tokens of styles), P pairs, Q triples.
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
"""A pair or triple counts as absent if it occurs less often than this share of the expected number.
`absent_pairs` and `absent_triples` define this number."""

FEWEST_PAIRS, FEWEST_TRIPLES = 2, 3
"""A pair or triple can count as absent only if its expected number of occurrences is at least this.
Rarer combinations may be absent by chance."""

ARTICLES = ("a", "an")
"""The articles that the sound of the next word selects."""

OTHER_ARTICLE = 0.25
"""The search does not write *a* (or *an*) before a word if less than this share of the articles
before the word are *a* (or *an*)."""


@dataclass(frozen=True)
class Grammar:
    """The grammar of the training captions, stored with the token ids of one vocabulary.

    A pair of tokens is stored as one number, first * V + second. A triple is stored as
    (first * V + second) * V + third. All arrays of pairs and triples are sorted.
    """

    endings: NDArray[np.float32]
    """Share of each token's occurrences that end a caption, (V,).

    The share of rare tokens is lowered, because they may end captions by chance. It is 0 if it is
    below ``LEAST_SHARE``, and for function words and numbers.
    """
    not_ending: NDArray[np.int64]
    """Pairs such as "a snow" that do not end a caption, (P,), although their second token ends
    captions after other tokens."""
    not_following: NDArray[np.int64]
    """Pairs such as "a umbrella" or "large of", (P,). Their second token does not follow the first
    in human captions."""
    not_third: NDArray[np.int64]
    """Triples such as "red and a" that do not occur, (Q,), although their third token follows the
    second after other tokens. The third token may be the end token."""

    @classmethod
    def count(cls, captions: Iterable[Sequence[int]], vocabulary: Vocabulary) -> Grammar:
        """Count the grammar in human captions.

        Args:
            captions: Token ids of each caption, without start and end tokens.
            vocabulary: The vocabulary of these ids.
        """
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
        words[UNKNOWN] = ends[UNKNOWN] = 0  # the search never writes the token for unknown words
        for counter in pairs, triples:
            for key in [key for key in counter if UNKNOWN in _tokens(key, size)]:
                del counter[key]
        shares = ends / (words + 10)  # + 10, because a rare word may end captions by chance
        shares[vocabulary.whole_words(FUNCTION_WORDS | NUMBERS)] = 0.0
        shares[shares < LEAST_SHARE] = 0.0
        not_ending = [
            key
            for key, count in pairs.items()
            if (share := shares[key % size])
            and (ended[key] + 8 * share) / (count + 8) < min(LEAST_SHARE, share / 3)
        ]
        not_following = absent_pairs(words, pairs) | wrong_articles(pairs, vocabulary)
        # No token follows itself. People do write "very very", but a search would not stop there.
        not_following |= {token * size + token for token in np.flatnonzero(words).tolist()}
        not_third = absent_triples(words, ends, pairs, triples)
        return cls(
            shares.astype(np.float32),
            *(np.array(sorted(keys), np.int64) for keys in (not_ending, not_following, not_third)),
        )


def _tokens(key: int, size: int) -> tuple[int, ...]:
    """Return the tokens of a stored triple, the last token first.

    ``size`` is the size of the vocabulary, V. For a pair, the third token is 0 (padding).
    """
    return key % size, key // size % size, key // size**2


def absent_pairs(words: NDArray[np.float64], pairs: Counter[int]) -> set[int]:
    """Find pairs of tokens that occur much less often than their tokens let us expect.

    The limits are ``RARELY`` and ``FEWEST_PAIRS``. A pair (a, b) is expected count(a) count(b) /
    count(all) times.

    Args:
        words: Number of occurrences of each token, (V,).
        pairs: Number of occurrences of each pair, stored as in `Grammar`.

    Returns:
        The absent pairs, stored as in `Grammar`.
    """
    size, total = len(words), max(words.sum(), 1)
    return {
        key
        for first in np.flatnonzero(words).tolist()
        for second in np.flatnonzero(words * (words[first] / total) >= FEWEST_PAIRS).tolist()
        if pairs[key := first * size + second] < RARELY * words[first] * words[second] / total
    }


def wrong_articles(pairs: Counter[int], vocabulary: Vocabulary) -> set[int]:
    """Find the pairs of a wrong article and a word, such as "a umbrella" (see ``OTHER_ARTICLE``).

    Args:
        pairs: Number of occurrences of each pair, stored as in `Grammar`.
        vocabulary: The vocabulary. If it lacks one of the articles, no pair is wrong.

    Returns:
        The wrong pairs, stored as in `Grammar`.
    """
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
    """Find triples of tokens that occur much less often than their pairs let us expect.

    The limits are ``RARELY`` and ``FEWEST_TRIPLES``. A triple (a, b, c) is expected count(a, b)
    count(b, c) / count(b) times.

    Args:
        words: Number of occurrences of each token, (V,).
        ends: Number of captions that end with each token, (V,).
        pairs: Number of occurrences of each pair, stored as in `Grammar`.
        triples: Number of occurrences of each triple, stored as in `Grammar`. The third token may
            be the end token.

    Returns:
        The absent triples, stored as in `Grammar`.
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
