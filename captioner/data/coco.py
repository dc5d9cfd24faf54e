"""Functions that read and check COCO annotation files and find the photos on disk."""

from __future__ import annotations

import json
import math
import os
import re
from collections import Counter, defaultdict
from collections.abc import Container, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from numbers import Integral
from pathlib import Path
from typing import Any, Literal, TypeAlias

from captioner.data.example import Example
from captioner.data.folders import NamedFiles
from captioner.errors import DataError
from captioner.files import read_input

Fields: TypeAlias = Mapping[str, Mapping[str, tuple[type, ...]]]
"""The fields that a reader needs. Each list in the file maps to its fields, and each field maps to
its accepted types."""

CAPTION_FIELDS: Fields = {
    "images": {"id": (int,), "file_name": (str,)},
    "annotations": {"image_id": (int,), "caption": (str,)},
}
"""The fields of a COCO captions file."""


def read_coco(
    path: str | Path, fields: Fields, content: Literal["captions", "instances"]
) -> dict[str, Any]:
    """Read a COCO file with captions or object instances, and check the fields that are needed.

    Whole numbers may be written as text or as 1.0, as pandas writes them. They are converted to
    integers. A caption that is null or NaN becomes empty text.

    Args:
        path: The file.
        fields: The fields that the caller needs.
        content: The content of the file, for error messages.

    Raises:
        DataError: The file is missing, is not JSON or lacks a list. An entry lacks a field or has a
            field of the wrong type. Two images share an id.
    """
    data = read_json(Path(path))
    if _is_karpathy(data):
        raise DataError(
            f"{path} has the layout of Karpathy's dataset_*.json; convert it with: captioner "
            f"prepare dataset {path} -o FOLDER"
        )
    for part, types in fields.items():
        entries = data.get(part)
        if not isinstance(entries, list) or not entries:
            raise DataError(f"{path} has no list {part!r}; use a COCO {content} file")
        for number, entry in enumerate(entries):
            for key, accepted in types.items():
                if not isinstance(entry, dict) or type(entry.get(key)) not in accepted:
                    where = f"{path}: {part}[{number}]"
                    if not isinstance(entry, dict) or key not in entry:
                        raise DataError(f"{where} has no field {key!r}; use a COCO {content} file")
                    entry[key] = _converted(where, key, entry[key], accepted)
    counts = Counter(image["id"] for image in data["images"])
    if repeated := [image_id for image_id, count in counts.items() if count > 1]:
        raise DataError(
            f"{path} lists the image id {repeated[0]} more than once; use a different id for each "
            "image"
        )
    return data


_KINDS = {int: "a whole number", str: "text", list: "a list"}
"""Names of types in error messages."""


def _is_karpathy(data: Mapping[str, Any]) -> bool:
    """Return whether the image entries contain the captions, as in Karpathy's files."""
    images = data.get("images")
    first = images[0] if isinstance(images, list) and images else None
    return isinstance(first, dict) and "sentences" in first and "annotations" not in data


def _converted(where: str, key: str, value: Any, accepted: tuple[type, ...]) -> Any:
    """Convert the value of a field to one of the accepted types.

    ``where`` and ``key`` identify the entry and the field in the error message.

    Raises:
        DataError: The value cannot be converted.
    """
    with suppress(ValueError):
        if int in accepted:
            return whole_number(value)
        if key == "caption":
            return caption_text(value)
    raise DataError(f"the {key} of {where} is {value!r:.60}; use {_KINDS[accepted[0]]}")


def whole_number(value: Any) -> int:
    """Return an id as an integer. The id may be written as 1.0 or as text.

    Raises:
        ValueError: The id is not a whole number.
    """
    if isinstance(value, str):
        whole = bool(re.fullmatch(r"\s*-?\d{1,18}\s*", value, re.ASCII))
    elif isinstance(value, float):
        whole = value.is_integer()
    else:
        whole = not isinstance(value, bool) and isinstance(value, Integral)
    if whole:
        return int(value)
    raise ValueError(f"the image id {value!r:.60} is not a whole number")


def caption_text(value: object) -> str:
    """Return a caption as text. Null and NaN mark a missing caption and become empty text.

    Raises:
        ValueError: The caption is neither text nor missing.
    """
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return ""
    if isinstance(value, str):
        return value
    raise ValueError(f"the caption {value!r:.60} is not text")


