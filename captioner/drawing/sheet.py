"""The layout and drawing of a figure.

    ┌──────────────────────────────────────────┐
    │ label                                    │  header of a block (one per caption, below
    │ the sentence                             │  each other)
    │ photo   word 1   word 2   word 3  word 4 │  cells: above a panel its word with the
    │ ▒▒▒▒▒   ▓▒▒▒▒▒   ▒▒▓▒▒▒   ▒▒▒▒▓▒  ▒▓▓▒▒▒ │  probability p, gate β and focus; below
    │         ▸ dog ▬▬ ▸ on ▬   …       …      │  it the alternatives
    │ 0 ▒▒▓▓ …      β …   p …                  │  legend
    └──────────────────────────────────────────┘

A block contains one caption. If all blocks have the same words, such as with several methods, each
block gets a single row if its text stays readable. In narrow cells, the title of a word takes three
lines.

All lengths are multiples of the text size. The text size is chosen from the size of a panel and the
printed width, so that no text is smaller than 6 points in print.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from captioner.caption_types import DOUBTFUL, DOUBTFUL_TRUTH, END_NAME, Alternative, Caption
from captioner.drawing import heatmap, style
from captioner.drawing.canvas import Canvas
from captioner.drawing.options import FigureOptions
from captioner.options import METHOD_TITLES

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_ASPECT = 1.5  # target width / height
_LEAST_ASPECT = 0.85  # width / height below which a figure is too tall for a column
_MAX_COLUMNS = 8  # unless the option columns is set
_MIN_TEXT = 14  # pixels
_SMALL = 0.82  # size of numbers and notes, in text sizes
_WIDE_CELL = 1 / 0.092  # text sizes: width of a cell with room for its numbers in two lines
_NARROW_CELL = 1 / 0.15  # text sizes: width of a cell with room for its numbers in three lines
_READABLE = 6 / 72  # inches; smallest text that is readable in print

_TITLES = METHOD_TITLES | {"keywords": "keywords"}
_METHOD_NOTES = {
    "attention": "attention: weight of the region; all regions sum to 100%",
    "attention_gate": "attention × gate: the attention that reached the word; all regions sum to β",
    "gradient_input": "gradient × input: first-order effect of the region on the word's log p, "
    "in % of the sum over all regions that support it",
    "grad_cam": "Grad-CAM: features of the region that raise the word's log p, in % of all regions",
    "occlusion": "occlusion: drop of the word's log p without the region, "
    "in % of the sum of all drops",
    "keywords": "keywords: what the region adds to the word's odds, in % of all regions",
}


Masks: TypeAlias = Mapping[int, Sequence[NDArray[np.bool_]]]
"""Masks of objects that a word names, by the position of the word, from 0. A mask has the photo's
size, (H, W)."""


@dataclass(frozen=True)
class Panel:
    """A panel with the map of one or several words, or with the photo if ``positions`` is empty."""

    title: str
    """The words of the panel, or the name of another panel, such as ``photo``."""
    positions: tuple[int, ...]
    """Positions of the words in the caption with its left-out words, from 0."""
    alpha: NDArray[np.float32] | None
    """The map, (Gh, Gw), or None for the photo."""
    masks: list[NDArray[np.bool_]]
    """Masks to outline, (H, W)."""
    alternatives: tuple[Alternative, ...] = ()
    """Candidate words to list below the panel."""
    unused: bool = False
    """True if the gates of all words in the panel are nearly closed."""
    left_out: bool = False
    """True if all words in the panel are left out of the caption."""


@dataclass(frozen=True)
class Block:
    """A caption and its panels."""

    caption: Caption
    """The caption, in which left-out words are not counted as words."""
    label: str
    """Name of the caption, such as the name of its model. May be empty."""
    panels: list[Panel]
    """The panels of the block, in the order of reading."""

    @cached_property
    def whole(self) -> Caption:
        """The caption with its left-out words. The positions of panels refer to it."""
        return self.caption.whole()


def panels_of(
    caption: Caption, shown: Sequence[tuple[int, ...]], masks: Masks, options: FigureOptions
) -> list[Panel]:
    """Return the panels of a caption: the photo, the shown words, and the mean map if requested.

    Args:
        caption: The caption, with T words.
        shown: Positions of the words in each panel, from 0. Positions from T on belong to left-out
            words.
        masks: Masks, (H, W), whose borders are drawn, by word position.
        options: Options of the figure.
    """
    count, caption = len(caption.words), caption.whole()
    words = caption.words
    closed = heatmap.closed_words(caption.gates) & (caption.method == "attention")
    panels = [Panel("photo", (), None, [m for at in sorted(masks) for m in masks[at]])]
    for positions in shown:
        single = len(positions) == 1
        title = " ".join(words[i] for i in positions)
        if caption.pieces and not single:
            title = "".join(caption.pieces[i] for i in positions).strip()
        chosen = caption.alphas[list(positions)]
        # The maximum is not renormalized, so that regions keep the values of the words' maps.
        alpha = chosen.max(axis=0) if options.combine == "max" else chosen.mean(axis=0)
        outlined = [mask for i in positions for mask in masks.get(i, ())]
        others = caption.alternatives[positions[0]] if single and caption.alternatives else ()
        others = others[: options.alternatives]
        unused = bool(closed[list(positions)].all())
        left_out = min(positions) >= count
        panels.append(Panel(title, positions, alpha, outlined, others, unused, left_out))
    if options.coverage and count:
        mean = caption.alphas[:count].mean(axis=0)
        panels.append(Panel("mean of all", tuple(range(count)), mean, []))
    return panels


class Layout:
    """Lengths of a figure in pixels, with ``columns`` panels side by side."""

    def __init__(
        self, panel: tuple[int, int], blocks: list[Block], columns: int, options: FigureOptions
    ) -> None:
        """Choose the text size and compute all lengths. ``panel`` is the size of a panel's map."""
        panels = [one for block in blocks for one in block.panels]
        self.columns, self.inches = columns, options.width
        cell = max(panel[0], heatmap.MIN_PANEL)
        lines = max(len(one.alternatives) for one in panels)
        # Alternatives need a wide cell, because each word has a bar next to it.
        most = cell / (_WIDE_CELL if lines else _NARROW_CELL)
        self.text = max(_MIN_TEXT, math.ceil(min(0.06 * math.sqrt(math.prod(panel)), most)))
        self._measure(cell)
        while self.printed() < _READABLE and self.text < most:
            self.text += 1
            self._measure(cell)
        em = self.em
        self.narrow = not options.plain and self.text > math.ceil(cell / _WIDE_CELL)
        """True if the cells are too narrow for two lines of numbers, so that their titles have
        three lines."""
        self.title = em(2.1 if options.plain else 3.5 if self.narrow else 2.8)
        """The height of the title above a panel."""
        self.line = round(1.4 * self.small)
        """The height of an alternative."""
        self.below = em(0.35) + lines * self.line if lines else 0
        self.cell_width, self.cell_height = cell, self.title + panel[1] + self.below
        self.rows = [-(-len(block.panels) // columns) for block in blocks]
        self.min_height = sum(self.rows) * (self.title + panel[1])  # without headers and legend
        self.empty = sum(self.rows) - len(panels) / columns  # number of empty cells, in rows

    def _measure(self, cell: int) -> None:
        """Compute the lengths that follow from the text size and the width of a cell."""
        em = self.em
        self.small = em(_SMALL)
        self.gap, self.block_gap, self.margin = em(0.9), em(2.4), em(1.2)
        self.inner = self.columns * (cell + self.gap) - self.gap
        self.width = self.inner + 2 * self.margin

    def printed(self) -> float:
        """Return the size of the smallest text in the printed figure, in inches."""
        return self.inches * self.small / self.width

    def em(self, factor: float) -> int:
        """Return a multiple of the text size, rounded to whole pixels."""
        return round(factor * self.text)

    def penalty(self) -> float:
        """Return a number that is larger for a worse layout.

        A layout is bad if its shape is too wide or too tall, if cells are empty or narrow, or if
        its text is too small to read in print.
        """
        # About 150 characters of numbers and phrases above the panels, and 350 of notes below them.
        header, legend = (
            2 + 1.2 * math.ceil(0.46 * n / (self.inner / self.text)) for n in (150, 350)
        )
        height = sum(r * (self.cell_height + self.gap) + header * self.text for r in self.rows)
        ratio = self.width / (height + legend * self.text)
        tall = 6 * max(0.0, math.log(_LEAST_ASPECT / ratio))
        unreadable = 100 * max(0.0, 1 - self.printed() / _READABLE)
        shape = abs(math.log(ratio / _ASPECT)) + tall
        return shape + 0.8 * self.empty + 0.3 * self.narrow + unreadable


def choose_layout(panel: tuple[int, int], blocks: list[Block], options: FigureOptions) -> Layout:
    """Return the layout with the lowest penalty. ``panel`` is the width and height of a panel.

    If all blocks show the same words, layouts with fewer rows are preferred, as long as their text
    is readable.
    """
    most = min(max(len(block.panels) for block in blocks), _MAX_COLUMNS)
    same = len(blocks) > 1 and len({block.caption.words for block in blocks}) == 1
    numbers = [options.columns] if options.columns else range(1, most + 1)
    layouts = [Layout(panel, blocks, number, options) for number in numbers]
    return min(layouts, key=lambda layout: layout.penalty() + 10 * same * max(layout.rows))


def _is_doubtful(caption: Caption, panel: Panel) -> bool:
    """Return whether a panel shows a single word that is probably not true of the photo."""
    single = len(panel.positions) == 1 and not panel.left_out
    return single and panel.positions[0] in caption.doubtful


class Sheet(Canvas):
    """A canvas that draws blocks of panels. Use it inside ``matplotlib_settings``."""

    def __init__(
        self, layout: Layout, blocks: list[Block], photo: Image.Image, options: FigureOptions
    ) -> None:
        """Create an empty sheet. ``photo`` has the size of a panel."""
        dpi = layout.width / options.width
        super().__init__(style.THEMES[options.theme], layout.small, dpi, options.dpi)
        self.layout, self.blocks, self.photo, self.options = layout, blocks, photo, options
        self.tops: dict[str, float] = {}
        """The value that is drawn brightest in all maps of a method, by method. Methods have
        separate scales, because their units differ."""
        for block in blocks:
            if shown := sorted({i for panel in block.panels for i in panel.positions}):
                one = block.whole
                self.tops[one.method] = max(
                    heatmap.scale_of(one, shown), self.tops.get(one.method, 0.0)
                )
        self.grids = sorted({one.caption.alphas.shape[1:] for one in blocks if one.whole.words})
        self.common = options.scale == "common"

    def draw(self) -> Figure:
        """Draw everything from top to bottom, and return the figure."""
        layout, y = self.layout, self.layout.margin - self.layout.block_gap
        for block in self.blocks:
            y = self._block(block, y + layout.block_gap)
        if self.grids and not self.options.plain:
            y = self._legend(y + round(1.3 * layout.gap))
        self.set_size(layout.width, y + layout.margin)
        return self.figure

    def _block(self, block: Block, top: int) -> int:
        """Draw a block, and return the y coordinate of its bottom."""
        layout, columns = self.layout, self.layout.columns
        y = self._header(block, top)
        for start in range(0, len(block.panels), columns):
            y += layout.gap
            row = block.panels[start : start + columns]
            for number, panel in enumerate(row):
                x = layout.margin + number * (layout.cell_width + layout.gap)
                self._cell(block.whole, panel, x, y)
            y += layout.cell_height
            y -= 0 if any(panel.alternatives for panel in row) else layout.below
        return y

    def _header(self, block: Block, y: int) -> int:
        """Draw the label, sentence, confidence and phrases of a block.

        Return the y coordinate of their bottom. If several methods explain one caption, only the
        first block shows the sentence. Left-out words follow the sentence in grey.
        """
        layout, muted, caption = self.layout, self.theme.muted, block.caption
        text, small, left, width = layout.text, layout.small, layout.margin, layout.inner
        if block.label:
            label = style.truncate(style.printable(block.label), text, width, bold=True)
            self.text(left, y + text, label, text, muted, bold=True)
            y += layout.em(1.5)
        first = self.blocks[0].caption
        if caption is not first and repr(caption) == repr(first):
            return y
        size, colour = (
            (layout.em(1.3 if layout.narrow else 1.5), None) if block.whole.words else (text, muted)
        )
        rest, phrases = "", caption.phrases
        if caption.left_out is not None:
            rest, phrases = caption.left_out.text, phrases + caption.left_out.phrases
        sentence = caption.text or ("" if rest else "No words, so no attention to show.")
        count = len(style.printable(sentence).split())
        for line in style.wrap([f"{sentence} {rest}"], size, width):
            words, x = line.split(" "), float(left)
            for part, fill in ((words[:count], colour), (words[count:], muted)):
                if part:
                    self.text(x, y + size, " ".join(part), size, fill)
                    x += style.text_width(" ".join([*part, ""]), size)
            count = max(0, count - len(words))
            y += round(1.3 * size)
        if self.options.plain:
            return y
        notes = []
        if caption.confidence is not None:
            notes.append(f"{style.percent(caption.confidence)} likely to be right")
        known = [f"{one.text} {style.percent(one.truth)}" for one in phrases if one.truth >= 0]
        if known:
            notes.append(f"chance of being true: {' · '.join(known)}")
        for line in style.wrap(notes, small, width):
            self.text(left, y + small, line, colour=muted)
            y += round(1.3 * small)
        return y

    def _cell(self, caption: Caption, panel: Panel, x: int, y: int) -> None:
        """Draw a panel with its title and alternatives, with its upper left corner at a point."""
        layout, picture, name = self.layout, self.photo, panel.title
        if panel.alpha is None:
            self.text(x, y + layout.em(1.15), panel.title, layout.text, self.theme.muted)
            if caption.words and caption.method != "keywords" and not self.options.plain:
                total = f"log p {style.number(caption.log_prob)}"
                self.text(x, y + layout.em(2.25), total, colour=self.theme.muted)
        else:
            self._title(caption, panel, x, y)
            name = f"{_TITLES[caption.method]}: {panel.title}"
            picture = heatmap.attention_image(
                self.photo,
                panel.alpha,
                scale_max=self.tops[caption.method] if self.common else None,
                regions=caption.regions,
                smooth=self.options.smooth,
                colormap=self.options.colormap,
            )
            if panel.left_out:
                picture = heatmap.greyed(picture)
        y += layout.title
        self.picture(x, y, picture, name)
        for mask in panel.masks:
            self.outline(x, y, picture.size, mask, max(1.0, 0.06 * layout.text))
        y += picture.height + layout.em(0.35)
        for line, other in enumerate(panel.alternatives):
            chosen = other.word == caption.words[panel.positions[0]]
            self._alternative(other, chosen, x, y + line * layout.line)

    def _title(self, caption: Caption, panel: Panel, x: int, y: int) -> None:
        """Draw the words above a panel, with their probability, their gate and the map's focus."""
        layout, plain, positions = self.layout, self.options.plain, list(panel.positions)
        right, baseline = x + layout.cell_width, y + layout.em(1.15)
        log_prob = float(np.minimum(caption.log_probs[positions], 0.0).sum(dtype=np.float64))
        # Each keyword has a probability of its own, so a product of them has no meaning.
        joint = len(positions) == 1 or caption.method != "keywords"
        p = f"p {style.probability(log_prob)}" if joint and not plain else ""
        doubtful = "?" if _is_doubtful(caption, panel) and not plain else ""
        end: float = right
        for text, bold in ((p if not layout.narrow else "", False), (doubtful, True)):
            if text:
                self.text(end, baseline, text, bold=bold, align="right")
                end -= style.text_width(text, layout.small, bold) + layout.em(0.4)
        word, size = style.fit(panel.title, layout.em(1.6 if plain else 1.2), end - x)
        grey = panel.left_out or (panel.unused and not plain)
        self.text(x, baseline, word, size, self.theme.muted if grey else None, bold=True)
        if plain:
            return
        assert panel.alpha is not None
        focus = f"focus {style.percent(heatmap.most_attended(panel.alpha)[1])}"
        gate = None
        if caption.method != "keywords":
            gate = float(caption.gates[positions].mean(dtype=np.float64))
        if layout.narrow:
            self.text(x, y + layout.em(2.15), p)
            if gate is not None:
                self.text(right, y + layout.em(2.15), f"β {style.number(gate)}", align="right")
            self.text(x, y + layout.em(3.1), focus)
            return
        baseline = y + layout.em(2.25)
        if gate is not None:
            start, upper = x + layout.em(0.9), baseline - layout.em(0.46)
            stop, lower = start + layout.em(2.3), max(baseline - layout.em(0.14), upper + 2)
            self.text(x, baseline, "β", colour=self.theme.muted)
            self.bar((start, upper, stop, lower), gate, self.theme.gate)
            self.text(stop + layout.em(0.4), baseline, style.number(gate))
        self.text(right, baseline, focus, align="right")

    def _alternative(self, other: Alternative, chosen: bool, x: int, y: int) -> None:
        """Draw a word that the model considered, with its probability.

        If ``chosen`` is True, the word is in the caption and is highlighted.
        """
        layout, theme, size = self.layout, self.theme, self.layout.small
        baseline, right = y + round(1.05 * size), x + layout.cell_width
        middle = x + size + round(0.45 * (layout.cell_width - size))
        colour, fill = (theme.text, theme.chosen) if chosen else (theme.muted, theme.other)
        if chosen:
            self.text(x, baseline, "▸", size, theme.chosen)
        name = "(end)" if other.word == END_NAME else other.word
        word = style.truncate(style.printable(name), size, middle - x - 1.4 * size, bold=chosen)
        self.text(x + size, baseline, word, size, colour, bold=chosen)
        upper, lower = baseline - round(0.52 * size), baseline - round(0.12 * size)
        end = max(right - round(3.9 * size), middle + 1)
        self.bar((middle, upper, end, lower), math.exp(min(other.log_prob, 0.0)), fill)
        self.text(right, baseline, style.probability(other.log_prob), size, colour, align="right")

    def _legend(self, top: int) -> int:
        """Draw the colour scale and the notes, and return the y coordinate of their bottom.

        They are side by side if the figure is wide enough.
        """
        layout, size = self.layout, self.layout.small
        notes = self._notes()
        width = min(layout.inner, layout.em(18))
        longest = max(style.text_width(note, size) for note in notes)
        beside = width + layout.block_gap + longest <= layout.inner
        bottom = self._scale(layout.margin, top, width, one_line=layout.narrow and not beside)
        x, y, room = layout.margin, bottom + layout.gap, layout.inner
        if beside:
            x, y, room = x + width + layout.block_gap, top, math.ceil(longest)
        y += size
        for line in style.wrap(notes, size, room):
            self.text(x, y, line, colour=self.theme.muted)
            y += round((1.3 if layout.narrow else 1.45) * size)
        return max(bottom, y - round(1.2 * size))

    def _notes(self) -> list[str]:
        """Return the lines of text in the legend."""
        drawn = [(b.whole, p) for b in self.blocks for p in b.panels if p.alpha is not None]
        several = any(len(panel.positions) > 1 for _, panel in drawn)
        greatest = several and self.options.combine == "max"
        doubtful = {c.truth is not None for c, p in drawn if _is_doubtful(c, p)}
        whole = all(block.caption.regions.covers_photo for block in self.blocks)
        kind = "attention" if [*self.tops] == ["attention"] else "relevance"
        even = sorted({heatmap.most_attended(np.full(g, 1 / math.prod(g)))[1] for g in self.grids})
        notes = {
            f"focus: share of {kind} on the strongest tenth of the map (spread evenly: "
            f"{' and '.join(map(style.percent, even))})": True,
            "maps of several words: their " + ("maximum" if greatest else "mean"): several,
            "β: gate, the weight of the photo for the word"
            + (" (several words: mean)" if several else ""): True,
            f"grey words: β below {heatmap.CLOSED_GATE}, so the map hardly counts": any(
                panel.unused and not panel.left_out for _, panel in drawn
            ),
            "grey maps: words left out of the caption, as they may not be true": any(
                panel.left_out for _, panel in drawn
            ),
            "p: probability of the word, given the previous words"
            + (" (several words: product)" if several else ""): True,
            "p of a keyword: at least one of five people uses it": "keywords" in self.tops,
            f"?: doubtful word, less than {DOUBTFUL_TRUTH:.0%} likely to be true": True in doubtful,
            f"?: doubtful word, p below {DOUBTFUL}"
            + " (model without truth)" * (True in doubtful): False in doubtful,
            "▸: the chosen word, among the most probable at its position": any(
                panel.alternatives for _, panel in drawn
            ),
            "white line: objects named by the words, from the given masks": any(
                panel.masks for _, panel in drawn
            ),
            "hatched: not seen by the model": not whole,
        }
        for method, top in self.tops.items() if kind == "relevance" else ():
            scale = f"; scale to {style.percent(top)}" if self.common else ""
            notes[_METHOD_NOTES[method] + scale] = True
        grids = " and ".join(f"{rows} × {columns}" for rows, columns in self.grids)
        notes[f"grid sizes differ ({grids}), so shares per region do too"] = len(self.grids) > 1
        return [note for note, applies in notes.items() if applies]

    def _scale(self, x: int, y: int, width: int, *, one_line: bool) -> int:
        """Draw the colour bar of the maps with its labels, and return the bottom of the bar.

        With ``one_line``, the title is next to the bar instead of above it.
        """
        layout, size, several = self.layout, self.layout.small, len(self.tops) > 1
        title, most = "each word on its own scale", "strongest tenth"
        if self.common:
            title = f"one scale for all words{' of a method' if several else ', share per region'}"
            most = "max" if several else f"≥ {style.percent(*self.tops.values())}"
        upper = y + round(1.75 * size)
        if one_line:
            most, upper = f"{most}; {title}", y + round(0.35 * size)
            width = min(layout.inner, layout.em(9) + round(style.text_width(most, size)))
        else:
            self.text(x, y + size, title, colour=self.theme.muted)
        lower = upper + layout.em(0.75)
        left = x + round(style.text_width("0", size) + 0.4 * layout.text)
        right = x + round(width - style.text_width(most, size) - 0.4 * layout.text)
        middle = (upper + lower) / 2 + 0.36 * size
        self.text(x, middle, "0")
        self.text(x + width, middle, most, align="right")
        bar = heatmap.scale_bar(right - left, lower - upper, self.options.colormap)
        self.picture(left, upper, bar, "scale")
        return lower
