"""Pixels of any kind as 8-bit RGB: NumPy arrays, and Pillow's images of any mode."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageChops

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


def to_rgb(image: Image.Image) -> Image.Image:
    """Convert an image of any mode to a new RGB image, transparent pixels to white; not rotated."""
    if image.mode in {"I", "F"} or image.mode.startswith("I;16"):
        return Image.fromarray(_to_8_bit(image)).convert("RGB")
    if image.has_transparency_data:
        white = Image.new("RGBA", image.size, "white")
        return Image.alpha_composite(white, _to_rgba(image)).convert("RGB")
    if image.mode == "CMYK" and image.format in {"JPEG", "MPO"} and "adobe" not in image.info:
        # Adobe stores inverted inks and marks the file; Pillow inverts every CMYK JPEG.
        return ImageChops.invert(image).convert("RGB")
    return image.convert("RGB")  # always a new image, never Pillow's file object


def _to_rgba(image: Image.Image) -> Image.Image:
    return image.convert("LA").convert("RGBA") if image.mode == "La" else image.convert("RGBA")


def _to_8_bit(image: Image.Image) -> NDArray[np.uint8]:
    """Scale grey values of more than 8 bits to 0..255.

    16-bit modes, and the 32-bit mode for formats that are 16-bit (PNG, PGM), are divided by 257.
    Other 32-bit integers and floats have no fixed range, so it is taken from the values: 0..1
    (floats only) is multiplied by 255, 0..255 is kept, 0..65535 is divided by 257, and any other
    range is stretched. NaN becomes 0, an infinity the nearest finite value. The value that a PNG
    declares transparent becomes white.
    """
    values = np.asarray(image)
    low, high = _range(values)
    scaled = np.empty(values.shape, dtype=np.uint8)
    for start in range(0, len(values), _STRIP):  # in strips: float64 takes 8 times the memory
        strip = slice(start, start + _STRIP)
        scaled[strip] = _strip_to_8_bit(values[strip].astype(np.float64), image, low, high)
    return scaled


_STRIP = 256
"""Rows that are scaled together."""


def _range(values: NDArray[Any]) -> tuple[float, float]:
    """Smallest and largest finite value; 0 and 0 if there is none."""
    low, high = math.inf, -math.inf
    for start in range(0, len(values), _STRIP):
        strip = values[start : start + _STRIP]
        finite = strip[np.isfinite(strip)]
        if finite.size:
            low, high = min(low, float(finite.min())), max(high, float(finite.max()))
    return (low, high) if low <= high else (0.0, 0.0)


def _strip_to_8_bit(
    values: NDArray[np.float64], image: Image.Image, low: float, high: float
) -> NDArray[np.uint8]:
    grey = np.nan_to_num(values, nan=0.0, posinf=high, neginf=low)
    if image.mode.startswith("I;16") or image.format in {"PNG", "PPM"}:
        grey /= 257
    elif low < 0 or high > 65535:
        grey = (grey - low) * (255 / (high - low) if high > low else 0)
    elif high > 255:
        grey /= 257
    elif high <= 1 and image.mode == "F":
        grey *= 255
    transparent = image.info.get("transparency")
    if isinstance(transparent, int):
        grey[values == transparent] = 255
    return np.clip(np.rint(grey), 0, 255).astype(np.uint8)
