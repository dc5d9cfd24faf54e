"""Letters on pictures: what a font can draw, how wide it gets, where lines break.

The font is DejaVu Sans, which comes inside matplotlib: pictures look the same on every machine.
Sizes and widths are pixels.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

from PIL import ImageFont

FAMILY = "DejaVu Sans"
MISSING = "\N{WHITE SQUARE}"
"""Drawn for a letter that the font does not have."""

_LARGE = 512  # measured at this size, where rounding to pixels does not count

_RAISED = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


def font_file(bold: bool = False) -> Path:
    """The font's file."""
    import matplotlib

    name = "DejaVuSans-Bold.ttf" if bold else "DejaVuSans.ttf"
    return Path(matplotlib.get_data_path()) / "fonts" / "ttf" / name


@lru_cache(maxsize=32)
def font(size: int, bold: bool = False) -> ImageFont.FreeTypeFont:
    """The font at a size, to draw with Pillow."""
    return ImageFont.truetype(str(font_file(bold)), size)


@lru_cache(maxsize=4096)
def width_of(text: str, size: float, bold: bool = False) -> float:
    """How wide a text gets, without the hinting of a small size."""
    return font(_LARGE, bold).getlength(text[:_LARGE]) * size / _LARGE


def drawn_width(text: str, size: int) -> float:
    """How wide a text gets where Pillow draws it: small sizes are fitted to whole pixels."""
    return font(size).getlength(text[:_LARGE])


def printable(text: str) -> str:
    """The text on one line, without letters that nothing can draw."""
    return "".join(letter if letter.isprintable() else " " for letter in text)


def drawable(text: str) -> str:
    """The text with a box for every letter that the font does not have."""
    known = _letters()
    return "".join(letter if ord(letter) in known else MISSING for letter in text)


@lru_cache(maxsize=1)
def _letters() -> frozenset[int]:
    """The letters that both cuts of the font have."""
    from matplotlib.ft2font import FT2Font

    plain, bold = (FT2Font(str(font_file(cut))).get_charmap() for cut in (False, True))
    return frozenset(plain) & frozenset(bold)


def lines_of(texts: Sequence[str], size: float, width: float) -> list[str]:
    """Texts over as many lines as they need; a word wider than a line is cut short."""
    lines: list[str] = []
    for text in texts:
        first = True
        for word in printable(text).split():
            if not first and width_of(f"{lines[-1]} {word}", size) <= width:
                lines[-1] += f" {word}"
            else:
                lines.append(cut(word, size, width))
            first = False
        if first:
            lines.append("")
    return lines


def fitted(word: str, size: float, width: float, *, bold: bool = False) -> tuple[str, float]:
    """A word and its size: smaller where it is long, cut short where that does not help."""
    word = printable(word)
    wanted = width_of(word, size, bold)
    size = max(0.6 * size, min(size, size * width / max(wanted, 1.0)))
    return cut(word, size, width, bold=bold), size


def cut(word: str, size: float, width: float, *, bold: bool = False) -> str:
    """As much of a word as fits, and an ellipsis for the rest."""
    if len(word) <= _LARGE and width_of(word, size, bold) <= width + 0.01:
        return word
    low, high = 0, min(len(word), _LARGE - 1)
    while low < high:  # the most letters that fit, by halving
        middle = (low + high + 1) // 2
        if width_of(f"{word[:middle]}…", size, bold) <= width:
            low = middle
        else:
            high = middle - 1
    return f"{word[:low]}…"


def number(value: float) -> str:
    """Two decimals with a real minus sign; a dash for what is not known."""
    return f"{value:.2f}".replace("-", "−") if math.isfinite(value) else "–"


def probability(log_prob: float) -> str:
    """A probability from its natural logarithm: 0.42, or 3·10⁻⁵ where decimals would say 0."""
    if math.isnan(log_prob) or log_prob == -math.inf:
        return "–"
    value = math.exp(min(log_prob, 0.0))
    if value >= 0.005:
        return f"{value:.2f}"
    tens = math.floor(log_prob / math.log(10.0) + 1e-12)
    digit = round(math.exp(log_prob - tens * math.log(10.0)))
    digit, tens = (1, tens + 1) if digit == 10 else (digit, tens)
    return f"{digit}·10{str(tens).translate(_RAISED)}"


def percent(share: float) -> str:
    """A share as a percentage of two digits."""
    value = 100.0 * share
    return f"{value:.0f}%" if value >= 9.95 else f"{value:.2g}%"
