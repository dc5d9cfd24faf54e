"""How sure a score is: the images are drawn again, with replacement, and scored again.

A resample is a row of weights, how often each image was drawn; ``Scores.resample`` turns rows into
scores. Two systems are compared under the same rows (the paired bootstrap), so that images which
are hard for both count against neither.

Source: Efron & Tibshirani 1993, An Introduction to the Bootstrap, chapter 13 (the percentile
interval); Koehn 2004, Statistical Significance Tests for Machine Translation Evaluation (paired
resampling of a corpus metric).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from captioner.errors import ConfigError

MIN_IMAGES = 30
"""With fewer images a resample is too like the next: no interval is told, and no verdict."""

SAME = 1e-6
"""Scores nearer to each other than this are the same."""

RESAMPLES = 1000
"""Resamples when nobody asks for another number; Koehn 2004 takes as many."""


class Difference(NamedTuple):
    """The score of one system minus that of another, on the same images."""

    difference: float
    """On the images as they are; above 0: the first system scores higher."""
    low: float
    """Lower end of its 95% interval."""
    high: float
    """Upper end of its 95% interval."""
    p_value: float
    """Two-sided; at least 2 / (resamples + 1), at most 1."""
    significant: bool
    """The interval leaves out 0; at the border a p-value of just above 0.05 may stand beside it."""


def weights(count: int, resamples: int = RESAMPLES, seed: int = 0) -> NDArray[np.float64]:
    """How often each image is drawn in each resample.

    Two systems get the same weights by the same count and seed. A row does not depend on how many
    rows follow it.

    Args:
        count: Images N; each resample draws as many.
        resamples: Rows R.
        seed: Start of the random draws.

    Returns:
        Whole numbers, (R, N); every row sums to N.

    Raises:
        ConfigError: Less than one image or resample, or a seed below 0.
    """
    if count < 1 or resamples < 1 or seed < 0:
        raise ConfigError(
            f"cannot draw {resamples} resamples of {count} images with seed {seed}; "
            "give at least one of both and a seed of 0 or more"
        )
    generator = np.random.default_rng(seed)
    rows = np.empty((resamples, count))
    for row in rows:  # one at a time: all draws at once would take as much memory again
        row[:] = np.bincount(generator.integers(count, size=count), minlength=count)
    return rows


def interval(values: ArrayLike) -> tuple[float, float]:
    """The 95% percentile interval.

    Args:
        values: A score in every resample, (R,); NaN is left out.

    Returns:
        The 2.5th and the 97.5th percentile; NaN twice when there is no value.
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
    """Whether two systems differ by more than the choice of images explains.

    The p-value asks how far the interval must widen to reach 0: twice the smaller share of the
    resamples in which the difference is not above 0, or not below 0. Each share counts the images
    as they are as one more resample, (1 + hits) / (1 + R), so that no p-value is 0.

    Source: Efron & Tibshirani 1993, chapters 13 and 15; Koehn 2004; the count of one more: Davison
    & Hinkley 1997, Bootstrap Methods and their Application, section 4.2.
    Deviation: Koehn's test is one-sided and gives a share, not a p-value.

    Args:
        first: Score of the first system on the images as they are.
        second: Score of the second.
        first_values: Scores of the first in every resample, (R,).
        second_values: Scores of the second under the same weights, (R,); a resample in which
            either is NaN is left out.

    Returns:
        First minus second; for equal systems 0, p-value 1.
    """
    apart = np.asarray(first_values, np.float64) - np.asarray(second_values, np.float64)
    apart = apart[~np.isnan(apart)]
    apart[np.abs(apart) < SAME] = 0  # BLEU of no match at all is a smoothing constant, not a score
    low, high = interval(apart)
    hits = int(min(np.count_nonzero(apart <= 0), np.count_nonzero(apart >= 0)))
    p_value = min(1.0, 2 * (1 + hits) / (1 + len(apart))) if apart.size else float("nan")
    return Difference(first - second, low, high, p_value, low > 0 or high < 0)
