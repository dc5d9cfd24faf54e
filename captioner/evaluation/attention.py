"""Statistics of attention maps: entropy, and how far the maps move between words.

Maps are arrays whose first axis is the words; the remaining axes (rows and columns, or regions)
hold one map that sums to 1.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray


def entropy(maps: ArrayLike) -> NDArray[np.float64]:
    """Entropy of each map in nats: 0 for a single region, ln L for a uniform map over L regions.

    Args:
        maps: (T, ...).

    Returns:
        (T,).
    """
    flat = _flatten(maps)
    logs = np.log(flat, out=np.zeros_like(flat), where=flat > 0)
    result: NDArray[np.float64] = -(flat * logs).sum(axis=1)
    return result


def movement(maps: ArrayLike) -> float:
    """Mean total variation distance between the maps of all pairs of words of a caption.

    The distance is sum_i |alpha_i - alpha'_i| / 2, the share of attention that would have to move:
    0 if all words share one map, 1 if no two words attend to a common region.

    Args:
        maps: (T, ...).

    Returns:
        0 to 1; NaN for fewer than two words.
    """
    flat = _flatten(maps)
    count = len(flat)
    if count < 2:
        return float("nan")
    distances = np.abs(flat[:, None] - flat[None]).sum(axis=2) / 2  # (T, T), 0 on the diagonal
    return float(distances.sum() / (count * (count - 1)))


def _flatten(maps: ArrayLike) -> NDArray[np.float64]:
    array = np.asarray(maps, dtype=np.float64)
    return array.reshape(len(array), int(np.prod(array.shape[1:])))
