"""Caption metrics: pycocoevalcap's scorers over Penn Treebank tokens.

The tokens come from ``captioner.tokenizer``, which gives what pycocoevalcap's own tokenizer gives
without its Java. Names and scale are pycocoevalcap's: CIDEr 1.0 is what papers print as 100.

Three are asked for: CIDEr_D, the formula of CIDEr under frozen document frequencies; METEOR and
SPICE, which need Java.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from captioner.errors import ConfigError, DataError
from captioner.evaluation import java as java_programs
from captioner.evaluation.cider import CiderD
from captioner.frequencies import DocumentFrequencies
from captioner.tokenizer import tokenize

SIGNATURE = (
    "PTB tokens (captioner.tokenizer) | pycocoevalcap Bleu, Rouge, Cider | one caption an image"
)
"""What makes numbers comparable: two reports with the same signature were measured alike."""

MIN_IMAGES_FOR_CIDER = 100
"""From so many images on, CIDEr's document frequencies tell common phrases from rare ones."""

ORDERS = 4
# pycocoevalcap's, in Bleu: what keeps a division by 0 away, and a missing match at 0.
_SMALL, _TINY = 1e-9, 1e-15


@dataclass(frozen=True)
class Scores:
    """Scores of a set of captions."""

    corpus: dict[str, float]
    """Bleu_1 .. Bleu_4, ROUGE_L, CIDEr over all images, and what else was asked for."""
    images: dict[int, dict[str, float]]
    """The same of each image; a single image's CIDEr takes its document frequencies from all."""
    counts: Mapping[str, NDArray[np.float64]] = field(
        default_factory=dict, repr=False, compare=False
    )
    """What a corpus metric that is no mean over images sums over them, in the order of the ids:
    Bleu (N, 10): right n-grams, n-grams, words, closest reference's words; METEOR (N, 23)."""

    def resample(self, weights: ArrayLike) -> dict[str, NDArray[np.float64]]:
        """The corpus scores of other draws of the same images.

        BLEU and METEOR are computed anew from the summed counts, all else is the weighted mean.
        CIDEr keeps the document frequencies of the whole set: it is the formula's constant here,
        not redrawn. An image without a SPICE makes SPICE NaN, as it does for the corpus.

        Args:
            weights: How often each image counts, (R, N), in the order of the ids; such as
                ``bootstrap.weights`` draws. No row may sum to 0.

        Returns:
            For each metric of `corpus` its R scores; a row of ones gives the corpus scores.

        Raises:
            ConfigError: The weights are of another number of images.
        """
        rows = np.asarray(weights, dtype=np.float64)
        if rows.ndim != 2 or rows.shape[1] != len(self.images):
            raise ConfigError(
                f"weights have shape {rows.shape}; give one row a resample with "
                f"{len(self.images)} numbers, one an image"
            )
        ids, drawn = sorted(self.images), rows.sum(axis=1)
        values = {name: rows @ [self.images[i][name] for i in ids] / drawn for name in self.corpus}
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
    download: bool = False,
) -> Scores:
    """Score one caption an image.

    Args:
        candidates: Caption by image id, as a person writes it.
        references: All true captions by image id; must hold every candidate's image.
        frequencies: Frozen document frequencies; add CIDEr_D.
        java: METEOR, SPICE or both; they need Java.
        download: Let pycocoevalcap fetch what SPICE lacks.

    Raises:
        ConfigError: What a metric of ``java`` needs is missing.
        DataError: Nothing to score, or an image has no references.
    """
    _check(candidates, references)
    for name in java:
        if reason := java_programs.unavailable(name, download):
            raise ConfigError(reason)
    ids = sorted(candidates)
    tokens = {i: tokenize(candidates[i]) for i in ids}
    truth_tokens = {i: [tokenize(text) for text in references[i]] for i in ids}
    result = {i: [" ".join(tokens[i])] for i in ids}
    truth = {i: [" ".join(words) for words in truth_tokens[i]] for i in ids}

    found, bleu_counts = _bleu(truth, result)
    counts = {"Bleu": bleu_counts}
    lines, texts = [result[i][0] for i in ids], [truth[i] for i in ids]
    if "METEOR" in java:
        with java_programs.Meteor() as meteor:
            whole, each, counts["METEOR"] = meteor.score(lines, texts)
        found["METEOR"] = whole, each
    found |= _rouge_and_cider(truth, result)
    if frequencies is not None:
        values = CiderD(truth_tokens, frequencies).score({i: [tokens[i]] for i in ids})
        each = np.array([values[i][0] for i in ids])
        found["CIDEr_D"] = each.mean(), each
    if "SPICE" in java:
        found["SPICE"] = java_programs.spice(lines, texts, download)

    images: dict[int, dict[str, float]] = {i: {} for i in ids}
    for name, (_, each) in found.items():
        for image_id, value in zip(ids, each, strict=True):
            images[image_id][name] = float(value)
    return Scores({name: float(whole) for name, (whole, _) in found.items()}, images, counts)


