"""Statistics of captions that need no references: length, variety and defects.

Words are those of ``captioner.tokenizer``: capitals and punctuation do not count.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

from captioner.errors import DataError
from captioner.tokenizer import tokenize
from captioner.vocabulary import BAD_ENDINGS


class Flaws(NamedTuple):
    """Marks of a broken caption. People leave some too: compare with the references' rates."""

    repeated_word: bool
    """A word directly follows itself: ``a a dog``."""
    repeated_phrase: bool
    """Two words stand side by side twice: ``a dog and a dog``."""
    bad_ending: bool
    """The last word is one that asks for another: ``a dog on the``."""


def flaws(tokens: Sequence[str]) -> Flaws:
    """Look for what is wrong with one caption.

    Args:
        tokens: Its tokens.
    """
    pairs = list(pairwise(tokens))
    return Flaws(
        repeated_word=any(first == second for first, second in pairs),
        repeated_phrase=len(set(pairs)) < len(pairs),
        bad_ending=bool(tokens) and tokens[-1] in BAD_ENDINGS,
    )


def describe(
    captions: Mapping[int, str], known: Iterable[str] | None = None
) -> dict[str, float | None]:
    """Statistics of one caption an image.

    Args:
        captions: Caption by image id, as a person writes it.
        known: The training captions; None when they are not at hand.

    Returns:
        What `describe_texts` gives, ``images``, how many, and two shares, 0 to 1: ``distinct``: no
        other image has the same; ``new``: not word for word among ``known``, None without these.

    Raises:
        DataError: There are no captions.
    """
    said = [tuple(tokenize(text)) for text in captions.values()]
    times = Counter(said)
    return {
        "images": len(said),
        **describe_texts(captions.values()),
        "distinct": sum(times[tokens] == 1 for tokens in said) / len(said),
        "new": None if known is None else _share_of_new(said, known),
    }


def describe_texts(texts: Iterable[str]) -> dict[str, float]:
    """Statistics of any texts: the captions, or the references, beside which to read them.

    Returns:
        ``length_mean``, ``length_min``, ``length_max``: in words. ``vocabulary``: how many
        different words. Shares, 0 to 1: ``repeated_words``, ``repeated_phrases``, ``bad_endings``:
        see `Flaws`.

    Raises:
        DataError: There are no texts.
    """
    said = [tokenize(text) for text in texts]
    if not said:
        raise DataError("there are no captions to describe; give at least one image")
    lengths, found = [len(tokens) for tokens in said], [flaws(tokens) for tokens in said]
    return {
        "length_mean": sum(lengths) / len(said),
        "length_min": min(lengths),
        "length_max": max(lengths),
        "vocabulary": len({word for tokens in said for word in tokens}),
        "repeated_words": sum(f.repeated_word for f in found) / len(said),
        "repeated_phrases": sum(f.repeated_phrase for f in found) / len(said),
        "bad_endings": sum(f.bad_ending for f in found) / len(said),
    }


def _share_of_new(said: Sequence[tuple[str, ...]], known: Iterable[str]) -> float:
    heard = {tuple(tokenize(text)) for text in known}
    return sum(tokens not in heard for tokens in said) / len(said)
