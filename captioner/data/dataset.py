"""Writes imported photos as COCO captions files, one per split.

Empty captions, photos without captions and photos that are not on disk are left out and counted.
Nothing is written before everything has been checked.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from captioner.data.coco import read_captions
from captioner.data.images import image_size
from captioner.data.importers import (
    TABLES,
    UNSPLIT,
    USUAL,
    Columns,
    ImportedPhoto,
    Splits,
    detect_layout,
    find_source,
    import_captions,
)
from captioner.errors import ConfigError, DataError, ImageError, counted
from captioner.files import atomic_write

EMPTY = ("", "nan")
"""Captions that are missing, as pandas writes them, in lower case."""


@dataclass
class ImportSummary:
    """What `write_coco` wrote and what it left out; ``str()`` formats it."""

    files: dict[str, Path] = field(default_factory=dict)
    """File by split; an empty split has none."""
    photos: dict[str, int] = field(default_factory=dict)
    captions: dict[str, int] = field(default_factory=dict)
    empty_captions: int = 0
    """Left out: white space, or nan."""
    photos_without_captions: int = 0
    """Left out: no captions, or only empty ones."""
    missing_photos: list[str] = field(default_factory=list)
    """Left out: not in the image folder, or not readable."""

    def __str__(self) -> str:
        lines = [
            f"{split}: {counted(count, 'photo')}, {counted(self.captions[split], 'caption')}"
            for split, count in self.photos.items()
        ]
        if self.empty_captions:
            lines.append(f"dropped: {self.empty_captions} empty captions")
        if self.photos_without_captions:
            lines.append(f"dropped: {self.photos_without_captions} photos without captions")
        if missing := self.missing_photos:
            what = "photos missing or unreadable in the image folder"
            lines.append(f"dropped: {len(missing)} {what} (first: {missing[0]})")
        return "\n".join(lines)


def prepare_dataset(
    source: str | Path,
    folder: str | Path,
    *,
    layout: str = "auto",
    columns: Columns = USUAL,
    images: str | Path | None = None,
    validation: float = 0.1,
    test: float = 0.0,
    seed: int = 0,
    first_id: int = 1,
    force: bool = False,
) -> ImportSummary:
    """Convert captions in another layout to COCO captions files.

    See `import_captions`, `write_coco` and, for a source without validation photos,
    `split_randomly`, which splits its training photos; a layout of auto is that of `detect_layout`.
    """
    source = find_source(source, layout)
    layout = detect_layout(source, columns) if layout == "auto" else layout
    if columns != USUAL and layout not in TABLES:
        raise ConfigError(
            f"{source} ({layout}) has no columns; leave out --file-column and --caption-column"
        )
    splits = import_captions(source, layout, columns)
    if "val" not in splits and (whole := {UNSPLIT, "train"} & splits.keys()):
        photos = [photo for name in whole for photo in splits.pop(name)]
        test = 0.0 if "test" in splits else test
        splits |= split_randomly(photos, validation=validation, test=test, seed=seed)
    return write_coco(splits, folder, images=images, force=force, first_id=first_id)


def split_randomly(
    photos: Iterable[ImportedPhoto],
    *,
    validation: float = 0.1,
    test: float = 0.1,
    seed: int = 0,
) -> Splits:
    """Split photos into train, val and test by a hash of seed and file name.

    The same photos and seed give the same splits, in any order and on any machine. Photos that
    share a file name stay together. A split gets at least one photo, unless its fraction is 0.

    Returns:
        The non-empty splits, each sorted by file name.

    Raises:
        ConfigError: A fraction is not in 0..1, or nothing is left for training.
        DataError: There are too few photos.
    """
    if not (0 <= validation <= 1 and 0 <= test <= 1 and validation + test < 1):
        raise ConfigError(
            f"validation is {validation} and test is {test}; give fractions of the photos, 0 or"
            " more and together below 1"
        )

    def digest(name: str) -> bytes:
        return hashlib.sha256(f"{seed}:{name}".encode(errors="surrogatepass")).digest()

    photos = sorted(photos, key=lambda photo: photo.file_name)
    names = sorted({photo.file_name for photo in photos}, key=digest)
    first, second = (max(1, round(len(names) * part)) if part else 0 for part in (validation, test))
    if (needed := first + second + 1) > len(names):
        raise DataError(f"{len(names)} photos are too few to split; at least {needed} are needed")
    parts = {"train": names[needed - 1 :], "val": names[:first], "test": names[first : needed - 1]}
    split_of = {name: split for split, its in parts.items() for name in its}
    splits: Splits = {split: [] for split, its in parts.items() if its}
    for photo in photos:
        splits[split_of[photo.file_name]].append(photo)
    return splits


def write_coco(
    splits: Splits,
    folder: str | Path,
    *,
    images: str | Path | None = None,
    force: bool = False,
    first_id: int = 1,
) -> ImportSummary:
    """Write captions_SPLIT.json for each split, in the format that pycocotools reads.

    Image ids of the source are kept; other photos are numbered from ``first_id``, or from the
    largest id of the source + 1 if that is greater. Captions are stripped. The folder may already
    hold other splits, but not with any of these photos: the test set must not leak into training.

    Args:
        splits: From an importer.
        folder: Created if missing.
        images: Image folder; photos that are not in it are left out, the others get their width and
            height in pixels (upright).
        force: Replace existing files.
        first_id: First id for photos without one; data sets used together need distinct ids.

    Raises:
        DataError: A file exists, a photo is in an existing split, or no photo is left.
        OSError: A file cannot be written.
    """
    files = {split: Path(folder, f"captions_{split}.json") for split in splits}
    if existing := [str(file) for file in files.values() if file.exists() and not force]:
        raise DataError(f"{existing[0]} exists; give another folder or --force")
    _refuse_overlap(splits, Path(folder))
    summary = ImportSummary()
    records = {s: _usable(photos, images, summary) for s, photos in splits.items()}
    if not any(records.values()):
        if not (missing := summary.missing_photos):
            raise DataError("no photo has a caption; check the captions")
        raise DataError(
            f"{images}: none of the {len(missing)} photos is in this folder (first: {missing[0]}); "
            "give the folder that their names are relative to"
        )
    ids = [image["id"] for kept in records.values() for image, _ in kept if image["id"] is not None]
    new_ids, numbers = itertools.count(max([first_id - 1, *ids]) + 1), itertools.count(1)
    for split, kept in records.items():
        for image, _ in kept:
            image["id"] = next(new_ids) if image["id"] is None else image["id"]
        annotations = [
            {"id": next(numbers), "image_id": image["id"], "caption": caption}
            for image, captions in kept
            for caption in captions
        ]
        summary.photos[split], summary.captions[split] = len(kept), len(annotations)
        if kept:
            content = {
                "info": {"description": f"{split} captions, imported by captioner"},
                "licenses": [],
                "images": [image for image, _ in kept],
                "annotations": annotations,
            }
            atomic_write(files[split], json.dumps(content) + "\n")
            summary.files[split] = files[split]
    return summary


def _refuse_overlap(splits: Splits, folder: Path) -> None:
    """Refuse a photo that is in a split that the folder already holds."""
    given = {photo.file_name for photos in splits.values() for photo in photos}
    for split in {"train", "val", "test"} - splits.keys():
        file = folder / f"captions_{split}.json"
        try:
            names, _ = read_captions([file])
        except DataError:
            continue  # missing, or not captions
        if shared := sorted(given.intersection(names.values())):
            raise DataError(
                f"{file} exists and holds {len(shared)} of these photos (first: {shared[0]}); "
                "remove it, or give another folder"
            )


def _usable(
    photos: list[ImportedPhoto], images: str | Path | None, summary: ImportSummary
) -> list[tuple[dict[str, Any], list[str]]]:
    """Image records (ids may be None) with captions; counts what is dropped in the summary."""
    kept = []
    for photo in photos:
        captions = [text for text in map(str.strip, photo.captions) if text.lower() not in EMPTY]
        summary.empty_captions += len(photo.captions) - len(captions)
        record: dict[str, Any] = {"id": photo.image_id, "file_name": photo.file_name}
        if not captions:
            summary.photos_without_captions += 1
            continue
        if images is not None:
            try:
                record["width"], record["height"] = image_size(Path(images, photo.file_name))
            except ImageError:
                summary.missing_photos.append(photo.file_name)
                continue
        kept.append((record, captions))
    return kept
