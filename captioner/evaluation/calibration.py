"""Fit the confidence of captions, and measure how well it is calibrated.

A confidence is calibrated if, of the captions with confidence p, the share p is right. What is
reported comes from cross-validation: every photo is judged by a model that was fitted without it,
the principal components and ranges of the features included.

Notation: N photos, F features, R resamples.

Source: expected calibration error and reliability diagram, Guo et al. 2017 (arXiv:1706.04599).
Score against coverage: selective prediction, Geifman and El-Yaniv 2017 (arXiv:1705.08500).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from captioner.errors import DataError
from captioner.evaluation.bootstrap import RESAMPLES, interval, resample_weights
from captioner.inference.confidence import (
    Calibrator,
    Observation,
    PhotoSpace,
    PhraseTable,
    WordReading,
    features,
)

_Floats = NDArray[np.float64]

BINS = 10
"""Bins of equal width for the calibration error and the diagram, as in Guo et al."""

FOLDS = 10

JUDGED_RIGHT = 1.0
"""The least mean judgement of a caption that is right: everybody finds it so."""

WRONG = 0.25
"""The highest score of a caption that counts as wrong as a whole, in reports."""

RANGE = (0.005, 0.995)
"""Quantiles of each feature that limit its range."""

FAMILIAR, PHOTOS = 0.98, 0.995
"""Shares of the calibration photos that are familiar, and that count as photos. The confidence of
others falls to 0 from the first quantile on: over the distance between the median and it; with
other kinds of images to compare, up to the second, of the log-odds."""

PENALTY, KINDS_PENALTY, READING_PENALTY = 20.0, 30.0, 300.0
"""Weights of the squared weights of standardized inputs, next to the sum of log-losses: of the
features, and of the vectors that tell photos from other images and that words are read from."""

MIN_MENTIONS = 20
"""Training photos that a word counts for, at least; from fewer it cannot be learned."""


class Example(NamedTuple):
    """A caption that was scored."""

    seen: Observation
    style: str
    group: str
    """Name of its data set, for the report."""
    score: float
    """CIDEr-D under the model's document frequencies, 1.0 is 100 points; or a judgement, 1.0 if
    nothing is false."""
    photo: str
    """Examples of one photo are in the same fold."""
    known: Set[str] = frozenset()
    """The words of the references."""


class Backdrop(NamedTuple):
    """What distinguishes photos that the model knows from other images."""

    photos: NDArray[np.float32]
    """Vectors of photos, (N, D)."""
    space: PhotoSpace
    kinds: NDArray[np.float32] | None
    """See ``Calibrator.kinds``."""
    reading: WordReading

    @classmethod
    def fit(
        cls,
        photos: NDArray[np.float32],
        kinds: Mapping[str, Sequence[Observation]],
        words: Sequence[Set[str]] = (),
    ) -> Backdrop:
        """From vectors of photos, (N, D), other images by kind, words of the photos' references.

        There may be no kinds, and no words; these are then not read from photos.
        """
        reading = fit_reading(photos, words)
        return cls(photos, PhotoSpace.fit(photos), fit_kinds(photos, kinds), reading)


@dataclass(frozen=True)
class Recipe:
    """What a calibrator needs besides examples."""

    phrases: PhraseTable
    search: Mapping[str, Any]
    """See ``Calibrator.search``."""
    threshold: float | None
    """See ``Calibrator.threshold``."""
    kinds: Mapping[str, Sequence[Observation]] = field(default_factory=dict)
    """Captions of images that are not photos, by kind."""
    training: Backdrop | None = None
    """Of training photos; None: that of the examples."""
    usual: NDArray[np.float32] | None = None
    """Vectors of other photos of which ``FAMILIAR`` are familiar, (M, D); None: the examples'."""

    @property
    def least(self) -> float:
        """The score from which a caption is right."""
        return JUDGED_RIGHT if self.threshold is None else self.threshold

    def backgrounds(self, examples: Sequence[Example]) -> tuple[Backdrop, NDArray[np.float32]]:
        """The backdrop for these examples, and the vectors of the usual photos."""
        own = np.stack([example.seen.photo for example in examples])
        usual = own if self.usual is None else self.usual
        return self.training or Backdrop.fit(own, self.kinds), usual


class Judged(NamedTuple):
    """N captions with their confidence and their score."""

    confidences: _Floats
    """(N,)."""
    scores: _Floats
    """(N,), see ``Example``."""
    threshold: float

    @property
    def right(self) -> _Floats:
        """1 where the caption is right, else 0, (N,)."""
        return (self.scores >= self.threshold).astype(np.float64)

    def take(self, rows: NDArray[Any]) -> Judged:
        """Some of the captions, selected as in NumPy."""
        return Judged(self.confidences[rows], self.scores[rows], self.threshold)


