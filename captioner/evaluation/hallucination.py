"""CHAIR: how many of the objects that captions mention are not in the photo; lower is better.

    CHAIR_i = mentions of objects that are not in the photo / all mentions of objects
    CHAIR_s = captions that mention an object that is not in the photo / all captions

Objects are the 80 categories of COCO. In a photo are those that are annotated in it (crowds too) or
that one of its reference captions names. With references alone, objects that people did not mention
count as hallucinated.

Source: Rohrbach et al. 2018, Object Hallucination in Image Captioning (arXiv:1809.02156).
Deviation: names are found by `captioner.evaluation.objects`, whose list of synonyms is another.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from captioner.evaluation.objects import find_names
from captioner.text.tokenizer import caption_tokens

BINS = 5


def photo_objects(
    references: Mapping[int, Sequence[str]], annotated: Iterable[tuple[int, str]]
) -> dict[int, set[str]]:
    """The categories in each photo, from reference captions and pairs of an id and a category."""
    found = {
        image_id: {name.category for text in texts for name in find_names(caption_tokens(text))}
        for image_id, texts in references.items()
    }
    for image_id, category in annotated:
        if image_id in found:
            found[image_id].add(category)
    return found


def count_mentions(
    captions: Sequence[Sequence[str]], objects: Sequence[Collection[str]]
) -> NDArray[np.float64]:
    """Mentions of objects that are not in the photo, and all mentions, of each caption: (N, 2).

    Of the tokens of each caption and the categories in its photo.
    """
    counts = np.zeros((len(captions), 2))
    for row, words, there in zip(counts, captions, objects, strict=True):
        names = find_names(words)
        row[:] = sum(name.category not in there for name in names), len(names)
    return counts


def chair_i(counts: NDArray[np.float64]) -> NDArray[np.float64]:
    """CHAIR_i from counts, or sums of counts, (R, 2): (R,); NaN without mentions."""
    with np.errstate(invalid="ignore"):
        result: NDArray[np.float64] = counts[:, 0] / counts[:, 1]
    return result


def by_confidence(
    counts: NDArray[np.float64], confidences: Sequence[float]
) -> list[dict[str, Any]]:
    """CHAIR of the captions in each fifth of 0 to 1 by confidence, (N,), of those with captions."""
    bins = np.minimum((np.array(confidences) * BINS).astype(int), BINS - 1)
    return [
        {
            "from": number / BINS,
            "to": (number + 1) / BINS,
            "captions": len(own),
            "mentions": int(own[:, 1].sum()),
            "CHAIR_i": chair_i(own.sum(axis=0, keepdims=True)).item(),
            "CHAIR_s": float((own[:, 0] > 0).mean()),
        }
        for number in np.unique(bins).tolist()
        for own in [counts[bins == number]]
    ]
