"""Caption metrics: pycocoevalcap's scorers over Penn Treebank tokens.

``captioner.text.tokenizer`` produces the tokens of pycocoevalcap's Java tokenizer without Java;
scripts without spaces between words are split into characters, and texts are normalized to NFC.
Metric names and scale are pycocoevalcap's: CIDEr 1.0 is 100 points.

Optional metrics: CIDEr_D, which is CIDEr with frozen document frequencies, and METEOR and SPICE,
which need Java.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from captioner.errors import ConfigError, DataError
from captioner.evaluation import java as java_programs
from captioner.evaluation.cider import CiderD
from captioner.evaluation.frequencies import ORDERS, DocumentFrequencies, Ngram, ngrams
from captioner.text.tokenizer import caption_tokens

SIGNATURE = (
    "PTB tokens (captioner.tokenizer) | pycocoevalcap Bleu, Rouge, Cider | one caption an image"
)
"""Scores are comparable if their signatures are equal."""

CHARACTERS = "characters of scripts without spaces (Chinese, Japanese, Thai, ...)"
"""Added to the signature of scores whose references have such characters."""

MIN_IMAGES_FOR_CIDER = 100
"""Fewest images for useful document frequencies in CIDEr."""

# Smoothing constants of pycocoevalcap's Bleu.
_SMALL, _TINY = 1e-9, 1e-15


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
            weights: How often each image counts, (R, N), in order of the ids, such as
                ``bootstrap.resample_weights``. No row may sum to 0.

        Returns:
            R scores of each metric; a row of ones gives the corpus scores.

        Raises:
            ConfigError: The weights are for another number of images.
        """
        rows = np.asarray(weights, dtype=np.float64)
        if rows.ndim != 2 or rows.shape[1] != len(self.images):
            raise ConfigError(
                f"weights have shape {rows.shape}; give one row per resample with one number for "
                f"each of the {len(self.images)} images"
            )
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
    download: bool = False,
) -> Scores:
    """Score one caption per image.

    Args:
        candidates: Caption by image id, not tokenized.
        references: All reference captions by image id, for at least the images of the candidates.
        frequencies: Frozen document frequencies; adds CIDEr_D.
        java: METEOR, SPICE or both; they need Java.
        download: Let pycocoevalcap download CoreNLP for SPICE.

    Raises:
        ConfigError: A requirement of a Java metric is missing.
        DataError: There are no captions, or an image has no references.
    """
    _check(candidates, references)
    for name in java:
        if reason := java_programs.unavailable(name, download):
            raise ConfigError(reason)
    ids = sorted(candidates)
    tokens = {i: caption_tokens(candidates[i]) for i in ids}
    truth_tokens = {i: [caption_tokens(text) for text in references[i]] for i in ids}
    result = {i: [" ".join(tokens[i])] for i in ids}
    truth = {i: [" ".join(words) for words in truth_tokens[i]] for i in ids}

    found, bleu_counts = _bleu(truth, result)
    counts = {"Bleu": bleu_counts}
    lines, texts = [result[i][0] for i in ids], [truth[i] for i in ids]
    if "METEOR" in java:
        with java_programs.Meteor() as meteor:
            whole, each, counts["METEOR"] = meteor.score(lines, texts)
        found["METEOR"] = whole, each
    found["ROUGE_L"] = _rouge(truth, result)
    found["CIDEr"] = _cider(list(truth_tokens.values()), list(tokens.values()))
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


def signature(
    frequencies: DocumentFrequencies | None = None,
    java: Collection[str] = (),
    *,
    characters: bool = False,
) -> str:
    """`SIGNATURE` with the optional metrics, and `CHARACTERS` if the references need them."""
    extra = [SIGNATURE, CHARACTERS] if characters else [SIGNATURE]
    if frequencies is not None:
        extra.append(
            f"CIDEr_D: document frequencies of {frequencies.documents} images, "
            f"{frequencies.digest()}"
        )
    versions = {"METEOR": "METEOR 1.5", "SPICE": "SPICE 1.0"}
    extra += [text for name, text in versions.items() if name in java]
    return " | ".join(extra)


