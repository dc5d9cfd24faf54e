"""Stems of content words. A content word is a word that can be true or false for a photo.

Nouns, verbs, adjectives and numbers are content words. Articles, prepositions, auxiliaries and
pronouns are function words. Two content words count as equal if they have the same stem ("dog" and
"dogs", "ride" and "riding").

Source: Snowball's English stemmer (Porter 2001), from the package snowballstemmer.
"""

from __future__ import annotations

from functools import lru_cache

import snowballstemmer

from captioner.text.tokenizer import caption_tokens
from captioner.text.vocabulary import is_content_word

_STEMMER = snowballstemmer.stemmer("english")


@lru_cache(maxsize=100_000)
def stem(word: str) -> str | None:
    """Return the stem of a content word, or None for a function word or a symbol.

    Args:
        word: A lower-case token from ``text.tokenizer``.
    """
    return str(_STEMMER.stemWord(word)) if is_content_word(word) else None


def content_stems(text: str) -> list[str]:
    """Return the distinct stems of the content words in a caption, in the order of the caption."""
    stems = map(stem, caption_tokens(text))
    return list(dict.fromkeys(one for one in stems if one is not None))
