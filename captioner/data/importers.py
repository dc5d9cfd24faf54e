"""Other people's layouts are read into one shape: photos with their captions, by split.

    layout      what is read                                                      splits
    karpathy    dataset_coco.json, dataset_flickr8k.json, dataset_flickr30k.json  train, val, test
    flickr8k    Flickr8k.token.txt with Flickr_8k.*Images.txt beside it           those listed
    kaggle      captions.txt of Kaggle's Flickr8k (``image,caption``)             none
    csv         a table with a file, a caption and perhaps a split column         if it says so
    coco        a COCO captions file, to be split                                 none

An importer reads what is there and judges nothing; `dataset_writer` splits photos of a layout
without splits (they come under ``"all"``), drops what cannot be used and writes COCO's layout.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from captioner.data.coco import read_json
from captioner.errors import DataError

UNSPLIT = "all"
"""The split name of photos whose layout knows no splits."""


@dataclass(frozen=True)
class ImportedPhoto:
    """One photo and what people wrote about it."""

    file_name: str
    """Its path below the image folder."""
    captions: tuple[str, ...]
    """As they stand in the source, empty ones too."""
    image_id: int | None = None
    """The source's own number, where it has one."""


Splits: TypeAlias = dict[str, list[ImportedPhoto]]


# --- Karpathy's splits ----------------------------------------------------------------------------


def import_karpathy(path: str | Path) -> Splits:
    """Read the dataset_*.json files of Karpathy and Fei-Fei (2015).

    Args:
        path: The JSON file.

    Returns:
        Photos of train (including COCO's ``restval``), val and test; the number is ``cocoid``,
        else ``imgid``.

    Raises:
        DataError: The file is missing, no JSON, or of another shape.
    """
    splits: Splits = {}
    for place, image in _records(read_json(Path(path)), "images", str(path)):
        name = _get(image, "filename", str, place)
        if image.get("filepath"):
            name = f"{_get(image, 'filepath', str, place)}/{name}"
        split = _get(image, "split", str, place)
        split = "train" if split == "restval" else split
        sentences = [_get(s, "raw", str, where) for where, s in _records(image, "sentences", place)]
        number = next((key for key in ("cocoid", "imgid") if image.get(key) is not None), None)
        image_id = None if number is None else _get(image, number, int, place)
        splits.setdefault(split, []).append(ImportedPhoto(name, tuple(sentences), image_id))
    return splits


# --- Flickr8k -------------------------------------------------------------------------------------

_FLICKR8K_LISTS = {
    "train": "Flickr_8k.trainImages.txt",
    "val": "Flickr_8k.devImages.txt",
    "test": "Flickr_8k.testImages.txt",
}
_TOKEN_FILES = (".token.txt", ".token")
_STRAY_COPY = re.compile(r"(\.jpe?g)\.\d+$", re.IGNORECASE)


def import_flickr8k(path: str | Path) -> Splits:
    """Read Flickr8k as published; Flickr30k's .token file has the same lines.

    A stray copy (``2258277193_586949ec62.jpg.1``) lends its captions to its photo only when that
    has none of its own. Photos that no list names are left out, unless there is no list at all.

    Args:
        path: The token file (``name.jpg#0<tab>caption``).

    Returns:
        Photos of the splits whose lists lie beside the token file, otherwise all of them.

    Raises:
        DataError: A file is missing, or a line cannot be read.
    """
    token_file = Path(path)
    captions, strays = _read_tokens(token_file)
    for name, borrowed in strays.items():
        captions.setdefault(name, borrowed)
    lists = {
        split: token_file.with_name(name)
        for split, name in _FLICKR8K_LISTS.items()
        if token_file.with_name(name).is_file()
    }
    if not lists:
        return {UNSPLIT: [ImportedPhoto(name, tuple(texts)) for name, texts in captions.items()]}
    splits: Splits = {}
    for split, file in lists.items():
        names = [_STRAY_COPY.sub(r"\1", line.strip()) for _, line in _lines(file)]
        splits[split] = [
            ImportedPhoto(name, tuple(captions.get(name, ()))) for name in dict.fromkeys(names)
        ]
    return splits


