"""Numbers about attention maps: how spread they are, and how far those of two words lie apart.

Maps are arrays whose first axis is the words; whatever follows (rows and columns, or regions) is
one map that sums to 1.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import ArrayLike, NDArray


def entropy(maps: ArrayLike) -> NDArray[np.float64]:
    """Entropy of every map, nats: 0 on one region, ln L when spread evenly over L.

    Args:
        maps: (T, ...).

    Returns:
        (T,).
    """
    flat = _flat(maps)
    logs = np.log(flat, out=np.zeros_like(flat), where=flat > 0)
    result: NDArray[np.float64] = -(flat * logs).sum(axis=1)
    return result


def movement(maps: ArrayLike) -> float:
    """How far the maps of two words differ, averaged over all pairs of words of a caption.

    The distance of two maps is their total variation, sum_i |alpha_i - alpha'_i| / 2: the share of
    attention that would have to be moved. 0: one map for all words; 1: no two words look at a
    common region.

    Args:
        maps: (T, ...).

    Returns:
        0 to 1; NaN for fewer than two words.
    """
    flat = _flat(maps)
    count = len(flat)
    if count < 2:
        return float("nan")
    apart = np.abs(flat[:, None] - flat[None]).sum(axis=2) / 2  # (T, T), 0 on the diagonal
    return float(apart.sum() / (count * (count - 1)))


def _flat(maps: ArrayLike) -> NDArray[np.float64]:
    array = np.asarray(maps, dtype=np.float64)
    return array.reshape(len(array), math.prod(array.shape[1:]))
