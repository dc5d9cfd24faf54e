"""One picture for a caption: the photo, the sentence, and where the model looked for each word.

    ┌──────────────────────────┐
    │ the sentence             │  header
    │ photo   word 1   word 2  │  panels: above each map its word, the gate β and the
    │ ▒▒▒▒▒   ▓▒▒▒▒▒   ▒▒▓▒▒▒  │  probability p of the word; all maps on one scale
    │ 0 ▒▒▓▓ 31%   β …   p …   │  legend: what the colours and the letters mean
    └──────────────────────────┘

Every length is a multiple of one: the size of the text, which follows from the size of a panel.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from captioner.caption import Caption, Region
from captioner.data.images import open_image
from captioner.errors import ConfigError
from captioner.visualization.heatmap import (
    attention_image,
    check_colormap,
    fit_photo,
    scale_bar,
    shared_scale,
)

_PAPER, _INK, _QUIET, _TRACK = "#ffffff", "#14141b", "#62626e", "#dedee5"
_GATE = "#e4672b"  # from the middle of inferno
_SHAPE = 1.5  # width / height that a page aims at
_MAX_COLUMNS = 8
_MIN_TEXT, _MIN_CELL = 14, 160  # pixels


def overlay(
    image: Image.Image | str | Path,
    caption: Caption,
    *,
    panel_size: int = 640,
    columns: int | None = None,
    smooth: bool = True,
    colormap: str = "inferno",
) -> Image.Image:
    """Draw where the model looked for every word of a caption.

    Args:
        image: The photo that was captioned, or its path.
        caption: The caption; all its alphas, (T, Gh, Gw), are drawn on one scale.
        panel_size: Longest side of a panel in pixels: larger photos are scaled down, smaller ones
            never up. 0 leaves every photo at its own size.
        columns: Panels in a row; None chooses a number that makes a well-shaped page.
        smooth: Interpolate the maps; False shows the regions as the blocks they are.
        colormap: One of ``COLORMAPS``; all of them get brighter with more attention.

    Returns:
        One RGB picture: the photo, then one panel a word.
    """
    check_colormap(colormap)
    _check(caption, columns)
    photo = fit_photo(open_image(image), panel_size)
    page = _Page.of(photo.size, 1 + len(caption.words), columns)
    header = _header(caption, page)
    legend = _legend(caption, page, colormap)

    top = page.margin + header.height + page.gap
    height = top + page.rows * page.cell_height + (page.rows - 1) * page.gap
    height += (legend.height + page.gap if legend else 0) + page.margin
    picture = Image.new("RGB", (page.width, height), _PAPER)
    picture.paste(header, (page.margin, page.margin))
    for index in range(1 + len(caption.words)):
        row, column = divmod(index, page.columns)
        x = page.margin + column * (page.cell_width + page.gap)
        y = top + row * (page.cell_height + page.gap)
        picture.paste(_title(caption, index - 1, page), (x, y))
        panel = photo
        if index > 0:
            panel = attention_image(
                photo,
                caption.alphas[index - 1],
                scale_max=shared_scale(caption.alphas),
                region=caption.region,
                smooth=smooth,
                colormap=colormap,
            )
        picture.paste(panel, (x, y + page.title))
    if legend:
        picture.paste(legend, (page.margin, height - page.margin - legend.height))
    return picture


def _check(caption: Caption, columns: int | None) -> None:
    """Refuse what cannot be drawn truthfully."""
    count, shape = len(caption.words), np.shape(caption.alphas)
    if len(shape) != 3 or shape[0] != count or (count and 0 in shape):
        raise ConfigError(
            f"the alphas of a caption of {count} words have the shape ({count}, rows, columns), "
            f"not {shape}"
        )
    if not np.isfinite(caption.alphas).all():
        raise ConfigError("the alphas hold NaN or infinity; there is no map to draw")
    for name in ("log_probs", "gates"):
        if np.shape(getattr(caption, name)) != (count,):
            raise ConfigError(
                f"the {name} of a caption of {count} words have the shape ({count},), "
                f"not {np.shape(getattr(caption, name))}"
            )
    if columns is not None and columns < 1:
        raise ConfigError(f"columns is {columns}; give 1 or more, or None to let the page choose")


@dataclass(frozen=True)
class _Page:
    """The lengths of a page in pixels."""

    panel: tuple[int, int]
    columns: int
    rows: int
    text: int
    cell_width: int

    @classmethod
    def of(cls, panel: tuple[int, int], panels: int, columns: int | None) -> _Page:
        """The page for a number of panels, in ``columns`` or in the best number of columns."""
        width, height = panel
        cell_width = max(width, _MIN_CELL)
        text = max(_MIN_TEXT, round(min(0.06 * math.sqrt(width * height), 0.07 * cell_width)))
        choices = [columns] if columns else range(1, min(panels, _MAX_COLUMNS) + 1)
        pages = [cls(panel, n, math.ceil(panels / n), text, cell_width) for n in choices]
        return min(pages, key=lambda page: page.unshapely(panels))

    def unshapely(self, panels: int) -> float:
        """How far the page is from a good shape, and how ragged its last row."""
        height = self.rows * (self.cell_height + self.gap) + 5 * self.text
        empty = self.rows * self.columns - panels
        return abs(math.log(self.width / height / _SHAPE)) + 0.8 * empty / self.columns

    @property
    def title(self) -> int:
        """Height of what stands above a panel."""
        return round(2.75 * self.text)

    @property
    def cell_height(self) -> int:
        """Height of a panel and its title."""
        return self.title + self.panel[1]

    @property
    def gap(self) -> int:
        """Between two panels."""
        return round(0.9 * self.text)

    @property
    def margin(self) -> int:
        """Around the page."""
        return round(1.2 * self.text)

    @property
    def inner(self) -> int:
        """Width between the margins."""
        return self.columns * (self.cell_width + self.gap) - self.gap

    @property
    def width(self) -> int:
        """Width of the page."""
        return self.inner + 2 * self.margin


def _header(caption: Caption, page: _Page) -> Image.Image:
    """The sentence over the whole width."""
    if not caption.words:
        return _lines(["No words, so no attention to show."], page.text, page.inner, _QUIET)
    return _lines([caption.text], round(1.5 * page.text), page.inner, _INK)


def _title(caption: Caption, index: int, page: _Page) -> Image.Image:
    """What stands above a panel; index -1 is the photo."""
    block = Image.new("RGB", (page.cell_width, page.title), _PAPER)
    draw = ImageDraw.Draw(block)
    word_line, number_line = round(1.15 * page.text), round(2.2 * page.text)  # baselines
    small = _font(round(0.8 * page.text))
    if index < 0:
        draw.text((0, word_line), "photo", _QUIET, _font(page.text), anchor="ls")
        if caption.words:
            total = f"log p {_number(caption.log_prob)}"
            draw.text((0, number_line), total, _QUIET, small, anchor="ls")
        return block
    width = min(page.cell_width, max(page.panel[0], _MIN_CELL))
    word, font = _fitted(caption.words[index], round(1.2 * page.text), width)
    draw.text((0, word_line), word, _INK, font, anchor="ls")

    gate = float(caption.gates[index])
    left, right = round(0.85 * page.text), round(3.35 * page.text)
    upper, lower = number_line - round(0.46 * page.text), number_line - round(0.14 * page.text)
    draw.text((0, number_line), "β", _QUIET, small, anchor="ls")
    draw.rectangle((left, upper, right, lower), _TRACK)
    filled = round(left + (right - left) * min(max(gate, 0.0), 1.0)) if gate > 0 else left
    if filled > left:
        draw.rectangle((left, upper, filled, lower), _GATE)
    draw.text((right + 0.4 * page.text, number_line), _number(gate), _INK, small, anchor="ls")
    probability = f"p {_number(math.exp(min(float(caption.log_probs[index]), 0.0)))}"
    draw.text((width, number_line), probability, _QUIET, small, anchor="rs")
    return block


def _legend(caption: Caption, page: _Page, colormap: str) -> Image.Image | None:
    """What the colours and the letters mean: beside each other where there is room."""
    if not caption.words:
        return None
    size = round(0.8 * page.text)
    notes = ["β = gate: how much the photo counts for the word", "p = probability of the word"]
    if caption.region != Region():
        notes.append("hatched: not seen by the model")
    bar = _scale(caption, min(page.inner, 17 * page.text), page.text, colormap)
    wide = math.ceil(max(_font(size).getlength(note) for note in notes))
    beside = bar.width + 2 * page.text + wide <= page.inner
    text = _lines(notes, size, wide if beside else page.inner, _QUIET)
    x, y = (bar.width + 2 * page.text, 0) if beside else (0, bar.height + page.gap)
    block = Image.new("RGB", (page.inner, max(bar.height, y + text.height)), _PAPER)
    block.paste(bar, (0, 0))
    block.paste(text, (x, y))
    return block


def _scale(caption: Caption, width: int, text: int, colormap: str) -> Image.Image:
    """The scale bar: zero, the uniform share and the largest share on it."""
    top = shared_scale(caption.alphas)
    uniform = 1.0 / (caption.alphas.shape[1] * caption.alphas.shape[2])
    font = _font(round(0.8 * text))
    name = _lines(["share of attention per region"], round(0.8 * text), width, _QUIET)
    block = Image.new("RGB", (width, name.height + round(2.3 * text)), _PAPER)
    block.paste(name, (0, 0))
    draw = ImageDraw.Draw(block)

    left = round(font.getlength("0") + 0.4 * text)
    right = round(width - font.getlength(_percent(top)) - 0.4 * text)
    upper, lower = name.height + round(0.25 * text), name.height + round(0.95 * text)
    middle = (upper + lower) / 2
    draw.text((0, middle), "0", _INK, font, anchor="lm")
    draw.text((width, middle), _percent(top), _INK, font, anchor="rm")
    block.paste(scale_bar(right - left, lower - upper, colormap), (left, upper))

    tick = left + round((right - left) * min(uniform / top, 1.0))
    thick = max(1, round(0.08 * text))
    draw.rectangle((tick, lower, tick + thick - 1, lower + round(0.25 * text)), _INK)
    label = f"uniform {_percent(uniform)}"
    half = font.getlength(label) / 2
    centre = min(max(tick, half), width - half)
    draw.text((centre, lower + round(1.12 * text)), label, _INK, font, anchor="ms")
    return block


def _lines(texts: Sequence[str], size: int, width: int, colour: str) -> Image.Image:
    """Text over as many lines as it needs."""
    font, leading = _font(size), round(1.35 * size)
    lines = [line for text in texts for line in _wrapped(text, font, width)]
    block = Image.new("RGB", (width, leading * len(lines)), _PAPER)
    draw = ImageDraw.Draw(block)
    for index, line in enumerate(lines):
        draw.text((0, index * leading + size), line, colour, font, anchor="ls")
    return block


def _wrapped(text: str, font: ImageFont.FreeTypeFont, width: int) -> list[str]:
    """The lines of a text; a word that is wider than a line is cut short."""
    lines: list[str] = []
    for word in _printable(text).split():
        if lines and font.getlength(f"{lines[-1]} {word}") <= width:
            lines[-1] += f" {word}"
        else:
            lines.append(_cut(word, font, width))
    return lines or [""]


def _fitted(word: str, size: int, width: int) -> tuple[str, ImageFont.FreeTypeFont]:
    """A word in bold, smaller where it is long, cut short where that does not help."""
    word = _printable(word)
    wanted = _font(size, bold=True).getlength(word)
    font = _font(max(round(0.6 * size), min(size, int(size * width / max(wanted, 1.0)))), bold=True)
    return _cut(word, font, width), font


def _cut(word: str, font: ImageFont.FreeTypeFont, width: int) -> str:
    """As much of a word as fits, and an ellipsis for the rest."""
    if font.getlength(word) <= width:
        return word
    word = word[:width]  # no letter is narrower than a pixel
    while word and font.getlength(f"{word}…") > width:
        word = word[:-1]
    return f"{word}…"


def _printable(text: str) -> str:
    """The text without line breaks and letters that no font can draw."""
    return "".join(letter if letter.isprintable() else " " for letter in text)


def _number(value: float) -> str:
    """Two decimals with a real minus sign; a dash for what is not known."""
    return f"{value:.2f}".replace("-", "−") if math.isfinite(value) else "–"


def _percent(share: float) -> str:
    """A share as a percentage of two digits."""
    percent = 100.0 * share
    return f"{percent:.0f}%" if percent >= 9.95 else f"{percent:.2g}%"


@lru_cache(maxsize=32)
def _font(size: int, bold: bool = False) -> ImageFont.FreeTypeFont:
    """DejaVu Sans, which comes inside matplotlib, at a size in pixels."""
    import matplotlib

    name = "DejaVuSans-Bold.ttf" if bold else "DejaVuSans.ttf"
    path = Path(matplotlib.get_data_path()) / "fonts" / "ttf" / name
    return ImageFont.truetype(str(path), size)
