"""The reliability diagram, and score against coverage, as a figure."""

from __future__ import annotations

import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from captioner.files import atomic_write

FORMATS = (".png", ".svg", ".pdf")
"""File extensions of the figure."""


def save_figure(report: Mapping[str, Any], path: Path) -> None:
    """Draw a report of `captioner.evaluation.calibrate`.

    Left, for each group of photos: the share of right captions by confidence; on the diagonal,
    confidence is calibrated. Right: the mean score of the most confident captions.

    Args:
        report: The report.
        path: The file; its extension, one of ``FORMATS``, selects the format.

    Raises:
        ConfigError: matplotlib is not installed.
        OSError: The file cannot be written.
    """
    from matplotlib.figure import Figure

    groups = report["groups"]
    figure = Figure(figsize=(4 * (len(groups) + 1), 4), dpi=100, layout="constrained")
    panels = figure.subplots(1, len(groups) + 1)
    for axes, (name, part) in zip(panels, groups.items(), strict=False):
        _reliability(axes, name, part)
    axes = panels[-1]
    for name, part in groups.items():
        shares = sorted(part["coverage"], key=float)
        x, y = [100 * float(share) for share in shares], [part["coverage"][s] for s in shares]
        axes.plot(x, y, marker="o", markersize=3, label=name)
    axes.axhline(1, color="0.7", linewidth=1, zorder=0)
    axes.set(
        title="score of the most confident captions",
        xlabel="captions kept, most confident first (%)",
        ylabel="CIDEr-D, relative to all captions",
        xlim=(0, 102),
    )
    axes.legend(frameon=False)
    buffer = io.BytesIO()
    kind = path.suffix.lower().removeprefix(".")
    dates = {"png": {}, "svg": {"Date": None}, "pdf": {"CreationDate": None}}
    figure.savefig(buffer, format=kind, metadata=dates[kind])
    atomic_write(path, buffer.getvalue())


def _reliability(axes: Any, name: str, part: Mapping[str, Any]) -> None:
    bins = part["bins"]
    most = max(one["photos"] for one in bins)
    axes.plot([0, 1], [0, 1], color="0.7", linewidth=1, zorder=0)
    x, y = [one["confidence"] for one in bins], [one["right"] for one in bins]
    errors = [1.96 * (r * (1 - r) / one["photos"]) ** 0.5 for r, one in zip(y, bins, strict=True)]
    heights = [0.25 * one["photos"] / most for one in bins]
    axes.bar(x, heights, width=0.06, color="0.85", zorder=0)
    axes.errorbar(x, y, yerr=errors, marker="o", capsize=2, linewidth=1)
    axes.set(
        title=f"{name}: {part['photos']:,} photos, error {part['calibration_error']:.3f}",
        xlabel="confidence (bars: number of captions)",
        ylabel="share of right captions (95% interval)",
        xlim=(0, 1),
        ylim=(0, 1),
        aspect="equal",
    )
