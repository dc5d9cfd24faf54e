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
from typing import Any, get_args

import yaml

from captioner.data.coco import read_dataset
from captioner.errors import CaptionerError
from captioner.evaluation.metrics import score
from captioner.hardware import Precision
from captioner.inference.captioner import load
from captioner.text.tokenizer import tokenize


def main() -> None:
    """Print a row per combination, and the one with the highest CIDEr."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", action="append", default=[], help="repeat for an ensemble")
    parser.add_argument("--annotations", required=True)
    parser.add_argument("--images", required=True)
    parser.add_argument("--vary", nargs="+", action="append", default=[], metavar="NAME VALUE")
    parser.add_argument("--style", default=None)
    parser.add_argument("--precision", choices=get_args(Precision), default="fp32")
    options = parser.parse_args()
    photos = read_dataset([options.annotations], [options.images])
    model = load(*options.model, precision=options.precision)
    common = {} if options.style is None else {"style": options.style}
    names = [name for name, *_ in options.vary]
    values = [[yaml.safe_load(value) for value in given] for _, *given in options.vary]
    searches: list[dict[str, Any]] = [
        dict(zip(names, combination, strict=True)) for combination in product(*values)
    ]
    for search in searches:  # a wrong option of the last row fails before the first is measured
        model.options(**common, **search)
    references = {photo.image_id: list(photo.captions) for photo in photos}
    found = []
    print("| " + " | ".join([*names, "CIDEr", "BLEU-4", "distinct words"]) + " |")
    print("|---" * (len(names) + 3) + "|")
    for search in searches:
        captions = {}
        results = model.stream((photo.path for photo in photos), **common, **search)
        for photo, result in zip(photos, results, strict=True):
            if result.error is not None:
                raise result.error
            captions[photo.image_id] = result.captions[0].text
        scores = score(captions, references).corpus
        words = {word for text in captions.values() for word in tokenize(text)}
        found.append(scores["CIDEr"])
        measured = [f"{100 * scores['CIDEr']:.1f}", f"{100 * scores['Bleu_4']:.1f}"]
        cells = [*map(str, search.values()), *measured, str(len(words))]
        print("| " + " | ".join(cells) + " |", flush=True)
    best = searches[found.index(max(found))]
    shown = " ".join(f"--{name.replace('_', '-')} {value}" for name, value in best.items())
    print(f"\nhighest CIDEr: {shown or 'no option was varied'}")


if __name__ == "__main__":
    try:
        main()
    except CaptionerError as problem:
        sys.exit(f"{Path(__file__).name}: {problem}")
