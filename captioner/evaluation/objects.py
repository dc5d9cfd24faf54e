"""Finds the names of the 80 COCO categories in captions.

`names.json` lists the phrases that name each category; ``dog(s)`` means "dog" and "dogs". A phrase
is included if COCO's annotators would most likely have labelled the object with that category.
Ambiguous words are excluded, which favours precision over recall:

* "orange" alone: a colour far more often than a fruit. "oranges" and "orange slice" count.
* "glass", "glasses": a window, spectacles or a drink; "wine glass" and "glass of wine" count.
* "baseball", "football", "basketball", "volleyball": the game more often than the ball.
* "plant", "bag", "screen", "desk", "van", "computer", "scooter", "chicken": COCO has two
  categories for them or none; "meter", "light": five metres, a lamp.
* "couple", "group", "crowd", "family", "team": of people or of giraffes.
* "male", "female", "passenger", "cook": they describe another noun, or are verbs.
* Pronouns: a model need not look at a person to generate "he".

"bike" is a bicycle unless "motor" or "dirt" precedes it. If a word is part of a longer phrase ("hot
dog", "bus stop", "baby zebra", "skis down"), the longer phrase wins: it names another category or,
if it is among its ``others``, none. ``animals`` to ``ways`` are parts of phrases that are made from
others: "a baby elephant" is not a person; "a stuffed dog", "a toy car" and "a dog house" are in no
category; in "a man skis down a hill" a preposition follows the verb.

Source: the category names are COCO's (Lin et al. 2014, arXiv:1405.0312); the phrases were collected
for this package from captions, before any model was measured with them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import NamedTuple

_LISTS = json.loads(Path(__file__).with_name("names.json").read_text(encoding="utf-8"))

CATEGORIES: dict[str, list[str]] = _LISTS["categories"]
"""Phrases that name each category."""

OTHERS: list[str] = _LISTS["others"]
"""Phrases that contain one of the words above but name none of the 80 categories."""


class Name(NamedTuple):
    """A category named by words[start:stop] of a caption."""

    category: str
    start: int
    stop: int


Phrases = Mapping[tuple[str, ...], str | None]
"""The category of each phrase; None: the phrase only looks like a name."""


def find_names(words: Sequence[str], table: Phrases | None = None) -> list[Name]:
    """Find the COCO categories that a caption names, or those of another table of phrases.

    Names do not overlap; from left to right, the longest phrase wins. Hyphens may replace the
    spaces of a phrase ("hot-dog").

    Args:
        words: Lower-case Penn Treebank tokens (`captioner.text.tokenizer`), e.g. ``Caption.words``.
        table: Phrases of one to three words.

    Returns:
        The names in word order.
    """
    table = _PHRASES if table is None else table
    names, start = [], 0
    while start < len(words):
        ends = range(min(start + _LONGEST, len(words)), start + 1, -1)
        stop = next((end for end in ends if tuple(words[start:end]) in table), start + 1)
        category = table.get(tuple(words[start:stop]))
        if category is not None:
            names.append(Name(category, start, stop))
        start = stop
    return names


def phrases(entries: Sequence[str]) -> Iterator[tuple[str, ...]]:
    """The words of phrases; "dog(s)" gives "dog" and "dogs"."""
    for entry in entries:
        stem, _, ending = entry.rstrip(")").partition("(")
        yield tuple(stem.split())
        if ending:
            yield tuple(f"{stem}{ending}".split())


def _table() -> dict[tuple[str, ...], str | None]:
    """The category of each phrase, None for those that only look like a name."""
    table: dict[tuple[str, ...], str | None] = {}
    table.update(dict.fromkeys(product(_LISTS["verbs"], _LISTS["ways"])))
    for category in _LISTS["animals"] + _LISTS["vehicles"]:
        for phrase in phrases(CATEGORIES[category]):
            table.update({(made, *phrase): None for made in _LISTS["made"]})
    for animal in _LISTS["animals"]:
        for phrase in phrases(CATEGORIES[animal]):
            table.update({(young, *phrase): animal for young in _LISTS["young"]})
            table.update({(*phrase, thing): None for thing in _LISTS["belongings"]})
    # Explicit phrases override the generated ones: "stuffed bear" is a teddy bear.
    table.update(dict.fromkeys(phrases(OTHERS)))
    for category, entries in CATEGORIES.items():
        table.update(dict.fromkeys(phrases(entries), category))
    return {("-".join(phrase),): category for phrase, category in table.items()} | table


_PHRASES = _table()
_LONGEST = max(len(phrase) for phrase in _PHRASES)
