"""Draws a figure: headers, panels with their titles, the legend."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from captioner.caption import DOUBTFUL, END_NAME, Alternative, Caption
from captioner.drawing import fonts
from captioner.drawing.drawing import Drawing
from captioner.drawing.heatmap import (
    CLOSED_GATE,
    above_scale,
    attention_image,
    scale_bar,
    scale_gates,
    shared_scale,
)
from captioner.drawing.layout import FigureLayout
from captioner.drawing.primitives import (
    Align,
    Box,
    Contour,
    Item,
    Picture,
    Text,
    bar,
    mask_contours,
)
from captioner.drawing.theme import Theme
from captioner.options import METHOD_TITLES

METHOD_NOTES = {
    "attention": "attention: weight of the region",
    "attention_gate": "attention × gate: the attention that reached the word; all regions sum to β",
    "gradient_input": "gradient × input: first-order effect of the region on the word's log p",
    "grad_cam": "Grad-CAM: features of the region that raise the word's log p",
    "occlusion": "occlusion: drop of the word's log p without the region",
}
"""What the brightness of each method means."""


@dataclass(frozen=True)
class Panel:
    """The photo (no positions), or the map of one or several words."""

    title: str
    note: str
    positions: tuple[int, ...]
    alpha: NDArray[np.float32] | None
    masks: list[NDArray[np.bool_]]
    alternatives: tuple[Alternative, ...] = ()


@dataclass(frozen=True)
class Block:
    """A caption and its panels."""

    caption: Caption
    label: str
    panels: list[Panel]


class Sheet:
    """Draws blocks of panels."""

    def __init__(
        self,
        layout: FigureLayout,
        blocks: list[Block],
        photo: Image.Image,
        theme: Theme,
        *,
        smooth: bool,
        colormap: str,
    ) -> None:
        self.layout, self.blocks, self.photo, self.theme = layout, blocks, photo, theme
        self.smooth, self.colormap = smooth, colormap
        with_words = [block.caption for block in blocks if block.caption.words]
        self.tops: dict[str, float] = {}
        """The brightest value of each method: their units differ."""
        for one in with_words:
            top = shared_scale(one.alphas, scale_gates(one))
            self.tops[one.method] = max(top, self.tops.get(one.method, 0.0))
        self.grids = sorted({one.alphas.shape[1:] for one in with_words})
        self.items: list[Item] = []

    def drawing(self) -> Drawing:
        """Draw everything, from top to bottom."""
        layout, y = self.layout, self.layout.margin
        for number, band in enumerate(layout.bands):
            y += layout.block_gap if number else 0
            y = self._band(band, y)
        if self.grids:
            y = self._legend(y + round(1.3 * layout.gap))
        title = " | ".join(
            f"{block.label}: {block.caption.text}" if block.label else block.caption.text
            for block in self.blocks
        )
        return Drawing(layout.width, y + layout.margin, self.theme.background, title, self.items)

    def _band(self, band: range, top: int) -> int:
        """Draw the blocks side by side; returns the y at which they end."""
        layout = self.layout
        headers = [self._header(self.blocks[block]) for block in band]
        y = top + max(height for _, height in headers) + layout.gap
        rows = []
        for row in range(layout.rows(band)):
            rows.append(y)
            shown = [panel for block in band for panel in self._row(block, row)]
            y += layout.cell_height + layout.gap
            y -= 0 if any(panel.alternatives for panel in shown) else layout.below
        bottom = y - layout.gap
        # Block by block, the order in which screen readers read an SVG.
        for block, (lines, _) in zip(band, headers, strict=True):
            left = layout.margin + block % layout.across * (layout.block_width + layout.block_gap)
            if block > band.start:
                middle, half = left - layout.block_gap // 2, max(1, round(0.03 * layout.text))
                self._box(middle - half, top, middle + half, bottom, self.theme.track)
            for text, baseline, size, colour, bold in lines:
                self._text(left, top + baseline, text, size, colour, bold=bold)
            for row, upper in enumerate(rows):
                for column, panel in enumerate(self._row(block, row)):
                    x = left + column * (layout.cell_width + layout.gap)
                    self._cell(self.blocks[block].caption, panel, x, upper)
        return bottom

    def _row(self, block: int, row: int) -> list[Panel]:
        """The panels in a row of a block."""
        columns = self.layout.columns
        return self.blocks[block].panels[row * columns : (row + 1) * columns]

    def _header(self, block: Block) -> tuple[list[tuple[str, int, int, str, bool]], int]:
        """Label and sentence, wrapped to the width of a block; returns lines and their height."""
        text, width = self.layout.text, self.layout.block_width
        lines, y = [], 0
        if block.label:
            label = fonts.truncate(fonts.printable(block.label), text, width, bold=True)
            lines.append((label, y + text, text, self.theme.muted, True))
            y += round(1.5 * text)
        empty = "No words, so no attention to show."
        size = text if not block.caption.words else round(1.5 * text)
        colour = self.theme.text if block.caption.words else self.theme.muted
        for line in fonts.wrap([block.caption.text or empty], size, width):
            lines.append((line, y + size, size, colour, False))
            y += round(1.3 * size)
        if block.caption.confidence is not None:
            small = self.layout.small
            sure = f"confidence {fonts.percent(block.caption.confidence)}"
            lines.append((sure, y + small, small, self.theme.muted, False))
            y += round(1.3 * small)
        return lines, y

    def _cell(self, caption: Caption, panel: Panel, x: int, y: int) -> None:
        """Draw a panel with its title and alternatives."""
        layout, picture = self.layout, self.photo
        self._title(caption, panel, x, y)
        if panel.alpha is not None:
            picture = attention_image(
                self.photo,
                panel.alpha,
                scale_max=self.tops[caption.method],
                regions=caption.regions,
                smooth=self.smooth,
                colormap=self.colormap,
            )
        method = METHOD_TITLES[caption.method]
        name = panel.title if panel.alpha is None else f"{method}: {panel.title}"
        upper = y + layout.title
        self.items.append(Picture(x, upper, picture, name))
        hairline = max(1.0, 0.06 * layout.text)
        for mask in panel.masks:
            self.items.append(Contour(x, upper, *picture.size, mask_contours(mask), hairline))
        chosen = caption.words[panel.positions[0]] if len(panel.positions) == 1 else ""
        lower = upper + picture.height + round(0.35 * layout.text)
        for line, other in enumerate(panel.alternatives):
            self._alternative(other, other.word == chosen, x, lower + line * layout.line)

    def _title(self, caption: Caption, panel: Panel, x: int, y: int) -> None:
        """Draw the word, its gate and its probability."""
        layout, theme = self.layout, self.theme
        text, small, right = layout.text, layout.small, x + layout.cell_width
        word_line, number_line = y + round(1.15 * text), y + round(2.25 * text)
        if panel.alpha is None:
            self._text(x, word_line, panel.title, text, theme.muted)
            if caption.words:
                total = f"log p {fonts.number(caption.log_prob)}"
                self._text(x, number_line, total, small, theme.muted)
            return
        room = float(layout.cell_width)
        if panel.note:
            self._text(right, word_line, panel.note, small, theme.muted, align="right")
            room -= fonts.text_width(panel.note, small) + text
        word, size = fonts.fit(panel.title, round(1.2 * text), room, bold=True)
        self._text(x, word_line, word, round(size, 1), theme.text, bold=True)

        gate = float(np.mean([float(caption.gates[p]) for p in panel.positions]))
        start, length = x + round(0.9 * text), round(2.3 * text)
        upper = number_line - round(0.46 * text)
        lower = max(number_line - round(0.14 * text), upper + 2)
        self._text(x, number_line, "β", small, theme.muted)
        end = start + length
        self.items += bar(start, upper, end, lower, gate, track=theme.track, fill=theme.gate)
        after = end + round(0.4 * text)
        self._text(after, number_line, fonts.number(gate), small, theme.text)
        log_prob = float(sum(min(float(caption.log_probs[p]), 0.0) for p in panel.positions))
        p = f"p {fonts.probability(log_prob)}"
        self._text(right, number_line, p, small, theme.text, align="right")
        if len(panel.positions) == 1 and panel.positions[0] in caption.doubtful:
            before = right - fonts.text_width(p, small) - round(0.4 * text)
            self._text(before, number_line, "?", small, theme.text, bold=True, align="right")

    def _alternative(self, other: Alternative, chosen: bool, x: int, y: int) -> None:
        """Draw a candidate word and its probability."""
        layout, theme, size = self.layout, self.theme, self.layout.small
        baseline, right = y + round(1.05 * size), x + layout.cell_width
        indent, number_room = round(1.0 * size), round(3.9 * size)
        middle = x + indent + round(0.45 * (layout.cell_width - indent))
        if chosen:
            self._text(x, baseline, "▸", size, theme.chosen)
        word, fitted = fonts.fit(
            "(end)" if other.word == END_NAME else other.word,
            size,
            middle - x - indent - 0.4 * size,
            bold=chosen,
        )
        colour = theme.text if chosen else theme.muted
        self._text(x + indent, baseline, word, round(fitted, 1), colour, bold=chosen)
        p = math.exp(min(other.log_prob, 0.0))
        upper, lower = baseline - round(0.52 * size), baseline - round(0.12 * size)
        end, fill = max(right - number_room, middle + 1), theme.chosen if chosen else theme.other
        self.items += bar(middle, upper, end, lower, p, track=theme.track, fill=fill)
        value = fonts.probability(other.log_prob)
        self._text(right, baseline, value, size, colour, align="right")

    def _legend(self, top: int) -> int:
        """Draw the colour scale and the notes, side by side if there is room."""
        layout, theme, size = self.layout, self.theme, self.layout.small
        noted = any(panel.note for block in self.blocks for panel in block.panels)
        notes = [
            "β  gate: weight of the photo for the word"
            + (" (several words: mean)" if noted else ""),
            "p  probability of the word, given the previous words"
            + (" (several words: product)" if noted else ""),
        ]
        if any(self._is_doubtful(block) for block in self.blocks):
            notes.append(f"?  doubtful word: p below {DOUBTFUL}")
        if any(panel.alternatives for block in self.blocks for panel in block.panels):
            notes.append("▸  the chosen word, among the most probable at its position")
        if any(panel.masks for block in self.blocks for panel in block.panels):
            notes.append("white line: objects named by the words, from the given masks")
        if not all(block.caption.regions.covers_photo for block in self.blocks):
            notes.append("hatched: not seen by the model")
        if above := self._above_scale():
            notes.append(f"above the scale: {above} (β below {CLOSED_GATE}, so it hardly counts)")
        if list(self.tops) != ["attention"]:
            notes += [METHOD_NOTES[method] for method in self.tops]
        if len(self.grids) > 1:
            grids = " and ".join(f"{rows} × {columns}" for rows, columns in self.grids)
            notes.append(f"grid sizes differ ({grids}), so shares per region do too")
        width = min(layout.inner, 18 * layout.text)
        bottom = self._scale(layout.margin, top, width)
        gap = round(2.4 * layout.text)
        longest = max(fonts.text_width(note, size) for note in notes)
        beside = width + gap + longest <= layout.inner
        x, y = (
            (layout.margin + width + gap, top) if beside else (layout.margin, bottom + layout.gap)
        )
        room = layout.inner if not beside else layout.inner - width - gap
        lines = fonts.wrap(notes, size, room)
        for index, line in enumerate(lines):
            self._text(x, y + size + round(1.45 * size) * index, line, size, theme.muted)
        return max(bottom, y + round(1.45 * size) * (len(lines) - 1) + round(1.25 * size))

    @staticmethod
    def _is_doubtful(block: Block) -> bool:
        """Whether a panel of the block shows a doubtful word."""
        doubtful = set(block.caption.doubtful)
        return any(
            len(panel.positions) == 1 and panel.positions[0] in doubtful for panel in block.panels
        )

    def _above_scale(self) -> str:
        """The drawn words that were left out of the scale and exceed it."""
        found: dict[str, None] = {}
        for caption, panels in ((block.caption, block.panels) for block in self.blocks):
            top = self.tops.get(caption.method, 1.0)
            above = above_scale(caption.alphas, scale_gates(caption), top)
            drawn = {p for panel in panels for p in panel.positions if len(panel.positions) == 1}
            found |= dict.fromkeys(f"“{caption.words[p]}”" for p in sorted(drawn) if above[p])
        return ", ".join(found)

    def _scale(self, x: int, y: int, width: int) -> int:
        """Draw the colour bar with zero, the uniform share and the maximum; returns its bottom."""
        text, size, theme = self.layout.text, self.layout.small, self.theme
        several = len(self.tops) > 1
        kind = "attention" if list(self.tops) == ["attention"] else "relevance"
        title = "each method on its own scale" if several else f"share of {kind} per region"
        self._text(x, y + size, title, size, theme.muted)
        upper, lower = y + round(1.75 * size), y + round(1.75 * size) + round(0.75 * text)
        most = "max" if several else fonts.percent(next(iter(self.tops.values())))
        left = x + round(fonts.text_width("0", size) + 0.4 * text)
        right = x + round(width - fonts.text_width(most, size) - 0.4 * text)
        middle = (upper + lower) / 2 + 0.36 * size
        self._text(x, middle, "0", size, theme.text)
        self._text(x + width, middle, most, size, theme.text, align="right")
        scale = scale_bar(right - left, lower - upper, self.colormap)
        self.items.append(Picture(left, upper, scale, "scale"))
        if several:
            return self._maxima(x, lower + round(0.35 * text) + size)
        (top,) = self.tops.values()
        thick, ticks = max(1, round(0.08 * text)), []
        shares = sorted({1.0 / (rows * columns) for rows, columns in self.grids})
        for share in shares:
            tick = left + round((right - left - thick) * min(share / top, 1.0))
            self._box(tick, lower, tick + thick, lower + round(0.28 * text), theme.text)
            ticks.append(tick + thick / 2)
        label = f"uniform {' and '.join(fonts.percent(share) for share in shares)}"
        half = fonts.text_width(label, size) / 2
        centre = min(max(sum(ticks) / len(ticks), x + half), x + width - half)
        baseline = lower + round(0.35 * text) + size
        self._text(centre, baseline, label, size, theme.text, align="center")
        return baseline + round(0.25 * size)

    def _maxima(self, x: int, baseline: int) -> int:
        """List the maximum of each method below the colour bar; returns the bottom."""
        size = self.layout.small
        for method, top in self.tops.items():
            text = f"max of {METHOD_TITLES[method]}: {fonts.percent(top)}"
            self._text(x, baseline, text, size, self.theme.muted)
            baseline += round(1.45 * size)
        return baseline - round(1.2 * size)

    def _box(self, left: float, top: float, right: float, bottom: float, colour: str) -> None:
        self.items.append(Box(left, top, right, bottom, colour))

    def _text(
        self,
        x: float,
        y: float,
        text: str,
        size: float,
        colour: str,
        *,
        bold: bool = False,
        align: Align = "left",
    ) -> None:
        if text.strip():
            self.items.append(Text(round(x, 1), round(y, 1), text, size, colour, bold, align))
