"""What a figure shows of a caption: the photo, and a panel for each word or group of words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from captioner.caption import Alternative, Caption
from captioner.drawing.options import FigureOptions
from captioner.drawing.word_queries import find
from captioner.errors import ConfigError

Masks = Mapping[int, Sequence[NDArray[np.bool_]]]
"""Masks (H, W) of the photo's size by position of a word, counted from 0."""


@dataclass(frozen=True)
class Panel:
    """The photo (no positions), or the map of one or several words."""

    title: str
    note: str
    positions: tuple[int, ...]
    alpha: NDArray[np.float32] | None
    masks: list[NDArray[np.bool_]]
    alternatives: tuple[Alternative, ...] = ()


@dataclass(frozen=True)
class Block:
    """A caption and its panels."""

    caption: Caption
    label: str
    panels: list[Panel]

    def single(self) -> list[int]:
        """Positions of the words that have a panel of their own, in order."""
        return sorted({p.positions[0] for p in self.panels if len(p.positions) == 1})


def panels_of(caption: Caption, masks: Masks, options: FigureOptions) -> list[Panel]:
    """The photo, all or the selected words, and on request the whole caption."""
    words, count = caption.words, len(caption.words)
    panels = [Panel("photo", "", (), None, [m for at in sorted(masks) for m in masks[at]])]
    shown = _find_all(caption, options.only) if options.only else [(i,) for i in range(count)]
    for positions in shown:
        single = len(positions) == 1
        title = " ".join(words[i] for i in positions)
        if caption.pieces and not single:
            title = "".join(caption.pieces[i] for i in positions).strip()
        chosen = caption.alphas[list(positions)]
        kind, alpha = "mean", chosen.mean(axis=0)
        if options.combine == "max":  # not renormalized: regions keep the colour of the word's map
            kind, alpha = "greatest", chosen.max(axis=0)
        others = caption.alternatives[positions[0]] if single and options.alternatives else ()
        panels.append(
            Panel(
                title,
                "" if single else f"{kind} of {len(positions)} words",
                positions,
                alpha,
                [mask for i in positions for mask in masks.get(i, ())],
                others[: options.alternatives],
            )
        )
    if options.coverage and words:
        title = f"all {count} words" if count > 1 else "all 1 word"
        panels.append(Panel(title, "mean", tuple(range(count)), caption.alphas.mean(axis=0), []))
    return panels


def check_only(captions: Sequence[Caption], only: Sequence[str]) -> None:
    """Raise ConfigError for a query that no caption has."""
    for query in only:
        if not any(_find_all(caption, [query]) for caption in captions):
            find(captions[0].words, query, captions[0].pieces)  # raises


def _find_all(caption: Caption, only: Sequence[str]) -> list[tuple[int, ...]]:
    """Positions of all queries in a caption, without duplicates; missing ones are skipped."""
    found: list[tuple[int, ...]] = []
    for query in only:
        with suppress(ConfigError):
            found += find(caption.words, query, caption.pieces)
    return list(dict.fromkeys(found))
