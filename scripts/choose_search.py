"""Score a model or an ensemble for every combination of some search options.

    python scripts/choose_search.py --annotations COCO/captions_val.json --images COCO/val \
        --vary beam_size 1 3 5 --vary length_penalty 0 0.5 [--style coco] [--model FOLDER ...]

Prints a row per combination: CIDEr, BLEU-4 and the number of distinct words in the captions. The
other options are the model's. Photos are encoded again for every row.
"""

from __future__ import annotations

import argparse
import sys
from itertools import product
from pathlib import Path
from typing import get_args

import yaml

import captioner
from captioner.errors import CaptionerError
from captioner.hardware import Precision


def main() -> None:
    """Print a row per combination, and the one with the highest CIDEr."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", action="append", default=[], help="repeat for an ensemble")
    parser.add_argument("--annotations", required=True)
    parser.add_argument("--images", required=True)
    parser.add_argument("--vary", nargs="+", action="append", default=[], metavar="NAME VALUE")
    parser.add_argument("--style")
    parser.add_argument("--precision", choices=get_args(Precision), default="fp32")
    given = parser.parse_args()
    model = captioner.load(*given.model, precision=given.precision)
    common = {} if given.style is None else {"style": given.style}
    names = [name for name, *_ in given.vary]
    values = [[yaml.safe_load(value) for value in listed] for _, *listed in given.vary]
    searches = [dict(zip(names, found, strict=True)) for found in product(*values)]
    for search in searches:  # a wrong option of the last row fails before the first is measured
        model.options(**common, **search)
    scores = []
    print("| " + " | ".join([*names, "CIDEr", "BLEU-4", "distinct words"]) + " |")
    print("|---" * (len(names) + 3) + "|")
    for search in searches:
        report = captioner.evaluate(
            model=model, annotations=given.annotations, images=given.images, **common, **search
        )
        scores.append(report["metrics"]["CIDEr"])
        measured = [f"{100 * report['metrics'][name]:.1f}" for name in ("CIDEr", "Bleu_4")]
        cells = [*map(str, search.values()), *measured, str(report["statistics"]["vocabulary"])]
        print("| " + " | ".join(cells) + " |", flush=True)
    best = searches[scores.index(max(scores))]
    shown = " ".join(f"--{name.replace('_', '-')} {value}" for name, value in best.items())
    print(f"\nhighest CIDEr: {shown or 'no option was varied'}")


if __name__ == "__main__":
    try:
        main()
    except CaptionerError as problem:
        sys.exit(f"{Path(__file__).name}: {problem}")
