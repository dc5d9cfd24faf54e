"""Conversion of imported photos to COCO captions files, with one file per split.

Empty captions, photos without captions and photos that are not on disk are left out and counted.
Everything is checked before the first file is written.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from captioner.data.coco import read_photos
from captioner.data.example import NO_ID, UNSPLIT, Example
from captioner.data.folders import NamedFiles
from captioner.data.images import image_size
from captioner.data.importers import import_captions
from captioner.data.options import DatasetOptions
from captioner.errors import ConfigError, DataError, ImageError
from captioner.files import atomic_write
from captioner.messages import counted

EMPTY = ("", "nan")
"""Texts that pandas writes for a missing caption, in lower case."""


@dataclass
class ImportSummary:
    """The files that `write_coco` wrote, and the photos and captions that it left out."""

    files: dict[str, Path] = field(default_factory=dict)
    """The file of each split. An empty split has no file."""
    photos: dict[str, int] = field(default_factory=dict)
    """Number of photos written, by split."""
    captions: dict[str, int] = field(default_factory=dict)
    """Number of captions written, by split."""
    empty_captions: int = 0
    """Number of captions left out because they are white space or nan."""
    photos_without_captions: int = 0
    """Number of photos left out because they have no captions, or only empty captions."""
    missing_photos: list[str] = field(default_factory=list)
    """Photos left out because they are not in the image folder or cannot be read."""

    def __str__(self) -> str:
        lines = [
            f"{split}: {counted(count, 'photo')}, {counted(self.captions[split], 'caption')}"
            for split, count in self.photos.items()
        ]
        if self.empty_captions:
            lines.append(f"dropped: {counted(self.empty_captions, 'empty caption')}")
        if count := self.photos_without_captions:
            lines.append(f"dropped: {counted(count, 'photo')} without captions")
        if missing := self.missing_photos:
            what = f"{counted(len(missing), 'photo')} missing or unreadable in the image folder"
            lines.append(f"dropped: {what} (first: {missing[0]})")
        return "\n".join(lines)


def prepare_dataset(options: DatasetOptions) -> ImportSummary:
    """Convert captions from any supported layout to COCO captions files.

    `import_captions` reads the captions, and `write_coco` writes the files. If the source has no
    validation photos, `split_randomly` splits its training photos.
    """
    photos = import_captions(options.source, options.layout, options)
    splits = {photo.split for photo in photos}
    whole = [photo for photo in photos if photo.split in (UNSPLIT, "train")]
    if whole and "val" not in splits:
        test = 0.0 if "test" in splits else options.test
        photos = [photo for photo in photos if photo.split not in (UNSPLIT, "train")]
        photos += split_randomly(whole, validation=options.val, test=test, seed=options.seed)
    return write_coco(photos, options)


def split_randomly(
    photos: Sequence[Example], *, validation: float = 0.1, test: float = 0.1, seed: int = 0
) -> list[Example]:
    """Split photos randomly into train, val and test, by a hash of seed and file name.

    The same photos and seed result in the same splits, in any order and on any machine. Photos that
    share a file name stay together. A split gets at least one photo, unless its fraction is 0.

    Returns:
        The photos with their splits, sorted by split and file name.

    Raises:
        ConfigError: A fraction is not in 0..1, or no photo is left for training.
        DataError: There are too few photos.
    """
    if not (0 <= validation <= 1 and 0 <= test <= 1 and validation + test < 1):
        raise ConfigError(
            f"val is {validation} and test is {test}; use fractions from 0 to 1 with a sum below 1"
        )

    def digest(name: Path) -> bytes:
        """Return a random sort key that depends only on the seed and the file name."""
        return hashlib.sha256(f"{seed}:{name.as_posix()}".encode(errors="surrogatepass")).digest()

    names = sorted({photo.path for photo in photos}, key=digest)
    first, second = (max(1, round(len(names) * part)) if part else 0 for part in (validation, test))
    if (needed := first + second + 1) > len(names):
        raise DataError(
            f"{counted(len(names), 'photo')} cannot be split with val {validation} and test "
            f"{test}; use at least {needed} photos"
        )
    splits = ["val"] * first + ["test"] * second + ["train"] * len(names)
    split_of = dict(zip(names, splits, strict=False))
    found = [replace(photo, split=split_of[photo.path]) for photo in photos]
    return sorted(found, key=lambda one: (("train", "val", "test").index(one.split), str(one.path)))


def write_coco(photos: Sequence[Example], options: DatasetOptions) -> ImportSummary:
    """Write a file captions_SPLIT.json for each split, in the format that pycocotools reads.

    Image ids from the source are kept. Photos without an id are numbered from ``first_id``, or from
    the largest id in the source + 1 if that is greater. White space around captions is removed. The
    folder may already contain files of other splits. These files must not contain any of the
    photos, because the test set must not leak into training.

    Raises:
        DataError: A file exists, a photo is in an existing split, or no photo is left.
        OSError: A file cannot be written.
    """
    splits = dict.fromkeys(photo.split for photo in photos)
    files = {split: Path(options.output, f"captions_{split}.json") for split in splits}
    if existing := [str(file) for file in files.values() if file.exists() and not options.force]:
        raise DataError(f"{existing[0]} already exists; choose a different folder or add --force")
    for split in ("train", "val", "test"):
        file = Path(options.output, f"captions_{split}.json")
        try:
            held = {} if split in splits else read_photos([file])
        except DataError:
            continue  # the file is missing, or has no captions
        names = {photo.path for photo in photos}
        if shared := sorted(names.intersection(photo.path for photo in held.values())):
            raise DataError(
                f"{file} already contains {len(shared)} of the imported photos (first: "
                f"{shared[0]}); remove the file or choose a different folder"
            )
    summary = ImportSummary()
    files_in = None if options.images is None else NamedFiles(Path(options.images))
    kept = [found for photo in photos if (found := _usable(photo, files_in, summary))]
    if not kept:
        if not (missing := summary.missing_photos):
            raise DataError(f"{options.source}: no photo has a caption; add captions to the source")
        raise DataError(
            f"{options.source}: no photo can be read (first: "
            f"{Path(options.images or '', missing[0])}); correct --images, or write the names as "
            "they are in this folder, with the same extension and case"
        )
    ids = [photo.image_id for photo, _ in kept if photo.image_id != NO_ID]
    new_ids, numbers = itertools.count(max([options.first_id - 1, *ids]) + 1), itertools.count(1)
    for split, file in files.items():
        entries: list[dict[str, Any]] = []
        annotations: list[dict[str, Any]] = []
        for photo, size in kept:
            if photo.split == split:
                image_id = next(new_ids) if photo.image_id == NO_ID else photo.image_id
                entries.append({"id": image_id, "file_name": photo.path.as_posix()} | size)
                annotations += [
                    {"id": next(numbers), "image_id": image_id, "caption": caption}
                    for caption in photo.captions
                ]
        summary.photos[split], summary.captions[split] = len(entries), len(annotations)
        if entries:
            info = {"description": f"{split} captions, imported by captioner"}
            content = {"info": info, "licenses": [], "images": entries, "annotations": annotations}
            atomic_write(file, json.dumps(content) + "\n")
            summary.files[split] = file
    return summary


def _usable(
    photo: Example, images: NamedFiles | None, summary: ImportSummary
) -> tuple[Example, dict[str, int]] | None:
    """Prepare a photo for writing, or return None if it has no captions or cannot be read.

    Args:
        photo: The photo.
        images: Files of the photo folder, or None if the photos are not looked up.
        summary: Counts the photos and captions that are left out.

    Returns:
        The photo with its name on disk and without empty captions, and its width and height in
        pixels ({} if ``images`` is None).
    """
    captions = tuple(text for text in map(str.strip, photo.captions) if text.lower() not in EMPTY)
    summary.empty_captions += len(photo.captions) - len(captions)
    if not captions:
        summary.photos_without_captions += 1
        return None
    size, name = {}, photo.path
    if images is not None:
        path = images.find(str(name)) or images.folder / name
        try:
            size["width"], size["height"] = image_size(path)
        except ImageError:
            summary.missing_photos.append(str(name))
            return None
        if path.is_relative_to(images.folder):
            name = path.relative_to(images.folder)
    return replace(photo, path=name, captions=captions), size
