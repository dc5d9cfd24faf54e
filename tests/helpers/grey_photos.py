"""Grey photos with captions."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from PIL import Image

from captioner.data.example import Example

PHOTOS = 23


def grey_photos(folder: Path) -> list[Example]:
    """Photos 100, 101, ...: each with its own grey, darker on the left; photo n has n % 3 + 1
    captions."""
    ramp = np.linspace(0, 200, 12).astype(np.uint8)[None, :, None].repeat(8, 0).repeat(3, 2)
    images = []
    for number in range(100, 100 + PHOTOS):
        path = folder / f"a photo.no {number}.{'png' if number % 2 else 'PNG'}"
        Image.fromarray(ramp + np.uint8(number - 100)).save(path)
        captions = tuple(f"{number} says {r}" for r in range(number % 3 + 1))
        images.append(Example(number, path, captions))
    return images
