"""Bootstrap intervals and paired significance tests over images.

A resample is a set of N images that is drawn with replacement from N images, so that some images
are drawn several times. It is stored as a row of weights: the number of times that each image was
drawn. The paired bootstrap compares two systems on the same resamples.

Notation: N images, R resamples.

Source: Efron & Tibshirani 1993, An Introduction to the Bootstrap, chapter 13 (percentile interval).
Koehn 2004, Statistical Significance Tests for Machine Translation Evaluation (paired resampling).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

MIN_IMAGES = 30
"""Minimum number of images for an interval or a test. With fewer images, the resamples vary too
little, and intervals become too narrow."""

SAME = 1e-6
"""Scores that differ by less than this count as equal."""

RESAMPLES = 1000
"""Default number of resamples, as in Koehn 2004."""


def too_few(count: int, unit: str, purpose: str) -> dict[str, str]:
    """Return a ``warning`` for the report if too few units were measured, otherwise {}.

    Args:
        count: Number of units.
        unit: Plural noun for the units, such as ``images``.
        purpose: The statistic that needs more units, such as ``confidence intervals``.
    """
    if count >= MIN_IMAGES:
        return {}
    return {"warning": f"{count} {unit} are too few for {purpose}; use {MIN_IMAGES} or more"}


def resample_weights(count: int, resamples: int | None = None, seed: int = 0) -> NDArray[np.uint8]:
    """Draw R resamples of N images, and return how often each image was drawn.

    The weights depend only on the count and the seed. A larger number of resamples adds rows, but
    does not change the first rows.

    Args:
        count: Number of images, N.
        resamples: Number of resamples, R. The default is ``RESAMPLES``, or 0 for fewer than
            ``MIN_IMAGES`` images.
        seed: Seed of the random numbers.

    Returns:
        The weights of the images in each resample, (R, N).
    """
    if resamples is None:
        resamples = RESAMPLES if count >= MIN_IMAGES else 0
    generator = np.random.default_rng(seed)
    rows = np.empty((resamples, count), dtype=np.uint8)  # a weight above 255 has P < 1e-500
    for row in rows:
        row[:] = np.bincount(generator.integers(count, size=count), minlength=count)
    return rows


def weighted_sums(weights: NDArray[Any], counts: NDArray[Any]) -> NDArray[np.float64]:
    """Sum the counts of the images in each resample.

    Args:
        weights: Number of times that each image was drawn, (R, N).
        counts: Counts of each image, (N, ...).

    Returns:
        The weighted sums, (R, ...).
    """
    # In blocks of rows: as float64, all rows of many images would take a gigabyte.
    blocks = [weights[start : start + 40] for start in range(0, max(1, len(weights)), 40)]
    return np.concatenate([block.astype(np.float64) @ counts for block in blocks])


def ratio(sums: NDArray[np.float64]) -> NDArray[np.float64]:
    """Divide the first column of ``sums``, (R, 2), by the second, and return the quotients, (R,).

    0 / 0 is NaN.
    """
    with np.errstate(invalid="ignore"):
        result: NDArray[np.float64] = sums[:, 0] / sums[:, 1]
    return result


def resampled_means(
    photos: Sequence[Any], owners: Sequence[Any], columns: Mapping[str, NDArray[np.float64]]
) -> dict[str, NDArray[np.float64]]:
    """Return the mean of each column of values in every resample of the photos.

    A photo can have several values. Photos are resampled instead of values, because the values of
    one photo are not independent of each other.

    Args:
        photos: Identifier of each photo, sorted, (N,).
        owners: Identifier of the photo that each value belongs to, (V,).
        columns: Values by name, (V,). NaN is ignored.

    Returns:
        The means by name, (R,). A mean is NaN if the resample contains no values. The array is
        empty, (0,), if fewer than ``MIN_IMAGES`` photos have values.
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
    """Return the 95% percentile interval, [low end, high end], or None without values.

    ``values`` contains a statistic for each resample, (R,). NaN is ignored.
    """
    array = np.asarray(values, dtype=np.float64)
    array = array[~np.isnan(array)]
    return np.percentile(array, (2.5, 97.5)).tolist() if array.size else None


class Significance(NamedTuple):
    """The result of a comparison of two systems. Without resamples, all fields are None."""

    interval: list[float] | None = None
    """95% interval of the difference between the systems, as [low end, high end]."""
    p_value: float | None = None
    """Two-sided p-value, from 2 / (resamples + 1) to 1."""
    significant: bool | None = None
    """True if the interval excludes 0. In a close case, the p-value may still exceed 0.05."""


def compare(differences: NDArray[np.floating[Any]]) -> Significance:
    """Test whether two systems differ by more than the choice of images explains.

        p = 2 min(share of differences <= 0, share of differences >= 0)

    The original images count as one more resample in both shares: a share is (1 + hits) / (1 + R).
    A p-value is therefore never 0.

    Source: Efron & Tibshirani 1993, chapters 13 and 15. Koehn 2004. Davison & Hinkley 1997,
    Bootstrap Methods and their Application, section 4.2, for (1 + hits) / (1 + R).
    Deviation: Koehn's test is one-sided and reports a share instead of a p-value.

    Args:
        differences: Score of the first system minus score of the second system in each resample,
            (R,). NaN is ignored.
    """
    found = differences[~np.isnan(differences)]
    found = np.where(np.abs(found) < SAME, 0, found)  # without matches, BLEU is tiny instead of 0
    ends = interval(found)
    if ends is None:
        return Significance()
    hits = int(min(np.count_nonzero(found <= 0), np.count_nonzero(found >= 0)))
    p_value = min(1.0, 2 * (1 + hits) / (1 + len(found)))
    return Significance(ends, p_value, ends[0] > 0 or ends[1] < 0)
