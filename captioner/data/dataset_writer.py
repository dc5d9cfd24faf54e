"""Imported photos become COCO captions files, one a split.

What cannot be used (empty captions, photos without captions, photos that are not on disk) is left
out and counted, never dropped in silence. Nothing is written before everything has been checked.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

from captioner.data.coco import read_captions
from captioner.data.images import image_size
from captioner.data.importers import ImportedPhoto, Splits
from captioner.errors import ConfigError, DataError, ImageError
from captioner.files import atomic_write


@dataclass
class ImportSummary:
    """What `write_coco` wrote and what it left out; ``str()`` of it is for people."""

    files: dict[str, Path] = field(default_factory=dict)
    """Split -> the file written; a split that ended up empty has none."""
    photos: dict[str, int] = field(default_factory=dict)
    captions: dict[str, int] = field(default_factory=dict)
    empty_captions: int = 0
    """Dropped: nothing but white space."""
    photos_without_captions: int = 0
    """Dropped: no caption, or only empty ones."""
    missing_photos: list[str] = field(default_factory=list)
    """Left out: not in the image folder, or no readable picture there."""

    def __str__(self) -> str:
        lines = [
            f"{split}: {count} photos, {self.captions[split]} captions"
            for split, count in self.photos.items()
        ]
        if self.empty_captions:
            lines.append(f"dropped: {self.empty_captions} empty captions")
        if self.photos_without_captions:
            lines.append(f"dropped: {self.photos_without_captions} photos without captions")
        if self.missing_photos:
            lines.append(
                f"left out: {len(self.missing_photos)} photos missing or unreadable in the image"
                f" folder ({_first_three(self.missing_photos)})"
            )
        return "\n".join(lines)


def split_randomly(
    photos: Iterable[ImportedPhoto],
    *,
    validation: float = 0.1,
    test: float = 0.1,
    seed: int = 0,
) -> Splits:
    """Part photos into train, val and test by a hash of seed and file name.

    The same photos and seed give the same splits whatever their order, on every machine. All
    captions of a photo, and photos of one file name, stay together. A part that is asked for gets
    at least one photo; one with fraction 0 is not made.

    Args:
        photos: All photos.
        validation: Fraction of the photos for val.
        test: Fraction of the photos for test.
        seed: Another seed gives other splits.

    Returns:
        The splits, each in the order of its file names.

    Raises:
        ConfigError: The fractions are not in 0..1 or leave nothing for training.
        DataError: There are too few photos.
    """
    if not (0 <= validation <= 1 and 0 <= test <= 1 and validation + test < 1):
        raise ConfigError(
            f"validation {validation} and test {test}: fractions of the photos from 0 on, together"
            " below 1; give smaller ones"
        )
    photos = sorted(photos, key=lambda photo: photo.file_name)
    names = sorted(
        {photo.file_name for photo in photos},
        key=lambda name: hashlib.sha256(f"{seed}:{name}".encode(errors="surrogatepass")).digest(),
    )
    ends, split_of = 0, dict.fromkeys(names, "train")
    for split, fraction in (("val", validation), ("test", test)):
        count = max(1, round(len(names) * fraction)) if fraction else 0
        split_of.update(dict.fromkeys(names[ends : ends + count], split))
        ends += count
    if ends >= len(names):
        raise DataError(f"{len(names)} photos are too few to be split; {ends + 1} are needed")
    splits: Splits = {s: [] for s in ("train", "val", "test") if s in split_of.values()}
    for photo in photos:
        splits[split_of[photo.file_name]].append(photo)
    return splits


def write_coco(
    splits: Splits,
    folder: str | Path,
    *,
    images: Path | None = None,
    force: bool = False,
    first_id: int = 1,
) -> ImportSummary:
    """Write captions_SPLIT.json for every split, as pycocotools reads them.

    Image ids stay where the source has them; other photos get the numbers from ``first_id`` on, or
    from the largest id there is. Captions are stripped. Another split that is in the folder already
    stays, unless it holds a photo of these: it could be tested on what was learned.

    Args:
        splits: What an importer returned.
        folder: Where the files go; made when missing.
        images: The image folder: photos that are not there are left out, the others get their width
            and height in pixels (upright, as `open_image` returns them).
        force: Replace files that exist.
        first_id: Of the photos that have none; sets that are learned from together need other ids.

    Returns:
        What was written and what was left out.

    Raises:
        ConfigError: ``first_id`` is below 0.
        DataError: A file exists, another split that is there holds one of the photos, a photo is
            in two splits, two photos have one id, no photo is left, or writing fails.
    """
    if first_id < 0:
        raise ConfigError(f"first_id is {first_id}; give 0 or more")
    files = {split: Path(folder, f"captions_{split}.json") for split in splits}
    if existing := [str(file) for file in files.values() if file.exists() and not force]:
        raise DataError(f"{existing[0]} exists already; give another folder or --force")
    _refuse_overlap(splits)
    for split in {"train", "val", "test"} - splits.keys():
        _refuse_leak(Path(folder, f"captions_{split}.json"), splits)
    summary = ImportSummary()
    records = {s: _usable(photos, images, summary) for s, photos in splits.items()}
    if not any(records.values()):
        raise DataError(_nothing_left(summary, images))
    _number(records, first_id)
    next_id = 1
    for split, kept in records.items():
        annotations = [
            {"id": number, "image_id": image["id"], "caption": caption}
            for number, (image, caption) in enumerate(
                ((image, caption) for image, captions in kept for caption in captions), next_id
            )
        ]
        next_id += len(annotations)
        summary.photos[split], summary.captions[split] = len(kept), len(annotations)
        if kept:
            _write_split(files[split], split, [image for image, _ in kept], annotations)
            summary.files[split] = files[split]
    return summary


def _refuse_overlap(splits: Splits) -> None:
    split_of: dict[str, str] = {}
    for split, photos in splits.items():
        for photo in photos:
            other = split_of.setdefault(photo.file_name, split)
            if other != split:
                raise DataError(f"{photo.file_name} is in two splits, {other} and {split}")


def _refuse_leak(other: Path, splits: Splits) -> None:
    """Another call's split must hold none of these photos."""
    try:
        names, _ = read_captions([other])
    except DataError:
        return  # not there, or no captions
    held = set(names.values())
    shared = [p.file_name for photos in splits.values() for p in photos if p.file_name in held]
    if shared:
        raise DataError(
            f"{other} is there already and holds {len(shared)} of these photos "
            f"({_first_three(shared)}); remove it, or give another folder"
        )


