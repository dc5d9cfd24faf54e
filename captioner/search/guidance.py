"""Guidance: scores that favour the words which this photo makes more probable than a blank one."""

from __future__ import annotations

import math

from captioner.search.arrays import Array, namespace, normalized

PLAUSIBLE = math.log(0.1)
"""Only words at least a tenth as probable as the most probable one are favoured."""
PENALTY = 20.0
"""How far the search keeps the others below all of these, in nats: they stay possible, for forced
words."""


def guide(
    log_probs: Array, blank: Array, guidance: float | Array, penalty: float = PENALTY
) -> Array:
    """Log-probabilities that the search should use in place of the model's.

        score(word) = (1 + G) log p(word | photo) - G log p(word | blank photo)

    Source: Kornblith et al. 2023 (arXiv:2307.16686), classifier-free guidance with the scale 1 + G;
    Li et al. 2022 (arXiv:2210.15097), the restriction to plausible words.
    Deviation: the decoder was not trained without photos, so it is given a photo of one colour.

    Args:
        log_probs: (B, K, V) log-probabilities of the next word, and of the same shape the results.
        blank: (B, K, V) those with a blank photo, -inf for the same words.
        guidance: G, above 0; one number, or (B, K, 1).
        penalty: How far all other words stay below the plausible ones, in nats.
    """
    xp = namespace(log_probs)
    possible = log_probs != -xp.inf
    own = xp.where(possible, log_probs, 0.0)  # -inf - -inf is not a number
    without = xp.where(possible & (blank != -xp.inf), blank, own)
    change = guidance * (own - without)
    plausible = log_probs >= xp.max(log_probs, axis=-1, keepdims=True) + PLAUSIBLE
    # A blank photo may make an improbable word more improbable by any factor, which says nothing.
    lowest = xp.min(xp.where(plausible, change, 0.0), axis=-1, keepdims=True)
    scores = own + xp.where(plausible, change, lowest - penalty)
    return normalized(xp.where(possible, scores, -xp.inf))
