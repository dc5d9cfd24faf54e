"""Readers of caption data sets in several layouts: photos with their captions, by split.

    layout      source                                                            splits
    karpathy    dataset_coco.json, dataset_flickr8k.json, dataset_flickr30k.json  train, val, test
    flickr8k    Flickr8k.token.txt with Flickr_8k.*Images.txt beside it           those listed
    kaggle      captions.txt of Kaggle's Flickr8k (``image,caption``)             none
    csv         table with a file, a caption and an optional split column         if it has them
    jsonl       the same as JSON Lines                                            if it has them
    imagefolder Hugging Face's image folder with metadata.jsonl or metadata.csv   if it has them
    coco        COCO captions file                                                none

Each layout has a reader of `Row`; `import_captions` joins the rows of a photo. Photos without a
split are returned under ``"all"``. Everything is returned, empty captions included;
`captioner.data.dataset` splits, filters and writes.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from captioner.data.coco import Fields, read_coco, read_json
from captioner.data.tables import (
    SEPARATORS,
    UNSPLIT,
    USUAL,
    Columns,
    Row,
    column_names,
    find_columns,
    is_kaggle,
    metadata_files,
    numbered_lines,
    read_csv,
    read_imagefolder,
    read_jsonl,
    read_kaggle,
    read_text,
)
from captioner.errors import DataError


@dataclass(frozen=True)
class ImportedPhoto:
    """One photo and its captions."""

    file_name: str
    """Path relative to the image folder."""
    captions: tuple[str, ...]
    """As in the source, including empty ones."""
    image_id: int | None = None
    """Id in the source, if any."""


Splits: TypeAlias = dict[str, list[ImportedPhoto]]


Reader: TypeAlias = Callable[[Path, Columns], Iterator[Row]]


def import_captions(path: str | Path, layout: str, columns: Columns = USUAL) -> Splits:
    """Read captions.

    Args:
        path: File, or image folder.
        layout: A key of `IMPORTERS`.
        columns: Of a table (`TABLES`).

    Returns:
        The photos by split.

    Raises:
        DataError: A file is missing or not of this layout, or a photo is in two splits.
    """
    captions: dict[tuple[str, int | None], list[str]] = {}
    split_of: dict[str, str] = {}
    for row in IMPORTERS[layout](Path(path), columns):
        name = row.file_name.strip()
        if not name:
            raise DataError(f"{row.where}: the file name is empty")
        if (other := split_of.setdefault(name, row.split)) != row.split:
            raise DataError(f"{row.where}: {name} is in two splits, {other} and {row.split}")
        captions.setdefault((name, row.image_id), []).extend(row.captions)
    splits: Splits = {}
    for (name, image_id), texts in captions.items():
        photo = ImportedPhoto(name, tuple(texts), image_id)
        splits.setdefault(split_of[name], []).append(photo)
    return splits


# --- JSON files -----------------------------------------------------------------------------------

_COCO_FIELDS: Fields = {
    "images": {"id": (int,), "file_name": (str,)},
    "annotations": {"image_id": (int,), "caption": (str,)},
}


def _read_coco(path: Path, _: Columns) -> Iterator[Row]:
    data = read_coco(path, _COCO_FIELDS, "captions")
    captions: dict[int, list[str]] = {image["id"]: [] for image in data["images"]}
    for number, entry in enumerate(data["annotations"]):
        if entry["image_id"] not in captions:
            raise DataError(
                f"{path}: annotations[{number}]: image_id {entry['image_id']} is not in the file"
            )
        captions[entry["image_id"]].append(entry["caption"])
    for image in data["images"]:
        yield Row(str(path), image["file_name"], captions[image["id"]], UNSPLIT, image["id"])


def _read_karpathy(path: Path, _: Columns) -> Iterator[Row]:
    """The splits of Karpathy and Fei-Fei (2015); ``restval`` is for training, as is usual."""
    for number, image in enumerate(read_json(path).get("images") or [None]):
        where = f"{path}: images[{number}]"
        try:
            name = "/".join(part for part in (image.get("filepath"), image["filename"]) if part)
            texts = [str(sentence["raw"]) for sentence in image["sentences"]]
            split = "train" if image["split"] == "restval" else str(image["split"])
        except (AttributeError, KeyError, TypeError) as error:
            raise DataError(
                f"{where} is not an entry of Karpathy's ({error}); give his dataset_*.json"
            ) from error
        yield Row(where, name, texts, split, image.get("cocoid", image.get("imgid")))


# --- Flickr8k -------------------------------------------------------------------------------------

_FLICKR8K_LISTS = {
    "train": "Flickr_8k.trainImages.txt",
    "val": "Flickr_8k.devImages.txt",
    "test": "Flickr_8k.testImages.txt",
}
_TOKEN_FILES = (".token.txt", ".token")
_DUPLICATE = re.compile(r"(\.jpe?g)\.\d+$", re.IGNORECASE)


def _read_flickr8k(path: Path, _: Columns) -> Iterator[Row]:
    """Flickr8k as published; Flickr30k's .token file has the same format.

    Captions of a duplicate file (``2258277193_586949ec62.jpg.1``) are used only if its photo has
    none. If there are split lists, photos that are in none of them are left out.
    """
    captions: dict[str, list[str]] = {}
    duplicates: dict[str, list[str]] = {}
    for where, line in numbered_lines(path):
        key, tab, caption = line.partition("\t")
        name, _hash, index = key.rpartition("#")
        if not tab or not name or not index.isdigit():
            raise DataError(f"{where}: expected 'name.jpg#0<tab>caption', got {line[:40]!r}")
        photo = _DUPLICATE.sub(r"\1", name)
        (captions if photo == name else duplicates).setdefault(photo, []).append(caption)
    captions = captions | {k: v for k, v in duplicates.items() if k not in captions}
    lists = {split: path.with_name(name) for split, name in _FLICKR8K_LISTS.items()}
    lists = {split: file for split, file in lists.items() if file.is_file()}
    if not lists:
        yield from (Row(str(path), name, texts) for name, texts in captions.items())
    for split, file in lists.items():
        names = (_DUPLICATE.sub(r"\1", line.strip()) for _, line in numbered_lines(file))
        for name in dict.fromkeys(names):
            yield Row(str(file), name, captions.get(name, []), split)


# --- All layouts ----------------------------------------------------------------------------------

TABLES = ("csv", "jsonl", "imagefolder")
"""Layouts that have `Columns`."""

IMPORTERS: dict[str, Reader] = {
    "karpathy": _read_karpathy,
    "flickr8k": _read_flickr8k,
    "kaggle": read_kaggle,
    "csv": read_csv,
    "jsonl": read_jsonl,
    "imagefolder": read_imagefolder,
    "coco": _read_coco,
}
"""Reader by layout."""


def find_source(path: str | Path, layout: str = "auto") -> Path:
    """Find the captions file in a folder.

    Args:
        path: File or folder.
        layout: A key of `IMPORTERS`, or auto.

    Returns:
        In a folder: Flickr8k.token.txt, or else its only token file, or else captions.txt, if the
        layout has such a file. A file is returned as it is, and so is an image folder.

    Raises:
        DataError: The folder has none of them, or several token files.
    """
    path = Path(path)
    if not path.is_dir() or (layout in ("auto", "imagefolder") and metadata_files(path)):
        return path
    tokens = sorted(file for file in path.iterdir() if file.name.endswith(_TOKEN_FILES))
    tokens = tokens if layout in ("auto", "flickr8k") else []
    tokens = [file for file in tokens if file.name == "Flickr8k.token.txt"] or tokens
    if len(tokens) > 1:
        raise DataError(f"{path}: {len(tokens)} token files in this folder; give one of them")
    table = layout in ("auto", "kaggle", "csv") and (path / "captions.txt").is_file()
    if not tokens and not table:
        raise DataError(
            f"{path} is a folder without captions (metadata.jsonl, metadata.csv, captions.txt or"
            " Flickr8k.token.txt); give the file with the captions of its photos, such as a CSV"
            " file with the columns file and caption"
        )
    return tokens[0] if tokens else path / "captions.txt"


def detect_layout(path: str | Path) -> str:
    """Detect the layout of a file, a key of `IMPORTERS`, from its name and content.

    Raises:
        DataError: The layout is unknown, or the file cannot be read.
    """
    layout = _layout_of(Path(path))
    if layout is None:
        raise DataError(
            f"{path}: unknown layout; give a CSV or JSON Lines file with a file and a caption"
            " column (others are named with --file-column and --caption-column), an image folder"
            " with metadata.jsonl, COCO captions, Karpathy's dataset_*.json, Flickr8k.token.txt or"
            " its folder, or Kaggle's captions.txt"
        )
    return layout


def _layout_of(path: Path) -> str | None:
    if metadata_files(path) or path.suffix.lower() == ".jsonl":
        return "imagefolder" if path.is_dir() else "jsonl"
    text = read_text(path)
    if text.lstrip().startswith(("{", "[")):
        data = read_json(path)
        images = data.get("images")
        first_image = images[0] if isinstance(images, list) and images else None
        if isinstance(first_image, dict) and "sentences" in first_image:
            return "karpathy"
        return "coco" if "images" in data and "annotations" in data else None
    first = text.split("\n", 1)[0]
    if path.name.endswith(_TOKEN_FILES) or re.match(r".+#\d+\t", first):
        return "flickr8k"
    if is_kaggle(first):
        return "kaggle"
    known = any(len(find_columns(column_names(text, s), USUAL)) == 2 for s in SEPARATORS)
    return "csv" if known or path.suffix.lower() in (".csv", ".tsv") else None
