"""Draws a figure: headers, panels with their titles, the legend."""

from __future__ import annotations

import math

import numpy as np
from matplotlib.figure import Figure
from PIL import Image

from captioner.caption import DOUBTFUL, END_NAME, Alternative, Caption
from captioner.drawing import style
from captioner.drawing.canvas import Canvas, matplotlib_settings
from captioner.drawing.heatmap import (
    CLOSED_GATE,
    above_scale,
    attention_image,
    scale_bar,
    scale_gates,
    shared_scale,
)
from captioner.drawing.layout import FigureLayout
from captioner.drawing.options import FigureOptions
from captioner.drawing.panels import Block, Panel
from captioner.options import METHOD_TITLES

METHOD_NOTES = {
    "attention": "attention: weight of the region",
    "attention_gate": "attention × gate: the attention that reached the word; all regions sum to β",
    "gradient_input": "gradient × input: first-order effect of the region on the word's log p",
    "grad_cam": "Grad-CAM: features of the region that raise the word's log p",
    "occlusion": "occlusion: drop of the word's log p without the region",
}
"""What the brightness of each method means."""


class Sheet:
    """Draws blocks of panels on a canvas."""

    def __init__(
        self,
        layout: FigureLayout,
        blocks: list[Block],
        photo: Image.Image,
        options: FigureOptions,
    ) -> None:
        self.layout, self.blocks, self.options = layout, blocks, options
        self.theme = style.THEMES[options.theme]
        with_words = [block.caption for block in blocks if block.caption.words]
        self.tops: dict[str, float] = {}
        """The brightest value of each method: their units differ."""
        for one in with_words:
            top = shared_scale(one.alphas, scale_gates(one))
            self.tops[one.method] = max(top, self.tops.get(one.method, 0.0))
        self.grids = sorted({one.alphas.shape[1:] for one in with_words})
        self.pictures = [
            [self._picture(photo, block.caption, panel) for panel in block.panels]
            for block in blocks
        ]

    def _picture(self, photo: Image.Image, caption: Caption, panel: Panel) -> Image.Image:
        if panel.alpha is None:
            return photo
        return attention_image(
            photo,
            panel.alpha,
            scale_max=self.tops[caption.method],
            regions=caption.regions,
            smooth=self.options.smooth,
            colormap=self.options.colormap,
        )

    def draw(self) -> Figure:
        """Draw everything."""
        with matplotlib_settings():
            self.canvas = Canvas(self.theme.background)
            self._draw()
        return self.canvas.figure

    def _draw(self) -> None:
        """Draw everything, from top to bottom."""
        layout, y = self.layout, self.layout.margin
        for number, band in enumerate(layout.bands):
            y += layout.block_gap if number else 0
            y = self._band(band, y)
        if self.grids:
            y = self._legend(y + round(1.3 * layout.gap))
        self.canvas.finish(layout.width, y + layout.margin)

    def _band(self, band: range, top: int) -> int:
        """Draw the blocks side by side; returns the y at which they end."""
        layout, columns = self.layout, self.layout.columns
        step = layout.block_width + layout.block_gap
        lefts = [layout.margin + block % layout.across * step for block in band]
        y = layout.gap + max(
            self._header(self.blocks[block], left, top)
            for block, left in zip(band, lefts, strict=True)
        )
        rows = []
        for row in range(layout.rows(band)):
            rows.append(y)
            shown = [p for i in band for p in self.blocks[i].panels[row * columns :][:columns]]
            y += layout.cell_height + layout.gap
            y -= 0 if any(panel.alternatives for panel in shown) else layout.below
        bottom = y - layout.gap
        for block, left in zip(band, lefts, strict=True):
            if block > band.start:
                middle, half = left - layout.block_gap // 2, max(1, layout.em(0.03))
                self.canvas.box(middle - half, top, middle + half, bottom, self.theme.track)
            for index in range(len(self.blocks[block].panels)):
                x = left + index % columns * (layout.cell_width + layout.gap)
                self._cell(block, index, x, rows[index // columns])
        return bottom

    def _header(self, block: Block, left: int, y: int) -> int:
        """Draw label, sentence and confidence, wrapped to the block; returns their bottom."""
        layout, theme, caption = self.layout, self.theme, block.caption
        text, small, width = layout.text, layout.small, layout.block_width
        if block.label:
            label = style.truncate(style.printable(block.label), text, width, bold=True)
            self.canvas.text(left, y + text, label, text, theme.muted, bold=True)
            y += layout.em(1.5)
        empty = "No words, so no attention to show."
        size, colour = (layout.em(1.5), theme.text) if caption.words else (text, theme.muted)
        for line in style.wrap([caption.text or empty], size, width):
            self.canvas.text(left, y + size, line, size, colour)
            y += round(1.3 * size)
        if caption.confidence is not None:
            sure = f"confidence {style.percent(caption.confidence)}"
            self.canvas.text(left, y + small, sure, small, theme.muted)
            y += round(1.3 * small)
        return y

    def _cell(self, block: int, index: int, x: int, y: int) -> None:
        """Draw a panel with its title and alternatives."""
        layout, picture = self.layout, self.pictures[block][index]
        caption, panel = self.blocks[block].caption, self.blocks[block].panels[index]
        self._title(caption, panel, x, y)
        method = METHOD_TITLES[caption.method]
        name = panel.title if panel.alpha is None else f"{method}: {panel.title}"
        upper = y + layout.title
        self.canvas.picture(x, upper, picture, name)
        for mask in panel.masks:
            hairline = max(1.0, 0.06 * layout.text)
            self.canvas.outline(x, upper, picture.size, mask, hairline)
        chosen = caption.words[panel.positions[0]] if len(panel.positions) == 1 else ""
        lower = upper + picture.height + layout.em(0.35)
        for line, other in enumerate(panel.alternatives):
            self._alternative(other, other.word == chosen, x, lower + line * layout.line)

    def _title(self, caption: Caption, panel: Panel, x: int, y: int) -> None:
        """Draw the word, its gate and its probability."""
        layout, theme, draw = self.layout, self.theme, self.canvas
        text, small, right = layout.text, layout.small, x + layout.cell_width
        word_line, number_line = y + layout.em(1.15), y + layout.em(2.25)
        if panel.alpha is None:
            draw.text(x, word_line, panel.title, text, theme.muted)
            if caption.words:
                total = f"log p {style.number(caption.log_prob)}"
                draw.text(x, number_line, total, small, theme.muted)
            return
        room = float(layout.cell_width)
        if panel.note:
            draw.text(right, word_line, panel.note, small, theme.muted, align="right")
            room -= style.text_width(panel.note, small) + text
        word, size = style.fit(panel.title, layout.em(1.2), room, bold=True)
        draw.text(x, word_line, word, size, theme.text, bold=True)

        gate = float(np.mean([float(caption.gates[p]) for p in panel.positions]))
        start, end = x + layout.em(0.9), x + layout.em(0.9) + layout.em(2.3)
        upper = number_line - layout.em(0.46)
        lower = max(number_line - layout.em(0.14), upper + 2)
        draw.text(x, number_line, "β", small, theme.muted)
        draw.bar((start, upper, end, lower), gate, track=theme.track, fill=theme.gate)
        draw.text(end + layout.em(0.4), number_line, style.number(gate), small, theme.text)
        log_prob = float(sum(min(float(caption.log_probs[p]), 0.0) for p in panel.positions))
        p = f"p {style.probability(log_prob)}"
        draw.text(right, number_line, p, small, theme.text, align="right")
        if len(panel.positions) == 1 and panel.positions[0] in caption.doubtful:
            before = right - style.text_width(p, small) - layout.em(0.4)
            draw.text(before, number_line, "?", small, theme.text, bold=True, align="right")

    def _alternative(self, other: Alternative, chosen: bool, x: int, y: int) -> None:
        """Draw a candidate word and its probability."""
        layout, theme, size = self.layout, self.theme, self.layout.small
        baseline, right = y + round(1.05 * size), x + layout.cell_width
        middle = x + size + round(0.45 * (layout.cell_width - size))
        if chosen:
            self.canvas.text(x, baseline, "▸", size, theme.chosen)
        name = "(end)" if other.word == END_NAME else other.word
        word, fitted = style.fit(name, size, middle - x - 1.4 * size, bold=chosen)
        colour = theme.text if chosen else theme.muted
        self.canvas.text(x + size, baseline, word, fitted, colour, bold=chosen)
        upper, lower = baseline - round(0.52 * size), baseline - round(0.12 * size)
        end = max(right - round(3.9 * size), middle + 1)
        p, fill = math.exp(min(other.log_prob, 0.0)), theme.chosen if chosen else theme.other
        self.canvas.bar((middle, upper, end, lower), p, track=theme.track, fill=fill)
        value = style.probability(other.log_prob)
        self.canvas.text(right, baseline, value, size, colour, align="right")

    def _legend(self, top: int) -> int:
        """Draw the colour scale and the notes, side by side if there is room."""
        layout, size = self.layout, self.layout.small
        notes = self._notes()
        width = min(layout.inner, 18 * layout.text)
        bottom = self._scale(layout.margin, top, width)
        longest = max(style.text_width(note, size) for note in notes)
        x, y, room = layout.margin, bottom + layout.gap, layout.inner
        if width + layout.block_gap + longest <= layout.inner:
            x, y, room = x + width + layout.block_gap, top, math.ceil(longest)
        y += size
        for line in style.wrap(notes, size, room):
            self.canvas.text(x, y, line, size, self.theme.muted)
            y += round(1.45 * size)
        return max(bottom, y - round(1.2 * size))

    def _notes(self) -> list[str]:
        """The lines of the legend."""
        panels = [panel for block in self.blocks for panel in block.panels]
        mean, product = (
            (" (several words: mean)", " (several words: product)")
            if any(panel.note for panel in panels)
            else ("", "")
        )
        notes = [
            f"β  gate: weight of the photo for the word{mean}",
            f"p  probability of the word, given the previous words{product}",
        ]
        if any({*block.single()} & {*block.caption.doubtful} for block in self.blocks):
            notes.append(f"?  doubtful word: p below {DOUBTFUL}")
        if any(panel.alternatives for panel in panels):
            notes.append("▸  the chosen word, among the most probable at its position")
        if any(panel.masks for panel in panels):
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
        return notes

    def _above_scale(self) -> str:
        """The drawn words that were left out of the scale and exceed it."""
        found: dict[str, None] = {}  # an ordered set
        for block in self.blocks:
            caption = block.caption
            top = self.tops.get(caption.method, 1.0)
            above = above_scale(caption.alphas, scale_gates(caption), top)
            found |= dict.fromkeys(f"“{caption.words[p]}”" for p in block.single() if above[p])
        return ", ".join(found)

    def _scale(self, x: int, y: int, width: int) -> int:
        """Draw the colour bar with zero, the uniform share and the maximum; returns its bottom."""
        layout, draw, colour = self.layout, self.canvas, self.theme.text
        size, several = layout.small, len(self.tops) > 1
        kind = "attention" if list(self.tops) == ["attention"] else "relevance"
        title = "each method on its own scale" if several else f"share of {kind} per region"
        draw.text(x, y + size, title, size, self.theme.muted)
        upper, lower = y + round(1.75 * size), y + round(1.75 * size) + round(0.75 * layout.text)
        most = "max" if several else style.percent(max(self.tops.values()))
        left = x + round(style.text_width("0", size) + 0.4 * layout.text)
        right = x + round(width - style.text_width(most, size) - 0.4 * layout.text)
        middle = (upper + lower) / 2 + 0.36 * size
        draw.text(x, middle, "0", size, colour)
        draw.text(x + width, middle, most, size, colour, align="right")
        bar = scale_bar(right - left, lower - upper, self.options.colormap)
        draw.picture(left, upper, bar, "scale")
        baseline = lower + layout.em(0.35) + size
        if several:
            for method, top in self.tops.items():
                text = f"max of {METHOD_TITLES[method]}: {style.percent(top)}"
                draw.text(x, baseline, text, size, self.theme.muted)
                baseline += round(1.45 * size)
            return baseline - round(1.2 * size)
        thick, ticks = max(1, layout.em(0.08)), []
        shares = sorted({1.0 / (rows * columns) for rows, columns in self.grids})
        for share in shares:
            part = min(share / max(self.tops.values()), 1.0)
            tick = left + round((right - left - thick) * part)
            draw.box(tick, lower, tick + thick, lower + layout.em(0.28), colour)
            ticks.append(tick + thick / 2)
        label = f"uniform {' and '.join(style.percent(share) for share in shares)}"
        half = style.text_width(label, size) / 2
        centre = min(max(sum(ticks) / len(ticks), x + half), x + width - half)
        draw.text(centre, baseline, label, size, colour, align="center")
        return baseline + round(0.25 * size)
