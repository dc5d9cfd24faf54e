"""The names of the 80 COCO categories in captions, and the metric CHAIR.

`names.json` lists the phrases that name each category. ``dog(s)`` means "dog" and "dogs". A phrase
is included if COCO's annotators would most likely have labelled the object with that category.
Ambiguous words are excluded, which favours precision over recall:

* "orange" alone is far more often a colour than a fruit. "oranges" and "orange slice" count.
* "glass" and "glasses" may be a window, spectacles or a drink. "wine glass" and "glass of wine"
  count.
* "baseball", "football", "basketball" and "volleyball" are more often the game than the ball.
* "plant", "bag", "screen", "desk", "van", "computer", "scooter" and "chicken" match two
  categories of COCO, or no category.
* "meter" may be a length, and "light" may be a lamp.
* "couple", "group", "crowd", "family" and "team" may be people or giraffes.
* "male", "female", "passenger" and "cook" often describe a different noun, or are verbs.
* Pronouns do not count: a model need not look at a person to generate "he".

"bike" is a bicycle unless "motor" or "dirt" precedes it. If a word is part of a longer phrase ("hot
dog", "bus stop", "baby zebra", "skis down"), the longer phrase wins. It names a different category,
or no category if it is listed in ``others``.

The lists ``animals`` to ``ways`` are building blocks of phrases. They make sure that "a baby
elephant" is not a person. "a stuffed dog", "a toy car" and "a dog house" belong to no category. In
"a man skis down a hill", a preposition shows that "skis" is a verb.

Source: the category names are COCO's (Lin et al. 2014, arXiv:1405.0312). The phrases were collected
for this package from captions, before any model was measured with them.

CHAIR measures how many of the objects that captions mention are not in the photo. Lower is better:

    CHAIR_i = mentions of objects that are not in the photo / all mentions of objects
    CHAIR_s = captions that mention an object that is not in the photo / all captions

An object is in the photo if it is annotated there (also as a crowd), or if a reference caption
names it.

Source: Rohrbach et al. 2018, Object Hallucination in Image Captioning (arXiv:1809.02156).
Deviation: a different list of synonyms.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from captioner.data.coco import read_json
from captioner.errors import DataError
from captioner.evaluation.bootstrap import ratio
from captioner.text.tokenizer import caption_tokens

_LISTS = json.loads(Path(__file__).with_name("names.json").read_text(encoding="utf-8"))

CATEGORIES: dict[str, list[str]] = _LISTS["categories"]
"""The phrases that name each category."""

OTHERS: list[str] = _LISTS["others"]
"""Phrases that contain a word of ``CATEGORIES`` but do not name a category."""


class Name(NamedTuple):
    """A category that ``words[start:stop]`` of a caption name."""

    category: str
    start: int
    stop: int


Phrases = Mapping[tuple[str, ...], str | None]
"""The category of each phrase, or None for phrases that only look like a name."""


def find_names(words: Sequence[str], table: Phrases | None = None) -> list[Name]:
    """Find the categories that a caption names.

    Names do not overlap. The search runs from left to right, and the longest phrase wins. Hyphens
    may replace the spaces of a phrase ("hot-dog").

    Args:
        words: Lower-case Penn Treebank tokens (`captioner.text.tokenizer`), e.g. ``Caption.words``.
        table: Phrases of one to three words. By default, the names of COCO's categories.

    Returns:
        The names, in the order of the words.
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
    """Split phrases into words. "dog(s)" becomes two phrases, "dog" and "dogs"."""
    for entry in entries:
        stem, _, ending = entry.rstrip(")").partition("(")
        yield tuple(stem.split())
        if ending:
            yield tuple(f"{stem}{ending}".split())


def _table() -> dict[tuple[str, ...], str | None]:
    """Build the table of all phrases and their categories; see ``Phrases``."""
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


# --- CHAIR ---------------------------------------------------------------------------------------

BINS = 5
"""Number of equal bins of the confidence, from 0 to 1."""


def read_objects(path: str | Path) -> dict[int, set[str]]:
    """Read which COCO categories are in which photos, from a JSON file.

    The file contains ``classes``, the names of the categories, and ``photos``, the indices of each
    photo's categories. Photos are listed by image id, ``{"9": [0, 2]}``, or by file name with the
    image id before the indices, ``{"a.jpg": [9, [0, 2]]}``.

    Returns:
        The categories in each photo of the file, by image id.

    Raises:
        DataError: The file is missing or not of this form, or a class is not one of COCO's.
    """
    data = read_json(Path(path))
    classes, photos = data.get("classes"), data.get("photos")
    if not isinstance(classes, list) or not isinstance(photos, dict) or not photos:
        raise DataError(
            f"{path} lacks 'classes' or 'photos'; use an objects file (docs/evaluation.md)"
        )
    if unknown := [name for name in classes if name not in [*CATEGORIES]]:
        raise DataError(
            f"{path}: the class {unknown[0]!r:.60} is not one of COCO's 80 categories; use the "
            "names of COCO"
        )
    found: dict[int, set[str]] = {}
    for key, entry in photos.items():
        try:
            image_id, indices = entry if entry and isinstance(entry[-1], list) else (key, entry)
            if any(type(index) is not int or index < 0 for index in indices):
                raise ValueError(f"{indices!r:.60} are not indices")
            if type(image_id) not in (int, str):
                raise TypeError(f"{image_id!r:.60} is not an image id")
            there = {classes[index] for index in indices}
            found.setdefault(int(image_id), set()).update(there)
        except (ValueError, TypeError, LookupError) as error:
            raise DataError(
                f"{path}: photo {key!r:.60} has invalid objects ({error}); list the indices of its "
                "classes (docs/evaluation.md)"
            ) from error
    return found


def photo_objects(
    references: Mapping[int, Sequence[str]], annotated: Mapping[int, Collection[str]]
) -> dict[int, set[str]]:
    """Return the categories in each photo: annotated, or named by a reference caption."""
    return {
        image_id: {
            *annotated.get(image_id, ()),
            *(name.category for text in texts for name in find_names(caption_tokens(text))),
        }
        for image_id, texts in references.items()
    }


def count_mentions(
    captions: Sequence[Sequence[str]], objects: Sequence[Collection[str]]
) -> NDArray[np.float64]:
    """Count mentions of objects that are not in the photo, and all mentions, per caption: (N, 2).

    Args:
        captions: Tokens of each caption.
        objects: Categories in the photo of each caption.
    """
    counts = np.zeros((len(captions), 2))
    for row, words, there in zip(counts, captions, objects, strict=True):
        names = find_names(words)
        row[:] = sum(name.category not in there for name in names), len(names)
    return counts


def by_confidence(
    counts: NDArray[np.float64], confidences: Sequence[float]
) -> list[dict[str, Any]]:
    """Compute CHAIR for each bin of confidence, without bins that contain no captions.

    Args:
        counts: Mentions in each caption, (N, 2), from `count_mentions`.
        confidences: Confidence of each caption, 0 to 1, (N,).
    """
    bins = np.minimum((np.array(confidences) * BINS).astype(int), BINS - 1)
    return [
        {
            "from": number / BINS,
            "to": (number + 1) / BINS,
            "captions": len(own),
            "mentions": int(own[:, 1].sum()),
            "CHAIR_i": ratio(own.sum(axis=0, keepdims=True)).item(),
            "CHAIR_s": float((own[:, 0] > 0).mean()),
        }
        for number in np.unique(bins).tolist()
        for own in [counts[bins == number]]
    ]
