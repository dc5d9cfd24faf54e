"""Hold out photos with five captions for a comparison, and select photos to train on.

    python scripts/hold_out.py COCO/captions_train.json FOLDER [--photos 400] [--train 16000]

Writes FOLDER/held.json and FOLDER/train.json, COCO captions files without a photo in common. The
selection depends on ids and numbers of captions alone. ``docs/results.md`` compares with it what
the shipped model's validation photos cannot show, such as the aspect ratio, which they have lost.
"""

from __future__ import annotations

import argparse
import json
import random
from collections import Counter
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from captioner.data.coco import Fields, read_coco
from captioner.errors import DataError
from captioner.files import atomic_write

FIELDS: Fields = {"images": {"id": (int,)}, "annotations": {"image_id": (int,)}}

REFERENCES = 5
"""Captions of a photo that is held out, or more."""


def select(content: Mapping[str, Any], photos: int, train: int) -> tuple[set[int], set[int]]:
    """Image ids to hold out and to train on.

    Raises:
        SystemExit: There are too few photos.
    """
    captions = Counter(annotation["image_id"] for annotation in content["annotations"])
    several = sorted(i for i, count in captions.items() if count >= REFERENCES)
    if len(several) < photos or len(captions) < photos + train:
        raise SystemExit(
            f"{len(captions)} photos, {len(several)} of them with {REFERENCES} or more captions; "
            f"give a smaller --photos ({photos}) or --train ({train})"
        )
    random.Random(0).shuffle(several)
    held = set(several[:photos])
    others = sorted(captions.keys() - held)
    random.Random(1).shuffle(others)
    return held, set(others[:train])


def part(content: Mapping[str, Any], image_ids: Collection[int]) -> dict[str, Any]:
    """A captions file reduced to some photos."""
    return {
        **content,
        "images": [image for image in content["images"] if image["id"] in image_ids],
        "annotations": [one for one in content["annotations"] if one["image_id"] in image_ids],
    }


def main() -> None:
    """Write both files."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("annotations", type=Path, help="COCO captions file")
    parser.add_argument("folder", type=Path, help="where to write")
    parser.add_argument("--photos", type=int, default=400, help="number to hold out")
    parser.add_argument("--train", type=int, default=16_000, help="number to train on")
    given = parser.parse_args()
    try:
        content = read_coco(given.annotations, FIELDS, "captions")
    except DataError as error:
        raise SystemExit(str(error)) from error
    held, train = select(content, given.photos, given.train)
    given.folder.mkdir(parents=True, exist_ok=True)
    for name, image_ids in (("held", held), ("train", train)):
        reduced = part(content, image_ids)
        atomic_write(given.folder / f"{name}.json", json.dumps(reduced))
        print(f"{name}.json: {len(reduced['images'])} photos")


if __name__ == "__main__":
    main()
