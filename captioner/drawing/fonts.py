"""Text metrics and number formats for pictures.

The font is DejaVu Sans, which comes with matplotlib, so pictures look the same on every machine.
Sizes and widths are in pixels.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

from PIL import ImageFont

FAMILY = "DejaVu Sans"
MISSING = "\N{WHITE SQUARE}"
"""Drawn for a character that the font lacks."""

_LARGE = 512  # text is measured at this size, where rounding to pixels is negligible

_SUPERSCRIPTS = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


def font_file(bold: bool = False) -> Path:
    """Path of the font file."""
    import matplotlib

    name = "DejaVuSans-Bold.ttf" if bold else "DejaVuSans.ttf"
    return Path(matplotlib.get_data_path()) / "fonts" / "ttf" / name


@lru_cache(maxsize=32)
def pillow_font(size: int, bold: bool = False) -> ImageFont.FreeTypeFont:
    """The font for drawing with Pillow."""
    return ImageFont.truetype(str(font_file(bold)), size)


@lru_cache(maxsize=4096)
def text_width(text: str, size: float, bold: bool = False) -> float:
    """Width of a text without hinting."""
    return pillow_font(_LARGE, bold).getlength(text[:_LARGE]) * size / _LARGE


def hinted_width(text: str, size: int) -> float:
    """Width of a text drawn by Pillow, which fits small sizes to whole pixels."""
    return pillow_font(size).getlength(text[:_LARGE])


def printable(text: str) -> str:
    """The text on one line, unprintable characters replaced by spaces."""
    return "".join(letter if letter.isprintable() else " " for letter in text)


def drawable(text: str) -> str:
    """The text with characters that the font lacks replaced by a box."""
    known = _characters()
    return "".join(letter if ord(letter) in known else MISSING for letter in text)


@lru_cache(maxsize=1)
def _characters() -> frozenset[int]:
    """Code points in both the regular and the bold font."""
    from matplotlib.ft2font import FT2Font

    plain, bold = (FT2Font(str(font_file(weight))).get_charmap() for weight in (False, True))
    return frozenset(plain) & frozenset(bold)


def wrap(texts: Sequence[str], size: float, width: float) -> list[str]:
    """Break each text into lines; a word wider than a line is truncated."""
    lines: list[str] = []
    for text in texts:
        first = True
        for word in printable(text).split():
            if not first and text_width(f"{lines[-1]} {word}", size) <= width:
                lines[-1] += f" {word}"
            else:
                lines.append(truncate(word, size, width))
            first = False
        if first:
            lines.append("")
    return lines


def fit(word: str, size: float, width: float, *, bold: bool = False) -> tuple[str, float]:
    """Shrink a word to a width, down to 0.6 of its size, then truncate it.

    Returns:
        The word and its size.
    """
    word = printable(word)
    wanted = text_width(word, size, bold)
    size = max(0.6 * size, min(size, size * width / max(wanted, 1.0)))
    return truncate(word, size, width, bold=bold), size


def truncate(word: str, size: float, width: float, *, bold: bool = False) -> str:
    """As much of a word as fits, followed by an ellipsis if it was cut."""
    if len(word) <= _LARGE and text_width(word, size, bold) <= width + 0.01:
        return word
    low, high = 0, min(len(word), _LARGE - 1)
    while low < high:  # binary search for the most characters that fit
        middle = (low + high + 1) // 2
        if text_width(f"{word[:middle]}…", size, bold) <= width:
            low = middle
        else:
            high = middle - 1
    return f"{word[:low]}…"


def number(value: float) -> str:
    """Two decimals with a minus sign (U+2212); a dash if not finite."""
    return f"{value:.2f}".replace("-", "−") if math.isfinite(value) else "–"


def probability(log_prob: float) -> str:
    """Format a natural log-probability: 0.42, or 3·10⁻⁵ below 0.005; a dash for NaN and -inf."""
    if math.isnan(log_prob) or log_prob == -math.inf:
        return "–"
    value = math.exp(min(log_prob, 0.0))
    if value >= 0.005:
        return f"{value:.2f}"
    tens = math.floor(log_prob / math.log(10.0) + 1e-12)
    digit = round(math.exp(log_prob - tens * math.log(10.0)))
    digit, tens = (1, tens + 1) if digit == 10 else (digit, tens)
    return f"{digit}·10{str(tens).translate(_SUPERSCRIPTS)}"


def percent(share: float) -> str:
    """A share as a percentage of two digits."""
    value = 100.0 * share
    return f"{value:.0f}%" if value >= 9.95 else f"{value:.2g}%"
