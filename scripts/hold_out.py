"""Hold out photos with five or more captions for a comparison, and select others to train on.

    python scripts/hold_out.py COCO/captions_train.json FOLDER [--photos 400] [--train 16000]

The script writes two COCO captions files, FOLDER/held.json and FOLDER/train.json, which have no
photo in common. The selection depends only on the id of each photo and the number of its captions.
Unlike the shipped model's validation photos, these photos have kept their aspect ratio.
"""

from __future__ import annotations

import argparse
import json
import random
from collections import Counter
from pathlib import Path

from captioner.files import atomic_write

REFERENCES = 5
"""Minimum number of captions that a photo needs to be held out."""


def main() -> None:
    """Select the photos and write both files."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("annotations", type=Path, help="COCO captions file to select photos from")
    parser.add_argument("folder", type=Path, help="write the two files to this folder")
    parser.add_argument("--photos", type=int, default=400, help="number of photos to hold out")
    parser.add_argument("--train", type=int, default=16_000, help="number of photos to train on")
    given = parser.parse_args()
    content = json.loads(given.annotations.read_text(encoding="utf-8"))
    captions = Counter(annotation["image_id"] for annotation in content["annotations"])
    several = sorted(i for i, count in captions.items() if count >= REFERENCES)
    random.Random(0).shuffle(several)
    held = set(several[: given.photos])
    others = sorted(captions.keys() - held)
    random.Random(1).shuffle(others)
    given.folder.mkdir(parents=True, exist_ok=True)
    for name, ids in (("held", held), ("train", set(others[: given.train]))):
        images = [image for image in content["images"] if image["id"] in ids]
        kept = [one for one in content["annotations"] if one["image_id"] in ids]
        written = {**content, "images": images, "annotations": kept}
        atomic_write(given.folder / f"{name}.json", json.dumps(written))


if __name__ == "__main__":
    main()
