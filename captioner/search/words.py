"""Token ids of the words in the search options, and the words that ``neutral`` replaces.

This module does not import torch, so a command can report an unknown word quickly.

With the option ``neutral``, captions do not guess the sex or age of people. The probabilities of
words such as *man*, *woman*, *lady* and *guy* are added to the probability of *person* before the
search chooses a word. In the same way, *boy* and *girl* become *child*. If words were replaced in
the finished caption instead, its grammar, attention and probabilities would not fit the new words.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from captioner.errors import ConfigError
from captioner.options import Role, SearchOptions
from captioner.schema import marked
from captioner.text.tokenizer import normalize, tokenize
from captioner.text.vocabulary import (
    BAD_ENDINGS,
    FUNCTION_WORDS,
    NUMBERS,
    SPECIAL_NAMES,
    Vocabulary,
)

# The words that imply a sex or age, by the neutral word that replaces them.
_GROUPS = {
    "person": """
        man woman guy lady gentleman adult teenager teen youth human mother father mom dad parent
        wife husband bride groom grandmother grandfather sister brother waiter waitress actor
        actress policeman policewoman fireman fisherman cameraman batsman baseman cowboy cowgirl
        businessman businesswoman salesman workman sportsman
        """,
    "people": """
        men women guys ladies gentlemen adults teenagers teens youths males females persons humans
        mothers fathers parents wives husbands brides grooms bridesmaids groomsmen sisters brothers
        policemen firemen fishermen cowboys businessmen workmen sportsmen
        """,
    "child": "boy girl kid toddler son daughter",
    "children": "boys girls kids toddlers sons daughters",
    "their": "his her hers",
    "they": "he she",
    "them": "him",
    "themselves": "himself herself",
}
# Words that ``neutral`` never writes.
_NEVER = "male female elderly teenage middle-aged aged womans mans"
# Words for an age. They may describe things ("an old house"), but not the following words.
_AGES = "young younger old older"
_NOT_AFTER_AGES = "person people couple couples"

NEUTRAL_WORDS = {word: neutral for neutral, words in _GROUPS.items() for word in words.split()}
"""The neutral word for each word that implies a sex or age, such as *person* for *man*."""


_WIDE = ("person", "people", "child", "children")

WIDE_WORDS = {word: wide for word, wide in NEUTRAL_WORDS.items() if wide in _WIDE}
"""The general word for each specific word, such as *person* for *man* (see ``Worth.wide``)."""


REPEATABLE = (FUNCTION_WORDS | NUMBERS) - {"back", "front", "side", "top"}
"""Words that a caption may contain twice even if ``block_repeats`` is set.