_Kept: TypeAlias = list[tuple[dict[str, Any], list[str]]]


def _usable(photos: list[ImportedPhoto], images: Path | None, summary: ImportSummary) -> _Kept:
    """Image records (the id may be None yet) with captions; what is dropped goes to the summary."""
    kept: _Kept = []
    for photo in photos:
        captions = [caption.strip() for caption in photo.captions if caption.strip()]
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


def _number(records: dict[str, _Kept], first: int) -> None:
    """Give every image record an id of its own, over all splits."""
    images = [image for kept in records.values() for image, _ in kept]
    names: dict[int, str] = {}
    for image in images:
        if image["id"] is not None:
            if other := names.get(image["id"]):
                raise DataError(f"id {image['id']} belongs to {other} and to {image['file_name']}")
            names[image["id"]] = image["file_name"]
    following = max([first - 1, *names])
    for image in images:
        if image["id"] is None:
            following += 1
            image["id"] = following


def _write_split(
    file: Path, split: str, images: list[dict[str, Any]], annotations: list[dict[str, Any]]
) -> None:
    content = {
        "info": {"description": f"{split} captions, imported by captioner"},
        "licenses": [],
        "images": images,
        "annotations": annotations,
    }
    try:
        atomic_write(file, json.dumps(content) + "\n")
    except OSError as error:
        raise DataError(f"{file}: cannot be written ({error.strerror})") from error


def _nothing_left(summary: ImportSummary, images: Path | None) -> str:
    if summary.missing_photos:
        return (
            f"{images}: none of the {len(summary.missing_photos)} photos is in this folder"
            f" ({_first_three(summary.missing_photos)}); give the folder their names start from"
        )
    return "no photo with a caption is left to write; check the captions"


def _first_three(names: list[str]) -> str:
    return ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
