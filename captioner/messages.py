"""Helpers for messages: counts, lists of names, times, and text that is safe on a terminal."""

import re
from collections.abc import Iterable, Sequence

_CONTROLS = re.compile(r"[\x00-\x1f\x7f-\x9f\ud800-\udfff\u2028\u2029\u202a-\u202e\u2066-\u2069]")
"""Control characters, halves of surrogate pairs, and marks that change the direction of text."""


def counted(count: int, noun: str) -> str:
    """Return a count with its noun: ``1 part`` or ``2,000 parts``."""
    return f"{count} {noun}" if count == 1 else f"{count:,} {noun}s"


def clock(seconds: float) -> str:
    """Return a time in seconds in the format of WebVTT: ``00:01:05.000``."""
    minutes, milliseconds = divmod(round(seconds * 1000), 60_000)
    hours, minutes = divmod(minutes, 60)
    return f"{hours:02}:{minutes:02}:{milliseconds / 1000:06.3f}"


def either(names: Iterable[object]) -> str:
    """Join names with commas and "or": ``a, b or c``."""
    *most, last = map(str, names)
    return f"{', '.join(most)} or {last}" if most else last


def first_of(names: Sequence[object]) -> str:
    """Return the first name and the number of further names: ``a (and 2 more)``."""
    return f"{names[0]} (and {len(names) - 1} more)" if len(names) > 1 else str(names[0])


def first_line(error: BaseException) -> str:
    """Return the first line of an exception's text, or the name of its class if it has no text."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip()


def printable(text: str, *, lines: bool = False) -> str:
    """Escape the control characters of text, such as those that file names may contain.

    Args:
        text: The text.
        lines: Keep line ends.
    """
    return _CONTROLS.sub(lambda c: c[0] if lines and c[0] == "\n" else ascii(c[0])[1:-1], text)
