"""Fit the truth of words and the confidence of captions, and measure how well they are calibrated.

The truth of a word is the probability that the word is true of the photo. The confidence of a
caption is the probability that the caption is right. Truth is calibrated if a share p of all words
with truth p is true. Confidence is calibrated if a share p of all captions with confidence p is
right.

Reports come from cross-validation: the confidence of a caption is computed by a calibrator that was
fitted without the caption's photo. The ranges of the features are fitted without this photo too.

Notation: N captions or other examples, F features, D size of a photo's vector, T words, P phrases.

Source: expected calibration error and reliability diagram, Guo et al. 2017 (arXiv:1706.04599).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from captioner.caption_types import joint_truth, phrase_spans
from captioner.errors import DataError
from captioner.evaluation.bootstrap import RESAMPLES, interval, resample_weights
from captioner.evaluation.objects import find_names
from captioner.inference.confidence import Calibrator, Observation, features
from captioner.inference.truth import WordTruth, probabilities
from captioner.search.words import NEUTRAL_WORDS
from captioner.search.worth import FUNCTION_WORD, UNKNOWN_WORD
from captioner.text.content import content_stems, stem
from captioner.text.tokenizer import caption_tokens

_Floats = NDArray[np.float64]

BINS = 10
"""Number of bins that divide the probabilities from 0 to 1, for the calibration error and the
diagram. They have equal width (Guo et al.)."""

FOLDS = 10
"""Number of parts that the photos are divided into for cross-validation."""

JUDGED_RIGHT = 1.0
"""Minimum score of a right caption if people have judged it: all of them judged it right."""

WRONG = 0.25
"""Maximum score of a caption that counts as wrong in reports."""

RANGE = (0.005, 0.995)
"""Two quantiles of each feature. Values outside the range between them are clipped, so that a rare
extreme value has little influence."""

FAMILIAR = (0.95, 0.999)
"""Two quantiles of the log-odds that an image is not a photo. They are computed over photos, each
with a fit without this photo.

An image with log-odds up to the first quantile is familiar, and its caption keeps the full
confidence. Between the two quantiles, the confidence falls to 0. So about 95% of new photos keep
the full confidence, and about 0.1% lose all of it.
"""

PENALTY, TRUTH_PENALTY, KINDS_PENALTY = 20.0, 1.0, 60.0
"""Penalty factors for squared weights in the three logistic regressions. The first applies to the
standardized features of captions, the second to the inputs of `WordTruth`, and the third to the
standardized vectors of photos."""


class ScoredCaption(NamedTuple):
    """A caption by the model, with its score and labels that mark which words are true.

    The score compares the caption with references or with people's judgements.
    """

    seen: Observation
    """The caption, and the model's inputs for its truth and confidence."""
    style: str
    """Style of the caption."""
    group: str
    """Name of the caption's data set in the report."""
    score: float
    """Mean grade by people, 0 to 1 (1.0 if everybody judged the caption right), or CIDEr-D with the
    model's document frequencies (1.0 is 100 points)."""
    photo: str
    """Identifier of the photo. All captions of a photo are in the same fold."""
    true: _Floats
    """Labels of the words from `true_words`, (T,). All are NaN without reference captions."""


class Kinds(NamedTuple):
    """A linear classifier that tells photos from other kinds of images, and its results."""

    weights: NDArray[np.float32]
    """Weights of the log-odds that an image is not a photo, (D + 1,). The last is the intercept."""
    familiar: tuple[float, float]
    """Log-odds at which the familiarity begins to fall from 1, and at which it reaches 0."""
    unseen: Mapping[str, _Floats]
    """Familiarity of each kind's images, from 1 (like a photo) to 0, in a fit without this kind."""
    auroc: Mapping[str, float | None]
    """For each kind, the probability that an image of this kind is less familiar than a photo. The
    fit contains neither the kind nor the photo."""


