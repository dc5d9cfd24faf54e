"""Caption metrics: BLEU, ROUGE-L and CIDEr over Penn Treebank tokens.

The scores equal those of pycocoevalcap, and so do their names and scale: CIDEr 1.0 is 100 points.
``captioner.text.tokenizer`` produces the tokens of its Java tokenizer without Java; scripts without
spaces between words are split into characters, and texts are normalized to NFC.

Optional metrics: CIDEr_D, which is CIDEr with frozen document frequencies, and METEOR and SPICE,
which need Java.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from captioner.errors import DataError, ProgramError
from captioner.evaluation import java as java_programs
from captioner.evaluation.frequencies import DocumentFrequencies
from captioner.evaluation.options import OnError, raise_error
from captioner.evaluation.references import ORDERS, References
from captioner.text.tokenizer import caption_tokens, has_unspaced
from captioner.version import __version__

# Constants of pycocoevalcap: smoothing of BLEU, weight of recall in ROUGE-L.
_SMALL, _TINY = 1e-9, 1e-15
_BETA = 1.2


@dataclass(frozen=True)
class Scores:
    """Scores of a set of captions."""

    corpus: dict[str, float]
    """Bleu_1 to Bleu_4, ROUGE_L, CIDEr and the optional metrics over all images."""
    images: dict[int, dict[str, float]]
    """The same for each image; CIDEr uses the document frequencies of all images."""
    counts: Mapping[str, NDArray[np.float64]] = field(
        default_factory=dict, repr=False, compare=False
    )
    """Counts of corpus metrics that are not a mean over images, in order of the ids:
    Bleu (N, 10), see `bleu_from_counts`; METEOR (N, 23), see `java.METEOR_COUNTS`."""

    @cached_property
    def _columns(self) -> dict[str, NDArray[np.float64]]:
        """Scores of the images in order of the ids, (N,), by metric."""
        ids = sorted(self.images)
        return {name: np.array([self.images[i][name] for i in ids]) for name in self.corpus}

    def resample(self, weights: ArrayLike) -> dict[str, NDArray[np.float64]]:
        """Corpus scores of resamples of the images.

        BLEU and METEOR are computed from the summed counts, all other metrics are weighted means.
        CIDEr keeps the document frequencies of the whole set. An image whose SPICE is NaN makes the
        corpus SPICE NaN.

        Args:
            weights: How often each image counts, (R, N), in order of the ids. No row may sum to 0.

        Returns:
            R scores of each metric; a row of ones gives the corpus scores.
        """
        rows = np.asarray(weights, dtype=np.float64)
        sizes = rows.sum(axis=1)
        values = {name: rows @ column / sizes for name, column in self._columns.items()}
        bleu = bleu_from_counts(rows @ self.counts["Bleu"])
        values |= {f"Bleu_{n + 1}": bleu[:, n] for n in range(ORDERS)}
        if "METEOR" in values:
            values["METEOR"] = java_programs.meteor_from_counts(rows @ self.counts["METEOR"])
        return values


def score(
    candidates: Mapping[int, str],
    references: Mapping[int, Sequence[str]],
    *,
    frequencies: DocumentFrequencies | None = None,
    java: Collection[str] = (),
) -> Scores:
    """Score one caption per image.

    Args:
        candidates: Caption by image id, not tokenized.
        references: All reference captions by image id, for at least the images of the candidates.
        frequencies: Frozen document frequencies; adds CIDEr_D.
        java: METEOR, SPICE or both; they need Java.

    Raises:
        DataError: There are no captions, or an image has no references.
        ProgramError: The program of a Java metric failed.
    """
    if not candidates:
        raise DataError("there are no captions to score; give at least one image")
    ids = sorted(candidates)
    tokens = [caption_tokens(candidates[i]) for i in ids]
    truth = {i: [caption_tokens(text) for text in references.get(i, ())] for i in ids}
    known = References(truth)
    captions, images = known.captions(tokens), known.index(ids)
    matches = known.match(images, captions)

    bleu = known.bleu_counts(images, captions, matches)
    counts = {"Bleu": bleu}
    whole, each = bleu_from_counts(bleu.sum(axis=0, keepdims=True))[0], bleu_from_counts(bleu)
    # Of all images, and of each in order of the ids.
    found: dict[str, tuple[Any, Any]] = {
        f"Bleu_{n + 1}": (whole[n], each[:, n]) for n in range(ORDERS)
    }
    lines = [" ".join(words) for words in tokens]
    texts = [[" ".join(words) for words in truth[i]] for i in ids]
    if "METEOR" in java:
        meteor = counts["METEOR"] = java_programs.meteor_counts(lines, texts)
        by_counts = java_programs.meteor_from_counts
        found["METEOR"] = by_counts(meteor.sum(axis=0)), by_counts(meteor)
    found["ROUGE_L"] = _with_mean([rouge_l(tokens[n], truth[i]) for n, i in enumerate(ids)])
    found["CIDEr"] = _with_mean(known.cider_d(images, captions, matches))
    if frequencies is not None:
        frozen = References(truth, frequencies).score({i: [tokens[n]] for n, i in enumerate(ids)})
        found["CIDEr_D"] = _with_mean([value for (value,) in frozen.values()])
    if "SPICE" in java:
        found["SPICE"] = _with_mean(java_programs.spice(lines, texts))
    return Scores(
        {name: float(whole) for name, (whole, _) in found.items()},
        {i: {name: float(each[n]) for name, (_, each) in found.items()} for n, i in enumerate(ids)},
        counts,
    )


def _with_mean(values: ArrayLike) -> tuple[np.float64, NDArray[np.float64]]:
    each = np.asarray(values, dtype=np.float64)
    return each.mean(), each


@dataclass
class CaptionEvaluator:
    """Scores captions against references, with the same settings for all systems compared."""

    references: Mapping[int, Sequence[str]]
    """All reference captions by image id."""
    frequencies: DocumentFrequencies | None = None
    """Frozen document frequencies; adds CIDEr_D."""
    java: Sequence[str] = ()
    """METEOR, SPICE or both."""
    on_error: OnError = raise_error
    """Called with the error of a metric's program, which is then omitted."""

    def score(self, captions: Mapping[int, str]) -> Scores:
        """Score one caption per image; see `score`."""
        while True:
            try:
                return score(
                    captions, self.references, frequencies=self.frequencies, java=self.java
                )
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
        content = json.dumps([[i, sorted(self.references[i])] for i in ids])
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
        parts += [
            f"{len(ids)} images",
            f"{few if few == many else f'{few} to {many}'} reference{'s' * (many > 1)} an image",
            f"references {hashlib.sha256(content.encode()).hexdigest()[:12]}",
        ]
        return " | ".join(parts)


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
