"""Photos of noise, COCO files about photos, settings of a run, and what a folder holds."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image


def noise_photos(
    folder: Path, names: Iterable[str], size: tuple[int, int] = (16, 12)
) -> list[Path]:
    """Photos of noise in one of seven colours; the folder is made."""
    folder.mkdir(exist_ok=True)
    paths = [folder / name for name in names]
    noise = np.random.default_rng(0).integers(256, size=(len(paths), *size[::-1], 3), dtype="u1")
    for number, (path, pixels) in enumerate(zip(paths, noise, strict=True)):
        colour = (number % 7 + 1) >> np.arange(3) & 1
        Image.fromarray(pixels * colour.astype(np.uint8)).save(path)
    return paths


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def images_of(names: Iterable[str], first: int = 1) -> list[dict[str, Any]]:
    """COCO's entries of photos of 40 x 32 pixels."""
    return [
        {"id": number, "file_name": name, "width": 40, "height": 32}
        for number, name in enumerate(names, first)
    ]


def write_captions(path: Path, captions: Mapping[str, Sequence[str]], first: int = 1) -> Path:
    """A COCO file with the captions of each photo, whose ids count from ``first``."""
    images = images_of(captions, first)
    pairs = [(image["id"], text) for image in images for text in captions[image["file_name"]]]
    annotations = [{"id": n, "image_id": i, "caption": text} for n, (i, text) in enumerate(pairs)]
    path.write_text(json.dumps({"images": images, "annotations": annotations}), encoding="utf-8")
    return path


def write_dogs(path: Path, names: Sequence[str], count: int, first: int = 1) -> Path:
    """A COCO file in which a dog fills the left half of the first ``count`` photos."""
    images = images_of(names, first)
    dog = {"category_id": 18, "iscrowd": 0, "segmentation": [[0, 0, 20, 0, 20, 32, 0, 32]]}
    dogs = [{"id": image["id"], "image_id": image["id"], **dog} for image in images[:count]]
    kinds = [{"id": 1, "name": "person"}, {"id": 18, "name": "dog"}]
    path.write_text(json.dumps({"images": images, "annotations": dogs, "categories": kinds}))
    return path


def run_settings(captions: Path, photos: Path, **sections: dict[str, Any]) -> dict[str, Any]:
    """The config of a run of a tiny model with random weights, to train and validate on the photos.

    The sections add settings to the config's, or replace them.
    """
    data = {"train_annotations": [str(captions)], "val_annotations": [str(captions)]}
    data |= {"images": [str(photos)], "vocabulary_threshold": 1, "workers": 0}
    settings: dict[str, dict[str, Any]] = {
        "data": data,
        "encoder": {"name": "timm/test_resnet", "weights": "none", "image_size": 48},
        "decoder": {"embed_dim": 8, "hidden_dim": 8, "attention_dim": 8},
        "training": {},
        "search": {"beam_size": 2, "max_length": 6},
    }
    return {name: own | sections.get(name, {}) for name, own in settings.items()}
