"""Stems of content words, the words of a caption that can be true or false of a photo.

Nouns, verbs, adjectives and numbers are content words. Articles, prepositions, auxiliaries and
pronouns are function words. Two words count as the same if they have the same stem ("dog" and
"dogs", "ride" and "riding").

Source: the stemmer is Snowball's English stemmer (Porter 2001), from the package snowballstemmer.
"""

from __future__ import annotations

from functools import lru_cache

import snowballstemmer

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
    """Return the distinct stems of a caption's content words, in the order of the caption."""
    stems = map(stem, caption_tokens(text))
    return list(dict.fromkeys(one for one in stems if one is not None))
