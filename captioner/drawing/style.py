"""The look of pictures: colours, the font, text widths and the format of numbers.

The font is DejaVu Sans, which comes with matplotlib, so pictures look the same on every machine.
Sizes and widths are in pixels.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from decimal import Decimal
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

from PIL import ImageFont

_LARGE = 512  # text is measured at this size, where rounding to pixels is negligible

_SUPERSCRIPTS = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


class Theme(NamedTuple):
    """A set of colours (#rrggbb) with a contrast of at least 4.5 for text and 3 for bars (WCAG AA).

    Colour-blind readers can tell the orange and the blue apart.
    """

    background: str
    text: str
    muted: str  # less important text
    track: str  # empty part of bars
    gate: str  # bar of the gate
    chosen: str  # bar of the chosen word
    other: str  # bars of the other candidate words
    highlight: str  # background of the current word of an animation


THEMES = {
    "light": Theme(
        background="#ffffff", text="#14141b", muted="#5c5c68", track="#e3e3e9",
        gate="#cf5317", chosen="#1f66b0", other="#8b8b97", highlight="#ffdcc7",
    ),
    "dark": Theme(
        background="#14141a", text="#f2f2f5", muted="#a9a9b5", track="#34343f",
        gate="#f0803c", chosen="#6aaef2", other="#747482", highlight="#6b3413",
    ),
}  # fmt: skip


def font_file(bold: bool = False) -> Path:
    """Return the path of the regular or bold font's file."""
    from captioner.drawing.backend import matplotlib

    name = "DejaVuSans-Bold.ttf" if bold else "DejaVuSans.ttf"
    return Path(matplotlib.get_data_path()) / "fonts" / "ttf" / name


@lru_cache(maxsize=32)
def pillow_font(size: int, bold: bool = False) -> ImageFont.FreeTypeFont:
    """Return the font in the form that Pillow needs. Pillow aligns letters with whole pixels."""
    return ImageFont.truetype(str(font_file(bold)), size)


@lru_cache(maxsize=4096)
def text_width(text: str, size: float, bold: bool = False) -> float:
    """Return the width of text in pixels, as if letters were not aligned with whole pixels."""
    return pillow_font(_LARGE, bold).getlength(text[:_LARGE]) * size / _LARGE


def printable(text: str) -> str:
    """Replace unprintable characters, including line breaks, with spaces."""
    return "".join(letter if letter.isprintable() else " " for letter in text)


def lacks_letters(text: str) -> bool:
    """Return whether the font lacks characters in the text, so that pictures would show boxes."""
    path = str(font_file())  # also imports matplotlib (see `backend`)
    from matplotlib.ft2font import FT2Font

    return not FT2Font(path).get_charmap().keys() >= set(map(ord, printable(text)))


def wrap(texts: Sequence[str], size: float, width: float) -> list[str]:
    """Break each text into lines, and truncate words that are wider than a line."""
    lines: list[str] = []
    for text in texts:
        line = ""
        for word in printable(text).split():
            joined = f"{line} {word}".lstrip()
            if line and text_width(joined, size) > width:
                lines.append(line)
                joined = word
            line = truncate(joined, size, width)
        lines.append(line)
    return lines


def fit(word: str, size: float, width: float) -> tuple[str, float]:
    """Fit a bold word into a width, and return the word and its text size.

    The word shrinks to no less than 0.7 of its size. If it is still too wide, it is truncated.
    """
    word = printable(word)
    wanted = text_width(word, size, bold=True)
    size = max(0.7 * size, min(size, size * width / max(wanted, 1.0)))
    return truncate(word, size, width, bold=True), size


def truncate(word: str, size: float, width: float, *, bold: bool = False) -> str:
    """Return a word or text, shortened with an ellipsis if it is wider than ``width``."""
    if len(word) <= _LARGE and text_width(word, size, bold) <= width + 0.01:
        return word
    word = word[: _LARGE - 1]
    while word and text_width(f"{word}…", size, bold) > width:
        word = word[:-1]
    return f"{word}…"


def number(value: float) -> str:
    """Format a number with two decimals, or as a dash if it is not finite."""
    return f"{value:.2f}".replace("-", "−") if math.isfinite(value) else "–"


def probability(log_prob: float) -> str:
    """Format a natural log-probability as a probability, such as 0.42.

    Values below 0.005 have the form 3·10⁻⁵. Probability 0 and NaN become a dash.
    """
    if math.isnan(log_prob) or log_prob == -math.inf:
        return "–"
    if log_prob >= math.log(0.005):
        return f"{math.exp(min(log_prob, 0.0)):.2f}"
    digit, tens = f"{Decimal(log_prob).exp():.0e}".split("e")  # exp of a float may be 0
    return f"{digit}·10{tens.translate(_SUPERSCRIPTS)}"


def percent(share: float) -> str:
    """Format a share (0 to 1) as a percentage, without decimals from 10% on.

    Smaller percentages have two significant digits.
    """
    value = 100.0 * share
    return f"{value:.0f}%" if value >= 9.95 else f"{value:.2g}%"
