"""What drawings are made of: text, boxes, pictures and contours.

Coordinates are pixels from the upper left corner.
"""

from __future__ import annotations

import io
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from PIL import Image

Align = Literal["left", "right", "center"]

OUTLINE = ((3.6, "#000000"), (1.6, "#ffffff"))
"""Strokes of a contour, as width in hairlines and colour: dark edges around a white line."""


@dataclass(frozen=True)
class Text:
    """One line of text; ``y`` is its baseline."""

    x: float
    y: float
    text: str
    size: float
    colour: str
    bold: bool = False
    align: Align = "left"


@dataclass(frozen=True)
class Box:
    """A filled rectangle."""

    left: float
    top: float
    right: float
    bottom: float
    colour: str
    radius: float = 0.0
    """Corner radius; used in animation frames only."""


@dataclass(frozen=True)
class Picture:
    """An RGB picture, never resampled."""

    x: int
    y: int
    image: Image.Image
    title: str = ""
    """Alternative text."""


@dataclass(frozen=True)
class Contour:
    """The border of a mask, in two tones that stand out on any photo."""

    x: int
    y: int
    width: int
    height: int
    lines: list[NDArray[np.float64]]
    """Closed lines (N, 2) of x and y, 0 to 1 within the picture."""
    hairline: float


Item = Text | Box | Picture | Contour


def bar(
    left: int,
    top: int,
    right: int,
    bottom: int,
    share: float,
    *,
    track: str,
    fill: str,
    whole_pixels: bool = False,
) -> list[Item]:
    """A horizontal bar, filled from the left; not at all if ``share`` is 0 or NaN."""
    items: list[Item] = [Box(left, top, right, bottom, track)]
    if share > 0:
        width, share = right - left, min(share, 1.0)
        length = 1 + round((width - 1) * share) if whole_pixels else max(round(width * share, 1), 1)
        items.append(Box(left, top, left + length, bottom, fill))
    return items


def mask_contours(mask: NDArray[np.bool_]) -> list[NDArray[np.float64]]:
    """Trace the border of a mask, half way between the pixels inside and outside.

    Args:
        mask: (H, W); closed at the border of the photo.

    Returns:
        Closed lines (N, 2) of x and y, 0 to 1 over the mask.
    """
    from contourpy import contour_generator

    padded = np.pad(np.asarray(mask, dtype=np.float32), 1)
    lines = contour_generator(z=padded).lines(0.5)
    height, width = mask.shape
    # Pixel i of the mask is i + 1 of the padded one, and its centre lies at i + 0.5.
    return [np.clip((np.asarray(line) - 0.5) / (width, height), 0.0, 1.0) for line in lines]


def encoded(image: Image.Image, kind: str, **options: Any) -> bytes:
    """A picture as the bytes of a file of Pillow's format ``kind``, with its options."""
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()
