"""Measure how varied the captions of a model are, in one style, on photos with captions.

    python scripts/studies/variety.py --annotations COCO/captions_val.json --images COCO/val \
        [--train-annotations COCO/captions_train.json] [--model FOLDER] [--style coco]

Prints a table: distinct words of the best captions, the fraction of best captions that are not
among the training captions, and mBLEU-4 of five samples per photo (each against the other four,
averaged; lower is more varied; Shetty et al. 2017, arXiv:1703.10476). The row for people is the
same for the reference captions of photos with five or more.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import get_args

from captioner.data.coco import read_captions, read_dataset
from captioner.errors import CaptionerError
from captioner.evaluation.metrics import score
from captioner.hardware import Precision
from captioner.inference.captioner import load
from captioner.text.tokenizer import tokenize

SAMPLES = 5
TEMPERATURE = 1.0


def main() -> None:
    """Print one row for the model and one for people."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--annotations", required=True)
    parser.add_argument("--images", required=True)
    parser.add_argument("--train-annotations", nargs="*", default=[])
    parser.add_argument("--model", default="shipped")
    parser.add_argument("--style", default="")
    parser.add_argument("--precision", choices=get_args(Precision), default="fp32")
    options = parser.parse_args()
    photos = read_dataset([options.annotations], [options.images])
    model = load(options.model, precision=options.precision)
    paths = [photo.path for photo in photos]

    def captions(**search: object) -> dict[int, list[str]]:
        results = model.stream(paths, style=options.style, **search)
        found = {}
        for photo, result in zip(photos, results, strict=True):
            if result.error is not None:
                raise result.error
            found[photo.image_id] = [caption.text for caption in result.captions]
        return found

    best = {image: texts[0] for image, texts in captions().items()}
    samples = captions(temperature=TEMPERATURE, num_captions=SAMPLES)
    people = {p.image_id: list(p.captions[:SAMPLES]) for p in photos if len(p.captions) >= SAMPLES}
    first = {image: texts[0] for image, texts in people.items()}
    known = None
    if options.train_annotations:
        texts = read_captions(options.train_annotations)[1].values()
        known = {tuple(tokenize(text)) for group in texts for text in group}
    print(f"| {len(photos)} photos | distinct words | new captions | mBLEU-4 |")
    print("|---|---|---|---|")
    print(row("model", best, known, samples))
    print(row("people", first, known, people))


def row(
    name: str,
    best: Mapping[int, str],
    known: set[tuple[str, ...]] | None,
    groups: Mapping[int, Sequence[str]],
) -> str:
    """One line of the table."""
    tokens = [tuple(tokenize(text)) for text in best.values()]
    words = len({word for caption in tokens for word in caption})
    new = "" if known is None else f"{sum(t not in known for t in tokens) / len(tokens):.0%}"
    return f"| {name} | {words} | {new} | {100 * mbleu(groups):.1f} |"


def mbleu(groups: Mapping[int, Sequence[str]]) -> float:
    """Corpus BLEU-4 of each caption of a photo against its others, averaged over the captions."""
    count = min(map(len, groups.values()))
    scores = []
    for number in range(count):
        one = {image: texts[number] for image, texts in groups.items()}
        others = {
            image: [text for place, text in enumerate(texts[:count]) if place != number]
            for image, texts in groups.items()
        }
        scores.append(score(one, others).corpus["Bleu_4"])
    return sum(scores) / count


if __name__ == "__main__":
    try:
        main()
    except CaptionerError as problem:
        sys.exit(f"{Path(__file__).name}: {problem}")