def cider_warning(images: int, frozen: bool = False) -> str | None:
    """A warning that CIDEr is unreliable over few images; None if there are enough.

    Args:
        images: Number of images scored together.
        frozen: Whether CIDEr_D is reported as well.
    """
    if images >= MIN_IMAGES_FOR_CIDER:
        return None
    start = (
        "CIDEr of one image is always 0" if images == 1 else f"CIDEr of {images} images is noisy"
    )
    hint = (
        "use CIDEr_D"
        if frozen
        else f"score {MIN_IMAGES_FOR_CIDER} or more images, or use CIDEr_D "
        "(captioner prepare frequencies)"
    )
    return f"{start}, as its document frequencies come from the scored images; {hint}"


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


def _check(candidates: Mapping[int, str], references: Mapping[int, Sequence[str]]) -> None:
    if not candidates:
        raise DataError("there are no captions to score; give at least one image")
    lacking = [image_id for image_id in candidates if not references.get(image_id)]
    if lacking:
        raise DataError(
            f"{len(lacking)} of {len(candidates)} images have no reference captions "
            f"(first: id {lacking[0]}); give annotations that cover every image"
        )


# Corpus score of each metric, and the scores of the images in order of the ids.
_Parts = dict[str, tuple[Any, Any]]


def _bleu(
    truth: Mapping[int, list[str]], result: Mapping[int, list[str]]
) -> tuple[_Parts, NDArray[np.float64]]:
    """BLEU-1 to BLEU-4, and the counts of each image, (N, 10)."""
    from pycocoevalcap.bleu.bleu_scorer import BleuScorer

    scorer = BleuScorer(n=ORDERS)
    for image_id, texts in truth.items():
        scorer += (result[image_id][0], texts)
        scorer.crefs[-1] = None  # not read again; all of them would take gigabytes
    whole, each = scorer.compute_score(option="closest", verbose=0)
    rows = []
    for part in scorer.ctest:
        words = part["testlen"]
        closest = scorer._single_reflen(part["reflen"], "closest", words)
        rows.append([*part["correct"], *part["guess"], words, closest])
    parts = {f"Bleu_{n + 1}": (whole[n], each[n]) for n in range(ORDERS)}
    return parts, np.array(rows, dtype=np.float64)


def _rouge(truth: Mapping[int, list[str]], result: Mapping[int, list[str]]) -> Any:
    from pycocoevalcap.rouge.rouge import Rouge

    return Rouge().compute_score(truth, result)


def _cider(truth: Sequence[Sequence[Sequence[str]]], result: Sequence[Sequence[str]]) -> Any:
    """CIDEr from tokens, by pycocoevalcap's scorer.

    The scorer would keep the n-grams of all captions, a gigabyte for 40,000 images; here it gets
    them image by image.
    """
    from pycocoevalcap.cider.cider_scorer import CiderScorer

    scorer = CiderScorer(n=ORDERS)
    scorer.crefs = _Lazy(truth, lambda captions: list(map(_ngram_counts, captions)))
    scorer.ctest = _Lazy(result, _ngram_counts)
    return scorer.compute_score()


class _Lazy(Sequence[Any]):
    """A sequence whose items are computed when they are read."""

    def __init__(self, items: Sequence[Any], compute: Callable[[Any], Any]) -> None:
        self.items, self.compute = items, compute

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: Any) -> Any:
        return self.compute(self.items[index])


def _ngram_counts(tokens: Sequence[str]) -> dict[Ngram, int]:
    """N-grams of all lengths in the order of pycocoevalcap, on which the last bits depend."""
    return {gram: count for order in ngrams(tokens) for gram, count in order.items()}
