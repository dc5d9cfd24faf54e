"""Caption statistics that need no references: length, vocabulary, repetitions, broken endings.

Words are those of ``captioner.text.tokenizer``, so case and punctuation are ignored, and in scripts
without spaces a word is a character.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from itertools import pairwise
from statistics import fmean

from captioner.text.tokenizer import caption_tokens
from captioner.text.vocabulary import BAD_ENDINGS


def describe(
    captions: Mapping[int, str], known: Iterable[str] | None = None
) -> dict[str, float | None]:
    """Statistics of one caption per image.

    Args:
        captions: Caption by image id, not tokenized.
        known: Training captions, if available.

    Returns:
        The values of `describe_texts`; ``images``, the number of images; ``distinct``, the share of
        captions that no other image has; and ``new``, the share that is not among ``known`` (None
        without training captions). Shares are 0 to 1.
    """
    tokenized = [tuple(caption_tokens(text)) for text in captions.values()]
    counts = Counter(tokenized)
    training = None if known is None else {tuple(caption_tokens(text)) for text in known}
    return {
        "images": len(tokenized),
        **describe_texts(captions.values()),
        "distinct": fmean(counts[tokens] == 1 for tokens in tokenized),
        "new": None if training is None else fmean(one not in training for one in tokenized),
    }


def describe_texts(texts: Iterable[str]) -> dict[str, float]:
    """Statistics of any texts, such as all captions or all references; at least one.

    Returns:
        ``length_mean``, ``length_min``, ``length_max``: length in words. ``vocabulary``: number of
        different words. Signs of broken captions, as shares of the texts, 0 to 1:
        ``repeated_words``, a word directly follows itself (``a a dog``); ``repeated_phrases``, a
        bigram occurs twice (``a dog and a dog``); ``bad_endings`` (``a dog on the``). References
        have some too, so compare with their shares.
    """
    tokenized = [caption_tokens(text) for text in texts]
    pairs = [list(pairwise(tokens)) for tokens in tokenized]
    lengths = [len(tokens) for tokens in tokenized]
    return {
        "length_mean": fmean(lengths),
        "length_min": min(lengths),
        "length_max": max(lengths),
        "vocabulary": len({word for tokens in tokenized for word in tokens}),
        "repeated_words": fmean(any(one == two for one, two in found) for found in pairs),
        "repeated_phrases": fmean(len(set(found)) < len(found) for found in pairs),
        "bad_endings": fmean(not BAD_ENDINGS.isdisjoint(tokens[-1:]) for tokens in tokenized),
    }
