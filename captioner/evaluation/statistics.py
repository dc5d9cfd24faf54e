"""Caption statistics that need no references: length, vocabulary, repetitions, broken endings.

Words are those of ``captioner.text.tokenizer``, so case and punctuation are ignored, and in scripts
without spaces a word is a character.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

from captioner.errors import DataError
from captioner.text.tokenizer import caption_tokens
from captioner.text.vocabulary import BAD_ENDINGS


class Flaws(NamedTuple):
    """Signs of a broken caption. References have some too, so compare with their rates."""

    repeated_word: bool
    """A word directly follows itself: ``a a dog``."""
    repeated_phrase: bool
    """A bigram occurs twice: ``a dog and a dog``."""
    bad_ending: bool
    """The caption breaks off: ``a dog on the``."""


def flaws(tokens: Sequence[str]) -> Flaws:
    """Find the flaws of one caption, given its tokens."""
    pairs = list(pairwise(tokens))
    return Flaws(
        repeated_word=any(first == second for first, second in pairs),
        repeated_phrase=len(set(pairs)) < len(pairs),
        bad_ending=bool(tokens) and tokens[-1] in BAD_ENDINGS,
    )


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

    Raises:
        DataError: There are no captions.
    """
    tokenized = [tuple(caption_tokens(text)) for text in captions.values()]
    counts = Counter(tokenized)
    new = None
    if known is not None:
        training = {tuple(caption_tokens(text)) for text in known}
        new = sum(tokens not in training for tokens in tokenized)
    return {
        "images": len(tokenized),
        **describe_texts(captions.values()),
        "distinct": sum(counts[tokens] == 1 for tokens in tokenized) / len(tokenized),
        "new": None if new is None else new / len(tokenized),
    }


def describe_texts(texts: Iterable[str]) -> dict[str, float]:
    """Statistics of any texts, such as all captions or all references.

    Returns:
        ``length_mean``, ``length_min``, ``length_max``: length in words. ``vocabulary``: number of
        different words. ``repeated_words``, ``repeated_phrases``, ``bad_endings``: shares of texts
        with these flaws (see `Flaws`), 0 to 1.

    Raises:
        DataError: There are no texts.
    """
    lengths: list[int] = []
    found: list[Flaws] = []
    words: set[str] = set()
    for tokens in map(caption_tokens, texts):
        lengths.append(len(tokens))
        found.append(flaws(tokens))
        words.update(tokens)
    if not lengths:
        raise DataError("there are no captions to describe; give at least one image")
    count = len(lengths)
    return {
        "length_mean": sum(lengths) / count,
        "length_min": min(lengths),
        "length_max": max(lengths),
        "vocabulary": len(words),
        "repeated_words": sum(f.repeated_word for f in found) / count,
        "repeated_phrases": sum(f.repeated_phrase for f in found) / count,
        "bad_endings": sum(f.bad_ending for f in found) / count,
    }
