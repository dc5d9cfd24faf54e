"""COCO annotation files: checked reading, and captions joined with the photos on disk."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias

from captioner.errors import DataError
from captioner.files import read_input

Fields: TypeAlias = Mapping[str, Mapping[str, tuple[type, ...]]]
"""The fields that a reader needs: list in the file -> field -> accepted types."""

CAPTION_FIELDS: Fields = {
    "images": {"id": (int,), "file_name": (str,)},
    "annotations": {"id": (int,), "image_id": (int,), "caption": (str,)},
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
    """Read a COCO file and check the fields that the caller relies on.

    Args:
        path: JSON file.
        fields: Required fields of the entries of each list.
        content: Kind of file, for error messages.

    Returns:
        The file's content.

    Raises:
        DataError: The file is missing or not JSON, a list is missing or empty, an entry lacks a
            field or has one of another type, or two images share an id.
    """
    data = read_json(Path(path))
    for part, types in fields.items():
        entries = data.get(part)
        if not isinstance(entries, list) or not entries:
            raise DataError(f"{path} has no {part!r}; give a COCO {content} file")
        for number, entry in enumerate(entries):
            if problem := _problem(entry, types):
                raise DataError(f"{path}: {part}[{number}] {problem}; give a COCO {content} file")
    counts = Counter(image["id"] for image in data["images"])
    if repeated := [image_id for image_id, count in counts.items() if count > 1]:
        raise DataError(f"{path}: image id {repeated[0]} occurs twice; give each image its own id")
    return data


_TYPE_NAMES = {int: "an integer", str: "a string", list: "polygons or run lengths"}


def _problem(entry: Any, types: Mapping[str, tuple[type, ...]]) -> str | None:
    """What is wrong with one entry."""
    for key, accepted in types.items():
        if not isinstance(entry, dict) or key not in entry:
            caption = isinstance(entry, dict) and "caption" in entry and "caption" not in types
            return f"lacks {key!r}{' (it is a caption)' if caption else ''}"
        if type(entry[key]) not in accepted:
            return f"has a {key!r} that is not {_TYPE_NAMES[accepted[0]]}"
    return None


def read_captions(
    annotations: Sequence[str | Path], *, renumber: bool = False
) -> tuple[dict[int, str], dict[int, list[str]]]:
    """Read COCO captions files.

    Args:
        annotations: One or more COCO captions files; a file given twice is read once.
        renumber: Give an image a new id if its own is that of another image in an earlier file:
            the numbers after the largest id, in the files' order. Only where nothing else, such as
            features or results, refers to the ids. Otherwise, such a clash is an error.

    Returns:
        File name by image id, and captions by image id (every image has an entry).

    Raises:
        DataError: A file is missing or not COCO captions, or two files give different file names
            for an image id.
    """
    found = _read_files(annotations, renumber)
    return found.names, found.captions


class _Captions(NamedTuple):
    """The content of several files by image id; see `read_captions`."""

    names: dict[int, str]
    captions: dict[int, list[str]]
    sources: dict[int, int]
    """See ``CaptionedImage.source``."""
    labels: dict[int, tuple[int | str, ...]]
    """See ``CaptionedImage.labels``."""


def _read_files(annotations: Sequence[str | Path], renumber: bool) -> _Captions:
    files: dict[Path, int] = {}
    for index, path in enumerate(annotations):
        files.setdefault(Path(path).resolve(), index)
    contents = {path: read_coco(path, CAPTION_FIELDS, "captions") for path in files}
    following = 1 + max(
        (image["id"] for data in contents.values() for image in data["images"]), default=0
    )
    found = _Captions({}, {}, {}, {})
    for path, data in contents.items():
        ids: dict[int, int] = {}  # from those of this file
        for image in data["images"]:
            image_id, name = image["id"], image["file_name"]
            if found.names.get(image_id, name) != name:
                if not renumber:
                    raise DataError(
                        f"{path}: image id {image_id} is {name} here but {found.names[image_id]} "
                        "in an earlier file; give files whose ids agree (captioner prepare dataset "
                        "has --first-id)"
                    )
                image_id, following = following, following + 1
            ids[image["id"]] = image_id
            found.names.setdefault(image_id, name)
            found.captions.setdefault(image_id, [])
            found.sources.setdefault(image_id, files[path])
            found.labels[image_id] = found.labels.get(image_id) or _labels(image)
        for entry in data["annotations"]:
            # The images may be listed in an earlier file.
            image_id = ids.get(entry["image_id"], entry["image_id"])
            if image_id not in found.names:
                raise DataError(
                    f"{path}: caption {entry['id']} belongs to image {entry['image_id']}, "
                    "which is not in the file; remove the caption or add the image"
                )
            if entry["caption"].strip():
                found.captions[image_id].append(entry["caption"].strip())
    return found


def read_dataset(
    annotations: Sequence[str | Path],
    images: Sequence[str | Path] | None,
    *,
    ids: set[int] | None = None,
    renumber: bool = False,
) -> list[CaptionedImage]:
    """Join captions with the photos on disk.

    Args:
        annotations: COCO captions files.
        images: Image folders, searched in order. None: the photos are in shards, and their paths
            are their file names.
        ids: Image ids to keep, e.g. one split of ``karpathy_ids``; None: all.
        renumber: See `read_captions`.

    Returns:
        The photos that have captions, sorted by image id.

    Raises:
        DataError: No annotations or no captioned photos, or a folder or photos are missing.
    """
    if not annotations:
        raise DataError("no annotations were given; give at least one COCO captions file")
    names, captions, sources, labels = _read_files(annotations, renumber)
    selected = {
        image_id: names[image_id]
        for image_id in sorted(names)
        if captions[image_id] and (ids is None or image_id in ids)
    }
    source = ", ".join(Path(path).name for path in annotations)
    if images is None:
        paths = {image_id: Path(name) for image_id, name in selected.items()}
    else:
        paths = locate_photos(selected, images, source)
    if not paths:
        raise DataError(
            f"{source} has no captioned photos{' in this split' if ids is not None else ''}; "
            "give a COCO captions file"
        )
    return [
        CaptionedImage(
            image_id,
            path,
            tuple(captions[image_id]),
            source=sources[image_id],
            labels=labels[image_id],
        )
        for image_id, path in paths.items()
    ]


def _labels(image: Mapping[str, Any]) -> tuple[int | str, ...]:
    """The classes of an image; COCO's format has no such field, so it may hold anything."""
    labels = image.get("labels")
    valid = isinstance(labels, list) and all(type(label) in (int, str) for label in labels)
    return tuple(labels) if isinstance(labels, list) and valid else ()


