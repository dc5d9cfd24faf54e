"""The names of the 80 COCO categories in captions, and the metric CHAIR.

`names.json` lists the phrases that name each category. ``dog(s)`` stands for "dog" and "dogs". A
phrase is included if COCO's annotators would most likely label the object with this category.
Ambiguous words are excluded, so precision is higher than recall:

* "orange" alone is far more often a colour than a fruit. "oranges" and "orange slice" count.
* "glass" and "glasses" may be a window, spectacles or a drink. "wine glass" and "glass of wine"
  count.
* "baseball", "football", "basketball" and "volleyball" usually mean the game, not the ball.
* Some words match two categories or none: "plant", "bag", "screen" and "desk", and also "van",
  "computer", "scooter" and "chicken".
* "meter" may be a length, and "light" may be a lamp.
* Words for groups, such as "couple", "crowd" and "family", may mean people or giraffes.
* "male", "female", "passenger" and "cook" often modify a different noun, or are verbs.
* Pronouns do not count: a model need not look at a person to generate "he".

"bike" is a bicycle unless "motor" or "dirt" precedes it. If a word is part of a longer phrase ("hot
dog", "bus stop", "baby zebra", "skis down"), the longer phrase counts instead. The longer phrase
names a different category, or no category if it is in the list ``others``.

The lists ``animals`` to ``ways`` in `names.json` are building blocks of phrases. With these lists,
"a baby elephant" is not a person, and "a stuffed dog", "a toy car" and "a dog house" have no
category. In "a man skis down a hill", the preposition shows that "skis" is a verb.

Source: the category names are COCO's (Lin et al. 2014, arXiv:1405.0312). The phrases were collected
for this package from captions, before any model was measured with them.

CHAIR measures how often captions mention objects that are not in the photo. Lower is better:

    CHAIR_i = mentions of objects that are not in the photo / all mentions of objects
    CHAIR_s = captions that mention an object that is not in the photo / all captions

An object counts as in the photo if the photo has an annotation of it (even as a crowd), or if a
reference caption names it.

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
"""The phrases that name each category, by the name of the category."""

OTHERS: list[str] = _LISTS["others"]
"""Phrases that contain a word of ``CATEGORIES`` but do not name a category, such as "bus stop"."""


class Name(NamedTuple):
    """A category, and the place in a caption that names it: the words ``words[start:stop]``."""

    category: str
    start: int
    stop: int


Phrases = Mapping[tuple[str, ...], str | None]
"""The category of each phrase, by the words of the phrase. The category is None for phrases that
contain the name of a category, but do not name one as a whole, such as "toy car"."""


def find_names(words: Sequence[str], table: Phrases | None = None) -> list[Name]:
    """Find the names of categories in a caption.

    Names do not overlap. The search runs from left to right and prefers the longest phrase. In the
    names of COCO's categories, hyphens may replace the spaces ("hot-dog").

    Args:
        words: Lower-case tokens from `captioner.text.tokenizer`, such as ``Caption.words``.
        table: The category of each phrase of one to four words, or None for a phrase without a
            category. By default, the phrases that name COCO's categories.

    Returns:
        The names, in the order of the caption.
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
    """Yield the words of each phrase in a list from `names.json`.

    An entry such as "dog(s)" stands for two phrases, "dog" and "dogs".
    """
    for entry in entries:
        stem, _, ending = entry.rstrip(")").partition("(")
        yield tuple(stem.split())
        if ending:
            yield tuple(f"{stem}{ending}".split())


def _table() -> dict[tuple[str, ...], str | None]:
    """Build a dictionary from phrases (words) to the COCO category that each phrase names.

    The category is None for phrases that name no category but contain the name of one ("toy car").
    """
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
"""Length of the longest phrase in words."""


# --- CHAIR ---------------------------------------------------------------------------------------

BINS = 5
"""Number of bins of equal width that divide the confidence, 0 to 1."""


def read_objects(path: str | Path) -> dict[int, set[str]]:
    """Read which COCO categories each photo contains, from a JSON file.

    In the file, ``classes`` lists the names of categories, and ``photos`` maps each photo to
    indices in this list. The key of a photo is its image id (``{"9": [0, 2]}``) or its file name.
    With a file name, the image id precedes the indices (``{"a.jpg": [9, [0, 2]]}``).

    Returns:
        The categories in each photo, by image id.

    Raises:
        DataError: The file is missing or has a different structure, or a class is not a COCO
            category.
    """
    data = read_json(Path(path))
    classes, photos = data.get("classes"), data.get("photos")
    if not isinstance(classes, list) or not isinstance(photos, dict) or not photos:
        raise DataError(
            f"{path} lacks 'classes' or 'photos'; use an objects file (see docs/evaluation.md)"
        )
    if unknown := [name for name in classes if name not in [*CATEGORIES]]:
        raise DataError(
            f"{path}: the class {unknown[0]!r:.60} is not one of COCO's 80 categories; use "
            "COCO's names"
        )
    found: dict[int, set[str]] = {}
    for key, entry in photos.items():
        try:
            image_id, indices = entry if entry and isinstance(entry[-1], list) else (key, entry)
            if any(type(index) is not int or index < 0 for index in indices):
                raise ValueError(f"{indices!r:.60} is not a list of numbers from 0")
            if type(image_id) not in (int, str):
                raise TypeError(f"{image_id!r:.60} is not an image id")
            there = {classes[index] for index in indices}
            found.setdefault(int(image_id), set()).update(there)
        except (ValueError, TypeError, LookupError) as error:
            raise DataError(
                f"{path}: photo {key!r:.60} has invalid objects ({error}); list indices of "
                "'classes' (see docs/evaluation.md)"
            ) from error
    return found


def photo_objects(
    references: Mapping[int, Sequence[str]], annotated: Mapping[int, Collection[str]]
) -> dict[int, set[str]]:
    """Return the categories that are annotated in each photo or named in its references.

    For CHAIR, these objects count as in the photo.

    Args:
        references: Reference captions by image id.
        annotated: Annotated categories by image id. Photos may be missing.

    Returns:
        The categories in each photo of ``references``, by image id.
    """
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
    """Count the objects that each caption mentions.

    An object that a caption mentions twice counts twice.

    Args:
        captions: Tokens of each of the N captions.
        objects: Categories in the photo of each caption.

    Returns:
        Two values per caption, (N, 2): the number of mentions of objects that are not in the photo,
        and the number of all mentions of objects.
    """
    counts = np.zeros((len(captions), 2))
    for row, words, there in zip(counts, captions, objects, strict=True):
        names = find_names(words)
        row[:] = sum(name.category not in there for name in names), len(names)
    return counts


def by_confidence(
    counts: NDArray[np.float64], confidences: Sequence[float]
) -> list[dict[str, Any]]:
    """Compute CHAIR separately for captions of low to high confidence.

    Args:
        counts: Mentions in each caption, (N, 2), from `count_mentions`.
        confidences: Confidence of each caption, 0 to 1, (N,).

    Returns:
        One entry for each bin of confidence that contains captions: the limits ``from`` and ``to``
        of the bin, the numbers of ``captions`` and ``mentions``, ``CHAIR_i`` and ``CHAIR_s``.
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