def fit(examples: Sequence[Example], recipe: Recipe) -> Calibrator:
    """Fit a calibrator."""
    backdrop, usual = recipe.backgrounds(examples)
    found = np.array(
        [features(one.seen, backdrop.space, recipe.phrases, backdrop.reading) for one in examples]
    )
    lowest, highest = np.quantile(found, RANGE, axis=0)
    limited = np.clip(found, lowest, highest)
    mean, scale = limited.mean(axis=0), limited.std(axis=0)
    scale[scale < 1e-9] = 1.0  # a feature that never varies, such as the beam's share in greedy
    styles = list(dict.fromkeys(one.style for one in examples))
    of_style = np.array([[one.style == style for style in styles] for one in examples], np.float64)
    right = np.array([one.score >= recipe.least for one in examples], np.float64)
    penalties = np.array([PENALTY] * found.shape[1] + [0.01] * len(styles))
    weights = logistic_regression(np.hstack([(limited - mean) / scale, of_style]), right, penalties)
    calibrator = Calibrator(
        weights=weights[: found.shape[1]],
        mean=mean,
        scale=scale,
        lowest=lowest,
        highest=highest,
        intercepts=dict(zip(styles, weights[found.shape[1] :].tolist(), strict=True)),
        familiar=(0.0, 1.0),
        space=backdrop.space,
        phrases=recipe.phrases,
        reading=backdrop.reading,
        kinds=backdrop.kinds,
        search=recipe.search,
        threshold=recipe.threshold,
    )
    strangeness = [calibrator.strangeness(photo) for photo in usual]
    middle, start, stop = np.quantile(strangeness, [0.5, FAMILIAR, PHOTOS])
    end = 2 * start - middle if backdrop.kinds is None else stop
    return replace(calibrator, familiar=(float(start), float(end + 1e-9)))


def fit_reading(photos: NDArray[np.float32], words: Sequence[Set[str]]) -> WordReading:
    """Read the words that count for enough of the photos, (N, D), from their vectors."""
    counts = Counter(word for used in words for word in used)
    known = tuple(sorted(w for w, n in counts.items() if MIN_MENTIONS <= n < len(words)))
    if not known:
        return WordReading()
    labels = np.array([[word in used for word in known] for used in words])
    weights, biases = linear_reading(photos, labels, READING_PENALTY)
    return WordReading(known, weights.astype(np.float32), biases.astype(np.float32))


def fit_kinds(
    photos: NDArray[np.float32], kinds: Mapping[str, Sequence[Observation]]
) -> NDArray[np.float32] | None:
    """``Calibrator.kinds`` from vectors of photos, (N, D), and other images by kind, if any."""
    if not kinds:
        return None
    others = np.stack([seen.photo for kind in kinds.values() for seen in kind])
    mean, scale = photos.mean(axis=0), photos.std(axis=0) + 1e-6
    inputs = (np.concatenate([photos, others]) - mean) / scale
    labels = np.repeat([0.0, 1.0], [len(photos), len(others)])
    penalties = np.full(inputs.shape[1] + 1, KINDS_PENALTY)
    penalties[-1] = 0.01
    ones = np.ones((len(inputs), 1))
    weights = logistic_regression(np.hstack([inputs, ones]), labels, penalties)
    of_vector = weights[:-1] / scale
    return np.append(of_vector, weights[-1] - of_vector @ mean).astype(np.float32)


def cross_validate(examples: Sequence[Example], recipe: Recipe) -> Judged:
    """Confidence of every example from a calibrator that was fitted without it.

    Raises:
        DataError: Nearly all captions are right, or nearly all wrong.
    """
    count = len(examples)
    scores = np.array([example.score for example in examples])
    judged = Judged(np.zeros(count), scores, recipe.least)
    right = int(judged.right.sum())
    if min(right, count - right) < 10:
        rule = f"have a CIDEr-D of {recipe.threshold} or more" if recipe.threshold else "are right"
        raise DataError(
            f"{right} of {count} captions {rule}; at least 10 must be right and 10 wrong"
            + (": give another threshold" if recipe.threshold else "")
        )
    photos = dict.fromkeys(one.photo for one in examples)
    folds = np.random.default_rng(0).permutation(len(photos)) % FOLDS
    of_photo = dict(zip(photos, folds, strict=True))
    fold = np.array([of_photo[one.photo] for one in examples])
    for number in range(FOLDS):
        calibrator = fit([examples[i] for i in np.flatnonzero(fold != number).tolist()], recipe)
        for i in np.flatnonzero(fold == number).tolist():
            judged.confidences[i] = calibrator.confidence(examples[i].seen, examples[i].style)
    return judged


