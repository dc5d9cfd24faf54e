"""Consensus ranking: order a photo's candidate captions by how well they agree with each other."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

NGRAMS = (1, 2, 3, 4)
"""Lengths of the word sequences (n-grams) that captions are compared by, as in CIDEr-D."""

LENGTH_SIGMA = 6.0
"""Standard deviation (words) of the Gaussian that lowers the score of captions with different
lengths, as in CIDEr-D."""


def by_consensus(
    captions: Sequence[Sequence[int]],
    weights: Sequence[float],
    rarity: Sequence[float] = (),
    rare_words: float = 0.0,
) -> list[int]:
    """Order a photo's captions by how well each caption agrees with all captions.

        score(c) = sum_r w_r CIDEr-D(c, r) + R (mean rarity of words in c + highest rarity in c)

    Every caption r serves as a reference for every caption c, with the normalized weight w_r.
    CIDEr-D measures how many word sequences two captions share. A caption that resembles most of
    the others therefore scores high, and a caption that resembles few of them scores low, even if
    it is the most probable one. Among captions that agree equally well, the term with R prefers
    specific words. In this term, a word that occurs in only one caption has rarity 0, because no
    second caption confirms it.

    Source: Kumar and Byrne 2004, minimum Bayes risk decoding. Devlin et al. 2015
    (arXiv:1505.04467), consensus captions. Vedantam et al. 2015 (arXiv:1411.5726), CIDEr-D.
    Deviation: The candidates are captions of the same photo, and in Devlin et al. they are captions
    of similar photos. An n-gram is weighted by the summed rarity of its words, and in CIDEr-D it is
    weighted by its document frequency. The term with R is ours.

    Args:
        captions: Token ids of K captions, without start and end tokens. Captions may repeat.
        weights: Weight of each caption as a reference, (K,). Only their proportions matter.
        rarity: Negative logarithm of each token's frequency, (V,), as in ``SearchTokens.rarity``.
            If empty, all n-grams have the same weight.
        rare_words: Weight of rare words, R. A value above 0 requires ``rarity``.

    Returns:
        Indices of the distinct captions, best first. Captions with equal scores keep their order.
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
    """Return the mean rarity of the words plus the highest rarity, for each distinct caption.

    Args:
        captions: All captions, which may repeat. A word in only one of them has rarity 0.
        distinct: The K captions without repetitions.
        rarity: Rarity of each token, (V,).

    Returns:
        The rareness of each distinct caption, (K,).
    """
    uses = Counter(token for tokens in captions for token in set(tokens))
    found = []
    for tokens in distinct:
        rarities = [rarity[token] if uses[token] > 1 else 0.0 for token in tokens] or [0.0]
        found.append(sum(rarities) / len(rarities) + max(rarities))
    return np.array(found)


def _similarities(
    captions: Sequence[tuple[int, ...]], rarity: Sequence[float]
) -> NDArray[np.float64]:
    """Compute CIDEr-D between all pairs of captions.

    Args:
        captions: Token ids of K distinct captions.
        rarity: Rarity of each token, (V,), or empty.

    Returns:
        The score, from 0 to 10, of each caption (row) with each reference (column), (K, K).
    """
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
        norms[norms == 0] = 1.0  # this caption is too short for n-grams of this size
        for row, value in enumerate(values):
            own = value.nonzero()[0]  # other n-grams do not occur in the caption and add nothing
            part = values[:, own]
            total[row] += (np.minimum(value[own], part) * part).sum(axis=1) / (norms[row] * norms)
    difference = lengths[:, None] - lengths
    return 10 / len(NGRAMS) * total * np.exp(-(difference**2) / (2 * LENGTH_SIGMA**2))
