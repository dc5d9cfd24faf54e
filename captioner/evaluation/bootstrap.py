"""Bootstrap intervals and paired significance tests over images.

A resample is a row of weights that counts how often each image was drawn. Two systems are compared
under the same rows (the paired bootstrap).

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
"""Fewest images for an interval or a significance test; resamples of fewer vary too little."""

SAME = 1e-6
"""Scores that differ by less than this are equal."""

RESAMPLES = 1000
"""Default number of resamples, as in Koehn 2004."""


def too_few(count: int, unit: str, purpose: str) -> dict[str, str]:
    """The ``warning`` of a report without intervals; empty if there are enough."""
    if count >= MIN_IMAGES:
        return {}
    return {"warning": f"{count} {unit} are too few for {purpose} (needs {MIN_IMAGES})"}


def resample_weights(count: int, resamples: int | None = None, seed: int = 0) -> NDArray[np.uint8]:
    """How often each of N images is drawn in each of R resamples of N with replacement: (R, N).

    By default ``RESAMPLES``, or none of fewer than ``MIN_IMAGES`` images. The same count and seed
    give the same weights. A row does not depend on the number of rows.
    """
    if resamples is None:
        resamples = RESAMPLES if count >= MIN_IMAGES else 0
    generator = np.random.default_rng(seed)
    rows = np.empty((resamples, count), dtype=np.uint8)  # P(256 or more) < 1e-500
    for row in rows:
        row[:] = np.bincount(generator.integers(count, size=count), minlength=count)
    return rows


def weighted_sums(weights: NDArray[Any], counts: NDArray[Any]) -> NDArray[np.float64]:
    """Sums of what was counted for each image, (N, ...), under weights, (R, N): (R, ...)."""
    # As float64, all rows of many images would take a gigabyte.
    blocks = [weights[start : start + 40] for start in range(0, max(1, len(weights)), 40)]
    return np.concatenate([block.astype(np.float64) @ counts for block in blocks])


def ratio(sums: NDArray[np.float64]) -> NDArray[np.float64]:
    """Divide the first of two sums by the second, (R, 2): (R,); NaN where the second is 0."""
    with np.errstate(invalid="ignore"):
        result: NDArray[np.float64] = sums[:, 0] / sums[:, 1]
    return result


def resampled_means(
    photos: Sequence[Any], owners: Sequence[Any], columns: Mapping[str, NDArray[np.float64]]
) -> dict[str, NDArray[np.float64]]:
    """Means of values that belong to photos, in resamples of the photos.

    Args:
        photos: What identifies each photo, sorted, (N,).
        owners: The photo of each value, (V,).
        columns: Values by name, (V,), of which NaN is ignored.

    Returns:
        The means by name, (R,), NaN for a resample without values; none, (0,), of values of fewer
        than ``MIN_IMAGES`` photos.
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
    """The 95% percentile interval of the score of each resample, (R,), of which NaN is ignored.

    None without values.
    """
    array = np.asarray(values, dtype=np.float64)
    array = array[~np.isnan(array)]
    return np.percentile(array, (2.5, 97.5)).tolist() if array.size else None


class Significance(NamedTuple):
    """Whether one system scores higher than another; all None without resamples."""

    interval: list[float] | None = None
    """95% interval of the difference."""
    p_value: float | None = None
    """Two-sided; from 2 / (resamples + 1) to 1."""
    significant: bool | None = None
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
    ends = interval(found)
    if ends is None:
        return Significance()
    hits = int(min(np.count_nonzero(found <= 0), np.count_nonzero(found >= 0)))
    p_value = min(1.0, 2 * (1 + hits) / (1 + len(found)))
    return Significance(ends, p_value, ends[0] > 0 or ends[1] < 0)
