"""Small photos, captions and measurements shared by the visualization tests."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from captioner.caption_types import Alternative, Caption, CropBox

WHOLE = CropBox()
LUMA = np.array([0.299, 0.587, 0.114])

UNUSUAL = [
    "pneumonoultramicroscopicsilicovolcanoconiosis" * 3,
    "猫が座っている",
    "🐈",
    "👩‍🚀",
    "line\nbreak",
    "nul\0l",
    "\ud800",
    "\uffff",
    "",
    " ",
    "שלום",
    "$\\frac{1}$",
    "i" * 5000,
]
"""Words that a font, matplotlib's mathematics or XML may not like."""


def flat(size: tuple[int, int], level: int = 128) -> Image.Image:
    return Image.new("RGB", size, (level, level, level))


def luma(image: Image.Image) -> NDArray[np.float64]:
    return np.asarray(image, dtype=np.float64) @ LUMA


def noisy(size: tuple[int, int]) -> Image.Image:
    pixels = np.random.default_rng(0).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def make_caption(
    words: list[str],
    grid: tuple[int, int] = (7, 7),
    crop_box: CropBox = WHOLE,
    seed: int = 0,
    alternatives: int = 0,
) -> Caption:
    rng = np.random.default_rng(seed)
    alphas = rng.random((len(words), *grid)) ** 4 + 1e-3
    alphas /= alphas.sum(axis=(1, 2), keepdims=True)
    log_probs = np.log(rng.uniform(0.05, 1.0, len(words))).astype(np.float32)
    gates = rng.random(len(words)).astype(np.float32)
    total = float(log_probs.sum())
    others = tuple(
        tuple(
            Alternative(word if rank == 1 else f"other{rank}", -1.0 - rank)
            for rank in range(alternatives)
        )
        for word in words
    )
    maps = alphas.astype(np.float32)
    return Caption(
        tuple(words), log_probs, maps, gates, total, crop_box, others if alternatives else ()
    )


def one_hot(grid: tuple[int, int], *cells: tuple[int, int]) -> Caption:
    """A caption with one word per cell, each with all of its attention on that cell."""
    alphas = np.zeros((len(cells), *grid), dtype=np.float32)
    for word, cell in enumerate(cells):
        alphas[(word, *cell)] = 1.0
    one = np.ones(len(cells), dtype=np.float32)
    words = tuple(f"word{i}" for i in range(len(cells)))
    return Caption(words, -one, alphas, one, -float(len(cells)))


def brightest_cell(panel: Image.Image, grid: tuple[int, int]) -> tuple[int, int]:
    """The cell (row, column) of a grid over a panel with the highest mean luma."""
    rows = np.array_split(luma(panel), grid[0], axis=0)
    means = [[cell.mean() for cell in np.array_split(row, grid[1], axis=1)] for row in rows]
    row, column = np.unravel_index(int(np.argmax(means)), grid)
    return int(row), int(column)
