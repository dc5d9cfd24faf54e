"""Readers of caption data sets in several layouts: photos with their captions, by split.

    layout      source                                                            splits
    karpathy    dataset_coco.json, dataset_flickr8k.json, dataset_flickr30k.json  train, val, test
    flickr8k    Flickr8k.token.txt with Flickr_8k.*Images.txt beside it           those listed
    kaggle      captions.txt of Kaggle's Flickr8k (``image,caption``)             none
    csv         table with a file, a caption and an optional split column         if it has them
    jsonl       the same as JSON Lines                                            if it has them
    imagefolder Hugging Face's image folder with metadata.jsonl or metadata.csv   if it has them
    coco        COCO captions file                                                none

Photos of a layout without splits are returned under ``"all"``. Importers return everything, empty
captions included; `captioner.data.dataset` splits, filters and writes.
"""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from captioner.data.coco import Fields, read_coco, read_json
from captioner.errors import DataError

UNSPLIT = "all"
"""Split name for layouts without splits."""


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


# --- Karpathy's splits ----------------------------------------------------------------------------


def import_karpathy(path: str | Path) -> Splits:
    """Read a dataset_*.json file of Karpathy and Fei-Fei (2015).

    Args:
        path: JSON file.

    Returns:
        Photos of train (including COCO's ``restval``, as is usual), val and test; the id is
        ``cocoid`` or else ``imgid``.

    Raises:
        DataError: The file is missing, not JSON, or of another form.
    """
    splits: Splits = {}
    for where, image in _records(read_json(Path(path)), "images", str(path)):
        name = _get(image, "filename", str, where)
        if image.get("filepath"):
            name = f"{_get(image, 'filepath', str, where)}/{name}"
        split = _get(image, "split", str, where)
        split = "train" if split == "restval" else split
        sentences = [_get(s, "raw", str, at) for at, s in _records(image, "sentences", where)]
        number = next((key for key in ("cocoid", "imgid") if image.get(key) is not None), None)
        image_id = None if number is None else _get(image, number, int, where)
        splits.setdefault(split, []).append(ImportedPhoto(name, tuple(sentences), image_id))
    return splits


# --- Flickr8k -------------------------------------------------------------------------------------

_FLICKR8K_LISTS = {
    "train": "Flickr_8k.trainImages.txt",
    "val": "Flickr_8k.devImages.txt",
    "test": "Flickr_8k.testImages.txt",
}
_TOKEN_FILES = (".token.txt", ".token")
_DUPLICATE = re.compile(r"(\.jpe?g)\.\d+$", re.IGNORECASE)


def import_flickr8k(path: str | Path) -> Splits:
    """Read Flickr8k as published; Flickr30k's .token file has the same format.

    Captions of a duplicate file (``2258277193_586949ec62.jpg.1``) are used only if its photo has
    none. If there are split lists, photos that are in none of them are left out.

    Args:
        path: Token file (``name.jpg#0<tab>caption``).

    Returns:
        Photos of the splits whose lists are beside the token file; without lists, all photos.

    Raises:
        DataError: A file is missing, or a line cannot be parsed.
    """
    token_file = Path(path)
    captions, duplicates = _read_tokens(token_file)
    for name, texts in duplicates.items():
        captions.setdefault(name, texts)
    lists = {
        split: token_file.with_name(name)
        for split, name in _FLICKR8K_LISTS.items()
        if token_file.with_name(name).is_file()
    }
    if not lists:
        return {UNSPLIT: [ImportedPhoto(name, tuple(texts)) for name, texts in captions.items()]}
    splits: Splits = {}
    for split, file in lists.items():
        names = [_DUPLICATE.sub(r"\1", line.strip()) for _, line in _lines(file)]
        splits[split] = [
            ImportedPhoto(name, tuple(captions.get(name, ()))) for name in dict.fromkeys(names)
        ]
    return splits


def _read_tokens(path: Path) -> tuple[dict[str, list[str]], dict[str, list[str]]]:
    """Captions by photo: of the photos, and of their duplicate files."""
    captions: dict[str, list[str]] = {}
    duplicates: dict[str, list[str]] = {}
    for number, line in _lines(path):
        key, tab, caption = line.partition("\t")
        name, _, index = key.rpartition("#")
        if not tab or not name or not index.isdigit():
            raise DataError(
                f"{path}:{number}: expected 'name.jpg#0<tab>caption', got {line[:40]!r}"
            )
        photo = _DUPLICATE.sub(r"\1", name)
        (captions if photo == name else duplicates).setdefault(photo, []).append(caption)
    return captions, duplicates


