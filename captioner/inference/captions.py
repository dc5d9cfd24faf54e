"""From what a search finds to captions: words, probabilities, maps and confidence."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from captioner.caption import END_NAME, Alternative, text_of
from captioner.inference.confidence import Observation
from captioner.inference.engine import CaptionScores
from captioner.search.arrays import top_k
from captioner.search.search import Hypothesis
from captioner.text.vocabulary import END, NEVER_GENERATED, Vocabulary

Alternatives = tuple[tuple[Alternative, ...], ...]


def given_hypothesis(scores: CaptionScores, row: int, tokens: list[int]) -> Hypothesis:
    """A given caption of a photo with its probabilities, as a search would return it."""
    length = len(tokens)
    log_probs = scores.log_probs[row, 0, np.arange(length + 1), [*tokens, END]]
    return Hypothesis(
        tokens=tokens,
        token_log_probs=log_probs[:-1],
        alphas=scores.alphas[row, 0, :length],
        gates=scores.gates[row, 0, :length],
        log_prob=float(log_probs.sum()),
        ended=True,
    )


def most_probable(
    scores: CaptionScores,
    captions: Sequence[Sequence[list[int]]],
    count: int,
    vocabulary: Vocabulary,
) -> list[list[Alternatives]]:
    """The ``count`` most probable words at every position of the photos' captions."""

    def of(log_probs: NDArray[np.float32]) -> Alternatives:  # (T, V)
        allowed = log_probs.copy()
        allowed[:, list(NEVER_GENERATED)] = -math.inf
        values, tokens = top_k(allowed, min(count, allowed.shape[-1] - len(NEVER_GENERATED)))
        return tuple(
            tuple(
                Alternative(END_NAME if token == END else vocabulary.shown([token])[0], value)
                for token, value in zip(*position, strict=True)
            )
            for position in zip(tokens.tolist(), values.tolist(), strict=True)
        )

    return [
        [of(scores.log_probs[row, column, : len(tokens)]) for column, tokens in enumerate(group)]
        for row, group in enumerate(captions)
    ]


def observe(best: Hypothesis, photo: NDArray[np.float32], vocabulary: Vocabulary) -> Observation:
    """What is known of the best caption of a photo, whose vector is (D,)."""
    assert best.evidence is not None  # collected on request
    return Observation(
        text=text_of(vocabulary.shown(best.tokens), vocabulary.pieces(best.tokens)),
        log_probs=best.token_log_probs,
        log_prob=best.log_prob,
        entropies=best.evidence.entropies,
        share=best.evidence.share,
        overlap=best.evidence.overlap,
        photo=photo,
    )