@dataclass(frozen=True)
class Recipe:
    """The parts of a calibrator that are known before its regression is fitted.

    A calibrator computes the confidence of captions, the probability that a caption is right. The
    parts are the same in all folds of a cross-validation, which differ only in the captions to
    which the regression is fitted.
    """

    search: Mapping[str, Any]
    """The search options with which the photos were captioned (see ``search_key``)."""
    threshold: float | None
    """Minimum CIDEr-D of a right caption, or None if people have judged the captions."""
    truth: WordTruth | None = None
    """The fitted truth of words, or None if it was not fitted. All folds of the cross-validation
    share one fit, because a fit to so many words hardly depends on the words of one fold."""
    kinds: Kinds | None = None
    """The classifier of other kinds of images, or None if all images count as photos."""

    @property
    def least(self) -> float:
        """The minimum score of a right caption."""
        return JUDGED_RIGHT if self.threshold is None else self.threshold


class Judged(NamedTuple):
    """Confidence and score of N captions, to measure calibration.

    Words or phrases may take the place of captions. Their confidence is the probability that they
    are true of the photo, and their score is 1 (true) or 0 (false).
    """

    confidences: _Floats
    """Confidence of each caption, (N,)."""
    scores: _Floats
    """Score of each caption, (N,); see ``ScoredCaption.score``."""
    threshold: float
    """Minimum score of a right caption."""

    @property
    def right(self) -> _Floats:
        """1 for each right caption and 0 for each other caption, (N,)."""
        return (self.scores >= self.threshold).astype(np.float64)

    def take(self, rows: NDArray[Any]) -> Judged:
        """Return the captions in these rows. ``rows`` is a NumPy index or mask."""
        return Judged(self.confidences[rows], self.scores[rows], self.threshold)


# --- the truth of words --------------------------------------------------------------------------


def true_words(
    words: Sequence[str], references: Sequence[str], objects: Collection[str] = ()
) -> _Floats:
    """Label the words of a caption as true or false of the photo.

    A word is true if a reference contains its stem, or if it names an annotated object. "person" is
    also true if a reference contains "man" or "woman". But "person" in a reference does not make
    "man" true, and neither does an annotated person.

    Args:
        words: Lower-case tokens of the caption.
        references: Captions of the photo by people.
        objects: COCO categories that are annotated in the photo.

    Returns:
        Labels of the words, (T,). 1: true. 0: false. NaN: a function word.
    """
    said = [word for text in references for word in caption_tokens(text)]
    known = {*content_stems(" ".join([*said, *(NEUTRAL_WORDS.get(word, "") for word in said)]))}
    named = {
        at
        for name in find_names(words)
        if name.category in objects
        for at in range(name.start, name.stop)
        if words[at] not in NEUTRAL_WORDS
    }
    stems = [stem(word) for word in words]
    labels = [
        np.nan if one is None else float(one in known or at in named)
        for at, one in enumerate(stems)
    ]
    return np.array(labels, np.float64)


def fit_truth(examples: Sequence[ScoredCaption]) -> WordTruth | None:
    """Fit the truth of words, or return None if the model has no reading of the photo.

    The truth of a word is the probability that the word is true of the photo. The reading
    estimates, before any caption is written, which content words are true of a photo. None is also
    returned if the reading lacks all words of the captions.

    Two logistic regressions are fitted: one with the word's log-probability as an input, for
    finished captions, and one without it, for the search.

    Raises:
        DataError: The reading does not separate true words from false words.
    """
    known = [(one.seen, _is_known(one), one.true) for one in examples]
    rows, log_probs, z, true = (
        np.concatenate([np.zeros(0), *parts]).astype(np.float64)
        for parts in (
            [seen.rows[at] for seen, at, _ in known],
            [seen.found.token_log_probs[at] for seen, at, _ in known],
            [np.append(seen.z, [0, 0])[seen.rows[at]] for seen, at, _ in known],
            [labels[at] for _, at, labels in known],
        )
    )
    unknown = (rows == UNKNOWN_WORD).astype(np.float64)
    if unknown.all():
        return None
    ones = np.ones(len(true))

    def fitted(*more: _Floats) -> list[float]:
        """Return the fitted weights of z, unknown words, the constant and ``more`` inputs.

        z is the log-odds by the model's reading of the photo, which estimates the true words.
        """
        inputs = np.stack([z, unknown, ones, *more], axis=1)
        weights = logistic_regression(inputs, true, np.full(inputs.shape[1], TRUTH_PENALTY))
        return [float(weight) for weight in weights]

    scale, shift, bias, log_prob_weight = fitted(log_probs)
    search_scale, search_shift, search_bias = fitted()
    if min(scale, search_scale) <= 0:
        raise DataError(
            "the words that the model predicts for photos do not separate true from false words; "
            "add photos with several captions each, or run scripts/fit_reading.py again"
        )
    return WordTruth(
        scale, log_prob_weight, bias, shift / scale,
        search_scale, search_bias, search_shift / search_scale,
    )  # fmt: skip


