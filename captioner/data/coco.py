"""COCO annotation files: checked reading, and captions joined with the photos on disk."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeAlias

from captioner.errors import DataError
from captioner.files import read_input

Fields: TypeAlias = Mapping[str, Mapping[str, tuple[type, ...]]]
"""The fields that a reader needs: list in the file -> field -> accepted types."""

CAPTION_FIELDS: Fields = {
    "images": {"id": (int,), "file_name": (str,)},
    "annotations": {"image_id": (int,), "caption": (str,)},
}


@dataclass(frozen=True)
class CaptionedImage:
    """One photo with all its captions, so that a step encodes each photo once."""

    image_id: int
    path: Path
    captions: tuple[str, ...]
    style: str = ""
    """See ``Vocabulary.start``."""
    source: int = 0
    """Index of the captions file, in the order given; of several that list the photo, the first."""
    labels: tuple[int | str, ...] = ()
    """Object classes: COCO's category ids or names, from the field ``labels`` of the image."""


def read_coco(
    path: str | Path, fields: Fields, content: Literal["captions", "instances"]
) -> dict[str, Any]:
    """Read a COCO file of this content and check the fields that the caller relies on.

    Raises:
        DataError: It is missing or not JSON, has no such list, an entry lacks a field or has one of
            another type, or two images share an id.
    """
    data = read_json(Path(path))
    for part, types in fields.items():
        entries = data.get(part)
        if not isinstance(entries, list) or not entries:
            raise DataError(f"{path} has no {part!r}; give a COCO {content} file")
        for number, entry in enumerate(entries):
            for key, accepted in types.items():
                if not isinstance(entry, dict) or type(entry.get(key)) not in accepted:
                    where = f"{path}: {part}[{number}]"
                    raise DataError(f"{where} lacks a valid {key!r}; give a COCO {content} file")
    counts = Counter(image["id"] for image in data["images"])
    if repeated := [image_id for image_id, count in counts.items() if count > 1]:
        raise DataError(f"{path}: image id {repeated[0]} occurs twice; give each image its own id")
    return data


def read_captions(
    annotations: Sequence[str | Path], *, renumber: bool = False
) -> tuple[dict[int, str], dict[int, list[str]]]:
    """Read COCO captions files; a file given twice is read once.

    ``renumber`` gives an image a new id if its own is that of another image in an earlier file: the
    numbers after the largest id, in the files' order. Only where nothing else, such as features or
    results, refers to the ids. Otherwise, such a clash is an error.

    Returns:
        File name by image id, and captions by image id (every image has an entry).

    Raises:
        DataError: A file is missing or not COCO captions, or two files give different file names
            for an image id.
    """
    found = _read_files(annotations, renumber)
    names = {image_id: photo.name for image_id, photo in found.items()}
    return names, {image_id: photo.captions for image_id, photo in found.items()}


@dataclass
class _Photo:
    """See `CaptionedImage`."""

    name: str
    source: int
    captions: list[str] = field(default_factory=list)
    labels: tuple[int | str, ...] = ()


def _read_files(annotations: Sequence[str | Path], renumber: bool) -> dict[int, _Photo]:
    files: dict[Path, int] = {}
    for index, path in enumerate(annotations):
        files.setdefault(Path(path).resolve(), index)
    contents = {path: read_coco(path, CAPTION_FIELDS, "captions") for path in files}
    following = 1 + max(
        (image["id"] for data in contents.values() for image in data["images"]), default=0
    )
    found: dict[int, _Photo] = {}
    for path, data in contents.items():
        ids: dict[int, int] = {}  # from those of this file
        for image in data["images"]:
            image_id, name = image["id"], image["file_name"]
            if image_id in found and found[image_id].name != name:
                if not renumber:
                    raise DataError(
                        f"{path}: image id {image_id} is {name} here but {found[image_id].name} "
                        "in an earlier file; give files whose ids agree (captioner prepare dataset "
                        "has --first-id)"
                    )
                image_id, following = following, following + 1
            ids[image["id"]] = image_id
            photo = found.setdefault(image_id, _Photo(name, files[path]))
            photo.labels = photo.labels or _labels(image)
        for entry in data["annotations"]:
            # The images may be listed in an earlier file.
            image_id = ids.get(entry["image_id"], entry["image_id"])
            if image_id not in found:
                raise DataError(
                    f"{path}: a caption belongs to image {entry['image_id']}, which is not in the "
                    "file; remove the caption or add the image"
                )
            if caption := entry["caption"].strip():
                found[image_id].captions.append(caption)
    return found