def measure_kinds(examples: Sequence[Example], recipe: Recipe) -> dict[str, dict[str, Any]]:
    """How well each kind of images is separated from photos by a fit to the other kinds.

    Returns:
        By kind ``images``; ``auroc``, the probability that one is stranger than a photo;
        ``confidence``, the mean of their captions, and the share ``below_0.2``.
    """
    backdrop, usual = recipe.backgrounds(examples)
    report = {}
    for name, seen in recipe.kinds.items():
        others = {kind: recipe.kinds[kind] for kind in recipe.kinds if kind != name}
        unseen = backdrop._replace(kinds=fit_kinds(backdrop.photos, others))
        calibrator = fit(examples, replace(recipe, training=unseen))
        strange, of_photos = (
            np.array([calibrator.strangeness(vector) for vector in vectors])
            for vectors in ([one.photo for one in seen], usual)
        )
        confidences = np.array([calibrator.confidence(one, examples[0].style) for one in seen])
        report[name] = {
            "images": len(seen),
            "auroc": auroc(strange, of_photos),
            "confidence": float(confidences.mean()),
            "below_0.2": float((confidences < 0.2).mean()),
        }
    return report


def logistic_regression(inputs: _Floats, labels: _Floats, penalties: _Floats) -> _Floats:
    """Weights that minimize the log-loss by Newton's method.

        sum_n log(1 + exp(-s_n w . x_n)) + sum_i penalty_i w_i^2 / 2,    s_n = 2 label_n - 1

    Args:
        inputs: (N, F).
        labels: 0 or 1, (N,).
        penalties: All above 0, (F,), which keeps the minimum finite and unique.

    Returns:
        The weights, (F,).
    """
    weights = np.zeros(inputs.shape[1])

    def loss(at: _Floats) -> float:
        signed = (2 * labels - 1) * (inputs @ at)
        return float(np.logaddexp(0, -signed).sum() + penalties @ at**2 / 2)

    current = loss(weights)
    for _ in range(100):
        p = np.exp(-np.logaddexp(0, -inputs @ weights))
        gradient = inputs.T @ (p - labels) + penalties * weights
        hessian = (inputs * (p * (1 - p))[:, None]).T @ inputs + np.diag(penalties)
        step = np.linalg.solve(hessian, gradient)
        while (new := loss(weights - step)) > current and np.abs(step).max() > 1e-12:
            step /= 2
        weights = weights - step
        if current - new < 1e-10:
            break
        current = new
    return weights


def linear_reading(
    vectors: NDArray[np.float32], labels: NDArray[np.bool_], penalty: float
) -> tuple[_Floats, _Floats]:
    """Weights (K, D) and biases (K,) of a logistic reading of vectors for K words, by L-BFGS.

        minimize  sum_nk log(1 + exp(-s_nk z_nk)) + penalty / 2 sum_k |w_k|^2,    s_nk = 1 or -1
                  z_nk = w_k . x_n + b_k, with the vectors x standardized for the penalty

    Args:
        vectors: (N, D).
        labels: Whether word k counts for photo n, (N, K).
        penalty: Weight of the squared weights.
    """
    import torch

    mean, scale = vectors.mean(axis=0), vectors.std(axis=0) + 1e-6
    inputs = torch.from_numpy((vectors - mean) / scale)
    targets = torch.from_numpy(labels.astype(np.float32))
    share = (targets.sum(0) + 0.5) / (len(targets) + 1)
    weights = torch.zeros(labels.shape[1], vectors.shape[1], requires_grad=True)
    biases = torch.logit(share).requires_grad_()
    optimizer = torch.optim.LBFGS(
        [weights, biases], max_iter=300, tolerance_change=1e-7, line_search_fn="strong_wolfe"
    )

    def loss() -> torch.Tensor:
        optimizer.zero_grad()
        logits = torch.addmm(biases, inputs, weights.T)
        log_loss = torch.nn.functional.binary_cross_entropy_with_logits
        terms = log_loss(logits, targets, reduction="sum") + penalty / 2 * (weights**2).sum()
        mean_loss = terms / len(inputs)
        mean_loss.backward()  # type: ignore[no-untyped-call]
        return mean_loss

    optimizer.step(loss)  # type: ignore[no-untyped-call]
    of_vector = weights.detach().double().numpy() / scale
    return of_vector, biases.detach().double().numpy() - of_vector @ mean