def cross_truth(examples: Sequence[ScoredCaption]) -> list[WordTruth | None]:
    """Return the truth of words for each example, fitted without the examples in the same fold.

    The truth of a word is the probability that the word is true of the photo. An entry is None if
    the model has no reading of the photo, an estimate of the true words.
    """
    found: list[WordTruth | None] = [None] * len(examples)
    for others, own in _folds(examples):
        truth = fit_truth([examples[i] for i in others])
        for i in own:
            found[i] = truth
    return found


def measure_truth(
    examples: Sequence[ScoredCaption], truths: Sequence[WordTruth | None]
) -> dict[str, dict[str, Any]]:
    """Measure how well the truth of words and phrases is calibrated.

    The truth is the probability that a word or phrase is true of the photo.

    Args:
        examples: The captions.
        truths: The fitted truth of words to use for each caption. A caption with None is left out.

    Returns:
        Figures for ``words`` and for ``phrases``, or {} if all ``truths`` are None:

        * ``count``: number of words or phrases.
        * ``true``: share of true words or phrases.
        * ``auroc``: probability that a true word (or phrase) has a higher truth than a false one.
        * ``calibration_error``: mean difference of truth and share of true words, 0 to 1.
        * ``bins``: for each bin, ``count``, the mean ``truth`` and the share ``true``.
    """
    if not any(truths):
        return {}
    known = [_is_known(one) for one in examples]
    words = (
        np.concatenate(
            [_truths(one, of)[at] for one, of, at in zip(examples, truths, known, strict=True)]
        ),
        np.concatenate([one.true[at] for one, at in zip(examples, known, strict=True)]),
    )
    report = {}
    for name, (p, true) in {"words": words, "phrases": _phrases(examples, truths)}.items():
        judged = Judged(p, true, 1.0)
        report[name] = {
            "count": len(p),
            "true": float(true.mean()),
            "auroc": auroc(p[true > 0], p[true == 0]),
            "calibration_error": calibration_error(judged),
            "bins": [
                dict(zip(("count", "truth", "true"), one.values(), strict=True))
                for one in reliability(judged)
            ],
        }
    return report


def _is_known(one: ScoredCaption) -> NDArray[np.bool_]:
    """Return a mask of the caption's content words that are labelled true or false, (T,)."""
    known: NDArray[np.bool_] = ~np.isnan(one.true) & (one.seen.rows != FUNCTION_WORD)
    return known


def _truths(one: ScoredCaption, truth: WordTruth | None) -> _Floats:
    """Return the probability that each word of a caption is true of the photo, (T,).

    Function words have NaN. ``truth`` is the fitted truth of words, or None if it was not fitted.
    """
    return probabilities(one.seen.log_odds(truth))


def _phrases(
    examples: Sequence[ScoredCaption], truths: Sequence[WordTruth | None]
) -> tuple[_Floats, _Floats]:
    """Return the truth and the label of each phrase that contains labelled words, (P,) each.

    The truth is the probability that the phrase is true of the photo. The label is 1 if all
    labelled words of the phrase are true, otherwise 0. A caption for which ``truths`` contains None
    is left out.
    """
    found = []
    for one, truth in zip(examples, truths, strict=True):
        of_words, known = _truths(one, truth), _is_known(one)
        for span in phrase_spans(one.seen.words) if truth is not None else ():
            if (at := known[span]).any():
                found.append((joint_truth(of_words[span][at]), one.true[span][at].min()))
    p, true = np.array(found, np.float64).reshape(-1, 2).T
    return p, true