def _read_tokens(path: Path) -> tuple[dict[str, list[str]], dict[str, list[str]]]:
    """Captions by photo: of the photos themselves, and of stray copies by the name of the photo."""
    captions: dict[str, list[str]] = {}
    strays: dict[str, list[str]] = {}
    for number, line in _lines(path):
        key, tab, caption = line.partition("\t")
        name, _, index = key.rpartition("#")
        if not tab or not name or not index.isdigit():
            raise DataError(f"{path}:{number}: not 'name.jpg#0<tab>caption' ({line[:40]!r})")
        photo = _STRAY_COPY.sub(r"\1", name)
        (captions if photo == name else strays).setdefault(photo, []).append(caption)
    return captions, strays


# --- Tables ---------------------------------------------------------------------------------------

_FILE_COLUMNS = ("file", "filename", "file_name", "image", "image_name", "path")
_CAPTION_COLUMNS = ("caption", "text", "sentence", "comment")
_SPLIT_NAMES = {
    **dict.fromkeys(("train", "training", "restval"), "train"),
    **dict.fromkeys(("val", "valid", "validation", "dev"), "val"),
    **dict.fromkeys(("test", "testing"), "test"),
}


def import_kaggle(path: str | Path) -> Splits:
    """Read Kaggle's captions.txt: all behind a line's first comma is the caption, quoted or not.

    Args:
        path: The file; its header is ``image,caption``.

    Returns:
        All photos, without splits.

    Raises:
        DataError: The file is missing, or a line cannot be read.
    """
    captions: dict[str, list[str]] = {}
    lines = _lines(Path(path))
    number, header = next(lines)
    if not _is_kaggle(header):
        raise DataError(f"{path}:{number}: the header is no 'image,caption' ({header[:40]!r})")
    for number, line in lines:
        name, comma, caption = line.partition(",")
        if not comma or not name.strip():
            raise DataError(f"{path}:{number}: not 'image,caption' ({line[:40]!r})")
        captions.setdefault(name.strip(), []).append(_unquote(caption.strip()))
    return {UNSPLIT: [ImportedPhoto(name, tuple(texts)) for name, texts in captions.items()]}


def import_csv(path: str | Path) -> Splits:
    """Read a table with one caption a row; its header tells the columns and what separates them.

    The first of tab, ``|``, ``;`` and ``,`` that parts the header into a file column (file,
    filename, file_name, image, image_name, path) and a caption column (caption, text, sentence,
    comment) is taken; a ``split`` column is optional. Comma and semicolon: quotes as in RFC 4180.
    Tab and ``|``: a quote is a character like others unless it encloses a field, as in Flickr30k's
    results.csv.

    Args:
        path: The table.

    Returns:
        The photos by split, or all of them when the table has no such column.

    Raises:
        DataError: The file is missing, the columns are not there, a row cannot be read, or a photo
            is in two splits.
    """
    text = _read_text(path)
    first = text.split("\n", 1)[0]
    separator, columns = _columns(first)
    if not separator:
        raise DataError(
            f"{path}:1: the header {first.strip()[:60]!r} names no file column"
            f" ({', '.join(_FILE_COLUMNS)}) or no caption column ({', '.join(_CAPTION_COLUMNS)})"
        )
    captions: dict[str, list[str]] = {}
    split_of: dict[str, str] = {}
    for number, row in _rows(text, separator, columns["count"], path):
        place = f"{path}:{number}"
        if len(row) != columns["count"]:
            raise DataError(
                f"{place}: {len(row)} fields where the header has {columns['count']};"
                f" put quotes around a field that holds {separator!r}"
            )
        name = row[columns["file"]].strip()
        if not name:
            raise DataError(f"{place}: the file column is empty")
        split = _split_name(row[columns["split"]], place) if "split" in columns else UNSPLIT
        if split_of.setdefault(name, split) != split:
            raise DataError(f"{place}: {name} is in two splits, {split_of[name]} and {split}")
        captions.setdefault(name, []).append(row[columns["caption"]])
    splits: Splits = {}
    for name, texts in captions.items():
        splits.setdefault(split_of[name], []).append(ImportedPhoto(name, tuple(texts)))
    return splits


