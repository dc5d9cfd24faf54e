"""Bootstrap intervals and paired significance tests over images.

A resample is a row of weights: the number of times that each image was drawn. Two systems are
compared under the same rows, which is the paired bootstrap.

Source: Efron & Tibshirani 1993, An Introduction to the Bootstrap, chapter 13 (percentile interval);
Koehn 2004, Statistical Significance Tests for Machine Translation Evaluation (paired resampling of
a corpus metric).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

MIN_IMAGES = 30
"""Fewest images for an interval or a test. Resamples of fewer images vary too little."""

SAME = 1e-6
"""Scores that differ by less than this count as equal."""

RESAMPLES = 1000
"""Default number of resamples, as in Koehn 2004."""


def too_few(count: int, unit: str, purpose: str) -> dict[str, str]:
    """Return the ``warning`` for a report without intervals, or {} if there are enough units."""
    if count >= MIN_IMAGES:
        return {}
    return {"warning": f"{count} {unit} are too few for {purpose} (needs {MIN_IMAGES})"}


def resample_weights(count: int, resamples: int | None = None, seed: int = 0) -> NDArray[np.uint8]:
    """Draw R resamples of N images, and return how often each image was drawn, (R, N).

    Images are drawn with replacement. The weights depend only on the count and the seed, and a row
    does not depend on the number of rows.

    Args:
        count: N.
        resamples: R. By default ``RESAMPLES``, or 0 if there are fewer than ``MIN_IMAGES`` images.
        seed: Seed of the random numbers.
    """
    if resamples is None:
        resamples = RESAMPLES if count >= MIN_IMAGES else 0
    generator = np.random.default_rng(seed)
    rows = np.empty((resamples, count), dtype=np.uint8)  # P(256 or more) < 1e-500
    for row in rows:
        row[:] = np.bincount(generator.integers(count, size=count), minlength=count)
    return rows


def weighted_sums(weights: NDArray[Any], counts: NDArray[Any]) -> NDArray[np.float64]:
    """Sum the counts of images, (N, ...), under the weights of each resample, (R, N): (R, ...)."""
    # In blocks of rows: as float64, all rows of many images would take a gigabyte.
    blocks = [weights[start : start + 40] for start in range(0, max(1, len(weights)), 40)]
    return np.concatenate([block.astype(np.float64) @ counts for block in blocks])


def ratio(sums: NDArray[np.float64]) -> NDArray[np.float64]:
    """Divide the first column by the second, (R, 2): (R,). NaN where the second is 0."""
    with np.errstate(invalid="ignore"):
        result: NDArray[np.float64] = sums[:, 0] / sums[:, 1]
    return result


def resampled_means(
    photos: Sequence[Any], owners: Sequence[Any], columns: Mapping[str, NDArray[np.float64]]
) -> dict[str, NDArray[np.float64]]:
    """Return the means of values in resamples of the photos that the values belong to.

    Args:
        photos: Identifier of each photo, sorted, (N,).
        owners: The photo of each value, (V,).
        columns: Values by name, (V,). NaN is ignored.

    Returns:
        The means by name, (R,), NaN for a resample without values. Empty, (0,), if the values
        belong to fewer than ``MIN_IMAGES`` photos.
    """
    weights, index = resample_weights(len(photos)), np.searchsorted(photos, owners)
    means = {}
    for name, values in columns.items():
        of_photos, known = index[~np.isnan(values)], values[~np.isnan(values)]
        numbers = np.bincount(of_photos, minlength=len(photos))
        counts = np.stack([np.bincount(of_photos, known, len(photos)), numbers], axis=1)
        enough = np.count_nonzero(numbers) >= MIN_IMAGES
        sums, totals = weighted_sums(weights if enough else weights[:0], counts).T
        with np.errstate(invalid="ignore"):
            means[name] = sums / totals
    return means


def interval(values: ArrayLike) -> list[float] | None:
    """Return the 95% percentile interval of the scores of resamples, (R,), or None if empty.

    NaN is ignored.
    """
    array = np.asarray(values, dtype=np.float64)
    array = array[~np.isnan(array)]
    return np.percentile(array, (2.5, 97.5)).tolist() if array.size else None


class Significance(NamedTuple):
    """The result of comparing two systems. All fields are None without resamples."""

    interval: list[float] | None = None
    """95% interval of the difference between the systems."""
    p_value: float | None = None
    """Two-sided p-value, from 2 / (resamples + 1) to 1."""
    significant: bool | None = None
    """True if the interval excludes 0. At the border, the p-value may still be just above 0.05."""


def compare(differences: NDArray[np.floating[Any]]) -> Significance:
    """Test whether two systems differ by more than the choice of images explains.

    The p-value is twice the share of resamples in which the difference is not above 0, or in which
    it is not below 0, whichever is smaller. The original images count as one more resample in both
    shares, (1 + hits) / (1 + R), so that a p-value is never 0.

    Source: Efron & Tibshirani 1993, chapters 13 and 15; Koehn 2004; (1 + hits) / (1 + R): Davison &
    Hinkley 1997, Bootstrap Methods and their Application, section 4.2.
    Deviation: Koehn's test is one-sided and reports a share, not a p-value.

    Args:
        differences: Score of one system minus the score of the other, under the same weights, in
            each resample, (R,). NaN is ignored.
    """
    found = differences[~np.isnan(differences)]
    found = np.where(np.abs(found) < SAME, 0, found)  # without a match, BLEU is a tiny constant
    ends = interval(found)
    if ends is None:
        return Significance()
    hits = int(min(np.count_nonzero(found <= 0), np.count_nonzero(found >= 0)))
    p_value = min(1.0, 2 * (1 + hits) / (1 + len(found)))
    return Significance(ends, p_value, ends[0] > 0 or ends[1] < 0)
