"""Metrics of support: how much of a caption its reference captions confirm.

C is the set of content words of a caption (stems, see `captioner.text.content`). R is the number of
references of its photo, and n(w) is the number of these references that contain the word w.

    supported_words    = sum over captions of |{w in C: n(w) > 0}| / sum over captions of |C|
    supported_captions = share of the captions with n(w) > 0 for all w in C
    agreement          = mean over captions of sum_{w in C} n(w) / R

A caption without content words is supported, and its agreement is 0. docs/evaluation.md explains
how to read these metrics.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from captioner.text.content import content_stems


def count_support(
    captions: Sequence[str], references: Sequence[Sequence[str]]
) -> NDArray[np.float64]:
    """Count, for each caption, the content words that its references confirm.

    Args:
        captions: N captions, not tokenized.
        references: The reference captions of each photo, at least one per photo.

    Returns:
        Number of content words in at least one reference, number of content words, and agreement,
        (N, 3).
    """
    rows = np.zeros((len(captions), 3))
    for row, caption, texts in zip(rows, captions, references, strict=True):
        having = Counter(word for text in texts for word in content_stems(text))
        counts = [having[word] for word in content_stems(caption)]
        row[:] = sum(count > 0 for count in counts), len(counts), sum(counts) / len(texts)
    return rows
