"""Consensus: order the captions found for a photo by how much they agree with each other."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

NGRAMS = (1, 2, 3, 4)
LENGTH_SIGMA = 6.0
"""Of the Gaussian that penalizes a difference in length, in words; as in CIDEr-D."""


def by_consensus(
    captions: Sequence[Sequence[int]],
    weights: Sequence[float],
    rarity: Sequence[float] = (),
    rare_words: float = 0.0,
) -> list[int]:
    """Order captions by their expected score if one of them, sampled by weight, were the reference.

        score(c) = sum_r w_r CIDEr-D(c, r) + R (mean rarity of the words of c + the highest one)

    An outlier scores low even if it is the most probable single caption, if most of the weight is
    elsewhere. The second term prefers, among captions that agree equally, specific ones. A word
    that occurs only once in all captions has no rarity there, as nothing confirms it.

    Source: Kumar and Byrne 2004, minimum Bayes risk decoding; Devlin et al. 2015
    (arXiv:1505.04467), consensus captions, with captions of similar photos as candidates; CIDEr-D,
    Vedantam et al. 2015 (arXiv:1411.5726). Deviation: the weight of an n-gram is the sum of the
    rarities of its words, so that no document frequencies are needed; the term with R.

    Args:
        captions: Token ids of K captions, without start and end; captions may be equal.
        weights: How much each counts as a reference, (K,); their scale is irrelevant.
        rarity: (V,) negative log-frequency of each token, see ``SearchTokens``; empty: all tokens
            count the same.
        rare_words: R; above 0 only with ``rarity``.

    Returns:
        Indices of distinct captions, best first; equal scores keep their order.
    """
    first: dict[tuple[int, ...], int] = {}
    shares: dict[tuple[int, ...], float] = {}
    for index, (tokens, weight) in enumerate(zip(captions, weights, strict=True)):
        first.setdefault(tuple(tokens), index)
        shares[tuple(tokens)] = shares.get(tuple(tokens), 0.0) + weight
    distinct = list(first)
    share = np.array([shares[tokens] for tokens in distinct])
    scores = _similarities(distinct, rarity) @ (share / max(share.sum(), 1e-30))
    if rare_words:
        scores = scores + rare_words * _rareness(captions, distinct, rarity)
    return [first[distinct[i]] for i in np.argsort(-scores, kind="stable").tolist()]


def _rareness(
    captions: Sequence[Sequence[int]],
    distinct: Sequence[tuple[int, ...]],
    rarity: Sequence[float],
) -> NDArray[np.float64]:
    """Mean rarity of the words of each distinct caption plus that of the rarest."""
    uses = Counter(token for tokens in captions for token in set(tokens))
    found = []
    for tokens in distinct:
        rarities = [rarity[token] if uses[token] > 1 else 0.0 for token in tokens] or [0.0]
        found.append(sum(rarities) / len(rarities) + max(rarities))
    return np.array(found)


def _similarities(
    captions: Sequence[tuple[int, ...]], rarity: Sequence[float]
) -> NDArray[np.float64]:
    """CIDEr-D, 0 to 10, of each caption (row) with each other one as its reference: (K, K)."""
    lengths = np.array([len(tokens) for tokens in captions], np.float64)
    total = np.zeros((len(captions), len(captions)))
    for size in NGRAMS:
        grams = [
            Counter(tokens[i : i + size] for i in range(len(tokens) - size + 1))
            for tokens in captions
        ]
        columns = {gram: column for column, gram in enumerate({g: None for c in grams for g in c})}
        values = np.zeros((len(captions), len(columns)))
        for row, counts in enumerate(grams):
            for gram, count in counts.items():
                weight = sum(rarity[token] for token in gram) if rarity else 1.0
                values[row, columns[gram]] = count * weight
        norms = np.linalg.norm(values, axis=1)
        norms[norms == 0] = 1.0  # too short for an n-gram
        for row, value in enumerate(values):
            own = value.nonzero()[0]  # the others add nothing
            part = values[:, own]
            total[row] += (np.minimum(value[own], part) * part).sum(axis=1) / (norms[row] * norms)
    difference = lengths[:, None] - lengths
    return 10 / len(NGRAMS) * total * np.exp(-(difference**2) / (2 * LENGTH_SIGMA**2))
