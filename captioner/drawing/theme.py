"""Colours of figures and animations: contrast of 4.5 for text and 3 for bars (WCAG AA)."""

from __future__ import annotations

from dataclasses import dataclass

from captioner.errors import ConfigError


@dataclass(frozen=True)
class Theme:
    """Colours as #rrggbb; orange and blue are distinguishable to colour-blind readers."""

    background: str
    text: str
    muted: str
    """Secondary text."""
    track: str
    """Background of bars, and rules."""
    gate: str
    chosen: str
    """Bar of the chosen word."""
    other: str
    """Bars of the other candidate words."""
    highlight: str
    """Background of the current word of an animation."""


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


def get_theme(name: str) -> Theme:
    """Return a theme by name."""
    if name not in THEMES:
        raise ConfigError(f"unknown theme {name!r}; choose one of {', '.join(THEMES)}")
    return THEMES[name]
