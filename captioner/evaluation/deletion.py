"""Deletion and insertion: regions are removed, or shown, in the order of their relevance.

    curve(f) = log p(word | share f of the regions deleted or inserted) - log p(word | photo)
    area     = mean of the curve over f from 0 to 1 (nats)

A faithful order finds the regions that the word depends on early: it has a low area under deletion
and a high one under insertion. Three orders that know nothing of the word's dependence are the
baselines: random, from the centre of the photo outwards, and least attended first.

Source: Petsiuk et al. 2018 (arXiv:1806.07421); deviations: regions instead of single pixels,
log-probabilities instead of probabilities, and the blur removes whole regions.

This module needs no torch; `evaluation.faithfulness` scores the photos.

Notation: W content words, L regions, S steps, V versions of a photo, N scored pairs of a version
and a word.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from captioner.evaluation.bootstrap import MIN_IMAGES, PhotoMeans, compare, interval, too_few
from captioner.geometry import Geometry
from captioner.options import ExplanationMethod, FaithfulnessOptions

Array = NDArray[np.float64]
Indices = NDArray[np.intp]
Score = Callable[[Indices, NDArray[np.bool_], Indices, Indices], Array]
"""From versions of a photo, which are fills (V,) and masks (V, L) of regions to fill, and versions
(N,) with words (N,) to score: to log-probabilities (N,)."""

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
    rows = np.concatenate([fills[..., None], masks], axis=-1).reshape(-1, regions + 1)
    rows, version = np.unique(rows, axis=0, return_inverse=True)
    word = np.broadcast_to(np.arange(words)[:, None], fills.shape).ravel()
    pairs, inverse = np.unique(version.ravel() * words + word, return_inverse=True)
    found = score(rows[:, 0], rows[:, 1:].astype(bool), *divmod(pairs, words))
    return found[inverse].reshape(len(CURVES), count, words, steps + 1)


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
    random = np.random.default_rng(seed).permutation(grid[0] * grid[1])
    attention = relevances["attention"]
    centre = np.broadcast_to(-geometry.from_centre(grid).ravel(), attention.shape)
    baselines = (np.zeros_like(attention), centre, -attention)
    values = np.stack([*(relevances[method] for method in METHODS), *baselines])
    order: Indices = random[np.argsort(-values[..., random], axis=-1, kind="stable")]
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
        means = PhotoMeans(photos, [one.photo for one in self.words])
        for level in self.words[0].curves:
            values = np.stack([one.curves[level] for one in self.words])  # (W, curves, orders, S+1)
            found[level] = {
                curve: _summarize(values[:, number], means, sign=1 if inserts else -1)
                for number, (curve, (_, inserts)) in enumerate(CURVES.items())
            }
        found["per_word"] = [one.as_dict() for one in self.words]
        if len(photos) < MIN_IMAGES:
            purpose = "confidence intervals"
            found["warning"] = too_few(len(photos), "photos with content words", purpose)
        return found


def _summarize(curves: Array, means: PhotoMeans, *, sign: int) -> dict[str, dict[str, Any]]:
    """The results of every order, from curves (W, orders, S + 1)."""
    areas = dict(zip(ORDERS, area(curves).T, strict=True))  # (W,) each
    resampled = {order: means.resampled(values) for order, values in areas.items()}

    def over(order: str, baseline: str) -> dict[str, Any]:
        this, other = resampled[order], resampled[baseline]
        test = None if this is None or other is None else compare(sign * (this - other))
        return {
            "difference": sign * float(areas[order].mean() - areas[baseline].mean()),
            "interval": test and test.interval,
            "significant": test and test.significant,
        }

    found: dict[str, dict[str, Any]] = {}
    for number, (order, values) in enumerate(areas.items()):
        drawn = resampled[order]
        found[order] = {
            "area": float(values.mean()),
            "interval": None if drawn is None else interval(drawn),
            "curve": curves[:, number].mean(axis=0).tolist(),
        }
        if order in METHODS:
            others = [name for name in ("attention", *BASELINES) if name != order]
            found[order] |= {f"over_{name}": over(order, name) for name in others}
    return found