# --- Tables ---------------------------------------------------------------------------------------

_FILE_COLUMNS = ("file", "filename", "file_name", "image", "image_name", "path")
_CAPTION_COLUMNS = ("caption", "text", "sentence", "comment")
_SPLIT_NAMES = {
    **dict.fromkeys(("train", "training", "restval"), "train"),
    **dict.fromkeys(("val", "valid", "validation", "dev"), "val"),
    **dict.fromkeys(("test", "testing"), "test"),
}


def import_kaggle(path: str | Path) -> Splits:
    """Read Kaggle's captions.txt, where the caption is all that follows a line's first comma.

    Args:
        path: File with the header ``image,caption``; captions may be quoted.

    Returns:
        All photos, without splits.

    Raises:
        DataError: The file is missing, or a line cannot be parsed.
    """
    captions: dict[str, list[str]] = {}
    lines = _lines(Path(path))
    number, header = next(lines)
    if not _is_kaggle(header):
        raise DataError(
            f"{path}:{number}: expected the header 'image,caption', got {header[:40]!r}"
        )
    for number, line in lines:
        name, comma, caption = line.partition(",")
        if not comma or not name.strip():
            raise DataError(f"{path}:{number}: expected 'image,caption', got {line[:40]!r}")
        captions.setdefault(name.strip(), []).append(_unquote(caption.strip()))
    return {UNSPLIT: [ImportedPhoto(name, tuple(texts)) for name, texts in captions.items()]}


@dataclass(frozen=True)
class Columns:
    """Names of a table's columns; None: the usual names, in any case."""

    file: str | None = None
    caption: str | None = None


USUAL = Columns()


def import_csv(path: str | Path, columns: Columns = USUAL) -> Splits:
    """Read a table with one caption per row.

    The separator is the first of tab, ``|``, ``;`` and ``,`` that splits the header into a file
    column (file, filename, file_name, image, image_name, path) and a caption column (caption, text,
    sentence, comment), or the columns that are given; a ``split`` column is optional. With comma
    and semicolon, quotes work as in RFC 4180; with tab and ``|`` they matter only around a whole
    field, as in Flickr30k's results.csv.

    Args:
        path: The table.
        columns: Names of the columns.

    Returns:
        The photos by split; without a split column, all photos.

    Raises:
        DataError: The file or a column is missing, a row cannot be parsed, or a photo is in two
            splits.
    """
    text = _read_text(path)
    first = text.split("\n", 1)[0]
    for separator in _SEPARATORS:
        names = _header(first, separator)
        found = _find_columns(names, columns)
        if len(found) == 2:
            break
    else:
        raise DataError(f"{path}:1: {_missing_columns(_widest_header(first), columns)}")
    rows = []
    for number, row in _rows(text, separator, len(names), path):
        if len(row) != len(names):
            raise DataError(
                f"{path}:{number}: {len(row)} fields, but the header has {len(names)};"
                f" put quotes around a field that holds {separator!r}"
            )
        split = row[names.index("split")] if "split" in names else None
        rows.append((f"{path}:{number}", row[found["file"]], [row[found["caption"]]], split))
    return _collect(rows)


def import_jsonl(path: str | Path, columns: Columns = USUAL) -> Splits:
    """Read JSON Lines: one object per photo or caption, with the keys of `import_csv`'s columns.

    The caption may be a list of captions.

    Raises:
        DataError: As `import_csv`.
    """
    rows = []
    for number, line in _lines(Path(path)):
        where = f"{path}:{number}"
        try:
            record = json.loads(line)
        except ValueError as error:
            raise DataError(f"{where}: not JSON ({error})") from error
        if not isinstance(record, dict):
            raise DataError(f"{where}: not a JSON object")
        keys = list(record)
        found = _find_columns([key.strip().lower() for key in keys], columns)
        if len(found) < 2:
            raise DataError(f"{where}: {_missing_columns(keys, columns)}")
        name, caption = (record[keys[found[kind]]] for kind in ("file", "caption"))
        texts = caption if isinstance(caption, list) else [caption]
        if not isinstance(name, str) or not all(isinstance(text, str) for text in texts):
            raise DataError(f"{where}: file name and caption are not text")
        split = record.get("split")
        rows.append((where, name, texts, None if split is None else str(split)))
    return _collect(rows)


