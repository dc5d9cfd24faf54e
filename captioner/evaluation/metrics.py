"""Caption metrics: BLEU, ROUGE-L and CIDEr over Penn Treebank tokens.

The scores equal those of pycocoevalcap, and so do their names and scale: CIDEr 1.0 is 100 points.
``captioner.text.tokenizer`` produces the tokens of its Java tokenizer without Java; scripts without
spaces between words are split into characters, and texts are normalized to NFC.

Optional metrics: CIDEr_D, which is CIDEr with frozen document frequencies, METEOR and SPICE, which
need Java, and CHAIR_i and CHAIR_s, see `captioner.evaluation.objects`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from captioner.errors import DataError, ProgramError
from captioner.evaluation import java as java_programs
from captioner.evaluation.objects import chair_i, count_mentions
from captioner.evaluation.options import OnError, raise_error
from captioner.evaluation.references import (
    ORDERS,
    Cider,
    DocumentFrequencies,
    Ngrams,
    bleu_counts,
    count_documents,
    split,
    words_of,
)
from captioner.text.tokenizer import caption_tokens, has_unspaced
from captioner.version import __version__

# Constants of pycocoevalcap: smoothing of BLEU, weight of recall in ROUGE-L.
_SMALL, _TINY = 1e-9, 1e-15
_BETA = 1.2


@dataclass(frozen=True)
class Scores:
    """Scores of a set of captions."""

    ids: Sequence[int]
    """The images, (N,)."""
    values: Mapping[str, NDArray[np.float64]]
    """Scores of each image, (N,), by metric; CIDEr uses the document frequencies of all images."""
    counts: Mapping[str, NDArray[np.float64]]
    """Counts of the metrics that are not a mean over images: Bleu (N, 10), see `bleu_from_counts`;
    METEOR (N, 23), see `java.METEOR_COUNTS`; CHAIR_i (N, 2), see `objects.count_mentions`."""

    @cached_property
    def corpus(self) -> dict[str, float]:
        """Bleu_1 to Bleu_4, ROUGE_L, CIDEr and the optional metrics over all images."""
        whole = self.resample(np.ones((1, len(self.ids))))
        return {name: value.item() for name, value in whole.items()}

    @cached_property
    def images(self) -> dict[int, dict[str, float]]:
        """Scores by image id."""
        return {
            image_id: {name: values[n].item() for name, values in self.values.items()}
            for n, image_id in enumerate(self.ids)
        }

    def resample(self, weights: ArrayLike) -> dict[str, NDArray[np.float64]]:
        """Corpus scores of resamples of the images.

        BLEU and METEOR are computed from the summed counts, all other metrics are weighted means.
        CIDEr keeps the document frequencies of the whole set. An image whose SPICE is NaN makes the
        corpus SPICE NaN.

        Args:
            weights: How often each image counts, (R, N), in order of the ids. No row may sum to 0.

        Returns:
            R scores of each metric.
        """
        rows = np.asarray(weights, dtype=np.float64)
        found = {name: rows @ values / rows.sum(axis=1) for name, values in self.values.items()}
        for name, counts in self.counts.items():
            found |= _from_counts(name, rows @ counts)
        return found


def _from_counts(name: str, counts: NDArray[np.float64]) -> dict[str, NDArray[np.float64]]:
    """Scores by metric, (R,), from the counts of ``Scores.counts``, summed or not."""
    if name == "METEOR":
        return {name: java_programs.meteor_from_counts(counts)}
    if name == "CHAIR_i":
        return {name: chair_i(counts)}
    return {f"Bleu_{n}": column for n, column in enumerate(bleu_from_counts(counts).T, 1)}


@dataclass
class CaptionEvaluator:
    """Scores captions against references, with the same settings for all systems compared."""

    references: Mapping[int, Sequence[str]]
    """All reference captions by image id."""
    frequencies: DocumentFrequencies | None = None
    """Frozen document frequencies; adds CIDEr_D."""
    java: Sequence[str] = ()
    """METEOR, SPICE or both."""
    objects: Mapping[int, Collection[str]] | None = None
    """The categories in each photo, by image id; adds CHAIR_i and CHAIR_s."""
    on_error: OnError = raise_error
    """Called with the error of a metric's program, which is then omitted."""

    def score(self, captions: Mapping[int, str]) -> Scores:
        """Score one caption per image, by image id and not tokenized.

        Raises:
            DataError: There are no captions, or an image has no references.
            ProgramError: The program of a Java metric failed; see ``on_error``.
        """
        if not captions:
            raise DataError("there are no captions to score; give at least one image")
        ids = sorted(captions)
        tokens = [caption_tokens(captions[i]) for i in ids]
        truth = {i: [caption_tokens(text) for text in self.references.get(i, ())] for i in ids}
        known = words_of(truth)
        ciders = {"CIDEr": Cider(count_documents(known.values()))}
        if self.frequencies is not None:
            ciders["CIDEr_D"] = Cider(self.frequencies)
        rows: dict[str, list[Any]] = {name: [] for name in ("Bleu", "ROUGE_L", *ciders)}
        for i, words in zip(ids, tokens, strict=True):
            own, others = Ngrams.of(split(words)), [*map(Ngrams.of, known[i])]
            rows["Bleu"].append(bleu_counts(own, others))
            rows["ROUGE_L"].append(rouge_l(words, truth[i]))
            for name, cider in ciders.items():
                rows[name] += cider.score([own], others)
        counts = {"Bleu": np.array(rows.pop("Bleu"), np.float64)}
        values = _from_counts("Bleu", counts["Bleu"])
        values |= {name: np.array(row) for name, row in rows.items()}
        lines = [" ".join(words) for words in tokens]
        texts = [[" ".join(words) for words in truth[i]] for i in ids]
        if "METEOR" in self.java:
            with self._program():
                counts["METEOR"] = java_programs.meteor_counts(lines, texts)
                values |= _from_counts("METEOR", counts["METEOR"])
        if "SPICE" in self.java:
            with self._program():
                values["SPICE"] = java_programs.spice(lines, texts)
        if self.objects is not None:
            counts["CHAIR_i"] = count_mentions(tokens, [self.objects[i] for i in ids])
            values |= _from_counts("CHAIR_i", counts["CHAIR_i"])
            values["CHAIR_s"] = (counts["CHAIR_i"][:, 0] > 0).astype(np.float64)
        return Scores(ids, values, counts)

    @contextmanager
    def _program(self) -> Iterator[None]:
        """Omit a metric from now on if its program fails."""
        try:
            yield
        except ProgramError as error:
            self.on_error(error)
            self.java = [metric for metric in self.java if metric != error.program]

    def signature(self, images: Iterable[int]) -> str:
        """Versions, tokenizer, metrics and a digest of the images and their references.

        Scores are comparable if their signatures are equal.
        """
        ids = sorted(images)
        counts = [len(self.references[i]) for i in ids]
        few, many = min(counts), max(counts)
        parts = [
            f"captioner {__version__}, pycocoevalcap 1.2",  # the version whose scores these equal
            "PTB tokens (captioner.tokenizer)",
            "pycocoevalcap Bleu, Rouge, Cider",
            "one caption an image",
        ]
        if any(has_unspaced(text) for i in ids for text in self.references[i]):
            parts.append("characters of scripts without spaces (Chinese, Japanese, Thai, ...)")
        if self.frequencies is not None:
            parts.append(
                f"CIDEr_D: document frequencies of {self.frequencies.documents} images, "
                f"{self.frequencies.digest()}"
            )
        versions = {"METEOR": "METEOR 1.5", "SPICE": "SPICE 1.0"}
        parts += [text for name, text in versions.items() if name in self.java]
        if self.objects is not None:
            parts.append(f"CHAIR objects {_digest([[i, sorted(self.objects[i])] for i in ids])}")
        parts += [
            f"{len(ids)} images",
            f"{few if few == many else f'{few} to {many}'} reference{'s' * (many > 1)} an image",
            f"references {_digest([[i, sorted(self.references[i])] for i in ids])}",
        ]
        return " | ".join(parts)


