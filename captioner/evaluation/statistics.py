"""Caption statistics that need no references: length, vocabulary, repetitions, broken endings.

Words are those of ``captioner.text.tokenizer``, so case and punctuation are ignored, and in scripts
without spaces a word is a character.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from itertools import pairwise

from captioner.errors import DataError
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
    new = None
    if known is not None:
        training = {tuple(caption_tokens(text)) for text in known}
        new = sum(tokens not in training for tokens in tokenized) / len(tokenized)
    return {
        "images": len(tokenized),
        **describe_texts(captions.values()),
        "distinct": sum(counts[tokens] == 1 for tokens in tokenized) / len(tokenized),
        "new": new,
    }


def describe_texts(texts: Iterable[str]) -> dict[str, float]:
    """Statistics of any texts, such as all captions or all references.

    Returns:
        ``length_mean``, ``length_min``, ``length_max``: length in words. ``vocabulary``: number of
        different words. Signs of broken captions, as shares of the texts, 0 to 1:
        ``repeated_words``, a word directly follows itself (``a a dog``); ``repeated_phrases``, a
        bigram occurs twice (``a dog and a dog``); ``bad_endings`` (``a dog on the``). References
        have some too, so compare with their shares.

    Raises:
        DataError: There are no texts.
    """
    lengths: list[int] = []
    words: set[str] = set()
    repeated_words = repeated_phrases = bad_endings = 0
    for tokens in map(caption_tokens, texts):
        pairs = list(pairwise(tokens))
        lengths.append(len(tokens))
        words.update(tokens)
        repeated_words += any(first == second for first, second in pairs)
        repeated_phrases += len(set(pairs)) < len(pairs)
        bad_endings += bool(tokens) and tokens[-1] in BAD_ENDINGS
    if not lengths:
        raise DataError("there are no captions to describe; give at least one image")
    count = len(lengths)
    return {
        "length_mean": sum(lengths) / count,
        "length_min": min(lengths),
        "length_max": max(lengths),
        "vocabulary": len(words),
        "repeated_words": repeated_words / count,
        "repeated_phrases": repeated_phrases / count,
        "bad_endings": bad_endings / count,
    }
