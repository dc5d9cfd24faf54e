"""Deletion and insertion: regions are removed, or shown, in the order of their relevance.

    curve(f) = log p(word | share f of the regions deleted or inserted) - log p(word | photo)
    area     = mean of the curve over f from 0 to 1 (nats)

A faithful order finds the regions that the word depends on early: it has a low area under deletion
and a high one under insertion. Three orders that know nothing of the word's dependence are the
baselines: random, from the centre of the photo outwards, and least attended first.

Source: Petsiuk et al. 2018 (arXiv:1806.07421); deviations: regions instead of single pixels,
log-probabilities instead of probabilities, and the blur removes whole regions.

Notation: W content words, L regions, S steps, N scored versions of a photo.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
from numpy.typing import NDArray

from captioner.geometry import Geometry
from captioner.options import ExplanationMethod

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
        score: Scores versions of the photo; versions that several orders share are scored once.

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