def read_dataset(
    annotations: Sequence[str | Path],
    images: Sequence[str | Path] | None,
    *,
    ids: Container[int] | None = None,
    renumber: bool = False,
) -> list[CaptionedImage]:
    """Join the captions of COCO files with the photos on disk.

    Args:
        annotations: See `read_captions`.
        images: Image folders, searched in order. None: the photos are in shards, and their paths
            are their file names.
        ids: Image ids to keep; None: all.
        renumber: See `read_captions`.

    Returns:
        The photos that have captions, sorted by image id.

    Raises:
        DataError: No annotations or no captioned photos, or a folder or photos are missing.
    """
    if not annotations:
        raise DataError("no annotations were given; give at least one COCO captions file")
    found = dict(sorted(_read_files(annotations, renumber).items()))
    names = {
        image_id: photo.name
        for image_id, photo in found.items()
        if photo.captions and (ids is None or image_id in ids)
    }
    source = ", ".join(Path(path).name for path in annotations)
    if not names:
        if ids is not None:
            raise DataError(f"no captioned photo of {source} is in this part of karpathy_split")
        raise DataError(f"{source} has no captioned photos; give a COCO captions file")
    if images is None:
        paths = {image_id: Path(name) for image_id, name in names.items()}
    else:
        paths = locate_photos(names, images, source)
    photos = ((image_id, path, found[image_id]) for image_id, path in paths.items())
    return [
        CaptionedImage(image_id, path, tuple(one.captions), "", one.source, one.labels)
        for image_id, path, one in photos
    ]


def _labels(image: Mapping[str, Any]) -> tuple[int | str, ...]:
    """The classes of an image; COCO's format has no such field, so it may hold anything."""
    labels = image.get("labels")
    valid = isinstance(labels, list) and all(type(label) in (int, str) for label in labels)
    return tuple(labels) if isinstance(labels, list) and valid else ()


def locate_photos(
    names: Mapping[int, str], images: Sequence[str | Path], source: str
) -> dict[int, Path]:
    """Find photos in image folders, searched in order, by their file names by image id.

    The result has the order of the names; ``source`` is the annotation file, for error messages.

    Raises:
        DataError: A folder is missing, or photos are missing from the folders.
    """
    folders = []
    for folder in map(Path, images):
        try:  # one listing is faster than a stat call per photo
            folders.append((folder, set(os.listdir(folder))))  # noqa: PTH208 (names, not paths)
        except OSError as error:
            raise DataError(
                f"the image folder {folder} cannot be read ({error.strerror}); check its name"
            ) from error
    found: dict[int, Path] = {}
    for image_id, name in names.items():
        for folder, files in folders:
            if name in files if "/" not in name else (folder / name).is_file():
                found[image_id] = folder / name
                break
    if missing := [name for image_id, name in names.items() if image_id not in found]:
        searched = ", ".join(map(str, images)) or "no folders"
        raise DataError(
            f"{len(missing)} of {len(names)} photos of {source} are not in {searched} "
            f"(first: {missing[0]}); give the image folders"
        )
    return found


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object, with or without a byte order mark; DataError: it holds anything else."""
    try:
        data = json.loads(read_input(path, "a JSON file").decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise DataError(
            f"{path} is not JSON ({error}); give a complete JSON file (captioner prepare dataset "
            "converts tables)"
        ) from error
    if not isinstance(data, dict):
        raise DataError(f"{path} holds a JSON {type(data).__name__}; give an object with 'images'")
    return data
