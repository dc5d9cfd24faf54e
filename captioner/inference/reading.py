"""A model's reading of a photo, and the keywords that are derived from it.

The reading of a photo consists of the log-odds that the photo shows each of S word stems. For
example, the stem "dog" stands for dog and dogs. ``model.reading`` computes the log-odds. A model
folder with a reading has the entry ``reading`` in its config:

    hidden     size of the hidden layer
    stems      the S stems
    rows       for each word of the vocabulary, the index of its stem, or -1
    keywords   for each keyword, the phrases that count as this keyword, written in stems: "couch":
               ["couch", "sofa"], "hot dog": ["hot dog", "hotdog"]

The odds of a keyword are the sum of the odds of its phrases. A phrase is as probable as its least
probable stem. The odds of a stem are the mean of the odds of the regions (see ``model.reading``),
so a map shows exactly what each region adds. This module does not need torch.

Notation: B photos, L = Gh x Gw regions, S stems, V tokens of the vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from captioner.caption_types import Keyword
from captioner.inference.confidence import sigmoid
from captioner.search.words import NEUTRAL_WORDS
from captioner.search.worth import FUNCTION_WORD, UNKNOWN_WORD
from captioner.text.vocabulary import SPECIAL_NAMES, Vocabulary, content_words

READING = "reading"
"""Name of two things: the config entry with the words that the model can recognize in a photo, and
the output of the ONNX graph with the log-odds of these words."""

MIN_PROBABILITY = 0.3
"""Smallest probability of a keyword. Less probable keywords are left out."""
LEAST_ODDS = float(np.log(MIN_PROBABILITY / (1 - MIN_PROBABILITY)))

NO_KEYWORDS = (
    "does not support keywords; leave out keywords, or add them to the model with "
    "scripts/fit_reading.py"
)
"""The end of an error message, which begins with the name of a model."""

_Array = NDArray[np.float32]
_Phrases = tuple[tuple[str, ...], ...]


class Reading(NamedTuple):
    """A model's reading of photos: log-odds that they show each of S word stems, float32.

    For example, the stem "dog" stands for dog and dogs. L is the number of regions in a photo.
    """

    words: _Array
    """Log-odds that a photo shows each stem, (B, S)."""
    regions: _Array
    """Log-odds of each stem in each region, (B, L, S)."""


@dataclass(frozen=True)
class ReadingWords:
    """The words that a model can recognize in a photo without writing a caption (its reading)."""

    stems: tuple[str, ...]
    """The S word stems, such as "dog" for dog and dogs, in the order of the reading's log-odds."""
    rows: tuple[int, ...]
    """For each word of the vocabulary, the index of its stem, or -1 if it has none of the stems."""
    keywords: Mapping[str, _Phrases] = field(default_factory=dict)
    """For each keyword, the phrases that count as this keyword, such as couch and sofa for "couch".
    A phrase is a tuple of stems."""

    @classmethod
    def of(
        cls,
        stems: Sequence[str],
        vocabulary: Vocabulary,
        keywords: Mapping[str, _Phrases] | None = None,
    ) -> ReadingWords:
        """Create the object, and find the stem of each word in a vocabulary, such as dog for dogs.

        Args:
            stems: The word stems that the model can recognize in a photo.
            vocabulary: The vocabulary of the model. If it consists of pieces of words, the pieces
                get no stem.
            keywords: For each keyword, the phrases that count as this keyword, as tuples of stems.
                None: no keywords.
        """
        from captioner.text.content import stem  # captioning does not need the stemmer

        numbers = {one: row for row, one in enumerate(stems)}
        words = vocabulary.words if vocabulary.subwords is None else ()
        rows = [numbers.get(stem(word) or "", -1) for word in words]
        rows += [-1] * (len(vocabulary.words) - len(rows))
        return cls(tuple(stems), tuple(rows), keywords or {})

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> ReadingWords | None:
        """Read the entry ``reading`` of a model's config, or return None if it does not exist.

        Raises:
            KeyError: A part of the entry is missing.
            TypeError: A part has the wrong type.
            ValueError: The entry does not fit the vocabulary.
        """
        if (entry := config.get(READING)) is None:
            return None
        stems, rows, hidden = tuple(entry["stems"]), tuple(entry["rows"]), entry["hidden"]
        keywords = {
            word: tuple(map(tuple, map(str.split, phrases)))
            for word, phrases in entry["keywords"].items()
        }
        phrases = [*chain.from_iterable(keywords.values())]
        fits = (
            {*map(type, rows)} <= {int}
            and min(rows, default=-1) >= -1
            and max(rows, default=-1) < len(stems)
            and len(rows) == len(config["vocabulary"])
            and all(keywords.values())
            and all(phrases)
            and {*chain.from_iterable(phrases)} <= {*stems}
            and type(hidden) is int
            and hidden > 0
        )
        if not fits:
            raise ValueError("the words of the entry 'reading' do not match the vocabulary")
        return cls(stems, rows, keywords)

    def as_config(self, hidden: int) -> dict[str, Any]:
        """Return these words as an entry of ``config.json``.

        ``hidden`` is the size of the hidden layer in the network that recognizes the words.
        """
        keywords = {
            word: [" ".join(phrase) for phrase in phrases]
            for word, phrases in self.keywords.items()
        }
        return {"hidden": hidden, "stems": self.stems, "rows": self.rows, "keywords": keywords}

    def token_rows(self, vocabulary: Vocabulary) -> NDArray[np.int64]:
        """Return the index of the stem of each token in the vocabulary, (V,).

        Content words without a stem get ``UNKNOWN_WORD`` (-2). All other tokens without a stem get
        ``FUNCTION_WORD`` (-1).
        """
        rows = np.array([*[FUNCTION_WORD] * len(SPECIAL_NAMES), *self.rows])
        is_content = [*[False] * len(SPECIAL_NAMES), *content_words(vocabulary.words)]
        return np.where((rows == FUNCTION_WORD) & is_content, UNKNOWN_WORD, rows)

    def of_tokens(self, words: _Array) -> _Array:
        """Convert the log-odds that photos show word stems, (B, S), to those of tokens, (B, V).

        Tokens without a stem, such as function words, get NaN.
        """
        nothing = np.full((len(words), 1), np.nan, np.float32)
        rows = np.array([*[-1] * len(SPECIAL_NAMES), *self.rows])
        return np.concatenate([words, nothing], axis=1)[:, rows]  # -1 is the column of NaN

    def read_keywords(
        self,
        words: _Array,
        regions: _Array,
        count: int,
        *,
        neutral: bool = False,
        familiarity: float = 1.0,
    ) -> tuple[Keyword, ...]:
        """Return the most probable keywords of a photo, best first.

        A keyword is left out if it is part of the most probable phrase of another keyword, such as
        "dog" next to "hot dog".

        Args:
            words: Log-odds that the photo shows each word stem, (S,).
            regions: Log-odds of the stems in each region, (Gh, Gw, S).
            count: Maximum number of keywords.
            neutral: Use "person" for men and women, and "child" for boys and girls.
            familiarity: Factor for all probabilities: 1 for photos, lower for images that do not
                look like photos, and at least 0.
        """
        keywords = self._neutral if neutral else self._plain
        odds = words[keywords.rows].min(axis=1)  # per phrase: the odds of its least probable stem
        total = np.logaddexp.reduceat(odds, keywords.starts)
        found: list[tuple[float, int, set[int]]] = []
        for number in np.flatnonzero(total >= LEAST_ODDS).tolist():
            probability = sigmoid(float(total[number])) * familiarity
            if probability >= MIN_PROBABILITY:
                of = keywords.phrases(number)
                best = keywords.rows[of][odds[of].argmax()]
                found.append((probability, number, set(best.tolist())))
        kept = [one for one in found if not any(one[2] < other[2] for other in found)]
        best_first = sorted(kept, key=lambda one: -one[0])[:count]
        return tuple(
            Keyword(keywords.words[number], probability, keywords.map_of(number, regions))
            for probability, number, _ in best_first
        )

    @cached_property
    def _plain(self) -> _Keywords:
        return _Keywords.of(self.stems, self.keywords)

    @cached_property
    def _neutral(self) -> _Keywords:
        """The keywords with neutral names, so that men and women count as "person"."""
        merged: dict[str, _Phrases] = {}
        for word, phrases in self.keywords.items():
            name = NEUTRAL_WORDS.get(word, word)
            merged[name] = (*merged.get(name, ()), *phrases)
        return _Keywords.of(self.stems, merged)


