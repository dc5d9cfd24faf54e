"""Array functions that work for both torch and NumPy, so that the search is written only once.

Operators and indexing are the same in both libraries. All other functions come from the Python
array API standard (https://data-apis.org/array-api). The package ``array-api-compat`` provides
these functions for both libraries under the same names. Importing it does not import torch.

NumPy 2.1 and later contains these functions itself, so its versions do not need
``array_api_compat.numpy``. Without this import, commands start 0.1 seconds faster.
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
"""Namespace with the array API functions for NumPy arrays."""


def namespace(*arrays: Array) -> Any:
    """Return the namespace with the array API functions for the library of these arrays.

    All arrays must come from the same library. Modules use the name ``xp`` for a namespace.
    """
    if isinstance(arrays[0], np.ndarray):
        return NUMPY
    return array_api_compat.array_namespace(*arrays)


def argsort(values: Array, axis: int) -> Array:
    """Return the indices that sort values from largest to smallest.

    Equal values keep their order. The values are negated, because NumPy does not support the
    argument ``descending`` of the standard.
    """
    return namespace(values).argsort(-values, axis=axis, stable=True)


def on_device(values: Any, dtype: Any, xp: Any, device: Any) -> Array:
    """Copy values to a device as an array, without waiting for work that the device has queued.

    Args:
        values: Numbers in a sequence or array.
        dtype: Type of the new array.
        xp: Namespace of the new array (see ``namespace``).
        device: Device of the new array. It is ignored for NumPy.
    """
    array = xp.asarray(values, dtype=dtype)
    return array if isinstance(array, np.ndarray) else upload(array, device)


def to_numpy(array: Array) -> NDArray[Any]:
    """Convert an array to a NumPy array, without a copy if it is on the CPU.

    NumPy does not support bfloat16, so tensors in half precision are converted to float32.
    """
    if isinstance(array, np.ndarray):
        return array
    if array.is_floating_point() and array.element_size() < 4:  # half precision
        array = array.float()
    return np.asarray(array.detach().cpu())


def top_k(values: Array, count: int) -> tuple[Array, Array]:
    """Return the largest values of every row and their indices, largest first.

    The order of equal values is undefined. If several equal values compete for the last place, it
    is also undefined which of them are returned.

    Args:
        values: Values, (..., n).
        count: Number of values to return for every row.

    Returns:
        The values and their indices, both (..., count).
    """
    if not isinstance(values, np.ndarray):
        found = values.topk(count, dim=-1)
        return found.values, found.indices
    index = np.argpartition(values, -count, axis=-1)[..., -count:]
    order = np.argsort(-np.take_along_axis(values, index, axis=-1), axis=-1, kind="stable")
    index = np.take_along_axis(index, order, axis=-1)
    return np.take_along_axis(values, index, axis=-1), index


def log_sum_exp(scores: Array, axis: int = -1) -> Array:
    """Return log(sum(exp(scores))) over one axis, which is removed.

    The result is -inf where all scores are -inf.
    """
    xp = namespace(scores)
    highest = xp.max(scores, axis=axis, keepdims=True)
    finite = xp.where(highest == -xp.inf, 0.0, highest)
    total = xp.sum(xp.exp(scores - finite), axis=axis)
    return xp.squeeze(highest, axis=axis) + xp.log(xp.where(total > 0, total, 1.0))


def normalized(scores: Array) -> Array:
    """Convert scores, (..., V), to log-probabilities with a log-softmax over the last axis.

    Scores of -inf stay -inf, even if a whole row is -inf.
    """
    xp = namespace(scores)
    total = log_sum_exp(scores)[..., None]
    return scores - xp.where(total == -xp.inf, 0.0, total)


def mean(arrays: Sequence[Array]) -> Array:
    """Return the elementwise mean of arrays of the same shape."""
    xp = namespace(*arrays)
    return xp.mean(xp.stack(list(arrays)), axis=0)


def mean_probability(log_probs: Sequence[Array]) -> Array:
    """Return the logarithm of the elementwise mean probability, as in an ensemble of models.

    ``log_probs`` contains the log-probabilities of each model, all of the same shape.
    """
    if len(log_probs) == 1:
        return log_probs[0]
    stacked = namespace(*log_probs).stack(list(log_probs))
    return log_sum_exp(stacked, axis=0) - math.log(len(log_probs))
