"""Captions in COCO's format, read with pycocotools, joined with the photos on disk."""

from __future__ import annotations

import contextlib
import io
import json
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from captioner.errors import DataError


@dataclass(frozen=True)
class CaptionedImage:
    """One photo and all its captions: one item, so that the encoder sees a photo once a step."""

    image_id: int
    path: Path
    captions: tuple[str, ...]
    style: str = ""
    """See ``Vocabulary.start``."""


def read_captions(annotations: Sequence[str | Path]) -> tuple[dict[int, str], dict[int, list[str]]]:
    """Read COCO captions files.

    Args:
        annotations: One or more COCO captions JSON files.

    Returns:
        File name by image id, and captions by image id (every image has an entry).

    Raises:
        DataError: A file is missing, is not JSON or not COCO captions, or two files disagree about
            an image id.
    """
    names: dict[int, str] = {}
    captions: dict[int, list[str]] = {}
    for annotation in dict.fromkeys(Path(path).resolve() for path in annotations):
        coco = _load(annotation)
        for image_id, image in coco.imgs.items():
            name = image["file_name"]
            if names.setdefault(image_id, name) != name:
                raise DataError(
                    f"{annotation}: image id {image_id} is {name} here but {names[image_id]} in an "
                    "earlier file; give files whose ids agree (captioner prepare dataset has "
                    "--first-id)"
                )
            captions.setdefault(image_id, [])
        # Not coco.anns: some files number their captions twice, and those would be lost there.
        for entry in coco.dataset["annotations"]:
            if entry["image_id"] not in names:
                raise DataError(
                    f"{annotation}: caption {entry['id']} belongs to image {entry['image_id']}, "
                    "which is not in the file; remove the caption or add the image"
                )
            if entry["caption"].strip():
                captions[entry["image_id"]].append(entry["caption"].strip())
    return names, captions


def read_dataset(
    annotations: Sequence[str | Path],
    images: Sequence[str | Path] | None,
    *,
    ids: set[int] | None = None,
) -> list[CaptionedImage]:
    """Join captions with the photos on disk.

    Args:
        annotations: COCO captions JSON files.
        images: Folders that hold the photos, searched in order. None: the photos are elsewhere (in
            shards), and their paths are their names.
        ids: Take these image ids only, e.g. one part of ``karpathy_ids``.

    Returns:
        The photos that have captions, by image id.

    Raises:
        DataError: Nothing to read, a folder is missing, or photos are missing from the folders.
    """
    if not annotations:
        raise DataError("no annotations were given; name one COCO captions JSON file or more")
    names, captions = read_captions(annotations)
    wanted = {
        image_id: names[image_id]
        for image_id in sorted(names)
        if captions[image_id] and (ids is None or image_id in ids)
    }
    if images is None:
        paths = {image_id: Path(name) for image_id, name in wanted.items()}
    else:
        paths = locate_photos(wanted, images, _names(annotations))
    if not paths:
        raise DataError(
            f"{_names(annotations)} holds no captioned photo"
            f"{' of this split' if ids is not None else ''}; give a COCO captions file"
        )
    return [
        CaptionedImage(image_id, path, tuple(captions[image_id]))
        for image_id, path in paths.items()
    ]


def locate_photos(
    names: Mapping[int, str], images: Sequence[str | Path], source: str
) -> dict[int, Path]:
    """Find photos on disk.

    Args:
        names: File name by image id.
        images: Folders that hold the photos, searched in order.
        source: The file that names them, for the error.

    Returns:
        Path by image id, in the order given.

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
        where = ", ".join(str(folder) for folder in images) or "no folder"
        raise DataError(
            f"{len(missing)} of {len(found)} photos of {source} are not in {where} "
            f"(first: {missing[0]}); name the folder(s) that hold them"
        )
    return {image_id: path for image_id, path in found.items() if path is not None}


def karpathy_ids(path: str | Path) -> dict[str, set[int]]:
    """COCO image ids of Karpathy's split.

    Args:
        path: Karpathy's ``dataset_coco.json``.

    Returns:
        ``train`` (with ``restval``, as is usual), ``val`` and ``test``.

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
        problem = (
            f"an image lacks {error}" if isinstance(error, KeyError) else "its form is another"
        )
        raise DataError(f"{path} is not Karpathy's dataset_coco.json: {problem}") from error
    return splits


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON file that holds an object, with or without a byte order mark.

    Raises:
        DataError: It is missing, cannot be read, or holds something else.
    """
    try:
        data = json.loads(path.read_text(encoding="utf-8-sig"))
    except FileNotFoundError as error:
        raise DataError(f"{path} does not exist; give a JSON file") from error
    except IsADirectoryError as error:
        raise DataError(f"{path} is a folder; give a JSON file") from error
    except (json.JSONDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise DataError(f"{path} is not JSON ({error}); give a whole JSON file") from error
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from error
    if not isinstance(data, dict):
        raise DataError(f"{path} holds a JSON {type(data).__name__}; give an object with 'images'")
    return data


_FIELDS: dict[str, dict[str, type]] = {
    "images": {"id": int, "file_name": str},
    "annotations": {"id": int, "image_id": int, "caption": str},
}
_KINDS = {int: "a whole number", str: "text"}


def _load(path: Path):  # type: ignore[no-untyped-def]  # pycocotools has no types
    """A pycocotools index of one file, checked, without its prints."""
    from pycocotools.coco import COCO

    data = read_json(path)
    for part, kinds in _FIELDS.items():
        entries = data.get(part)
        if not isinstance(entries, list) or not entries:
            raise DataError(f"{path} has no {part!r}; give a COCO captions file")
        for number, entry in enumerate(entries):
            for key, kind in kinds.items():
                if not isinstance(entry, dict) or key not in entry:
                    problem = f"lacks {key!r}"
                elif type(entry[key]) is not kind:
                    problem = f"has a {key!r} that is not {_KINDS[kind]}"
                else:
                    continue
                raise DataError(f"{path}: {part}[{number}] {problem}; give a COCO captions file")
    twice = [
        i for i, count in Counter(image["id"] for image in data["images"]).items() if count > 1
    ]
    if twice:
        raise DataError(f"{path}: image id {twice[0]} stands twice; give every image its own")
    coco = COCO()
    coco.dataset = data
    with contextlib.redirect_stdout(io.StringIO()):
        coco.createIndex()
    return coco


def _listing(folder: Path) -> tuple[Path, set[str]]:
    """A folder and its file names: one listing instead of a question for every photo."""
    try:
        return folder, set(os.listdir(folder))  # noqa: PTH208 - names, not paths
    except FileNotFoundError as error:
        raise DataError(f"the image folder {folder} does not exist; check its name") from error
    except NotADirectoryError as error:
        raise DataError(f"{folder} is a file; give the folder that holds the photos") from error


def _holds(folder: Path, files: set[str], name: str) -> bool:
    return name in files if "/" not in name else (folder / name).is_file()


def _names(annotations: Sequence[str | Path]) -> str:
    return ", ".join(Path(path).name for path in annotations)
