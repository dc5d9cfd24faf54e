"""Captions that do not guess the sex or age of people: their words, merged inside the search.

The model's probabilities of man, woman, lady, guy, ... are added to that of *person* before the
search chooses, so that attention, log-probability, article and grammar are those of the word that
the caption contains. Children remain children.
"""

from __future__ import annotations

from typing import NamedTuple

from captioner.text.tokenizer import normalize, tokenize
from captioner.text.vocabulary import Vocabulary

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
    """A caption as reference for captions without sex and age: its words replaced one by one.

    For metrics only. It is no substitute for the search, as articles and grammar may be wrong.
    """
    words = [NEUTRAL_WORDS.get(word, word) for word in tokenize(normalize(text))]
    kept = []
    for word, following in zip(words, [*words[1:], ""], strict=True):
        age = word in _AGES.split() and following in _NOT_AFTER_AGES.split()
        if not age and word not in _NEVER.split():
            kept.append(word)
    return " ".join(kept)
