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

CHAIR counts how many of the objects that captions mention are not in the photo; lower is better:

    CHAIR_i = mentions of objects that are not in the photo / all mentions of objects
    CHAIR_s = captions that mention an object that is not in the photo / all captions

In a photo are the objects that are annotated in it (crowds too) or that one of its reference
captions names. With references alone, objects that people did not mention count as hallucinated.

Source: Rohrbach et al. 2018, Object Hallucination in Image Captioning (arXiv:1809.02156).
Deviation: the list of synonyms is another.
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


# --- CHAIR ---------------------------------------------------------------------------------------

BINS = 5


def read_objects(path: str | Path) -> dict[int, set[str]]:
    """Read which COCO categories are in which photos.

    The file is a JSON object with ``classes``, the names of the categories, and ``photos``, which
    has the indices of each photo's categories: ``{"9": [0, 2]}`` by image id, or
    ``{"a.jpg": [9, [0, 2]]}`` by file name, with the image id before the indices.

    Returns:
        The categories in each photo of the file, by image id.

    Raises:
        DataError: The file is missing, has another form, or has a class that is not one of COCO's.
    """
    data = read_json(Path(path))
    classes, photos = data.get("classes"), data.get("photos")
    if not isinstance(classes, list) or not isinstance(photos, dict) or not photos:
        raise DataError(
            f"{path} lacks 'classes' or 'photos'; give an objects file (docs/evaluation.md)"
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
                f"{path}: photo {key!r:.60} has invalid objects ({error}); give the indices of its "
                "classes (docs/evaluation.md)"
            ) from error
    return found


def photo_objects(
    references: Mapping[int, Sequence[str]], annotated: Mapping[int, Collection[str]]
) -> dict[int, set[str]]:
    """The categories in each photo, from its reference captions and its annotated categories."""
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
    """Mentions of objects that are not in the photo, and all mentions, of each caption: (N, 2).

    Of the tokens of each caption and the categories in its photo.
    """
    counts = np.zeros((len(captions), 2))
    for row, words, there in zip(counts, captions, objects, strict=True):
        names = find_names(words)
        row[:] = sum(name.category not in there for name in names), len(names)
    return counts


def by_confidence(
    counts: NDArray[np.float64], confidences: Sequence[float]
) -> list[dict[str, Any]]:
    """CHAIR of the captions in each fifth of 0 to 1 by confidence, (N,), of those with captions."""
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