def _columns(header: str) -> tuple[str, dict[str, int]]:
    """The separator and the place of each column (and their count); "" where none fits."""
    for separator in "\t|;,":
        names = [_unquote(name.strip()).strip().lower() for name in header.split(separator)]
        places = {"count": len(names)}
        for key, accepted in (
            ("file", _FILE_COLUMNS),
            ("caption", _CAPTION_COLUMNS),
            ("split", ("split",)),
        ):
            if found := [name for name in accepted if name in names]:
                places[key] = names.index(found[0])
        if "file" in places and "caption" in places:
            return separator, places
    return "", {}


def _rows(
    text: str, separator: str, count: int, path: str | Path
) -> Iterator[tuple[int, list[str]]]:
    """Line number and fields of every row behind the header that is not blank."""
    if separator in "\t|":
        for number, line in enumerate(text.split("\n")[1:], start=2):
            row = [_unquote(cell.strip()) for cell in line.rstrip("\r").split(separator)]
            # Flickr30k's results.csv has three columns, and lacks one '|' in one line.
            lacks_one = separator == "|" and (count, len(row)) == (3, 2)
            if lacks_one and (lost := re.match(r"(\d+)\s+(.*)", row[1])):
                row[1:] = lost.groups()
            if any(row):
                yield number, row
        return
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=separator, strict=True)
    try:
        next(reader)
        for row in reader:
            if any(cell.strip() for cell in row):
                yield reader.line_num, row
    except csv.Error as error:
        raise DataError(f"{path}:{reader.line_num}: not valid CSV ({error})") from error


def _unquote(text: str) -> str:
    """Take off quotes that enclose a whole field (``"a ""b"" c"``); others belong to the text."""
    inner = text[1:-1]
    enclosed = len(text) >= 2 and text[0] == text[-1] == '"'
    return inner.replace('""', '"') if enclosed and '"' not in inner.replace('""', "") else text


def _split_name(text: str, place: str) -> str:
    name = _SPLIT_NAMES.get(text.strip().lower())
    if name is None:
        raise DataError(f"{place}: the split {text.strip()!r} is none of {', '.join(_SPLIT_NAMES)}")
    return name


def _is_kaggle(header: str) -> bool:
    return header.strip().lower() == "image,caption"


# --- COCO -----------------------------------------------------------------------------------------


def import_coco(path: str | Path) -> Splits:
    """Read a COCO captions file, so that it can be split.

    Args:
        path: The JSON file.

    Returns:
        All photos with their ids, without splits.

    Raises:
        DataError: The file is missing, no JSON, or holds no captions.
    """
    data = read_json(Path(path))
    names = {
        _get(image, "id", int, place): _get(image, "file_name", str, place)
        for place, image in _records(data, "images", str(path))
    }
    captions: dict[int, list[str]] = {image_id: [] for image_id in names}
    for place, annotation in _records(data, "annotations", str(path)):
        image_id = _get(annotation, "image_id", int, place)
        if image_id not in captions:
            raise DataError(f"{place}: image_id {image_id} is not among the images")
        captions[image_id].append(_get(annotation, "caption", str, place))
    return {UNSPLIT: [ImportedPhoto(names[i], tuple(texts), i) for i, texts in captions.items()]}


# --- All layouts ----------------------------------------------------------------------------------