# --- measures ------------------------------------------------------------------------------------


def _bins(judged: Judged) -> NDArray[np.intp]:
    """The bin of each caption, (N,)."""
    bins: NDArray[np.intp] = np.minimum((judged.confidences * BINS).astype(np.intp), BINS - 1)
    return bins


def reliability(judged: Judged) -> list[dict[str, Any]]:
    """The bins that hold captions, from low to high confidence.

    Returns:
        Of each bin the number of ``photos``, the mean ``confidence`` and the share that is
        ``right``.
    """
    bins = _bins(judged)
    return [
        {
            "photos": len(own.scores),
            "confidence": float(own.confidences.mean()),
            "right": float(own.right.mean()),
        }
        for own in (judged.take(bins == number) for number in np.unique(bins))
    ]


def auroc(high: _Floats, low: _Floats) -> float | None:
    """Probability that one of ``high`` is above one of ``low``; None if there are none."""
    if not (len(high) and len(low)):
        return None
    low = np.sort(low)
    wins = np.searchsorted(low, high) + np.searchsorted(low, high, side="right")
    return float(wins.mean() / 2 / len(low))


def calibration_error(judged: Judged) -> float:
    """Expected calibration error, 0 to 1.

    sum_b n_b / N |mean confidence_b - share right_b|
    """
    surplus = np.bincount(_bins(judged), judged.confidences - judged.right)
    return float(np.abs(surplus).sum() / len(judged.scores))


def error_by_chance(judged: Judged, draws: int = 1000) -> float:
    """Mean calibration error of a perfectly calibrated confidence on as many photos.

    Above 0, because the share of right captions in a bin varies by chance.
    """
    p = judged.confidences
    lucky = (np.random.default_rng(0).random((draws, len(p))) < p).astype(np.float64)
    return float(np.mean([calibration_error(Judged(p, right, 1)) for right in lucky]))


def coverage_gain(judged: Judged, share: float) -> float:
    """Mean score of the most confident share of the captions, divided by that of all."""
    scores = judged.scores[np.argsort(-judged.confidences, kind="stable")]
    taken = np.clip(share * len(scores) - np.arange(len(scores)), 0, 1)
    return float(np.average(scores, weights=taken) / (scores.mean() or np.nan))


def measure(judged: Judged) -> dict[str, Any]:
    """Calibration and coverage, with 95% bootstrap intervals over photos.

    Returns:
        ``photos``; ``right``, the share of right captions; ``score``, their mean;
        ``calibration_error``, its ``interval`` and what it would be ``by_chance``;
        ``auroc``, the probability that a right caption has a higher confidence than another, and
        ``auroc_wrong``, that one whose score is at most ``WRONG`` has a lower one;
        ``brier``, the mean squared difference of confidence and right (0 or 1); ``half_gain``, see
        `coverage_gain`, and its interval; ``coverage``, the gain by share; ``bins``.
    """
    count = len(judged.scores)
    times = resample_weights(count, RESAMPLES)
    resamples = (judged.take(np.repeat(np.arange(count), row)) for row in times)
    errors, halves = zip(
        *((calibration_error(one), coverage_gain(one, 0.5)) for one in resamples), strict=True
    )
    coverage = {f"{n / 10:g}": coverage_gain(judged, n / 10) for n in range(1, 11)}
    right, wrong = judged.right > 0, judged.scores <= WRONG
    return {
        "photos": count,
        "right": float(judged.right.mean()),
        "score": float(judged.scores.mean()),
        "calibration_error": calibration_error(judged),
        "calibration_error_interval": interval(errors),
        "calibration_error_by_chance": error_by_chance(judged),
        "auroc": auroc(judged.confidences[right], judged.confidences[~right]),
        "auroc_wrong": auroc(judged.confidences[~wrong], judged.confidences[wrong]),
        "brier": float(((judged.confidences - judged.right) ** 2).mean()),
        "half_gain": coverage["0.5"],
        "half_gain_interval": interval(halves),
        "coverage": coverage,
        "bins": reliability(judged),
    }


def measure_groups(judged: Judged, groups: Sequence[str]) -> dict[str, dict[str, Any]]:
    """`measure` of each group of photos, and of ``all`` if there are several."""
    parts = {name: judged.take(np.array(groups) == name) for name in dict.fromkeys(groups)}
    if len(parts) > 1:
        parts["all"] = judged
    return {name: measure(part) for name, part in parts.items()}
