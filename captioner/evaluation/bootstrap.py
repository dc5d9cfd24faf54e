"""Bootstrap intervals and paired significance tests over images.

A resample is a row of weights that counts how often each image was drawn. Two systems are compared
under the same rows (the paired bootstrap).

Source: Efron & Tibshirani 1993, An Introduction to the Bootstrap, chapter 13 (percentile interval);
Koehn 2004, Statistical Significance Tests for Machine Translation Evaluation (paired resampling of
a corpus metric).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

MIN_IMAGES = 30
"""Fewest images for an interval or a significance test; resamples of fewer vary too little."""

SAME = 1e-6
"""Scores that differ by less than this are equal."""

RESAMPLES = 1000
"""Default number of resamples, as in Koehn 2004."""


def too_few(count: int, unit: str, purpose: str) -> str:
    """The note of a report without intervals."""
    return f"{count} {unit} are too few for {purpose} (needs {MIN_IMAGES})"


def resample_weights(count: int, resamples: int = RESAMPLES, seed: int = 0) -> NDArray[np.uint8]:
    """How often each of N images is drawn in each of R resamples of N with replacement: (R, N).

    The same count and seed give the same weights. A row does not depend on the number of rows.
    """
    generator = np.random.default_rng(seed)
    rows = np.empty((resamples, count), dtype=np.uint8)  # P(256 or more) < 1e-500
    for row in rows:
        row[:] = np.bincount(generator.integers(count, size=count), minlength=count)
    return rows


class PhotoMeans:
    """Means of values that belong to photos, in resamples of the photos.

    Args:
        photos: What identifies each photo, sorted, (N,).
        owners: The photo of each value, (V,).
    """

    def __init__(self, photos: Sequence[Any], owners: Sequence[Any]) -> None:
        self._index = np.searchsorted(photos, owners)
        self._weights: NDArray[np.float64] | None = None
        if len(photos) >= MIN_IMAGES:
            self._weights = resample_weights(len(photos)).astype(np.float64)

    def resampled(self, values: NDArray[np.float64]) -> NDArray[np.float64] | None:
        """The mean in each resample, (R,), of values, (V,), of which NaN is ignored.

        None if fewer than `MIN_IMAGES` photos have values; NaN for a resample without values.
        """
        images, values = self._index[~np.isnan(values)], values[~np.isnan(values)]
        if self._weights is None or len(np.unique(images)) < MIN_IMAGES:
            return None
        count = self._weights.shape[1]
        sums = self._weights @ np.bincount(images, values, count)
        totals = self._weights @ np.bincount(images, minlength=count)
        means: NDArray[np.float64] = np.full(len(totals), np.nan)
        return np.divide(sums, totals, out=means, where=totals > 0)


def interval(values: ArrayLike) -> list[float]:
    """The 95% percentile interval of the score of each resample, (R,).

    NaN is ignored; without values the ends are NaN.
    """
    array = np.asarray(values, dtype=np.float64)
    array = array[~np.isnan(array)]
    return np.percentile(array, (2.5, 97.5)).tolist() if array.size else [np.nan, np.nan]


class Significance(NamedTuple):
    """Whether one system scores higher than another."""

    interval: list[float]
    """95% interval of the difference."""
    p_value: float
    """Two-sided; from 2 / (resamples + 1) to 1."""
    significant: bool
    """Whether the interval excludes 0. At the border the p-value may be just above 0.05."""


def compare(differences: NDArray[np.floating[Any]]) -> Significance:
    """Test whether two systems differ by more than the choice of images explains.

    The p-value is twice the smaller share of resamples in which the difference is not above 0, or
    not below 0. The images themselves count as one more resample, (1 + hits) / (1 + R), so that no
    p-value is 0.

    Source: Efron & Tibshirani 1993, chapters 13 and 15; Koehn 2004; (1 + hits) / (1 + R): Davison &
    Hinkley 1997, Bootstrap Methods and their Application, section 4.2.
    Deviation: Koehn's test is one-sided and reports a share, not a p-value.

    Args:
        differences: Score of one system minus that of the other in each resample, under the same
            weights, (R,); NaN is ignored.
    """
    found = differences[~np.isnan(differences)]
    found = np.where(np.abs(found) < SAME, 0, found)  # BLEU without a match is a smoothing constant
    low, high = interval(found)
    hits = int(min(np.count_nonzero(found <= 0), np.count_nonzero(found >= 0)))
    p_value = min(1.0, 2 * (1 + hits) / (1 + len(found))) if len(found) else float("nan")
    return Significance([low, high], p_value, low > 0 or high < 0)