def locate_photos(
    names: Mapping[int, str], images: Sequence[str | Path], source: str
) -> dict[int, Path]:
    """Find photos on disk.

    Args:
        names: File name by image id.
        images: Image folders, searched in order.
        source: The annotation file, for error messages.

    Returns:
        Path by image id, in the order of ``names``.

    Raises:
        DataError: A folder is missing, or photos are missing from the folders.
    """
    folders = [_listing(Path(folder)) for folder in images]
    found = {
        image_id: next(
            (folder / name for folder, files in folders if _holds(folder, files, name)), None
        )
        for image_id, name in names.items()
    }
    missing = [names[image_id] for image_id, path in found.items() if path is None]
    if missing:
        searched = ", ".join(str(folder) for folder in images)
        problem = f"are not in {searched}" if searched else "cannot be found without image folders"
        raise DataError(
            f"{len(missing)} of {len(found)} photos of {source} {problem} "
            f"(first: {missing[0]}); give the image folders"
        )
    return {image_id: path for image_id, path in found.items() if path is not None}


def karpathy_ids(path: str | Path) -> dict[str, set[int]]:
    """COCO image ids of Karpathy's split.

    Args:
        path: Karpathy's ``dataset_coco.json``.

    Returns:
        Image ids of ``train`` (including ``restval``, as is usual), ``val`` and ``test``.

    Raises:
        DataError: The file is missing or is not Karpathy's.
    """
    data = read_json(Path(path))
    splits: dict[str, set[int]] = {"train": set(), "val": set(), "test": set()}
    try:
        for image in data["images"]:
            split = "train" if image["split"] == "restval" else image["split"]
            splits.setdefault(split, set()).add(int(image["cocoid"]))
    except (KeyError, TypeError, ValueError) as error:
        raise DataError(f"{path} is not Karpathy's dataset_coco.json ({error})") from error
    return splits


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object, with or without a byte order mark.

    Raises:
        DataError: The file is missing, cannot be read, or holds something else.
    """
    return parse_json(read_input(path, "a JSON file"), path)


def parse_json(content: bytes, name: str | Path) -> dict[str, Any]:
    """Parse a JSON object, with or without a byte order mark.

    Args:
        content: The file's bytes.
        name: The file's name, for messages.

    Raises:
        DataError: It holds something else.
    """
    try:
        data = json.loads(content.decode("utf-8-sig"))
    except (json.JSONDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise DataError(f"{name} is not JSON ({error}); give a complete JSON file") from error
    if not isinstance(data, dict):
        raise DataError(f"{name} holds a JSON {type(data).__name__}; give an object with 'images'")
    return data


def _listing(folder: Path) -> tuple[Path, set[str]]:
    """A folder and its file names: one listing is faster than a stat call per photo."""
    try:
        return folder, set(os.listdir(folder))  # noqa: PTH208 - names, not paths
    except FileNotFoundError as error:
        raise DataError(f"the image folder {folder} does not exist; check its name") from error
    except NotADirectoryError as error:
        raise DataError(f"{folder} is a file; give the folder that holds the photos") from error


def _holds(folder: Path, files: set[str], name: str) -> bool:
    return name in files if "/" not in name else (folder / name).is_file()