# --- photos and other images ---------------------------------------------------------------------


def fit_kinds(
    photos: Sequence[NDArray[np.float32]], kinds: Mapping[str, NDArray[np.float32]]
) -> Kinds:
    """Fit a linear classifier that tells photos from other kinds of images.

    The classifier itself is fitted to all images. Familiarity, from 1 (like a photo) to 0, is
    measured with further fits. The log-odds that an image is not a photo come from a fit without
    the image's kind, and the log-odds of a photo from a fit without this photo. In a fit with the
    photo, its log-odds would be too low, so fewer new photos would count as familiar than
    `FAMILIAR` promises.

    Args:
        photos: For each photo, the vectors of the photo and of its variants, such as a
            black-and-white copy, (number of variants, D).
        kinds: Vectors of the images of each kind, (number of images, D).
    """
    fold = np.random.default_rng(0).permutation(len(photos)) % len(kinds)
    odds: dict[str, tuple[_Floats, _Floats]] = {}
    for number, name in enumerate(kinds):
        others = np.concatenate([kinds[kind] for kind in kinds if kind != name])
        seen, unseen = (
            np.concatenate([photos[i] for i in np.flatnonzero(rows).tolist()])
            for rows in (fold != number, fold == number)
        )
        weights = _tell_apart(seen, others)
        odds[name] = kinds[name] @ weights[:-1] + weights[-1], unseen @ weights[:-1] + weights[-1]
    start, end = np.quantile(
        np.concatenate([of_photos for _, of_photos in odds.values()]), FAMILIAR
    )
    end = max(end, start + 1e-6)
    return Kinds(
        _tell_apart(np.concatenate(photos), np.concatenate([*kinds.values()])).astype(np.float32),
        (float(start), float(end)),
        {name: ((end - own) / (end - start)).clip(0, 1) for name, (own, _) in odds.items()},
        {name: auroc(*both) for name, both in odds.items()},
    )


def _tell_apart(photos: NDArray[np.float32], others: NDArray[np.float32]) -> _Floats:
    """Fit the log-odds that a vector belongs to ``others`` and not to ``photos``.

    Args:
        photos: Vectors of photos, one per row, (..., D).
        others: Vectors of other images, one per row, (..., D).

    Returns:
        The weights, then the intercept, (D + 1,).
    """
    mean, scale = photos.mean(axis=0), photos.std(axis=0) + 1e-6
    inputs = (np.concatenate([photos, others]) - mean) / scale
    labels = np.repeat([0.0, 1.0], [len(photos), len(others)])
    penalties = np.full(inputs.shape[1] + 1, KINDS_PENALTY)
    penalties[-1] = 0.01
    weights = logistic_regression(np.c_[inputs, np.ones(len(inputs))], labels, penalties)
    of_vector = weights[:-1] / scale
    return np.append(of_vector, weights[-1] - of_vector @ mean)


def measure_kinds(
    calibrator: Calibrator, kinds: Kinds, seen: Mapping[str, Sequence[Observation]], style: str
) -> dict[str, dict[str, Any]]:
    """Measure how well the classifier separates photos from kinds of images that it has not seen.

    For each kind, the classifier was fitted to the other kinds only.

    Args:
        calibrator: The fitted calibrator.
        kinds: The fitted classifier and its results.
        seen: Captions of the images of each kind, with the inputs for their confidence.
        style: Style of the captions.

    Returns:
        Figures for each kind. ``images`` is the number of images. ``auroc`` is the probability that
        an image of the kind is less familiar (less like a photo) than a photo. ``confidence`` is
        the mean confidence of the captions, and ``below_0.2`` is the share of captions with a
        confidence below 0.2.
    """
    of_captions, report = replace(calibrator, kinds=None), {}
    for name, images in seen.items():
        confidences = kinds.unseen[name] * [of_captions.confidence(one, style) for one in images]
        report[name] = {
            "images": len(images),
            "auroc": kinds.auroc[name],
            "confidence": float(confidences.mean()),
            "below_0.2": float((confidences < 0.2).mean()),
        }
    return report


