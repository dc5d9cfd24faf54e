"""The colours of figures and animations: text has a contrast of 4.5, bars of 3 (WCAG AA)."""

from __future__ import annotations

from dataclasses import dataclass

from captioner.errors import ConfigError


@dataclass(frozen=True)
class Theme:
    """Colours as #rrggbb. Orange and blue stay apart for colour-blind eyes."""

    paper: str
    ink: str
    quiet: str
    """Text of less weight."""
    track: str
    """The whole length of a bar, and fine rules."""
    gate: str
    """The bar of the gate, from the middle of inferno."""
    said: str
    """The bar of the word that was said."""
    other: str
    """The bars of the words that were not said."""
    shade: str
    """Behind the word that is being said."""


THEMES = {
    "light": Theme(
        paper="#ffffff", ink="#14141b", quiet="#5c5c68", track="#e3e3e9",
        gate="#cf5317", said="#1f66b0", other="#8b8b97", shade="#ffdcc7",
    ),
    "dark": Theme(
        paper="#14141a", ink="#f2f2f5", quiet="#a9a9b5", track="#34343f",
        gate="#f0803c", said="#6aaef2", other="#747482", shade="#6b3413",
    ),
}  # fmt: skip


def theme_of(name: str) -> Theme:
    """A theme by its name."""
    if name not in THEMES:
        raise ConfigError(f"unknown theme {name!r}; choose one of {', '.join(THEMES)}")
    return THEMES[name]
