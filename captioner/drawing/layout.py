"""Layout of a figure.

    ┌──────────────────────────┬──────────────────────────┐
    │ label                    │ label                    │  header of a block (one per caption)
    │ the sentence             │ the sentence             │
    │ photo   word 1   word 2  │ photo   word 1   word 2  │  cells: above a panel its word, gate β
    │ ▒▒▒▒▒   ▓▒▒▒▒▒   ▒▒▓▒▒▒  │ ▒▒▒▒▒   ▓▒▒▒▒▒   ▒▒▓▒▒▒  │  and probability p; below it the
    │         ▸ dog ▬▬ ▸ on ▬  │         ▸ cat ▬▬ ▸ on ▬  │  alternatives
    ├──────────────────────────┴──────────────────────────┤
    │ 0 ▒▒▓▓ 31%   β …   p …                              │  legend
    └─────────────────────────────────────────────────────┘

All lengths are multiples of the text size, which follows from the size of a panel and the width of
the figure, so that text is readable when printed 7 inches wide.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

_ASPECT = 1.5  # target width / height
_MAX_COLUMNS = 8  # over all blocks, unless columns is given
_MIN_TEXT, _MIN_CELL, _MIN_CELL_NOTED = 14, 160, 250  # pixels
_PRINT_WIDTH, _PRINT_TEXT = 7 * 72, 5.2  # points: two columns of a paper, smallest text there
_READABLE = 0.0135  # text size / figure width: 6.8 points at a width of 7 inches


@dataclass
class FigureLayout:
    """Arrangement and lengths of a figure, in pixels."""

    panel: tuple[int, int]
    counts: tuple[int, ...]
    """Number of panels of each block."""
    across: int
    """Blocks per band."""
    columns: int
    """Panels per row of a block."""
    alternatives: int
    """Lines below a panel."""
    cell_width: int
    text: int
    """Text size."""

    @classmethod
    def choose(
        cls,
        panel: tuple[int, int],
        counts: Sequence[int],
        columns: int | None,
        *,
        alternatives: int = 0,
        noted: bool = False,
    ) -> FigureLayout:
        """Choose the arrangement with the lowest penalty.

        Args:
            panel: Width and height of a panel.
            counts: Number of panels of each block.
            columns: Panels per row of a block; None: automatic.
            alternatives: Lines below a panel.
            noted: Whether some titles have a note, which needs wider cells.
        """
        blocks, most = len(counts), max(counts)
        # Two or three captions are always side by side.
        arrangements = [blocks] if blocks <= 3 else range(2, min(blocks, 4) + 1)
        cell = max(panel[0], _MIN_CELL_NOTED if noted else _MIN_CELL)
        layouts = []
        for across in arrangements:
            widest = max(1, min(most, _MAX_COLUMNS // across))
            for n in [columns] if columns else range(1, widest + 1):
                fitting = max(0.06 * math.sqrt(math.prod(panel)), _READABLE * cell * n * across)
                text = max(_MIN_TEXT, round(min(fitting, 0.092 * cell)))
                layouts.append(cls(panel, tuple(counts), across, n, alternatives, cell, text))
        return min(layouts, key=FigureLayout._penalty)

    def _penalty(self) -> float:
        """Penalty for a bad aspect ratio, empty cells and small text in print."""
        rows = [self.rows(band) for band in self.bands]
        height = sum(r * (self.cell_height + self.gap) + 4 * self.text for r in rows)
        cells = sum(rows) * self.columns * self.across
        empty = (cells - sum(self.counts)) / (self.columns * self.across)
        aspect = abs(math.log(self.width / (height + 4 * self.text) / _ASPECT))
        printed = _PRINT_WIDTH * self.small / self.width
        return aspect + 0.8 * empty + 0.5 * max(0.0, _PRINT_TEXT - printed)

    def __post_init__(self) -> None:
        em = self.em
        self.small = em(0.82)  # text size of numbers and notes
        self.line = round(1.4 * self.small)  # height of an alternative
        self.title = em(2.8)  # height of the title above a panel
        self.below = em(0.35) + self.alternatives * self.line if self.alternatives else 0
        self.cell_height = self.title + self.panel[1] + self.below
        self.gap, self.block_gap, self.margin = em(0.9), em(2.4), em(1.2)
        self.block_width = self.columns * (self.cell_width + self.gap) - self.gap
        self.inner = self.across * (self.block_width + self.block_gap) - self.block_gap
        self.width = self.inner + 2 * self.margin

    def em(self, factor: float) -> int:
        """A multiple of the text size in whole pixels."""
        return round(factor * self.text)

    @property
    def bands(self) -> list[range]:
        """The blocks side by side, from top to bottom."""
        blocks = len(self.counts)
        return [range(s, min(s + self.across, blocks)) for s in range(0, blocks, self.across)]

    def rows(self, band: range) -> int:
        """Rows of panels in a band."""
        return max(math.ceil(self.counts[block] / self.columns) for block in band)

    @property
    def min_height(self) -> int:
        """Height of the panels, without headers and legend."""
        return sum(self.rows(band) for band in self.bands) * (self.title + self.panel[1])