# --- the confidence of captions ------------------------------------------------------------------


def fit(examples: Sequence[ScoredCaption], recipe: Recipe) -> Calibrator:
    """Fit a calibrator to scored captions, and return it.

    A calibrator computes the confidence of captions. It is a logistic regression on the features of
    a caption, with a separate intercept for each style.

    Args:
        examples: The captions, with the scores that decide which captions are right.
        recipe: The parts of the calibrator that do not come from the scores.
    """
    found = np.array([features(one.seen, recipe.truth) for one in examples])
    lowest, highest = np.quantile(found, RANGE, axis=0)
    limited = np.clip(found, lowest, highest)
    mean, scale = limited.mean(axis=0), limited.std(axis=0)
    scale[scale < 1e-9] = 1.0  # a constant feature, such as truth in a model without a reading
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
        truth=recipe.truth,
        search=recipe.search,
        threshold=recipe.threshold,
    )
    if recipe.kinds is None:
        return calibrator
    return replace(calibrator, kinds=recipe.kinds.weights, familiar=recipe.kinds.familiar)


def cross_validate(examples: Sequence[ScoredCaption], recipe: Recipe) -> Judged:
    """Compute the confidence of every example with a calibrator that was fitted without its photo.

    Returns:
        The confidences and scores, in the order of ``examples``.

    Raises:
        DataError: Fewer than 10 captions are right, or fewer than 10 are wrong.
    """
    count = len(examples)
    scores = np.array([example.score for example in examples])
    judged = Judged(np.zeros(count), scores, recipe.least)
    right = int(judged.right.sum())
    if min(right, count - right) < 10:
        rule = f"have a CIDEr-D of {recipe.threshold} or more" if recipe.threshold else "are right"
        raise DataError(
            f"{right} of {count} captions {rule}, but at least 10 must be right and 10 wrong; "
            + (
                f"{'lower' if right < 10 else 'raise'} threshold"
                if recipe.threshold
                else "add photos"
            )
        )
    for others, own in _folds(examples):
        calibrator = fit([examples[i] for i in others], recipe)
        for i in own:
            judged.confidences[i] = calibrator.confidence(examples[i].seen, examples[i].style)
    return judged


def _folds(examples: Sequence[ScoredCaption]) -> Iterator[tuple[list[int], list[int]]]:
    """Yield the folds (parts) of a cross-validation. All examples of a photo are in one fold.

    Yields:
        Indices of the examples to fit to, and indices of the examples to measure.
    """
    photos = dict.fromkeys(one.photo for one in examples)
    folds = np.random.default_rng(0).permutation(len(photos)) % FOLDS
    of_photo = dict(zip(photos, folds, strict=True))
    fold = np.array([of_photo[one.photo] for one in examples])
    for number in range(FOLDS):
        yield np.flatnonzero(fold != number).tolist(), np.flatnonzero(fold == number).tolist()


def logistic_regression(inputs: _Floats, labels: _Floats, penalties: _Floats) -> _Floats:
    """Fit a logistic regression by minimizing the penalized log-loss with Newton's method.

        sum_n log(1 + exp(-s_n w . x_n)) + sum_i penalty_i w_i^2 / 2,    s_n = 2 label_n - 1

    Here x_n are the features of example n, and w are the weights.

    Args:
        inputs: Features of the examples, (N, F).
        labels: Label of each example, 0 or 1, (N,).
        penalties: Penalty factor of each weight, above 0, (F,). It keeps the minimum finite and
            unique.

    Returns:
        The weights, (F,).
    """
    weights = np.zeros(inputs.shape[1])

    def loss(at: _Floats) -> float:
        """Return the penalized log-loss for the weights ``at``."""
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


# --- measures ------------------------------------------------------------------------------------


