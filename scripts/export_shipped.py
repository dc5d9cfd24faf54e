"""Write the 8-bit graphs of the shipped model, its default on CPUs, beside its weights.

    python scripts/export_shipped.py \
        --annotations COCO/captions_train.json --images COCO/train \
        --annotations data/flickr8k/captions_train.json --images FLICKR8K/images

Give the training photos of every data set, never those whose captions are scored: a sample of them
calibrates the ranges of the activations. scripts/ship_model.py calls this for a new model.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Sequence
from pathlib import Path

from captioner.data.coco import read_dataset
from captioner.errors import CaptionerError
from captioner.inference.export.folder import export
from captioner.inference.folder import SHIPPED_MODEL

PHOTOS = 100
"""Calibration photos of each data set."""


def export_shipped(model: Path, annotations: Sequence[Path], images: Sequence[Path]) -> None:
    """Write 8-bit graphs into a model folder, calibrated on photos of its training data."""
    photos: list[Path] = []
    for captions, folder in zip(annotations, images, strict=True):
        known = sorted(image.path for image in read_dataset([str(captions)], [str(folder)]))
        photos += random.Random(0).sample(known, min(PHOTOS, len(known)))
    done = export(model, model, photos, weights=True)
    for name, megabytes in done.sizes.items():
        print(f"{model / name}  {megabytes:.1f} MB")
    if done.equal is not None:
        print("the same caption as float32 for {} of {} calibration photos".format(*done.equal))


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--annotations", type=Path, action="append", required=True)
    parser.add_argument("--images", type=Path, action="append", required=True)
    parser.add_argument("--model", type=Path, default=SHIPPED_MODEL)
    given = parser.parse_args()
    if len(given.annotations) != len(given.images):
        parser.error("give one --images for every --annotations")
    export_shipped(given.model, given.annotations, given.images)


if __name__ == "__main__":
    try:
        main()
    except CaptionerError as problem:
        sys.exit(f"{Path(__file__).name}: {problem}")