The four nouns are excluded, because the search would otherwise write "the side of the side".
"""


class PeopleTokens(NamedTuple):
    """Token ids of the words that the option ``neutral`` affects, in one vocabulary."""

    groups: tuple[tuple[int, ...], ...] = ()
    """Groups of tokens. Each group is a neutral word, followed by the words that it replaces."""
    never: tuple[int, ...] = ()
    """Words that captions must not contain."""
    ages: tuple[int, ...] = ()
    """Words for the age of people or things, such as "old"."""
    not_after_ages: tuple[int, ...] = ()
    """Words for people, which must not follow a word in ``ages``."""


def people_tokens(vocabulary: Vocabulary) -> PeopleTokens:
    """Look up the token ids of the words that ``neutral`` affects.

    If a neutral word is not in the vocabulary, captions must not contain the words that it would
    replace.
    """
    groups, unmerged = [], []
    for neutral, words in _GROUPS.items():
        members = vocabulary.whole_words(words.split())
        if neutral in vocabulary:
            groups.append((*vocabulary.encode([neutral]), *members))
        else:
            unmerged += members
    never, ages, after = (
        tuple(vocabulary.whole_words(words.split())) for words in (_NEVER, _AGES, _NOT_AFTER_AGES)
    )
    return PeopleTokens(tuple(groups), (*never, *unmerged), ages, after)


def neutral_caption(text: str) -> str:
    """Replace the words in a reference caption that imply a person's sex or age.

    Metrics use the result to compare references with captions of the option ``neutral``. The words
    are replaced one by one, so the grammar of the result may be wrong.
    """
    words = [NEUTRAL_WORDS.get(word, word) for word in tokenize(normalize(text))]
    kept = []
    for word, following in zip(words, [*words[1:], ""], strict=True):
        age = word in _AGES.split() and following in _NOT_AFTER_AGES.split()
        if not age and word not in _NEVER.split():
            kept.append(word)
    pairs = zip(kept, [*kept[1:], ""], strict=True)
    # Correct the article if a word was dropped: "an elderly man" becomes "a person".
    nouns = {*_GROUPS, *_NOT_AFTER_AGES.split()}
    return " ".join("a" if one == "an" and after in nouns else one for one, after in pairs)


class SearchTokens(NamedTuple):
    """Token ids of the words in the search options, and the rarity of every token."""

    forced: tuple[int, ...] = ()
    """Words that each caption must contain."""
    banned: tuple[int, ...] = ()
    """Words that captions must not contain."""
    bad_endings: tuple[int, ...] = ()
    """Words that captions must not end with, if ``guard_endings`` is set."""
    repeatable: tuple[int, ...] = ()
    """Words that a caption may repeat even if ``block_repeats`` is set."""
    rarity: Sequence[float] = ()
    """Negative logarithm of each token's frequency, up to a constant, (V,) (see ``rarities``).

    It is empty if neither ``rare_words`` nor ``candidates`` is set, or if the vocabulary consists
    of word pieces.
    """
    people: PeopleTokens = PeopleTokens()
    """Words that ``neutral`` affects. They are empty if ``neutral`` is not set."""


def encode_search_words(options: SearchOptions, vocabulary: Vocabulary) -> SearchTokens:
    """Look up the token ids of the words in the search options.

    Banned words outside the vocabulary are ignored.

    Raises:
        ConfigError: The model does not have a forced word or the style, ``neutral`` replaces a
            forced word, or an option does not support a vocabulary of word pieces.
    """
    vocabulary.start(options.style)
    for name in marked(SearchOptions, Role.WHOLE_WORDS):
        if getattr(options, name):
            check_whole_words(vocabulary, name)
    rarity = vocabulary.subwords is None and bool(options.rare_words or options.candidates)
    unknown = [word for word in options.forced_words if word not in vocabulary]
    if unknown:
        raise ConfigError(
            f"forced_words contains {', '.join(unknown)}, which the model does not know; "
            f"{vocabulary.advice(unknown[0])}"
        )
    if options.neutral and (replaced := NEUTRAL_WORDS.keys() & set(options.forced_words)):
        raise ConfigError(
            f"forced_words contains {', '.join(sorted(replaced))}, but neutral is set and never "
            "writes such words; leave out these words, or set neutral to false"
        )
    endings = BAD_ENDINGS if options.guard_endings else ()
    return SearchTokens(
        tuple(vocabulary.encode(options.forced_words)),
        tuple(vocabulary.encode(word for word in options.banned_words if word in vocabulary)),
        tuple(vocabulary.whole_words(endings)),
        tuple(vocabulary.whole_words(REPEATABLE if options.block_repeats else ())),
        rarities(len(vocabulary)) if rarity else (),
        people_tokens(vocabulary) if options.neutral else PeopleTokens(),
    )


def check_whole_words(vocabulary: Vocabulary, option: str) -> None:
    """Check that a vocabulary consists of whole words, because an option needs them.

    Args:
        vocabulary: The vocabulary of the model.
        option: Name of the option, for the error message.

    Raises:
        ConfigError: The vocabulary consists of word pieces.
    """
    if vocabulary.subwords is not None:
        raise ConfigError(
            f"{option} needs a model that writes whole words, but this model writes word pieces "
            f"(tokenizer bpe); leave out {option}"
        )


def rarities(size: int) -> tuple[float, ...]:
    """Estimate the negative logarithm of every token's frequency from its rank, up to a constant.

    Model folders do not contain word counts, but their words are sorted by frequency. According to
    the Zipf-Mandelbrot law, a frequency is proportional to 1 / (rank + 2.7), where the most
    frequent word has rank 1. Every training caption contains the end token. So the end token, like
    all special tokens, gets the same value as the most frequent word.

    Args:
        size: Number of tokens, V.
    """
    first_word = len(SPECIAL_NAMES)
    return tuple(math.log(max(token - first_word, 0) + 1 + 2.7) for token in range(size))