def import_imagefolder(path: str | Path, columns: Columns = USUAL) -> Splits:
    """Read an image folder of Hugging Face ``datasets``.

    Args:
        path: Folder with ``metadata.jsonl`` or ``metadata.csv``, or with folders of splits (train,
            validation, test) that hold one each.
        columns: Names of the columns, usually ``file_name`` and ``text``.

    Returns:
        The photos by split, with paths relative to the folder; without split folders, all photos.

    Raises:
        DataError: As `import_csv`.
    """
    splits: Splits = {}
    files = _metadata_files(Path(path))
    if not files:
        problem = (
            "has no metadata.jsonl or metadata.csv"
            if Path(path).is_dir()
            else "cannot be read (No such folder)"
        )
        raise DataError(f"{path}: {problem}; give an image folder of Hugging Face datasets")
    for file in files:
        read = import_jsonl if file.suffix == ".jsonl" else import_csv
        if file.parent == Path(path):
            return read(file, columns)
        folder = file.parent.name
        photos = [photo for found in read(file, columns).values() for photo in found]
        splits.setdefault(_SPLIT_NAMES[folder.lower()], []).extend(
            ImportedPhoto(f"{folder}/{photo.file_name}", photo.captions) for photo in photos
        )
    return splits


def _metadata_files(folder: Path) -> list[Path]:
    """The metadata of an image folder: its own, or else that of its split folders."""
    if not folder.is_dir():
        return []
    inside = [
        one for one in sorted(folder.iterdir()) if one.is_dir() and one.name.lower() in _SPLIT_NAMES
    ]
    own, of_splits = (
        [
            each / name
            for each in folders
            for name in ("metadata.jsonl", "metadata.csv")
            if (each / name).is_file()
        ]
        for folders in ([folder], inside)
    )
    return own[:1] or of_splits


def _collect(rows: Iterable[tuple[str, str, list[str], str | None]]) -> Splits:
    """The photos of a table's rows: location, file name, captions, and name of the split."""
    captions: dict[str, list[str]] = {}
    split_of: dict[str, str] = {}
    for where, text, texts, given in rows:
        name = text.strip()
        if not name:
            raise DataError(f"{where}: the file name is empty")
        split = UNSPLIT if given is None else _split_name(given, where)
        if split_of.setdefault(name, split) != split:
            raise DataError(f"{where}: {name} is in two splits, {split_of[name]} and {split}")
        captions.setdefault(name, []).extend(texts)
    splits: Splits = {}
    for name, texts in captions.items():
        splits.setdefault(split_of[name], []).append(ImportedPhoto(name, tuple(texts)))
    return splits


_SEPARATORS = "\t|;,"


def _header(line: str, separator: str) -> list[str]:
    """Column names in lower case."""
    return [_unquote(name.strip()).strip().lower() for name in line.split(separator)]


def _widest_header(line: str) -> list[str]:
    """The column names with the separator that gives most of them."""
    return max((_header(line, separator) for separator in _SEPARATORS), key=len)


def _find_columns(names: Sequence[str], columns: Columns) -> dict[str, int]:
    """Index of the file and of the caption column, as far as they are there."""
    found = {}
    for kind, given, usual in (
        ("file", columns.file, _FILE_COLUMNS),
        ("caption", columns.caption, _CAPTION_COLUMNS),
    ):
        accepted = usual if given is None else (given.strip().lower(),)
        if index := [names.index(name) for name in accepted if name in names]:
            found[kind] = index[0]
    return found


def _missing_columns(names: Sequence[str], columns: Columns) -> str:
    """Which columns are missing, which there are, and what to give."""
    found = _find_columns([name.lower() for name in names], columns)
    missing = [kind for kind in ("file", "caption") if kind not in found]
    wanted = " and ".join(
        f"no {kind} column" if (given := getattr(columns, kind)) is None else f"no column {given!r}"
        for kind in missing
    )
    options = " and ".join(f"--{kind}-column" for kind in missing)
    return f"{wanted}; the columns are {', '.join(names)[:200]}: name the right one with {options}"


def _rows(
    text: str, separator: str, count: int, path: str | Path
) -> Iterator[tuple[int, list[str]]]:
    """Line number and fields of every non-blank row after the header."""
    if separator in "\t|":
        for number, line in enumerate(text.split("\n")[1:], start=2):
            row = [_unquote(cell.strip()) for cell in line.rstrip("\r").split(separator)]
            # Flickr30k's results.csv has three columns, and lacks one '|' in one line.
            lacks_one = separator == "|" and (count, len(row)) == (3, 2)
            if lacks_one and (fields := re.match(r"(\d+)\s+(.*)", row[1])):
                row[1:] = fields.groups()
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
    """Remove quotes around a whole field (``"a ""b"" c"``); others belong to the text."""
    inner = text[1:-1]
    enclosed = len(text) >= 2 and text[0] == text[-1] == '"'
    return inner.replace('""', '"') if enclosed and '"' not in inner.replace('""', "") else text