def read_photos(annotations: Sequence[str | Path], *, renumber: bool = False) -> dict[int, Example]:
    """Read photos and captions from COCO captions files. A file that is passed twice is read once.

    Args:
        annotations: Paths of the files.
        renumber: Choose new ids for images whose id belongs to a different image in an earlier
            file. New ids follow the largest id, in the order of the files. Use this only if
            nothing else, such as features or results, refers to the ids. Without it, a repeated
            id is an error.

    Returns:
        All photos by image id, in the order of the files, including photos without captions. The
        path of each photo is its file name in the annotations.

    Raises:
        DataError: A file is missing or has no COCO captions, or two files have different file
            names for an image id.
    """
    files: dict[Path, int] = {}
    for index, path in enumerate(annotations):
        files.setdefault(Path(path).resolve(), index)
    contents = {path: read_coco(path, CAPTION_FIELDS, "captions") for path in files}
    following = 1 + max(
        (image["id"] for data in contents.values() for image in data["images"]), default=0
    )
    found: dict[int, Example] = {}
    captions = defaultdict[int, list[str]](list)
    for path, data in contents.items():
        ids: dict[int, int] = {}  # the new id, by the id in this file
        for image in data["images"]:
            image_id, name = image["id"], Path(image["file_name"])
            if image_id in found and found[image_id].path != name:
                if not renumber:
                    raise DataError(
                        f"{path}: image id {image_id} belongs to {name} here, but to "
                        f"{found[image_id].path} in an earlier file; use files with different ids "
                        "(set --first-id of captioner prepare dataset)"
                    )
                image_id, following = following, following + 1
            ids[image["id"]] = image_id
            found.setdefault(image_id, Example(image_id, name, (), "", files[path]))
        for entry in data["annotations"]:
            # The images may be listed in an earlier file.
            image_id = ids.get(entry["image_id"], entry["image_id"])
            if image_id not in found:
                raise DataError(
                    f"{path}: a caption refers to image id {entry['image_id']}, but no image has "
                    "this id; remove the caption or add the image"
                )
            if caption := entry["caption"].strip():
                captions[image_id].append(caption)
    return {i: replace(photo, captions=tuple(captions[i])) for i, photo in found.items()}


def read_captions(
    annotations: Sequence[str | Path], *, renumber: bool = False
) -> dict[int, tuple[str, ...]]:
    """Return the captions of each image by image id, from COCO captions files.

    The arguments and errors are the same as for `read_photos`.
    """
    photos = read_photos(annotations, renumber=renumber)
    return {image_id: photo.captions for image_id, photo in photos.items()}


def read_dataset(
    annotations: Sequence[str | Path],
    images: Sequence[str | Path],
    *,
    ids: Container[int] | None = None,
    renumber: bool = False,
) -> list[Example]:
    """Join the captions of COCO files with the photos on disk.

    Args:
        annotations: Paths of COCO captions files.
        images: Image folders, searched in order.
        ids: Image ids to keep. None keeps all.
        renumber: Choose new ids for images whose id belongs to a different image in an earlier
            file. Without it, such an id is an error.

    Returns:
        The photos that have captions, sorted by image id.

    Raises:
        DataError: Annotations, captions, a folder or photos are missing.
    """
    if not annotations:
        raise DataError("no annotations were passed; add at least one COCO captions file")
    found = sorted(read_photos(annotations, renumber=renumber).items())
    photos = [one for i, one in found if one.captions and (ids is None or i in ids)]
    source = ", ".join(Path(path).name for path in annotations)
    if not photos:
        if ids is not None:
            raise DataError(
                f"{source} has no captions for the photos that data.karpathy_split selects; set "
                "data.train_annotations and data.val_annotations to files with these photos"
            )
        raise DataError(f"{source} has no captioned photos; use a COCO captions file")
    return locate_photos(photos, images, source)


def locate_photos(
    photos: Sequence[Example], images: Sequence[str | Path], source: str
) -> list[Example]:
    """Find photos on disk, and return them with the paths of their files.

    Args:
        photos: Photos with their file names.
        images: Image folders, searched in order.
        source: Name of the annotation files, for error messages.

    Raises:
        DataError: A folder is missing, or photos are missing from the folders.
    """
    folders = []
    for folder in map(Path, images):
        try:
            os.scandir(folder).close()
        except OSError as error:
            raise DataError(
                f"the image folder {folder} cannot be read ({error.strerror}); check its name "
                "and permissions"
            ) from error
        folders.append(NamedFiles(folder))
    found, missing = [], []
    for photo in photos:
        paths = (folder.find(str(photo.path)) for folder in folders)
        if path := next(filter(None, paths), None):
            found.append(replace(photo, path=path))
        else:
            missing.append(str(photo.path))
    if missing:
        searched = ", ".join(map(str, images)) or "no folders"
        raise DataError(
            f"{len(missing)} of {len(photos)} photos from {source} are missing from {searched} "
            f"(first: {missing[0]}); add the image folders that contain them"
        )
    return found


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object from a file. The file may begin with a byte order mark.

    Raises:
        DataError: The file cannot be read, or does not contain a JSON object.
    """
    try:
        data = json.loads(read_input(path, "a JSON file").decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise DataError(
            f"{path} is not valid JSON ({error}); use a complete JSON file, or convert a table "
            "with captioner prepare dataset"
        ) from error
    if not isinstance(data, dict):
        raise DataError(
            f"{path} contains a JSON {type(data).__name__}, not an object with 'images'; convert "
            "lists of captions with captioner prepare dataset"
        )
    return data
