"""Deletion and insertion: regions are removed, or shown, in the order of their relevance.

    curve(f) = log p(word | share f of the regions deleted or inserted) - log p(word | photo)
    area     = mean of the curve over f from 0 to 1 (nats)

A faithful order finds the regions that the word depends on early: it has a low area under deletion
and a high one under insertion. Three orders that know nothing of the word's dependence are the
baselines: random, from the centre of the photo outwards, and least attended first.

Source: Petsiuk et al. 2018 (arXiv:1806.07421); deviations: regions instead of single pixels,
log-probabilities instead of probabilities, and the blur removes whole regions.

This module needs no torch; `evaluation.faithfulness` scores the photos.

Notation: W content words, L regions, S steps, N scored versions of a photo.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from captioner.evaluation.bootstrap import (
    MIN_IMAGES,
    compare,
    interval,
    resample_weights,
    resampled_means,
    too_few,
)
from captioner.geometry import Geometry
from captioner.options import ExplanationMethod, FaithfulnessOptions

Array = NDArray[np.float64]
Indices = NDArray[np.intp]
Score = Callable[[Indices, NDArray[np.bool_], Indices], Array]
"""From fills (N,), masks (N, L) of regions to fill, and words (N,) to log-probabilities (N,)."""

MEAN, BLUR = 0, 1
CURVES = {
    "deletion_mean": (MEAN, False),
    "deletion_blur": (BLUR, False),
    "insertion_blur": (BLUR, True),
}
"""The fill of each curve, and whether regions are inserted."""

METHODS: tuple[ExplanationMethod, ...] = ("attention", "gradient_input", "grad_cam", "occlusion")
"""``attention_gate`` is missing: the gate is one number per word, so the order is attention's."""
BASELINES = ("random", "centre", "least_attended")
ORDERS = (*METHODS, *BASELINES)


def area(curves: Array) -> Array:
    """Area under curves at equal steps from 0 to 1, by the trapezoidal rule: (..., S + 1)."""
    result: Array = (curves[..., 1:] + curves[..., :-1]).mean(axis=-1) / 2
    return result


def measure_orders(orders: Indices, steps: int, score: Score) -> Array:
    """Delete and insert the regions of a photo in given orders.

    Args:
        orders: Indices of the regions, first those to delete or insert first, (orders, W, L).
        steps: S.
        score: Called once; versions that several orders share are scored once.

    Returns:
        Log-probability of the words, (curves, orders, W, S + 1).
    """
    count, words, regions = orders.shape
    counts = np.rint(np.linspace(0, regions, steps + 1))
    ranks = orders.argsort(axis=2)
    first = ranks[:, :, None, :] < counts[:, None]  # (orders, W, S + 1, L), deleted or inserted
    masks = np.stack([~first if inserts else first for _, inserts in CURVES.values()])
    fills = np.array([fill for fill, _ in CURVES.values()])[:, None, None, None]
    fills = np.where(masks.any(axis=-1), fills, MEAN)  # without a mask there is nothing to fill
    word = np.broadcast_to(np.arange(words)[:, None], fills.shape)
    rows = np.concatenate([fills[..., None], masks, word[..., None]], axis=-1).astype(np.intp)
    unique, inverse = np.unique(rows.reshape(-1, regions + 2), axis=0, return_inverse=True)
    found = score(unique[:, 0], unique[:, 1:-1].astype(bool), unique[:, -1])
    return found[inverse.ravel()].reshape(len(CURVES), count, words, steps + 1)


def region_orders(
    relevances: Mapping[ExplanationMethod, Array],
    geometry: Geometry,
    grid: tuple[int, int],
    seed: int,
) -> Indices:
    """The orders of the regions of a photo, most relevant first.

    Args:
        relevances: By method of ``METHODS``, (W, L).
        geometry: Where the regions lie.
        grid: Gh and Gw.
        seed: Seed of the random order, which also orders equally relevant regions.

    Returns:
        (orders, W, L), in the order of ``ORDERS``.
    """
    regions = grid[0] * grid[1]
    random = np.random.default_rng(seed).permutation(regions)
    distances = geometry.from_centre(grid).ravel()
    words = len(relevances["attention"])
    values = [
        *(relevances[method] for method in METHODS),
        np.zeros((words, regions)),
        np.broadcast_to(-distances, (words, regions)),
        -relevances["attention"],
    ]
    shuffled = np.stack(values)[..., random]
    order: Indices = random[np.argsort(-shuffled, axis=-1, kind="stable")]
    return order


