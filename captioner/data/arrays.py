"""NumPy arrays as photos."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from captioner.errors import NotAnImageError

_LAYOUT = "give (H, W, 3) for RGB, (H, W, 4) for RGBA, or (H, W) or (H, W, 1) for grey values"


def image_from_array(array: NDArray[Any]) -> Image.Image:
    """Convert an array to an image.

    Args:
        array: (H, W, 3) in RGB order, (H, W, 4) RGBA, (H, W) or (H, W, 1) grey; uint8 from 0 to
            255, or floats from 0 to 1.

    Raises:
        NotAnImageError: The shape, the type or the range is another one. Nothing is rescaled by
            guesswork: a photo of a wrong range would get a confident, wrong caption.
    """
    if array.ndim == 3 and array.shape[2] == 1:
        array = array[:, :, 0]
    if not (array.ndim == 2 or (array.ndim == 3 and array.shape[2] in (3, 4))):
        raise NotAnImageError(f"an array of shape {array.shape}; {_other_layout(array)}")
    if 0 in array.shape:
        raise NotAnImageError(f"an array of shape {array.shape} has no pixels; {_LAYOUT}")
    if np.issubdtype(array.dtype, np.floating):
        array = _from_floats(array)
    elif array.dtype != np.uint8:
        raise NotAnImageError(
            f"an array of {array.dtype}; give uint8 from 0 to 255, or floats from 0 to 1"
        )
    return Image.fromarray(np.ascontiguousarray(array))


def _from_floats(array: NDArray[Any]) -> NDArray[np.uint8]:
    low, high = float(array.min()), float(array.max())
    if not (low >= 0 and high <= 1):  # also for NaN
        found = f"from {low:g} to {high:g}" if math.isfinite(high - low) else "with NaN or infinity"
        raise NotAnImageError(
            f"an array of floats {found}; give floats from 0 to 1, or uint8 from 0 to 255"
        )
    scaled: NDArray[np.uint8] = np.rint(array * 255).astype(np.uint8)
    return scaled


def _other_layout(array: NDArray[Any]) -> str:
    if array.ndim == 4:
        return "give one photo, or a list of them: list(array)"
    if array.ndim == 3 and array.shape[0] in (1, 3, 4):
        return "give the channels last: array.transpose(1, 2, 0)"
    return _LAYOUT
