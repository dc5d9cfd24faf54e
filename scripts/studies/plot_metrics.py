"""Plot the metrics.jsonl of training runs.

    python scripts/studies/plot_metrics.py RUN_FOLDER... -o curves.png

One panel per metric (reward, validation CIDEr and BLEU-4, bad endings, ...), one line per run.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import matplotlib as mpl
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from captioner.training.run import read_metrics

PANELS = {
    "loss": "cross-entropy (nats per word)",
    "val_loss": "cross-entropy (validation)",
    "reward": "reward of samples (training photos)",
    "CIDEr": "CIDEr (validation)",
    "Bleu_4": "BLEU-4 (validation)",
    "bad_endings": "bad endings (validation)",
    "sampled_bad_endings": "bad endings of samples",
}


def main() -> None:
    """Read the metrics and save the plot."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("runs", nargs="+", type=Path)
    parser.add_argument("-o", "--output", type=Path, required=True)
    options = parser.parse_args()
    runs = {run.name: read_metrics(run) for run in options.runs}
    measured = {name for found in runs.values() for row in found for name in row}
    if "reward" in measured:
        measured.discard("loss")  # weighted by advantages, so not meaningful
    panels = {name: title for name, title in PANELS.items() if name in measured}
    mpl.rcParams.update({"font.size": 9, "axes.spines.top": False, "axes.spines.right": False})
    figure = Figure(figsize=(3.2 * len(panels), 2.8), layout="constrained")
    for index, (name, title) in enumerate(panels.items(), 1):
        axes = figure.add_subplot(1, len(panels), index)
        for run, found in runs.items():
            points = [(row["epoch"], row[name]) for row in found if name in row]
            if points:
                axes.plot(*zip(*points, strict=True), marker="o", markersize=3, label=run)
        axes.set_title(title, loc="left", fontsize=9)
        axes.set_xlabel("epoch")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        if index == 1 and len(runs) > 1:
            axes.legend(frameon=False)
    figure.savefig(options.output, dpi=110)


if __name__ == "__main__":
    main()
