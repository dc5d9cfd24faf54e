"""The content of a figure's page, drawn: headers, panels with their titles, the legend."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from captioner.caption import END_NAME, Alternative, Caption, CropBox
from captioner.visualization import lettering
from captioner.visualization.drawing import (
    Align,
    Box,
    Contour,
    Drawing,
    Item,
    Picture,
    Text,
    contour,
)
from captioner.visualization.heatmap import attention_image, scale_bar, shared_scale
from captioner.visualization.layout import Page
from captioner.visualization.theme import Theme


@dataclass(frozen=True)
class Panel:
    """The photo (no places) or the map of some words."""

    title: str
    note: str
    places: tuple[int, ...]
    alpha: NDArray[np.float32] | None
    masks: list[NDArray[np.bool_]]
    alternatives: tuple[Alternative, ...] = ()


@dataclass(frozen=True)
class Block:
    """What is drawn of one caption."""

    caption: Caption
    label: str
    panels: list[Panel]


@dataclass(frozen=True)
class Look:
    """How it is drawn."""

    colours: Theme
    smooth: bool
    colormap: str


class Sheet:
    """Draws the blocks on the page."""

    def __init__(self, page: Page, blocks: list[Block], photo: Image.Image, look: Look) -> None:
        self.page, self.blocks, self.photo, self.look = page, blocks, photo, look
        self.colours = look.colours
        with_words = [block.caption.alphas for block in blocks if block.caption.words]
        self.top = max((shared_scale(alphas) for alphas in with_words), default=1.0)
        self.grids = sorted({alphas.shape[1:] for alphas in with_words})
        self.items: list[Item] = []

    def drawing(self) -> Drawing:
        """Everything, from the top down."""
        page, y = self.page, self.page.margin
        for number, band in enumerate(page.bands):
            y += page.block_gap if number else 0
            y = self._band(band, y)
        if self.grids:
            y = self._legend(y + round(1.3 * page.gap))
        title = " | ".join(
            f"{block.label}: {block.caption.text}" if block.label else block.caption.text
            for block in self.blocks
        )
        return Drawing(page.width, y + page.margin, self.colours.paper, title, self.items)

    def _band(self, band: range, top: int) -> int:
        """The blocks that stand beside each other; returns where they end."""
        page = self.page
        headers = [self._header(self.blocks[block]) for block in band]
        y = top + max(height for _, height in headers) + page.gap
        rows = []
        for row in range(page.rows(band)):
            rows.append(y)
            shown = [panel for block in band for panel in self._row(block, row)]
            y += page.cell_height + page.gap
            y -= 0 if any(panel.alternatives for panel in shown) else page.below
        bottom = y - page.gap
        # Block after block: that is the order in which a voice reads it.
        for block, (lines, _) in zip(band, headers, strict=True):
            left = page.margin + block % page.across * (page.block_width + page.block_gap)
            if block > band.start:
                middle, half = left - page.block_gap // 2, max(1, round(0.03 * page.text))
                self._box(middle - half, top, middle + half, bottom, self.colours.track)
            for text, baseline, size, colour, bold in lines:
                self._text(left, top + baseline, text, size, colour, bold=bold)
            for row, upper in enumerate(rows):
                for column, panel in enumerate(self._row(block, row)):
                    x = left + column * (page.cell_width + page.gap)
                    self._cell(self.blocks[block].caption, panel, x, upper)
        return bottom

    def _row(self, block: int, row: int) -> list[Panel]:
        """The panels of a block's row."""
        columns = self.page.columns
        return self.blocks[block].panels[row * columns : (row + 1) * columns]

    def _header(self, block: Block) -> tuple[list[tuple[str, int, int, str, bool]], int]:
        """Label and sentence over the width of a block: lines, and their height."""
        text, width = self.page.text, self.page.block_width
        lines, y = [], 0
        if block.label:
            label = lettering.cut(lettering.printable(block.label), text, width, bold=True)
            lines.append((label, y + text, text, self.colours.quiet, True))
            y += round(1.5 * text)
        empty = "No words, so no attention to show."
        size = text if not block.caption.words else round(1.5 * text)
        colour = self.colours.ink if block.caption.words else self.colours.quiet
        for line in lettering.lines_of([block.caption.text or empty], size, width):
            lines.append((line, y + size, size, colour, False))
            y += round(1.3 * size)
        return lines, y

    def _cell(self, caption: Caption, panel: Panel, x: int, y: int) -> None:
        """A panel with its title and its alternatives."""
        page, picture = self.page, self.photo
        self._title(caption, panel, x, y)
        if panel.alpha is not None:
            picture = attention_image(
                self.photo,
                panel.alpha,
                scale_max=self.top,
                crop_box=caption.crop_box,
                smooth=self.look.smooth,
                colormap=self.look.colormap,
            )
        name = panel.title if panel.alpha is None else f"attention: {panel.title}"
        upper = y + page.title
        self.items.append(Picture(x, upper, picture, name))
        hairline = max(1.0, 0.06 * page.text)
        for mask in panel.masks:
            self.items.append(Contour(x, upper, *picture.size, contour(mask), hairline))
        said = caption.words[panel.places[0]] if len(panel.places) == 1 else ""
        lower = upper + picture.height + round(0.35 * page.text)
        for line, other in enumerate(panel.alternatives):
            self._alternative(other, other.word == said, x, lower + line * page.line)

    def _title(self, caption: Caption, panel: Panel, x: int, y: int) -> None:
        """The word, its gate and its probability."""
        page, colours = self.page, self.colours
        text, small, right = page.text, page.small, x + page.cell_width
        word_line, number_line = y + round(1.15 * text), y + round(2.25 * text)
        if panel.alpha is None:
            self._text(x, word_line, panel.title, text, colours.quiet)
            if caption.words:
                total = f"log p {lettering.number(caption.log_prob)}"
                self._text(x, number_line, total, small, colours.quiet)
            return
        room = float(page.cell_width)
        if panel.note:
            self._text(right, word_line, panel.note, small, colours.quiet, align="right")
            room -= lettering.width_of(panel.note, small) + text
        word, size = lettering.fitted(panel.title, round(1.2 * text), room, bold=True)
        self._text(x, word_line, word, round(size, 1), colours.ink, bold=True)

        gate = float(np.mean([float(caption.gates[place]) for place in panel.places]))
        start, length = x + round(0.9 * text), round(2.3 * text)
        upper = number_line - round(0.46 * text)
        lower = max(number_line - round(0.14 * text), upper + 2)
        self._text(x, number_line, "β", small, colours.quiet)
        self._bar((start, upper, start + length, lower), gate, colours.gate)
        after = start + length + round(0.4 * text)
        self._text(after, number_line, lettering.number(gate), small, colours.ink)
        log_prob = float(sum(min(float(caption.log_probs[place]), 0.0) for place in panel.places))
        p = f"p {lettering.probability(log_prob)}"
        self._text(right, number_line, p, small, colours.ink, align="right")

    def _alternative(self, other: Alternative, said: bool, x: int, y: int) -> None:
        """A word that could have been said, and how probable it was."""
        page, colours, size = self.page, self.colours, self.page.small
        baseline, right = y + round(1.05 * size), x + page.cell_width
        indent, number_room = round(1.0 * size), round(3.9 * size)
        middle = x + indent + round(0.45 * (page.cell_width - indent))
        if said:
            self._text(x, baseline, "▸", size, colours.said)
        word, fitted = lettering.fitted(
            "(end)" if other.word == END_NAME else other.word,
            size,
            middle - x - indent - 0.4 * size,
            bold=said,
        )
        colour = colours.ink if said else colours.quiet
        self._text(x + indent, baseline, word, round(fitted, 1), colour, bold=said)
        p = math.exp(min(other.log_prob, 0.0))
        upper, lower = baseline - round(0.52 * size), baseline - round(0.12 * size)
        bar = colours.said if said else colours.other
        self._bar((middle, upper, max(right - number_room, middle + 1), lower), p, bar)
        value = lettering.probability(other.log_prob)
        self._text(right, baseline, value, size, colour, align="right")

    def _legend(self, top: int) -> int:
        """What the colours and the letters mean, beside each other where there is room."""
        page, colours, size = self.page, self.colours, self.page.small
        noted = any(panel.note for block in self.blocks for panel in block.panels)
        notes = [
            "β  gate: how much the photo counts for the word"
            + (" (of several words: the mean)" if noted else ""),
            "p  probability of the word, given the words before it"
            + (" (of several: the product)" if noted else ""),
        ]
        if any(panel.alternatives for block in self.blocks for panel in block.panels):
            notes.append("▸  the word that was said, among the most probable at its place")
        if any(panel.masks for block in self.blocks for panel in block.panels):
            notes.append("white line: what the words name, as the given masks have it")
        if any(block.caption.crop_box != CropBox() for block in self.blocks):
            notes.append("hatched: not seen by the model")
        if len(self.grids) > 1:
            grids = " and ".join(f"{rows} × {columns}" for rows, columns in self.grids)
            notes.append(f"the grids differ ({grids}), and a region's share with them")
        width = min(page.inner, 18 * page.text)
        bottom = self._scale(page.margin, top, width)
        gap = round(2.4 * page.text)
        longest = max(lettering.width_of(note, size) for note in notes)
        beside = width + gap + longest <= page.inner
        x, y = (page.margin + width + gap, top) if beside else (page.margin, bottom + page.gap)
        room = page.inner if not beside else page.inner - width - gap
        lines = lettering.lines_of(notes, size, room)
        for index, line in enumerate(lines):
            self._text(x, y + size + round(1.45 * size) * index, line, size, colours.quiet)
        return max(bottom, y + round(1.45 * size) * (len(lines) - 1) + round(1.25 * size))

    def _scale(self, x: int, y: int, width: int) -> int:
        """The colour bar: zero, the uniform share and the largest share; returns where it ends."""
        text, size, colours = self.page.text, self.page.small, self.colours
        self._text(x, y + size, "share of attention per region", size, colours.quiet)
        upper, lower = y + round(1.75 * size), y + round(1.75 * size) + round(0.75 * text)
        most = lettering.percent(self.top)
        left = x + round(lettering.width_of("0", size) + 0.4 * text)
        right = x + round(width - lettering.width_of(most, size) - 0.4 * text)
        middle = (upper + lower) / 2 + 0.36 * size
        self._text(x, middle, "0", size, colours.ink)
        self._text(x + width, middle, most, size, colours.ink, align="right")
        bar = scale_bar(right - left, lower - upper, self.look.colormap)
        self.items.append(Picture(left, upper, bar, "scale"))
        thick, ticks = max(1, round(0.08 * text)), []
        shares = sorted({1.0 / (rows * columns) for rows, columns in self.grids})
        for share in shares:
            tick = left + round((right - left - thick) * min(share / self.top, 1.0))
            self._box(tick, lower, tick + thick, lower + round(0.28 * text), colours.ink)
            ticks.append(tick + thick / 2)
        label = f"uniform {' and '.join(lettering.percent(share) for share in shares)}"
        half = lettering.width_of(label, size) / 2
        centre = min(max(sum(ticks) / len(ticks), x + half), x + width - half)
        baseline = lower + round(0.35 * text) + size
        self._text(centre, baseline, label, size, colours.ink, align="center")
        return baseline + round(0.25 * size)

    def _bar(self, place: tuple[int, int, int, int], part: float, colour: str) -> None:
        """A bar (left, upper, right, lower) that is filled from the left to a part of it."""
        left, upper, right, lower = place
        self._box(left, upper, right, lower, self.colours.track)
        if part > 0:  # false for NaN too
            filled = round((right - left) * min(part, 1.0), 1)
            self._box(left, upper, left + max(filled, 1.0), lower, colour)

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
