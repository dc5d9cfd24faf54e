"""Content words: the words of a caption that can be true or false of a photo.

Nouns, verbs, adjectives and numbers are content words; articles, prepositions, auxiliaries and
pronouns are not. Two words count as the same if they have the same stem ("dog" and "dogs", "ride"
and "riding").

Source: the stemmer is Snowball's English stemmer (Porter 2001), from the package snowballstemmer.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise

import snowballstemmer

from captioner.caption import CLITICS
from captioner.text.tokenizer import caption_tokens
from captioner.text.vocabulary import is_content_word

_STEMMER = snowballstemmer.stemmer("english")


@lru_cache(maxsize=100_000)
def stem(word: str) -> str | None:
    """Return the stem of a content word, or None for any other word.

    Args:
        word: A lower-case token of ``text.tokenizer``.
    """
    return str(_STEMMER.stemWord(word)) if is_content_word(word) else None


def content_stems(text: str) -> list[str]:
    """Return the distinct stems of the content words of a caption, in their order."""
    stems = map(stem, caption_tokens(text))
    return list(dict.fromkeys(one for one in stems if one is not None))


def phrase_spans(words: Sequence[str]) -> list[slice]:
    """Split the words of a caption into phrases that are true or false as a whole.

    A phrase begins at a function word that follows a content word: "a black and white cat", "is
    sitting", "in a kitchen". Clitics and conjunctions between two content words do not begin one.
    """
    content = [stem(word) is not None for word in words]
    starts = [
        at
        for at in range(1, len(words))
        if content[at - 1]
        and not content[at]
        and words[at] not in CLITICS
        and not (words[at] in ("and", "or") and content[at + 1 : at + 2] == [True])
    ]
    bounds = [0, *starts, len(words)]
    return [slice(start, end) for start, end in pairwise(bounds) if end > start]
