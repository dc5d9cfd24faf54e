"""Pixels of any kind as 8-bit RGB: NumPy arrays, and Pillow's images of any mode."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageChops

from captioner.errors import NotAnImageError

_LAYOUT = "(H, W, 3) for RGB with the channels last, (H, W, 4) for RGBA, or (H, W) for grey values"
_STRIP = 256
"""Rows that are scaled together: float64 takes 8 times the memory."""


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
    colour = array.ndim == 3 and array.shape[2] in (3, 4)
    if 0 in array.shape or not (array.ndim == 2 or colour):
        raise NotAnImageError(f"an array of shape {array.shape}; give one photo as {_LAYOUT}")
    floats = np.issubdtype(array.dtype, np.floating)
    if not (array.min() >= 0 and array.max() <= 1 if floats else array.dtype == np.uint8):
        found = f"{array.dtype} from {array.min():g} to {array.max():g}"
        raise NotAnImageError(
            f"an array of {found}; give floats from 0 to 1, or uint8 from 0 to 255"
        )
    values = np.rint(array * 255).astype(np.uint8) if floats else array
    return Image.fromarray(np.ascontiguousarray(values))


def to_rgb(image: Image.Image) -> Image.Image:
    """Convert an image of any mode to a new RGB image, transparent pixels to white; not rotated."""
    if image.mode in {"I", "F"} or image.mode.startswith("I;16"):
        return Image.fromarray(_to_8_bit(image)).convert("RGB")
    if image.has_transparency_data:
        white = Image.new("RGBA", image.size, "white")
        plain = image.convert("LA") if image.mode == "La" else image
        # A name for a converted image would keep its memory.
        return Image.alpha_composite(
            white, plain if plain.mode == "RGBA" else plain.convert("RGBA")
        ).convert("RGB")
    if image.mode == "CMYK" and image.format in {"JPEG", "MPO"} and "adobe" not in image.info:
        # Adobe stores inverted inks and marks the file; Pillow inverts every CMYK JPEG.
        return ImageChops.invert(image).convert("RGB")
    return image.convert("RGB")  # always a new image, never Pillow's file object


def _to_8_bit(image: Image.Image) -> NDArray[np.uint8]:
    """Scale grey values of more than 8 bits to 0..255.

    16-bit modes, and the 32-bit mode for formats that are 16-bit (PNG, PGM), are divided by 257.
    Other 32-bit integers and floats have no fixed range, so it is taken from the values: 0..1
    (floats only) is multiplied by 255, 0..255 is kept, 0..65535 is divided by 257, and any other
    range is stretched. NaN becomes 0, an infinity the nearest finite value. The value that a PNG
    declares transparent becomes white.
    """
    array = np.asarray(image)
    finite = array[np.isfinite(array)] if image.mode == "F" else array
    low, high = (float(finite.min()), float(finite.max())) if finite.size else (0.0, 0.0)
    sixteen = image.mode.startswith("I;16") or image.format in {"PNG", "PPM"}
    transparent = image.info.get("transparency")
    scaled = np.empty(array.shape, dtype=np.uint8)
    for start in range(0, len(array), _STRIP):
        values = array[start : start + _STRIP].astype(np.float64)
        grey = np.nan_to_num(values, nan=0.0, posinf=high, neginf=low)
        if sixteen or (low >= 0 and 255 < high <= 65535):
            grey /= 257
        elif low < 0 or high > 65535:
            grey = (grey - low) * (255 / (high - low) if high > low else 0)
        elif high <= 1 and image.mode == "F":
            grey *= 255
        if isinstance(transparent, int):
            grey[values == transparent] = 255
        scaled[start : start + _STRIP] = np.clip(np.rint(grey), 0, 255)
    return scaled
