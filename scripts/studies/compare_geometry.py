"""Compare attention on COCO masks with and without the regions' geometry, paired by name.

Captions every photo once and measures the maps twice: on equal cells, as most projects draw them,
and at the positions of the encoder's regions. See docs/regions.md.

    python scripts/studies/compare_geometry.py coco128/images coco128/annotations/instances.json
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

import captioner
from captioner.caption import Caption
from captioner.errors import CaptionerError
from captioner.evaluation.bootstrap import interval, resample_weights
from captioner.evaluation.grounding import Grounding, measure
from captioner.evaluation.masks import read_instances

KEYS = ("correctness", "uniform", "centre", "pointing", "pointing_uniform", "pointing_centre")
Array = NDArray[np.float64]


def main() -> None:
    """Print a Markdown table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("images", type=Path)
    parser.add_argument("instances", type=Path)
    parser.add_argument("--model", default=None, help="model folder; default: the shipped model")
    options = parser.parse_args()
    instances = read_instances(options.instances)
    model = captioner.load(*([options.model] if options.model else []), precision="fp32")
    names = {options.images / name: image_id for image_id, name in instances.names.items()}
    captions: dict[int, Caption] = {}
    for result in model.stream(sorted(names), batch_size=8):
        if result.error:
            raise result.error
        captions[names[Path(str(result.photo))]] = result.captions[0]
    even = {i: dataclasses.replace(caption, geometry=None) for i, caption in captions.items()}
    _report(captions, measure(even, instances), measure(captions, instances))


def _report(captions: Mapping[int, Caption], before: Grounding, after: Grounding) -> None:
    # Keep names measured under both: a region may cover an object under one geometry only.
    both = [{(o.image_id, o.start): o for o in one.occurrences} for one in (before, after)]
    shared = sorted(both[0].keys() & both[1].keys())
    photos = sorted(captions)
    weights = resample_weights(len(photos), 1000, 0)
    column = {photo: number for number, photo in enumerate(photos)}
    photo = np.array([column[image_id] for image_id, _ in shared])

    def resampled(values: Array) -> Array:
        """Sums over the names of all photos, for the sample itself and for each resample."""
        sums = np.bincount(photo, values, len(photos))
        return np.concatenate([[sums.sum()], weights @ sums])

    rows: dict[str, list[Array]] = {}
    for key in KEYS:
        values = [np.array([getattr(one[name], key) for name in shared]) for one in both]
        # Leave out pairs whose pointing is NaN (the centre is in a crowd region).
        valid = ~np.isnan(values).any(axis=0)
        number = resampled(valid.astype(float))
        rows[key] = [resampled(np.where(valid, v, 0.0)) / number for v in values]
    for name, (key, baseline) in {
        "over_uniform": ("correctness", "uniform"),
        "over_centre": ("correctness", "centre"),
        "pointing_over_centre": ("pointing", "pointing_centre"),
    }.items():
        rows[name] = [rows[key][i] - rows[baseline][i] for i in (0, 1)]
    rows["ratio"] = [rows["correctness"][i] / rows["uniform"][i] for i in (0, 1)]
    print(f"{len(shared)} names in {len(np.unique(photo))} photos\n")
    print("| | equal cells | region geometry | difference | 95% interval |\n|---|---|---|---|---|")
    for key, (old, new) in rows.items():
        low, high = interval((new - old)[1:])
        cells = [
            f"{one[0]:.3f} ({' to '.join(f'{end:.3f}' for end in interval(one[1:]))})"
            for one in (old, new)
        ]
        change = f"{new[0] - old[0]:+.3f} | {low:+.3f} to {high:+.3f}"
        print(f"| {key} | {' | '.join(cells)} | {change} |")


if __name__ == "__main__":
    try:
        main()
    except CaptionerError as problem:
        sys.exit(f"{Path(__file__).name}: {problem}")