def _digest(content: object) -> str:
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()[:12]


def bleu_from_counts(counts: NDArray[np.float64]) -> NDArray[np.float64]:
    """BLEU-1 to BLEU-4 from counts summed over captions.

    Source: Papineni et al. 2002, with the smoothing constants of pycocoevalcap.

    Args:
        counts: Correct n-grams (4), all n-grams (4), words, words of the closest reference:
            (R, 10).

    Returns:
        (R, 4).
    """
    correct, total = counts[:, :ORDERS], counts[:, ORDERS : 2 * ORDERS]
    words, reference_words = counts[:, 2 * ORDERS], counts[:, 2 * ORDERS + 1]
    precisions = np.cumprod((correct + _TINY) / (total + _SMALL), axis=1)
    means = precisions ** (1 / np.arange(1, ORDERS + 1))
    ratio = (words + _TINY) / (reference_words + _SMALL)
    result: NDArray[np.float64] = means * np.exp(np.minimum(0, 1 - 1 / ratio))[:, None]
    return result


def rouge_l(candidate: Sequence[str], references: Sequence[Sequence[str]]) -> float:
    """ROUGE-L of a caption, 0 to 1, from its longest common subsequence with each reference.

        F = (1 + beta^2) P R / (R + beta^2 P),    beta = 1.2

    P is the highest precision (common words over the caption's words) and R the highest recall
    over the references.

    Source: Lin 2004, ROUGE: A Package for Automatic Evaluation of Summaries.
    Deviation: as in pycocoevalcap, precision and recall may come from two references, and an
    empty caption equals an empty reference.
    """
    words = candidate or [""]
    others = [reference or [""] for reference in references]
    common = [_common_length(words, other) for other in others]
    precision = max(common) / len(words)
    recall = max(count / len(other) for count, other in zip(common, others, strict=True))
    if precision == 0:
        return 0.0
    return (1 + _BETA**2) * precision * recall / (recall + _BETA**2 * precision)


def _common_length(first: Sequence[str], second: Sequence[str]) -> int:
    """Length of the longest common subsequence.

    Source: Hyyrö 2004, Bit-parallel LCS-length computation revisited.
    """
    places: dict[str, int] = {}
    for place, word in enumerate(first):
        places[word] = places.get(word, 0) | 1 << place
    row = (1 << len(first)) - 1
    for word in second:
        match = row & places.get(word, 0)
        row = (row + match) | (row - match)
    return len(first) - (row & ((1 << len(first)) - 1)).bit_count()
