"""The results of measuring faithfulness: areas with intervals over photos, as JSON and text."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from captioner.evaluation.bootstrap import (
    MIN_IMAGES,
    compare,
    interval,
    resample_weights,
)
from captioner.evaluation.deletion import (
    BASELINES,
    CURVES,
    METHODS,
    ORDERS,
    Array,
    Indices,
    area,
)
from captioner.options import METHOD_TITLES, FaithfulnessOptions


class Word(NamedTuple):
    """A content word and what was measured for it."""

    photo: str
    """File name of the photo, or its index."""
    word: str
    log_prob: float
    """Given the photo as it is (nats)."""
    curves: dict[str, Array]
    """By level: (curves, orders, S + 1)."""

    def as_dict(self) -> dict[str, Any]:
        """Photo, word, log-probability and, by level, curve and order, the area."""
        areas = {
            level: {
                curve: dict(zip(ORDERS, np.round(area(of_curve), 4).tolist(), strict=True))
                for curve, of_curve in zip(CURVES, curves, strict=True)
            }
            for level, curves in self.curves.items()
        }
        return {"photo": self.photo, "word": self.word, "log_prob": self.log_prob, **areas}


@dataclass(frozen=True, eq=False)
class Faithfulness:
    """What was measured for a set of captions."""

    options: FaithfulnessOptions
    photos: int
    """Number of photos that were read, with or without content words."""
    words: tuple[Word, ...]
    regions: int
    """L."""

    def summary(self) -> dict[str, Any]:
        """All results as JSON data.

        Returns:
            ``photos``, ``photos_with_words``, ``words``, ``steps``, ``regions``, ``log_prob`` (mean
            over words) and, by level, curve and order: ``area`` (mean over words), ``curve`` (at S
            + 1 equal steps), ``interval`` (95%, bootstrap over photos), and for methods
            ``over_random``, ``over_centre``, ``over_least_attended`` and ``over_attention``: how
            much better the area is (``difference``, positive is better) with its paired
            ``interval`` and ``significant``. Intervals are None for fewer than 30 photos.
            ``per_word`` lists the areas of every word.
        """
        photos = sorted({one.photo for one in self.words})
        found: dict[str, Any] = {
            "photos": self.photos,
            "photos_with_words": len(photos),
            "words": len(self.words),
            "steps": self.options.steps,
            "regions": self.regions,
        }
        if not self.words:
            return found
        found["log_prob"] = float(np.mean([one.log_prob for one in self.words]))
        weights = resample_weights(len(photos)) if len(photos) >= MIN_IMAGES else None
        index = np.searchsorted(photos, [one.photo for one in self.words])
        for level in self.words[0].curves:
            values = np.stack([one.curves[level] for one in self.words])  # (W, curves, orders, S+1)
            found[level] = {
                curve: _summarize(values[:, number], index, weights, sign=-1 if number < 2 else 1)
                for number, curve in enumerate(CURVES)
            }
        found["per_word"] = [one.as_dict() for one in self.words]
        if weights is None:
            found["warning"] = (
                f"{len(photos)} photos with content words are too few for confidence intervals "
                f"(needs {MIN_IMAGES})"
            )
        return found


def _summarize(
    curves: Array, photos: Indices, weights: Array | None, *, sign: int
) -> dict[str, dict[str, Any]]:
    """The results of every order, from curves (W, orders, S + 1)."""
    areas = np.stack([area(curve) for curve in curves.transpose(1, 0, 2)])  # (orders, W)
    resampled = None
    if weights is not None:  # the words of a photo are drawn together
        counts = weights @ np.bincount(photos)
        sums = np.stack([np.bincount(photos, row) for row in areas])
        resampled = weights @ sums.T / counts[:, None]  # (resamples, orders)
    found: dict[str, dict[str, Any]] = {}
    for number, order in enumerate(ORDERS):
        one: dict[str, Any] = {
            "area": float(areas[number].mean()),
            "interval": None if resampled is None else list(interval(resampled[:, number])),
            "curve": [float(value) for value in curves[:, number].mean(axis=0)],
        }
        for baseline in ("attention", *BASELINES) if order in METHODS else ():
            if baseline == order:
                continue
            other = ORDERS.index(baseline)
            entry: dict[str, Any] = {
                "difference": sign * float(areas[number].mean() - areas[other].mean()),
                "interval": None,
                "significant": None,
            }
            if resampled is not None:
                test = compare(
                    sign * areas[number].mean(),
                    sign * areas[other].mean(),
                    sign * resampled[:, number],
                    sign * resampled[:, other],
                )
                entry |= {"interval": [test.low, test.high], "significant": test.significant}
            one[f"over_{baseline}"] = entry
        found[order] = one
    return found


# --- text ----------------------------------------------------------------------------------------

_TITLES = METHOD_TITLES | {
    "attention": "attention (x gate)",
    "gradient_input": "gradient x input",
    "least_attended": "least attended",
}


def as_lines(found: Mapping[str, Any]) -> list[str]:
    """The summary as lines of text."""
    lines = [
        f"faithfulness: {found['words']} content words of {found['photos_with_words']} photos, "
        f"{found['steps']} steps of {found['regions']} regions",
    ]
    if not found["words"]:
        return lines
    lines.append(
        "mean change of a word's log-probability (nats) and 95% interval over photos; of "
        f"{found['log_prob']:.2f} on average"
    )
    for level in ("grid", "pixels"):
        if level not in found:
            continue
        heads = [f"{name.replace('_', ', '):<26}" for name in CURVES]
        lines += ["", f"{level:<20}{''.join(heads)}".rstrip()]
        for order in ORDERS:
            cells = [f"{_cell(found[level][curve][order]):<26}" for curve in CURVES]
            lines.append(f"{_TITLES.get(order, order):<20}{''.join(cells)}".rstrip())
    lines += [
        "",
        "Lower is better for deletion, higher for insertion. * better than random; ** better than "
        "centre as well",
        "(95% interval of the paired difference). The gate does not change the order of regions.",
    ]
    if "warning" in found:
        lines.append(f"note: {found['warning']}")
    return lines


def _cell(one: Mapping[str, Any]) -> str:
    text = f"{one['area']:6.2f}"
    if one["interval"] is not None:
        text += f" ({one['interval'][0]:.2f} to {one['interval'][1]:.2f})"
    better = [
        name in one and one[name]["significant"] and one[name]["difference"] > 0
        for name in ("over_random", "over_centre")
    ]
    return f"{text} {'**' if all(better) else '*' if better[0] else ''}".rstrip()