def _split_name(text: str, where: str) -> str:
    name = _SPLIT_NAMES.get(text.strip().lower())
    if name is None:
        raise DataError(
            f"{where}: unknown split {text.strip()!r}; allowed: {', '.join(_SPLIT_NAMES)}"
        )
    return name


def _is_table(path: Path, header: str) -> bool:
    """Whether a file has the usual columns, or at least the name of a table."""
    known = any(len(_find_columns(_header(header, s), USUAL)) == 2 for s in _SEPARATORS)
    return known or path.suffix.lower() in (".csv", ".tsv")


def _is_kaggle(header: str) -> bool:
    return header.strip().lower() == "image,caption"


# --- COCO -----------------------------------------------------------------------------------------


_FIELDS: Fields = {
    "images": {"id": (int,), "file_name": (str,)},
    "annotations": {"image_id": (int,), "caption": (str,)},
}


def import_coco(path: str | Path) -> Splits:
    """Read a COCO captions file, for splitting it.

    Args:
        path: JSON file.

    Returns:
        All photos with their ids, without splits.

    Raises:
        DataError: The file is missing or not COCO captions.
    """
    data = read_coco(path, _FIELDS, "captions")
    captions: dict[int, list[str]] = {image["id"]: [] for image in data["images"]}
    for number, entry in enumerate(data["annotations"]):
        if entry["image_id"] not in captions:
            raise DataError(
                f"{path}: annotations[{number}]: image_id {entry['image_id']} is not in the file"
            )
        captions[entry["image_id"]].append(entry["caption"])
    return {
        UNSPLIT: [
            ImportedPhoto(image["file_name"], tuple(captions[image["id"]]), image["id"])
            for image in data["images"]
        ]
    }


# --- All layouts ----------------------------------------------------------------------------------

TABLES = ("csv", "jsonl", "imagefolder")
"""Layouts whose importers take `Columns` as well."""

IMPORTERS: dict[str, Callable[..., Splits]] = {
    "karpathy": import_karpathy,
    "flickr8k": import_flickr8k,
    "kaggle": import_kaggle,
    "csv": import_csv,
    "jsonl": import_jsonl,
    "imagefolder": import_imagefolder,
    "coco": import_coco,
}
"""Importer by layout."""


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
    if not path.is_dir() or (layout in ("auto", "imagefolder") and _metadata_files(path)):
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
    """Detect the layout of a file from its name and content.

    Args:
        path: The file.

    Returns:
        A key of `IMPORTERS`.

    Raises:
        DataError: The layout is unknown, or the file cannot be read.
    """
    layout = _layout_of_file(Path(path))
    if layout is None:
        raise DataError(
            f"{path}: unknown layout; give a CSV or JSON Lines file with a file and a caption"
            " column (others are named with --file-column and --caption-column), an image folder"
            " with metadata.jsonl, COCO captions, Karpathy's dataset_*.json, Flickr8k.token.txt or"
            " its folder, or Kaggle's captions.txt"
        )
    return layout


def _layout_of_file(path: Path) -> str | None:
    if _metadata_files(path) or path.suffix.lower() == ".jsonl":
        return "imagefolder" if path.is_dir() else "jsonl"
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
    return "csv" if _is_table(path, first) else None


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
    """Line number from 1 and text of every non-blank line."""
    for number, line in enumerate(_read_text(path).split("\n"), start=1):
        if line.strip():
            yield number, line.rstrip("\r")


def _records(data: dict[str, Any], key: str, where: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """The objects of a list in a JSON object, each with its location for messages."""
    for index, record in enumerate(_get(data, key, list, where)):
        if not isinstance(record, dict):
            raise DataError(f"{where}: {key}[{index}] is not an object")
        yield f"{where}: {key}[{index}]", record


def _get(record: dict[str, Any], key: str, kind: type, where: str) -> Any:
    value = record.get(key)
    if not isinstance(value, kind) or isinstance(value, bool):
        problem = "has no" if value is None else f"has {value!r:.30} as"
        raise DataError(f"{where} {problem} {key!r} ({kind.__name__})")
    return value
