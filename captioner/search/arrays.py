"""Arrays of torch or of NumPy: the search is written once for both.

The search uses what both libraries share (operators, indexing) and the functions of the Python
array API standard (https://data-apis.org/array-api), which ``array-api-compat`` gives for both
under the same names. Importing it does not import torch. NumPy has them itself since 2.1, which
saves a command line the 0.1 seconds that the import of ``array_api_compat.numpy`` takes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from importlib import import_module
from typing import Any, TypeAlias

import array_api_compat
import numpy as np
from numpy.typing import NDArray

from captioner.hardware import upload

Array: TypeAlias = Any
"""A torch tensor on any device, or a NumPy array."""


NUMPY: Any = np if hasattr(np, "cumulative_sum") else import_module("array_api_compat.numpy")
"""The functions of the standard for NumPy arrays."""


def namespace(*arrays: Array) -> Any:
    """The functions of the array API standard for these arrays, all of one library."""
    if isinstance(arrays[0], np.ndarray):
        return NUMPY
    return array_api_compat.array_namespace(*arrays)


def argsort(values: Array, axis: int) -> Array:
    """Indices that sort from largest to smallest; equal values keep their order.

    NumPy lacks the standard's ``descending``.
    """
    return namespace(values).argsort(-values, axis=axis, stable=True)


def on_device(values: Any, dtype: Any, xp: Any, device: Any) -> Array:
    """Values as an array of a library on its device, without waiting for the work queued there."""
    array = xp.asarray(values, dtype=dtype)
    return array if isinstance(array, np.ndarray) else upload(array, device)


def to_numpy(array: Array) -> NDArray[Any]:
    """Copy an array from its device, in float32 if NumPy lacks its type; no copy on the CPU."""
    if isinstance(array, np.ndarray):
        return array
    if array.is_floating_point() and array.element_size() < 4:  # bfloat16
        array = array.float()
    return np.asarray(array.detach().cpu())


def top_k(values: Array, count: int) -> tuple[Array, Array]:
    """The ``count`` largest values of every row and their indices, largest first: (..., count).

    Which of several equal values is chosen is not defined.
    """
    if not isinstance(values, np.ndarray):
        found = values.topk(count, dim=-1)
        return found.values, found.indices
    index = np.argpartition(values, -count, axis=-1)[..., -count:]
    order = np.argsort(-np.take_along_axis(values, index, axis=-1), axis=-1, kind="stable")
    index = np.take_along_axis(index, order, axis=-1)
    return np.take_along_axis(values, index, axis=-1), index


def log_sum_exp(scores: Array, axis: int = -1) -> Array:
    """log(sum(exp(scores))) over a dimension; -inf where all are."""
    xp = namespace(scores)
    highest = xp.max(scores, axis=axis, keepdims=True)
    finite = xp.where(highest == -xp.inf, 0.0, highest)
    total = xp.sum(xp.exp(scores - finite), axis=axis)
    return xp.squeeze(highest, axis=axis) + xp.log(xp.where(total > 0, total, 1.0))


def normalized(scores: Array) -> Array:
    """Log-probabilities in proportion to the exponentials of scores (..., V); -inf stays -inf."""
    xp = namespace(scores)
    total = log_sum_exp(scores)[..., None]
    return scores - xp.where(total == -xp.inf, 0.0, total)


def mean(arrays: Sequence[Array]) -> Array:
    """Mean of arrays of the same shape."""
    xp = namespace(*arrays)
    return xp.mean(xp.stack(list(arrays)), axis=0)


def mean_probability(log_probs: Sequence[Array]) -> Array:
    """Log of the mean probability, from log-probabilities of the same shape."""
    if len(log_probs) == 1:
        return log_probs[0]
    stacked = namespace(*log_probs).stack(list(log_probs))
    return log_sum_exp(stacked, axis=0) - math.log(len(log_probs))