IMPORTERS: dict[str, Callable[[str | Path], Splits]] = {
    "karpathy": import_karpathy,
    "flickr8k": import_flickr8k,
    "kaggle": import_kaggle,
    "csv": import_csv,
    "coco": import_coco,
}
"""Layout, as `detect_layout` names it -> its importer."""


def find_source(path: str | Path, layout: str = "auto") -> Path:
    """The file that a folder stands for.

    Args:
        path: What the user gave.
        layout: A key of `IMPORTERS`, or auto.

    Returns:
        A folder's Flickr8k.token.txt, else its only token file, else its captions.txt, as far as
        the layout may be in one; a file is itself.

    Raises:
        DataError: The folder holds none of them, or several token files.
    """
    path = Path(path)
    if not path.is_dir():
        return path
    tokens = sorted(file for file in path.iterdir() if file.name.endswith(_TOKEN_FILES))
    tokens = tokens if layout in ("auto", "flickr8k") else []
    tokens = [file for file in tokens if file.name == "Flickr8k.token.txt"] or tokens
    if len(tokens) > 1:
        raise DataError(f"{path}: {len(tokens)} token files in this folder; give one of them")
    table = layout in ("auto", "kaggle", "csv") and (path / "captions.txt").is_file()
    if not tokens and not table:
        raise DataError(
            f"{path}: no Flickr8k.token.txt and no captions.txt in this folder; give the file"
            " with the captions"
        )
    return tokens[0] if tokens else path / "captions.txt"


def detect_layout(path: str | Path) -> str:
    """Tell which importer fits a file.

    Args:
        path: The file.

    Returns:
        A key of `IMPORTERS`.

    Raises:
        DataError: None fits, or the file cannot be read.
    """
    layout = _layout_of_file(Path(path))
    if layout is None:
        raise DataError(
            f"{path}: no layout that is known; give Karpathy's dataset_*.json, Flickr8k.token.txt"
            " or its folder, Kaggle's captions.txt, a CSV with a file and a caption column, or a"
            " COCO captions file"
        )
    return layout


def _layout_of_file(path: Path) -> str | None:
    text = _read_text(path)
    if text.lstrip().startswith(("{", "[")):
        data = read_json(Path(path))
        images = data.get("images")
        first_image = images[0] if isinstance(images, list) and images else None
        if isinstance(first_image, dict) and "sentences" in first_image:
            return "karpathy"
        return "coco" if "images" in data and "annotations" in data else None
    first = text.split("\n", 1)[0]
    if path.name.endswith(_TOKEN_FILES) or re.match(r".+#\d+\t", first):
        return "flickr8k"
    if _is_kaggle(first):
        return "kaggle"
    return "csv" if _columns(first)[0] else None


# --- Reading --------------------------------------------------------------------------------------


def _read_text(path: str | Path) -> str:
    """The text of a UTF-8 file, with or without a byte order mark."""
    try:
        content = Path(path).read_bytes()
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror}); check the path") from error
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise DataError(
            f"{path}:{line}: not UTF-8 (byte 0x{content[error.start]:02x}); save the file as UTF-8"
        ) from error
    if not text.strip():
        raise DataError(f"{path}: the file is empty")
    return text


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    """Line number from 1 and text of every line that is not blank."""
    for number, line in enumerate(_read_text(path).split("\n"), start=1):
        if line.strip():
            yield number, line.rstrip("\r")


def _records(data: dict[str, Any], key: str, place: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """The objects of a list in a JSON object, each with its place for messages."""
    for index, record in enumerate(_get(data, key, list, place)):
        if not isinstance(record, dict):
            raise DataError(f"{place}: {key}[{index}] is no object")
        yield f"{place}: {key}[{index}]", record


def _get(record: dict[str, Any], key: str, kind: type, place: str) -> Any:
    value = record.get(key)
    if not isinstance(value, kind) or isinstance(value, bool):
        what = "has no" if value is None else f"has {value!r:.30} as"
        raise DataError(f"{place} {what} {key!r} ({kind.__name__})")
    return value