def _bins(judged: Judged) -> NDArray[np.intp]:
    """Return the number of the bin (interval) that contains each caption's confidence, (N,)."""
    bins: NDArray[np.intp] = np.minimum((judged.confidences * BINS).astype(np.intp), BINS - 1)
    return bins


def reliability(judged: Judged) -> list[dict[str, Any]]:
    """Compute the data of a reliability diagram: the share of right captions by confidence.

    Returns:
        The bins that contain captions, from low to high confidence. Each bin has the number of
        captions (``photos``), their mean ``confidence``, and the share of ``right`` captions.
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
    """Return the probability that a random value of ``high`` exceeds a random value of ``low``.

    Equal values count half. The result is None if either array is empty.
    """
    if not (len(high) and len(low)):
        return None
    low = np.sort(low)
    wins = np.searchsorted(low, high) + np.searchsorted(low, high, side="right")
    return float(wins.mean() / 2 / len(low))


def calibration_error(judged: Judged) -> float:
    """Return the expected calibration error, 0 to 1.

        sum_b n_b / N |mean confidence_b - share right_b|

    The sum is over bins b of confidence. Bin b contains n_b of the N captions, and its two other
    terms are the mean confidence and the share of right captions in the bin.
    """
    surplus = np.bincount(_bins(judged), judged.confidences - judged.right)
    return float(np.abs(surplus).sum() / len(judged.scores))


def error_by_chance(judged: Judged, draws: int = 1000) -> float:
    """Return the calibration error that a perfectly calibrated confidence would show on average.

    Even this error is above 0, because the share of right captions in a bin varies by chance. A
    measured calibration error of this size is therefore no sign of a bad calibration.

    Args:
        judged: The captions. Only their confidences are used.
        draws: Number of random draws of right and wrong captions to average over.
    """
    p = judged.confidences
    lucky = (np.random.default_rng(0).random((draws, len(p))) < p).astype(np.float64)
    return float(np.mean([calibration_error(Judged(p, right, 1)) for right in lucky]))


def measure(judged: Judged) -> dict[str, Any]:
    """Measure how well confidence is calibrated, and how well it ranks captions.

    Returns:
        These figures:

        * ``photos``: number of captions. A group has one caption per photo.
        * ``right``: share of right captions.
        * ``score``: mean score.
        * ``calibration_error``: mean difference of confidence and share of right captions in bins
          of confidence, 0 to 1. ``calibration_error_interval`` is its 95% bootstrap interval over
          photos.
        * ``calibration_error_by_chance``: the error of a perfectly calibrated confidence.
        * ``auroc``: probability that a right caption has a higher confidence than a caption that is
          not right.
        * ``auroc_wrong``: probability that a caption with a score of `WRONG` or less has a lower
          confidence than a caption with a higher score.
        * ``bins``: count, mean confidence and share of right captions by confidence, from
          `reliability`.
    """
    count = len(judged.scores)
    times = resample_weights(count, RESAMPLES)
    resamples = (judged.take(np.repeat(np.arange(count), row)) for row in times)
    right, wrong = judged.right > 0, judged.scores <= WRONG
    return {
        "photos": count,
        "right": float(judged.right.mean()),
        "score": float(judged.scores.mean()),
        "calibration_error": calibration_error(judged),
        "calibration_error_interval": interval([*map(calibration_error, resamples)]),
        "calibration_error_by_chance": error_by_chance(judged),
        "auroc": auroc(judged.confidences[right], judged.confidences[~right]),
        "auroc_wrong": auroc(judged.confidences[~wrong], judged.confidences[wrong]),
        "bins": reliability(judged),
    }


def measure_groups(judged: Judged, groups: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Apply `measure` to each group of captions and, with several groups, to all captions.

    Args:
        judged: Confidence and score of each caption.
        groups: Name of each caption's group, (N,).
    """
    parts = {name: judged.take(np.array(groups) == name) for name in dict.fromkeys(groups)}
    if len(parts) > 1:
        parts["all"] = judged
    return {name: measure(part) for name, part in parts.items()}
