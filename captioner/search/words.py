"""The words in the search options as token ids; no torch, so that unknown words fail at once.

For captions that do not guess the sex or age of people (``neutral``), the model's probabilities of
man, woman, lady, guy, ... are added to that of *person* before the search chooses, so that
attention, log-probability, article and grammar are those of the word that the caption contains.
Children remain children.
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
_NEVER = "male female elderly teenage middle-aged aged womans mans"
_AGES = "young younger old older"
_NOT_AFTER_AGES = "person people couple couples"

NEUTRAL_WORDS = {word: neutral for neutral, words in _GROUPS.items() for word in words.split()}
"""The word that replaces each word with a sex or age."""


_WIDE = ("person", "people", "child", "children")

WIDE_WORDS = {word: wide for word, wide in NEUTRAL_WORDS.items() if wide in _WIDE}
"""The word that covers each word with a sex or age, for ``worth.Worth.wide``."""


REPEATABLE = (FUNCTION_WORDS | NUMBERS) - {"back", "front", "side", "top"}
"""Words that a caption may contain twice even if ``block_repeats`` is set.

The four nouns are excluded, because otherwise the search writes "the side of the side".
"""


class PeopleTokens(NamedTuple):
    """The words for people in a vocabulary."""

    groups: tuple[tuple[int, ...], ...] = ()
    """Of each group, the token that receives the probabilities, then those that give theirs."""
    never: tuple[int, ...] = ()
    ages: tuple[int, ...] = ()
    """Tokens that say an age of people and of things ("old")."""
    not_after_ages: tuple[int, ...] = ()


def people_tokens(vocabulary: Vocabulary) -> PeopleTokens:
    """Look up the words for people in a vocabulary.

    Words whose neutral word the vocabulary lacks are never used.
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
    """A reference for captions without sex and age: its words replaced one by one.

    For metrics only. It is no substitute for the search, as the grammar may be wrong.
    """
    words = [NEUTRAL_WORDS.get(word, word) for word in tokenize(normalize(text))]
    kept = []
    for word, following in zip(words, [*words[1:], ""], strict=True):
        age = word in _AGES.split() and following in _NOT_AFTER_AGES.split()
        if not age and word not in _NEVER.split():
            kept.append(word)
    pairs = zip(kept, [*kept[1:], ""], strict=True)  # "an elderly man" is "a person"
    nouns = {*_GROUPS, *_NOT_AFTER_AGES.split()}
    return " ".join("a" if one == "an" and after in nouns else one for one, after in pairs)


class SearchTokens(NamedTuple):
    """What the search options refer to in a vocabulary: token ids, and how rare each token is."""

    forced: tuple[int, ...] = ()
    banned: tuple[int, ...] = ()
    bad_endings: tuple[int, ...] = ()
    repeatable: tuple[int, ...] = ()
    """Words that may repeat if ``block_repeats`` is set."""
    rarity: Sequence[float] = ()
    """(V,) negative log-frequency of each token up to a constant, if ``rare_words`` or
    ``candidates`` is set; empty for a vocabulary of pieces."""
    people: PeopleTokens = PeopleTokens()
    """If ``neutral`` is set."""


def encode_search_words(options: SearchOptions, vocabulary: Vocabulary) -> SearchTokens:
    """Look up the words of the search options; banned words outside the vocabulary are ignored.

    ConfigError: the model does not know another word, or the style, or has no whole words.
    """
    vocabulary.start(options.style)
    for name in marked(SearchOptions, Role.WHOLE_WORDS):
        if getattr(options, name):
            check_whole_words(vocabulary, name)
    rarity = vocabulary.subwords is None and bool(options.rare_words or options.candidates)
    unknown = [word for word in options.forced_words if word not in vocabulary]
    if unknown:
        raise ConfigError(
            f"forced_words contains {', '.join(unknown)}, which the model does not know; give "
            "words from its vocabulary"
        )
    if options.neutral and (replaced := NEUTRAL_WORDS.keys() & set(options.forced_words)):
        raise ConfigError(
            f"forced_words contains {', '.join(sorted(replaced))}, which neutral replaces; leave "
            "one of the two out"
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
    """Raise ConfigError if a vocabulary is one of pieces, which are not sorted by frequency."""
    if vocabulary.subwords is not None:
        raise ConfigError(
            f"{option} needs a model of whole words, but this one writes pieces of words "
            "(tokenizer bpe); leave it out"
        )


def rarities(size: int) -> tuple[float, ...]:
    """Negative log-frequency of every token up to a constant, from its rank alone.

    Words are sorted by frequency, so the law of Zipf and Mandelbrot, frequency proportional to
    1 / (rank + 2.7), replaces counts that model folders do not hold. The end token, which every
    training caption has, counts as the most frequent word.
    """
    first_word = len(SPECIAL_NAMES)
    return tuple(math.log(max(token - first_word, 0) + 1 + 2.7) for token in range(size))
