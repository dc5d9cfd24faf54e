"""What human captions show about grammar: where they may end, and which words agree.

Without it, a search that ends captions early would write *a cat sitting on top*, and a search that
rewards true words *a umbrella*.

Notation: V tokens of the vocabulary, without the start tokens of styles; P pairs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from captioner.text.vocabulary import FUNCTION_WORDS, Vocabulary

LEAST_SHARE = 0.02
"""A caption may end after a word if at least this share of its occurrences end a human caption."""

DETERMINERS = ("a", "an", "two", "three", "four", "five", "several", "many", "some")
FEWEST, RARELY = 2, 0.04
"""A word does not follow a determiner if the pair is this much rarer than by chance, where chance
would make at least ``FEWEST`` pairs."""


@dataclass(frozen=True)
class Grammar:
    """What human captions show about the grammar of a vocabulary: endings, and words that agree.

    Counted in the training captions. Pairs of tokens are stored as first * V + second, sorted.
    """

    endings: NDArray[np.float32]
    """(V,) share of the occurrences of each token that end a caption; 0 where captions rarely end,
    or the token is a function word."""
    not_ending: NDArray[np.int64]
    """Pairs after which captions do not end, although they do after the second token: "a snow"."""
    not_following: NDArray[np.int64]
    """Pairs of a determiner and a word that never follows it: "a umbrella", "two dog"."""

    @classmethod
    def count(cls, captions: Iterable[Sequence[int]], vocabulary: Vocabulary) -> Grammar:
        """Count in captions, each a sequence of tokens of the vocabulary."""
        size = len(vocabulary)
        words, ends = np.zeros(size), np.zeros(size)
        pairs: Counter[int] = Counter()
        ended: Counter[int] = Counter()
        for tokens in captions:
            np.add.at(words, list(tokens), 1)
            ends[tokens[-1:]] += 1
            keys = [one * size + two for one, two in pairwise(tokens)]
            pairs.update(keys)
            ended.update(keys[-1:])
        shares = ends / (words + 10)  # a rare word may end captions by chance
        shares[vocabulary.whole_words(FUNCTION_WORDS)] = 0.0
        shares[shares < LEAST_SHARE] = 0.0
        not_ending = [
            key
            for key, count in pairs.items()
            if (share := shares[key % size])
            and (ended[key] + 8 * share) / (count + 8) < min(LEAST_SHARE, share / 3)
        ]
        determiners = vocabulary.whole_words(DETERMINERS)
        expected = np.outer(words[determiners], words) / max(words.sum(), 1)
        not_following = [
            token * size + word
            for token, of_token in zip(determiners, expected, strict=True)
            for word in np.flatnonzero(of_token >= FEWEST).tolist()
            if pairs[token * size + word] < RARELY * of_token[word]
        ]
        return cls(
            shares.astype(np.float32),
            np.array(sorted(not_ending), np.int64),
            np.array(sorted(not_following), np.int64),
        )
