"""Bootstrap intervals and paired significance tests over images.

A resample is a row of weights that counts how often each image was drawn; ``Scores.resample`` turns
rows into scores. Two systems are compared under the same rows (the paired bootstrap).

Source: Efron & Tibshirani 1993, An Introduction to the Bootstrap, chapter 13 (percentile interval);
Koehn 2004, Statistical Significance Tests for Machine Translation Evaluation (paired resampling of
a corpus metric).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

MIN_IMAGES = 30
"""Fewest images for an interval or a significance test; resamples of fewer vary too little."""

SAME = 1e-6
"""Scores that differ by less than this are equal."""

BLOCK = 40
"""Resamples that are computed together."""

RESAMPLES = 1000
"""Default number of resamples, as in Koehn 2004."""


class Difference(NamedTuple):
    """Score of one system minus that of another on the same images."""

    difference: float
    """On the images themselves; above 0 if the first system scores higher."""
    low: float
    """Lower end of the 95% interval."""
    high: float
    """Upper end of the 95% interval."""
    p_value: float
    """Two-sided; from 2 / (resamples + 1) to 1."""
    significant: bool
    """Whether the interval excludes 0. At the border the p-value may be just above 0.05."""


def resample_weights(count: int, resamples: int = RESAMPLES, seed: int = 0) -> NDArray[np.float64]:
    """How often each image is drawn in each resample.

    The same count and seed give the same weights. A row does not depend on the number of rows.

    Args:
        count: Number of images N; each resample draws N of them with replacement.
        resamples: Number of rows R.
        seed: Seed of the random generator.

    Returns:
        Integers as floats, (R, N); every row sums to N.
    """
    return np.concatenate(list(resample_blocks(count, resamples, seed)))


def resample_blocks(
    count: int, resamples: int = RESAMPLES, seed: int = 0
) -> Iterator[NDArray[np.float64]]:
    """The rows of `resample_weights` in blocks, as all of many images take hundreds of megabytes.

    Yields:
        Rows, (``BLOCK`` or the rest, N).
    """
    generator = np.random.default_rng(seed)
    for start in range(0, resamples, BLOCK):
        rows = np.empty((min(BLOCK, resamples - start), count))
        for row in rows:
            row[:] = np.bincount(generator.integers(count, size=count), minlength=count)
        yield rows


def interval(values: ArrayLike) -> tuple[float, float]:
    """The 95% percentile interval.

    Args:
        values: The score of each resample, (R,); NaN is ignored.

    Returns:
        The 2.5th and the 97.5th percentile; NaN if there are no values.
    """
    array = np.asarray(values, dtype=np.float64)
    array = array[~np.isnan(array)]
    if not array.size:
        return float("nan"), float("nan")
    low, high = np.percentile(array, (2.5, 97.5))
    return float(low), float(high)


def compare(
    first: float, second: float, first_values: ArrayLike, second_values: ArrayLike
) -> Difference:
    """Test whether two systems differ by more than the choice of images explains.

    The p-value is twice the smaller share of resamples in which the difference is not above 0, or
    not below 0. The images themselves count as one more resample, (1 + hits) / (1 + R), so that no
    p-value is 0.

    Source: Efron & Tibshirani 1993, chapters 13 and 15; Koehn 2004; (1 + hits) / (1 + R): Davison &
    Hinkley 1997, Bootstrap Methods and their Application, section 4.2.
    Deviation: Koehn's test is one-sided and reports a share, not a p-value.

    Args:
        first: Score of the first system on the images themselves.
        second: Score of the second.
        first_values: Score of the first system in each resample, (R,).
        second_values: Score of the second under the same weights, (R,); resamples in which either
            is NaN are ignored.

    Returns:
        First minus second; for equal systems the difference is 0 and the p-value 1.
    """
    differences = np.asarray(first_values, np.float64) - np.asarray(second_values, np.float64)
    differences = differences[~np.isnan(differences)]
    differences[np.abs(differences) < SAME] = 0  # BLEU without a match is a smoothing constant
    low, high = interval(differences)
    hits = int(min(np.count_nonzero(differences <= 0), np.count_nonzero(differences >= 0)))
    count = len(differences)
    p_value = min(1.0, 2 * (1 + hits) / (1 + count)) if count else float("nan")
    return Difference(first - second, low, high, p_value, low > 0 or high < 0)
