"""Score a model or an ensemble for each beam size and length penalty, and print the best.

    python scripts/choose_search.py [--model FOLDER ...] --images FLICKR8K/images \
        --annotations data/flickr8k/captions_val.json \
        [--beam-sizes 1 3 5 10] [--length-penalties 0 0.5 1]

Prints a table (CIDEr / BLEU-4). Photos are encoded again for every cell.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from captioner.api import load
from captioner.data.coco import read_dataset
from captioner.errors import CaptionerError
from captioner.evaluation.metrics import score


def main() -> None:
    """Print a row per beam size."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", action="append", default=[], help="repeat for an ensemble")
    parser.add_argument("--annotations", required=True)
    parser.add_argument("--images", required=True)
    parser.add_argument("--beam-sizes", type=int, nargs="+", default=[1, 3, 5, 10])
    parser.add_argument("--length-penalties", type=float, nargs="+", default=[0.0, 0.5, 1.0])
    parser.add_argument("--precision", choices=["auto", "fp32", "bf16"], default="fp32")
    options = parser.parse_args()
    images = read_dataset([options.annotations], [options.images])
    model = load(*options.model, precision=options.precision)
    found = {}
    print("| beam | " + " | ".join(f"penalty {p:g}" for p in options.length_penalties) + " |")
    print("|---" * (1 + len(options.length_penalties)) + "|")
    for beam in options.beam_sizes:
        cells = []
        # The penalty has no effect on greedy search.
        for penalty in options.length_penalties[: 1 if beam == 1 else None]:
            search = model.options(beam_size=beam, length_penalty=penalty)
            captions = {}
            results = model.stream((image.path for image in images), search)
            for image, result in zip(images, results, strict=True):
                if result.error is not None:
                    raise result.error
                captions[image.image_id] = result.captions[0].text
            scores = score(captions, {i.image_id: i.captions for i in images}).corpus
            found[beam, penalty] = scores["CIDEr"]
            cells.append(f"{100 * scores['CIDEr']:.1f} / {100 * scores['Bleu_4']:.1f}")
        print(f"| {beam} | " + " | ".join(cells) + " |", flush=True)
    beam, penalty = max(found, key=lambda cell: found[cell])
    print(f"\nhighest CIDEr: --beam-size {beam} --length-penalty {penalty:g}")


if __name__ == "__main__":
    try:
        main()
    except CaptionerError as problem:
        sys.exit(f"{Path(__file__).name}: {problem}")
