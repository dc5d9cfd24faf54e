"""Where everything stands on a figure's page.

    ┌──────────────────────────┬──────────────────────────┐
    │ label                    │ label                    │  header of each block: one a caption
    │ the sentence             │ the sentence             │
    │ photo   word 1   word 2  │ photo   word 1   word 2  │  cells: above each panel its word, the
    │ ▒▒▒▒▒   ▓▒▒▒▒▒   ▒▒▓▒▒▒  │ ▒▒▒▒▒   ▓▒▒▒▒▒   ▒▒▓▒▒▒  │  gate β and the probability p;
    │         ▸ dog ▬▬ ▸ on ▬  │         ▸ cat ▬▬ ▸ on ▬  │  below it the alternatives
    ├──────────────────────────┴──────────────────────────┤
    │ 0 ▒▒▓▓ 31%   β …   p …                              │  legend
    └─────────────────────────────────────────────────────┘

Every length is a multiple of one: the size of the text, which follows from the size of a panel
and from the width of the page: on the width of two columns of a paper it stays readable.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

_SHAPE = 1.5  # width / height that a page aims at
_MAX_COLUMNS = 8  # of the page, where the caller does not say
_MIN_TEXT, _MIN_CELL, _MIN_CELL_NOTED = 14, 160, 250  # pixels
_PAPER, _PRINT = 7 * 72, 5.2  # points: the width of two columns, the smallest letters there
_READABLE = 0.0135  # text size / page width: 6.8 points on a width of 7 inches


@dataclass(frozen=True)
class Page:
    """The lengths of a page in pixels."""

    panel: tuple[int, int]
    counts: tuple[int, ...]
    """Panels of each block."""
    across: int
    """Blocks beside each other."""
    columns: int
    """Panels beside each other in a block."""
    alternatives: int
    """Lines below a panel."""
    cell_width: int
    text: int

    @classmethod
    def of(
        cls,
        panel: tuple[int, int],
        counts: Sequence[int],
        columns: int | None,
        *,
        alternatives: int = 0,
        noted: bool = False,
    ) -> Page:
        """The page for blocks of panels, in the best arrangement.

        Args:
            panel: Width and height of a panel.
            counts: Panels of each block.
            columns: Panels beside each other in a block; None chooses.
            alternatives: Lines below a panel.
            noted: Some title has a note beside its word and needs the room.
        """
        blocks, most = len(counts), max(counts)
        # Two or three captions always stand side by side.
        arrangements = [blocks] if blocks <= 3 else range(2, min(blocks, 4) + 1)
        cell = max(panel[0], _MIN_CELL_NOTED if noted else _MIN_CELL)
        pages = []
        for across in arrangements:
            widest = max(1, min(most, _MAX_COLUMNS // across))
            for n in [columns] if columns else range(1, widest + 1):
                fitting = max(0.06 * math.sqrt(math.prod(panel)), _READABLE * cell * n * across)
                text = max(_MIN_TEXT, round(min(fitting, 0.092 * cell)))
                pages.append(cls(panel, tuple(counts), across, n, alternatives, cell, text))
        return min(pages, key=lambda page: page.unshapely())

    def unshapely(self) -> float:
        """How far the page is from a good shape, how ragged its last rows, how small in print."""
        rows = [self.rows(band) for band in self.bands]
        height = sum(r * (self.cell_height + self.gap) + 4 * self.text for r in rows)
        places = sum(rows) * self.columns * self.across
        empty = (places - sum(self.counts)) / (self.columns * self.across)
        shape = abs(math.log(self.width / (height + 4 * self.text) / _SHAPE))
        return shape + 0.8 * empty + 0.5 * max(0.0, _PRINT - _PAPER * self.small / self.width)

    @property
    def bands(self) -> list[range]:
        """The blocks that stand beside each other, from the top down."""
        blocks = len(self.counts)
        return [range(s, min(s + self.across, blocks)) for s in range(0, blocks, self.across)]

    def rows(self, band: range) -> int:
        """Rows of panels of the blocks of a band."""
        return max(math.ceil(self.counts[block] / self.columns) for block in band)

    @property
    def least_height(self) -> int:
        """Height of the panels, without headers and legend."""
        return sum(self.rows(band) for band in self.bands) * (self.title + self.panel[1])

    @property
    def small(self) -> int:
        """Size of the numbers and notes."""
        return round(0.82 * self.text)

    @property
    def title(self) -> int:
        """Height of what stands above a panel."""
        return round(2.8 * self.text)

    @property
    def line(self) -> int:
        """Height of an alternative."""
        return round(1.4 * self.small)

    @property
    def below(self) -> int:
        """Height of what stands below a panel."""
        return round(0.35 * self.text) + self.alternatives * self.line if self.alternatives else 0

    @property
    def cell_height(self) -> int:
        """Height of a panel with what stands above and below."""
        return self.title + self.panel[1] + self.below

    @property
    def gap(self) -> int:
        """Between two panels."""
        return round(0.9 * self.text)

    @property
    def block_gap(self) -> int:
        """Between two blocks."""
        return round(2.4 * self.text)

    @property
    def margin(self) -> int:
        """Around the page."""
        return round(1.2 * self.text)

    @property
    def block_width(self) -> int:
        """Width of a block."""
        return self.columns * (self.cell_width + self.gap) - self.gap

    @property
    def inner(self) -> int:
        """Width between the margins."""
        return self.across * (self.block_width + self.block_gap) - self.block_gap

    @property
    def width(self) -> int:
        """Width of the page."""
        return self.inner + 2 * self.margin
