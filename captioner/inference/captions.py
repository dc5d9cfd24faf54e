"""From what a search finds to captions: words, probabilities, maps and confidence."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from captioner.caption import END_NAME, Alternative, Caption
from captioner.inference.engine import CaptionScores
from captioner.search.arrays import top_k
from captioner.search.search import Hypothesis
from captioner.text.vocabulary import END, NEVER_GENERATED, Vocabulary


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


def add_alternatives(
    captions: Sequence[list[Caption]], scores: CaptionScores, count: int, vocabulary: Vocabulary
) -> None:
    """Add the ``count`` most probable words at every position to the photos' captions."""
    for row, group in enumerate(captions):
        for column, caption in enumerate(group):
            log_probs = scores.log_probs[row, column, : len(caption.words)].copy()  # (T, V)
            log_probs[:, list(NEVER_GENERATED)] = -math.inf
            most = min(count, log_probs.shape[-1] - len(NEVER_GENERATED))
            values, tokens = top_k(log_probs, most)
            group[column] = replace(
                caption,
                alternatives=tuple(
                    tuple(
                        Alternative(END_NAME if t == END else vocabulary.shown([t])[0], value)
                        for t, value in zip(*position, strict=True)
                    )
                    for position in zip(tokens.tolist(), values.tolist(), strict=True)
                ),
            )
