"""Metrics of support: how much of a caption the photo's reference captions confirm.

C is the set of content words in a caption, as stems (see `captioner.text.content`). |C| is their
number. R is the number of references of the photo, and n(w) is the number of these references that
contain the word w.

    supported_words    = sum over captions of |{w in C: n(w) > 0}| / sum over captions of |C|
    supported_captions = share of the captions with n(w) > 0 for all w in C
    agreement          = mean over captions of sum_{w in C} n(w) / R

A caption without content words counts as supported, and its agreement is 0. docs/evaluation.md
explains how to read these metrics.
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
    """Count the content words in each caption, and the content words that the references confirm.

    Args:
        captions: N captions, not tokenized.
        references: The reference captions of each photo, at least one per photo.

    Returns:
        Three values per caption, (N, 3): the number of content words that occur in a reference, the
        number of all content words, and the agreement, sum_{w in C} n(w) / R.
    """
    rows = np.zeros((len(captions), 3))
    for row, caption, texts in zip(rows, captions, references, strict=True):
        having = Counter(word for text in texts for word in content_stems(text))
        counts = [having[word] for word in content_stems(caption)]
        row[:] = sum(count > 0 for count in counts), len(counts), sum(counts) / len(texts)
    return rows