def signature(frequencies: DocumentFrequencies | None = None, java: Collection[str] = ()) -> str:
    """`SIGNATURE` with what else was asked for."""
    extra = [SIGNATURE]
    if frequencies is not None:
        extra.append(
            f"CIDEr_D: document frequencies of {frequencies.documents} images, "
            f"{frequencies.digest()}"
        )
    versions = {"METEOR": "METEOR 1.5", "SPICE": "SPICE 1.0"}
    extra += [text for name, text in versions.items() if name in java]
    return " | ".join(extra)


def cider_warning(images: int, frozen: bool = False) -> str | None:
    """Why CIDEr over few images means little; None when there are enough.

    Args:
        images: How many are scored together.
        frozen: CIDEr_D stands beside it.
    """
    if images >= MIN_IMAGES_FOR_CIDER:
        return None
    start = (
        "CIDEr of one image is always 0" if images == 1 else f"CIDEr of {images} images says little"
    )
    return f"{start}: it counts over the images at hand which phrases are common; " + (
        "read CIDEr_D, whose document frequencies are frozen"
        if frozen
        else f"score {MIN_IMAGES_FOR_CIDER} or more, or give frozen document frequencies "
        "(captioner prepare frequencies) for CIDEr_D"
    )


def bleu_from_counts(counts: NDArray[np.float64]) -> NDArray[np.float64]:
    """BLEU's last step: from counts summed over captions to BLEU-1 to 4.

    Source: Papineni et al. 2002; the constants that keep a division by 0 away are pycocoevalcap's.

    Args:
        counts: Right n-grams (4), n-grams (4), words, closest reference's words: (R, 10).

    Returns:
        (R, 4).
    """
    right, made = counts[:, :ORDERS], counts[:, ORDERS : 2 * ORDERS]
    words, reference_words = counts[:, 2 * ORDERS], counts[:, 2 * ORDERS + 1]
    precisions = np.cumprod((right + _TINY) / (made + _SMALL), axis=1)
    means = precisions ** (1 / np.arange(1, ORDERS + 1))
    ratio = (words + _TINY) / (reference_words + _SMALL)
    result: NDArray[np.float64] = means * np.exp(np.minimum(0, 1 - 1 / ratio))[:, None]
    return result


def _check(candidates: Mapping[int, str], references: Mapping[int, Sequence[str]]) -> None:
    if not candidates:
        raise DataError("there are no captions to score; give at least one image")
    lacking = [image_id for image_id in candidates if not references.get(image_id)]
    if lacking:
        raise DataError(
            f"{len(lacking)} of {len(candidates)} images have no reference captions "
            f"(first: id {lacking[0]}); give annotations that cover every image"
        )


# A metric over all images, and of each in the order of the ids.
_Parts = dict[str, tuple[Any, Any]]


def _bleu(
    truth: Mapping[int, list[str]], result: Mapping[int, list[str]]
) -> tuple[_Parts, NDArray[np.float64]]:
    """BLEU-1 to 4, and the counts of each image, (N, 10)."""
    from pycocoevalcap.bleu.bleu_scorer import BleuScorer

    scorer = BleuScorer(n=ORDERS)
    for image_id, texts in truth.items():
        scorer += (result[image_id][0], texts)
    whole, each = scorer.compute_score(option="closest", verbose=0)
    rows = []
    for part in scorer.ctest:
        words = part["testlen"]
        closest = scorer._single_reflen(part["reflen"], "closest", words)
        rows.append([*part["correct"], *part["guess"], words, closest])
    parts = {f"Bleu_{n + 1}": (whole[n], each[n]) for n in range(ORDERS)}
    return parts, np.array(rows, dtype=np.float64)


def _rouge_and_cider(truth: Mapping[int, list[str]], result: Mapping[int, list[str]]) -> _Parts:
    from pycocoevalcap.cider.cider import Cider
    from pycocoevalcap.rouge.rouge import Rouge

    return {
        "ROUGE_L": Rouge().compute_score(truth, result),
        "CIDEr": Cider().compute_score(truth, result),
    }