# --- summary -------------------------------------------------------------------------------------


class Word(NamedTuple):
    """A content word and what was measured for it."""

    photo: str
    """File name of the photo."""
    word: str
    log_prob: float
    """Given the photo as it is (nats)."""
    curves: dict[str, Array]
    """By level: (curves, orders, S + 1)."""

    def as_dict(self) -> dict[str, Any]:
        """Photo, word, log-probability and, by level, curve and order, the area."""
        areas = {
            level: {
                curve: dict(zip(ORDERS, np.round(area(of_curve), 4).tolist(), strict=True))
                for curve, of_curve in zip(CURVES, curves, strict=True)
            }
            for level, curves in self.curves.items()
        }
        return {"photo": self.photo, "word": self.word, "log_prob": self.log_prob, **areas}


@dataclass(frozen=True, eq=False)
class Faithfulness:
    """What was measured for a set of captions."""

    options: FaithfulnessOptions
    photos: int
    """Number of photos that were read, with or without content words."""
    words: tuple[Word, ...]
    regions: int
    """L."""

    def summary(self) -> dict[str, Any]:
        """All results as JSON data.

        Returns:
            ``photos``, ``photos_with_words``, ``words``, ``steps``, ``regions``, ``log_prob`` (mean
            over words) and, by level, curve and order: ``area`` (mean over words), ``curve`` (at S
            + 1 equal steps), ``interval`` (95%, bootstrap over photos), and for methods
            ``over_random``, ``over_centre``, ``over_least_attended`` and ``over_attention``: how
            much better the area is (``difference``, positive is better) with its paired
            ``interval`` and ``significant``. Intervals are None for fewer than 30 photos.
            ``per_word`` lists the areas of every word.
        """
        photos = sorted({one.photo for one in self.words})
        found: dict[str, Any] = {
            "photos": self.photos,
            "photos_with_words": len(photos),
            "words": len(self.words),
            "steps": self.options.steps,
            "regions": self.regions,
        }
        if not self.words:
            return found
        found["log_prob"] = float(np.mean([one.log_prob for one in self.words]))
        weights = resample_weights(len(photos)) if len(photos) >= MIN_IMAGES else None
        index = np.searchsorted(photos, [one.photo for one in self.words])
        for level in self.words[0].curves:
            values = np.stack([one.curves[level] for one in self.words])  # (W, curves, orders, S+1)
            found[level] = {
                curve: _summarize(values[:, number], index, weights, sign=1 if inserts else -1)
                for number, (curve, (_, inserts)) in enumerate(CURVES.items())
            }
        found["per_word"] = [one.as_dict() for one in self.words]
        if weights is None:
            purpose = "confidence intervals"
            found["warning"] = too_few(len(photos), "photos with content words", purpose)
        return found


def _summarize(
    curves: Array, photos: Indices, weights: Array | None, *, sign: int
) -> dict[str, dict[str, Any]]:
    """The results of every order, from curves (W, orders, S + 1)."""
    areas = dict(zip(ORDERS, area(curves).T, strict=True))  # (W,) each
    resampled = {}
    if weights is not None:  # the words of a photo are drawn together
        resampled = {name: resampled_means(weights, photos, areas[name]) for name in ORDERS}
    found: dict[str, dict[str, Any]] = {}
    for number, order in enumerate(ORDERS):
        one: dict[str, Any] = {
            "area": float(areas[order].mean()),
            "interval": interval(resampled[order]) if resampled else None,
            "curve": curves[:, number].mean(axis=0).tolist(),
        }
        for baseline in ("attention", *BASELINES) if order in METHODS else ():
            if baseline == order:
                continue
            difference = sign * float(areas[order].mean() - areas[baseline].mean())
            entry: dict[str, Any] = {
                "difference": difference,
                "interval": None,
                "significant": None,
            }
            if resampled:
                test = compare(sign * (resampled[order] - resampled[baseline]))
                entry |= {"interval": test.interval, "significant": test.significant}
            one[f"over_{baseline}"] = entry
        found[order] = one
    return found
