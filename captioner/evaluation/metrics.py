"""Caption metrics: BLEU, ROUGE-L and CIDEr on Penn Treebank tokens.

The scores, their names and their scale are the same as in pycocoevalcap: a CIDEr of 1.0 is 100
points. ``captioner.text.tokenizer`` produces the tokens of pycocoevalcap's Java tokenizer without
Java. Text is normalized to NFC first. Scripts without spaces between words are split into
characters.

`captioner.evaluation.support` adds metrics that count the words that references confirm. Optional
metrics come from `captioner.evaluation.objects` (CHAIR) and `captioner.evaluation.java` (METEOR and
SPICE). CIDEr_D is CIDEr with document frequencies from a file. ``length`` is the mean number of
words.

Notation: N images, R resamples of the images (see `captioner.evaluation.bootstrap`).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import ArrayLike, NDArray

from captioner.errors import DataError, ProgramError
from captioner.evaluation.bootstrap import ratio, weighted_sums
from captioner.evaluation.java import PROGRAMS, meteor_from_counts
from captioner.evaluation.objects import count_mentions
from captioner.evaluation.options import OnError, raise_error
from captioner.evaluation.references import (
    DocumentFrequencies,
    bleu_counts,
    bleu_from_counts,
    cider_d,
    count_documents,
    ngrams,
    split,
    words_of,
)
from captioner.evaluation.support import count_support
from captioner.text.tokenizer import caption_tokens, has_unspaced
from captioner.version import __version__

_BETA = 1.2  # weight of recall in ROUGE-L, as in pycocoevalcap


@dataclass(frozen=True)
class Scores:
    """The scores of a set of captions, one caption per image."""

    ids: Sequence[int]
    """Ids of the images, (N,)."""
    counts: Mapping[str, NDArray[np.float64]]
    """The counts or the score of each image, by metric. Their sums over all images yield the scores
    of the whole set.

    * Bleu: counts from `bleu_counts`, (N, 9).
    * METEOR: counts from `java.meteor_counts`, (N, 23).
    * CHAIR_i: counts from `objects.count_mentions`, (N, 2).
    * supported_words: the first two counts from `support.count_support`, (N, 2).
    * All other metrics: the scores, (N,). CIDEr uses document frequencies from all N images.
    """

    @cached_property
    def corpus(self) -> dict[str, float]:
        """The scores of all captions together, by metric."""
        whole = self.resample(np.ones((1, len(self.ids))))
        return {name: value.item() for name, value in whole.items()}

    @cached_property
    def images(self) -> dict[int, dict[str, float]]:
        """The scores of each image by image id, then by metric."""
        values = _scores(self.counts, np.ones(len(self.ids)))
        return {
            image_id: {name: of_metric[n].item() for name, of_metric in values.items()}
            for n, image_id in enumerate(self.ids)
        }

    def resample(self, weights: ArrayLike) -> dict[str, NDArray[np.float64]]:
        """Compute the scores of R resamples of the images.

        BLEU, METEOR, CHAIR_i and supported_words are computed from summed counts. All other scores
        are weighted means. CIDEr keeps the document frequencies of all N images. If SPICE is NaN
        for one image, SPICE is NaN in every resample.

        Args:
            weights: Number of times that each image was drawn, (R, N), in the order of ``ids``. No
                row may sum to 0.

        Returns:
            The scores by metric, (R,).
        """
        rows = np.asarray(weights)
        sums = {name: weighted_sums(rows, counts) for name, counts in self.counts.items()}
        return _scores(sums, rows.sum(axis=1, dtype=np.float64))


def _scores(
    sums: Mapping[str, NDArray[np.float64]], images: NDArray[np.float64]
) -> dict[str, NDArray[np.float64]]:
    """Compute scores from summed counts.

    Args:
        sums: Counts or scores of images (``Scores.counts``), summed over R sets of images, by
            metric.
        images: Number of images in each sum, (R,).

    Returns:
        The scores by metric, (R,).
    """
    found: dict[str, NDArray[np.float64]] = {}
    for name, counts in sums.items():
        if name == "Bleu":
            found |= {f"Bleu_{n}": column for n, column in enumerate(bleu_from_counts(counts).T, 1)}
        elif name == "METEOR":
            found[name] = meteor_from_counts(counts)
        elif name in ("CHAIR_i", "supported_words"):
            found[name] = ratio(counts)
        else:
            found[name] = counts / images
    return found


@dataclass
class CaptionEvaluator:
    """An evaluator that scores captions. It contains the reference captions and the settings."""

    references: Mapping[int, Sequence[str]]
    """The reference captions of each image, by image id."""
    frequencies: DocumentFrequencies | None = None
    """Fixed document frequencies. If set, the metric CIDEr_D is added."""
    java: Sequence[str] = ()
    """The Java metrics to add: METEOR, SPICE or both."""
    objects: Mapping[int, Collection[str]] | None = None
    """Object categories in each photo, by image id. If set, CHAIR_i and CHAIR_s are added."""
    on_error: OnError = raise_error
    """Function that handles the error of a Java metric. If it does not raise the error, this metric
    is left out from then on."""

    def score(self, captions: Mapping[int, str]) -> Scores:
        """Score one caption per image.

        Args:
            captions: Captions by image id, not tokenized.

        Raises:
            DataError: There are no captions, or an image has no references.
            ProgramError: The program of a Java metric failed, and ``on_error`` raised the error.
        """
        if not captions:
            raise DataError("the results contain no captions to score; use at least one caption")
        ids = sorted(captions)
        tokens = [caption_tokens(captions[i]) for i in ids]
        truth = {i: [caption_tokens(text) for text in self.references.get(i, ())] for i in ids}
        known = words_of(truth)
        frequencies = {"CIDEr": count_documents(known.values())}
        if self.frequencies is not None:
            frequencies["CIDEr_D"] = self.frequencies
        rows: dict[str, list[ArrayLike]] = {name: [] for name in ("Bleu", "ROUGE_L", *frequencies)}
        for i, words in zip(ids, tokens, strict=True):
            own, others = [ngrams(split(words))], [*map(ngrams, known[i])]
            rows["Bleu"] += [*bleu_counts(own, others)]
            rows["ROUGE_L"].append(rouge_l(words, truth[i]))
            for name, counted in frequencies.items():
                rows[name] += cider_d(own, others, counted)
        counts = {name: np.array(row, np.float64) for name, row in rows.items()}
        lines = [" ".join(words) for words in tokens]
        texts = [[" ".join(words) for words in truth[i]] for i in ids]
        for metric in list(self.java):
            try:
                counts[metric] = PROGRAMS[metric](lines, texts)
            except ProgramError as error:  # leave out the metric from now on
                self.on_error(error)
                self.java = [other for other in self.java if other != metric]
        support = count_support([captions[i] for i in ids], [self.references[i] for i in ids])
        counts |= {
            "supported_words": support[:, :2],
            "supported_captions": (support[:, 0] == support[:, 1]).astype(np.float64),
            "agreement": support[:, 2],
            "length": np.array([*map(len, tokens)], np.float64),
        }
        if self.objects is not None:
            mentions = count_mentions(tokens, [self.objects[i] for i in ids])
            counts |= {"CHAIR_i": mentions, "CHAIR_s": (mentions[:, 0] > 0).astype(np.float64)}
        return Scores(ids, counts)

    def signature(self, images: Iterable[int]) -> str:
        """Describe in one line of text how the scores are computed.

        Scores are comparable if their signatures are equal. A signature lists the versions, the
        tokenizer and the metrics. It ends with a digest (hash) of the images and their references.

        Args:
            images: Ids of the scored images.
        """
        ids = sorted(images)
        counts = [len(self.references[i]) for i in ids]
        few, many = min(counts), max(counts)
        parts = [
            f"captioner {__version__}, pycocoevalcap 1.2",  # scores agree with this release
            "PTB tokens (captioner.tokenizer)",
            "pycocoevalcap Bleu, Rouge, Cider",
            "content words (captioner.text.content)",
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
    """Return 12 hex digits that identify the content, which is JSON data."""
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()[:12]


def rouge_l(candidate: Sequence[str], references: Sequence[Sequence[str]]) -> float:
    """Compute ROUGE-L, 0 to 1, from the longest common subsequence with each reference.

        F = (1 + beta^2) P R / (R + beta^2 P),    beta = 1.2

    Common words are the words in the longest common subsequence. Precision P is their number
    divided by the length of the caption. Recall R is their number divided by the length of the
    reference. The highest P and the highest R over all references are used.

    Source: Lin 2004, ROUGE: A Package for Automatic Evaluation of Summaries.
    Deviation: as in pycocoevalcap, P and R may come from different references, and an empty caption
    matches an empty reference.
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
    """Return the length of the longest common subsequence of two lists of words.

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
