"""Conversion of NumPy arrays and Pillow images of any mode to 8-bit RGB."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageChops

from captioner.data.colour import profile_of, to_srgb
from captioner.errors import NotAnImageError

_LAYOUT = "(H, W, 3) for RGB with the channels last, (H, W, 4) for RGBA, or (H, W) for grey values"
_16_BIT = {"PNG", "PPM"}
"""Formats, by Pillow's names, with 16-bit values that Pillow reads in its 32-bit mode."""
_STRIP = 256
"""Number of rows to scale at a time, because float64 takes 8 times the memory."""


def image_from_array(array: NDArray[Any]) -> Image.Image:
    """Convert an array to an image.

    Args:
        array: (H, W, 3) in RGB order, (H, W, 4) RGBA, (H, W) or (H, W, 1) grey; uint8 from 0 to
            255, or floats from 0 to 1.

    Raises:
        NotAnImageError: The shape, the type or the range is not one of these. Values are not
            rescaled by guesswork, because a wrong range would get a confident, wrong caption.
    """
    if array.ndim == 3 and array.shape[2] == 1:
        array = array[:, :, 0]
    colour = array.ndim == 3 and array.shape[2] in (3, 4)
    if 0 in array.shape or not (array.ndim == 2 or colour):
        raise NotAnImageError(f"the array has the shape {array.shape}; pass one photo as {_LAYOUT}")
    floats = np.issubdtype(array.dtype, np.floating)
    if not (array.min() >= 0 and array.max() <= 1 if floats else array.dtype == np.uint8):
        found = f"{array.dtype} values from {array.min():g} to {array.max():g}"
        raise NotAnImageError(
            f"the array has {found}; pass floats from 0 to 1, or uint8 from 0 to 255"
        )
    values = np.rint(array * 255).astype(np.uint8) if floats else array
    return Image.fromarray(np.ascontiguousarray(values))


def to_rgb(image: Image.Image) -> Image.Image:
    """Convert an image of any mode to a new sRGB image, without rotating it.

    Transparent pixels become white. A colour profile is applied if it fits the image's colours.
    """
    profile = profile_of(image)
    colours = profile[16:20] if profile else b""
    if image.mode == "CMYK":
        inks = image
        if image.format in {"JPEG", "MPO"} and "adobe" not in image.info:
            # Adobe stores inverted inks and marks the file; Pillow inverts every CMYK JPEG.
            inks = ImageChops.invert(image)
        made = to_srgb(inks, profile) if profile and colours == b"CMYK" else None
        return made or inks.convert("RGB")
    rgb = _without_profile(image)
    if profile and colours == b"RGB ":
        return to_srgb(rgb, profile) or rgb
    if profile and colours == b"GRAY" and image.mode[0] in "1LIF" and image.mode != "LAB":
        return to_srgb(rgb.getchannel(0), profile) or rgb
    return rgb


def fit_photo(photo: Image.Image, longest: int, at_least: int = 0) -> Image.Image:
    """Convert a photo to RGB, with a longest side from ``at_least`` to ``longest`` pixels.

    The photo is scaled only if its longest side is outside this range. Transparent pixels are
    blended with white. If ``longest`` is 0, the photo is never scaled.
    """
    if photo.mode != "RGB":
        photo = to_rgb(photo)
    longer = max(photo.size)
    wanted = min(max(longer, at_least), longest or longer)
    if longer == wanted:
        return photo
    width, height = (max(1, round(side * wanted / longer)) for side in photo.size)
    return photo.resize((width, height), Image.Resampling.LANCZOS, reducing_gap=3.0)


def _without_profile(image: Image.Image) -> Image.Image:
    """Convert an image to a new RGB image without applying its colour profile."""
    if image.mode in {"I", "F"} or image.mode.startswith("I;16"):
        return Image.fromarray(_to_8_bit(image)).convert("RGB")
    if image.has_transparency_data:
        white = Image.new("RGBA", image.size, "white")
        plain = image.convert("LA") if image.mode == "La" else image
        # A variable for the converted image would keep its memory in use.
        return Image.alpha_composite(
            white, plain if plain.mode == "RGBA" else plain.convert("RGBA")
        ).convert("RGB")
    return image.convert("RGB")  # always a new image, never Pillow's file object


def _to_8_bit(image: Image.Image) -> NDArray[np.uint8]:
    """Scale grey values of more than 8 bits to 0..255, (H, W), uint8.

    - Values of 16-bit modes are divided by 257. This includes the 32-bit mode of formats that have
      16 bits (PNG, PGM).
    - Values of 12-bit TIFFs are divided by 4095 / 255.
    - Other 32-bit integers and floats have no fixed range, so the range is taken from the values.
      Floats that are mostly in 0..1 are multiplied by 255. Values in 0..255 are kept. Values in
      0..65535 are divided by 257. Any other range is stretched to 0..255.

    NaN becomes 0, and an infinity becomes the nearest finite value. The value that a PNG declares
    transparent becomes white.
    """
    array = np.asarray(image)
    tags: Any = getattr(image, "tag_v2", {})
    bits = tags.get(258, (16,))[0]
    if bits == 32 and tags.get(339, (1,))[0] == 1:
        array = array.view(np.uint32)  # Pillow has no unsigned mode
    finite = array[np.isfinite(array)] if image.mode == "F" else array
    low, high = (float(finite.min()), float(finite.max())) if finite.size else (0.0, 0.0)
    sixteen = image.mode.startswith("I;16") or (image.mode == "I" and image.format in _16_BIT)
    white = 4095 if bits == 12 else 65535
    unit = image.mode == "F" and _mostly_in_unit_range(finite)
    transparent = image.info.get("transparency")
    scaled = np.empty(array.shape, dtype=np.uint8)
    for start in range(0, len(array), _STRIP):
        values = array[start : start + _STRIP].astype(np.float64)
        grey = np.nan_to_num(values, nan=0.0, posinf=high, neginf=low)
        if unit:
            grey *= 255
        elif sixteen or (low >= 0 and 255 < high <= 65535):
            grey *= 255 / white
        elif low < 0 or high > 65535:
            grey = (grey - low) * (255 / (high - low) if high > low else 0)
        if isinstance(transparent, int):
            grey[values == transparent] = 255
        scaled[start : start + _STRIP] = np.clip(np.rint(grey), 0, 255)
    # Pillow inverts TIFFs in which 0 is white, but only up to 8 bits.
    return 255 - scaled if tags and tags.get(262, 0) == 0 else scaled


def _mostly_in_unit_range(finite: NDArray[Any]) -> bool:
    """Return whether floats are from 0 to 1. At most a tenth may be above 1 (highlights)."""
    if finite.size == 0:
        return False
    dark, bright = np.quantile(finite[:: max(1, finite.size // 100_000)], (0.1, 0.9))
    return bool(dark >= 0 and finite.min() >= 0 and bright <= 1)