class _Keywords(NamedTuple):
    """K keywords and their P phrases, in which every phrase is a row of stem indices."""

    words: tuple[str, ...]
    rows: NDArray[np.intp]
    """Indices of each phrase's stems, (P, longest). Shorter phrases repeat their last stem."""
    starts: NDArray[np.intp]
    """Index of the first phrase of each keyword, (K,)."""

    @classmethod
    def of(cls, stems: Sequence[str], keywords: Mapping[str, _Phrases]) -> _Keywords:
        """Look up the indices of the stems in all phrases of each keyword."""
        numbers = {stem: row for row, stem in enumerate(stems)}
        phrases = [phrase for some in keywords.values() for phrase in some]
        longest = max(map(len, phrases))
        padded = [(*phrase, *phrase[-1:] * (longest - len(phrase))) for phrase in phrases]
        rows = np.array([[numbers[stem] for stem in phrase] for phrase in padded])
        counts = [len(some) for some in keywords.values()]
        return cls(tuple(keywords), rows, np.cumsum([0, *counts[:-1]]))

    def phrases(self, number: int) -> slice:
        """Return the phrases of the keyword with this index, as a slice of ``rows``."""
        ends = [*self.starts[1:], len(self.rows)]
        return slice(self.starts[number], ends[number])

    def map_of(self, number: int, regions: _Array) -> _Array:
        """Return the log-odds of the keyword with index ``number`` in each region, (Gh, Gw).

        ``regions`` are the log-odds of the stems in each region, (Gh, Gw, S).
        """
        each = regions[..., self.rows[self.phrases(number)]].min(axis=-1)  # (Gh, Gw, phrases)
        total: _Array = np.logaddexp.reduce(each, axis=-1)
        return total


def has_keywords(reading: ReadingWords | None) -> bool:
    """Return whether a model supports keywords.

    ``reading`` contains the words that the model can recognize in a photo, or is None if it cannot
    recognize words.
    """
    return reading is not None and bool(reading.keywords)
