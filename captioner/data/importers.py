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

import csv
import io
import json
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

from captioner.data.coco import CAPTION_FIELDS, read_coco, read_json
from captioner.errors import DataError
from captioner.files import read_input

UNSPLIT = "all"
"""Split name for photos without a split."""


@dataclass(frozen=True)
class Columns:
    """Names of a table's columns; None: the usual names, in any case."""

    file: str | None = None
    caption: str | None = None


USUAL = Columns()


class Row(NamedTuple):
    """A photo with some of its captions."""

    where: str
    """For messages, such as ``captions.csv:12``."""
    file_name: str
    captions: list[str]
    split: str = UNSPLIT
    image_id: int | None = None


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

    Raises:
        DataError: A file is missing or not of this layout, or a photo is in two splits.
    """
    captions: dict[tuple[str, int | None], list[str]] = {}
    split_of: dict[str, str] = {}
    for row in IMPORTERS[layout](Path(path), columns):
        name = row.file_name.strip()
        if (other := split_of.setdefault(name, row.split)) != row.split:
            raise DataError(f"{row.where}: {name} is in two splits, {other} and {row.split}")
        captions.setdefault((name, row.image_id), []).extend(row.captions)
    splits: Splits = {}
    for (name, image_id), texts in captions.items():
        photo = ImportedPhoto(name, tuple(texts), image_id)
        splits.setdefault(split_of[name], []).append(photo)
    return splits


# --- JSON files -----------------------------------------------------------------------------------


def _read_coco(path: Path, _: Columns) -> Iterator[Row]:
    data = read_coco(path, CAPTION_FIELDS, "captions")
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
            split = image["split"]
        except (AttributeError, KeyError, TypeError) as error:
            raise DataError(
                f"{where} is not an entry of Karpathy's ({error}); give his dataset_*.json"
            ) from error
        image_id = image.get("cocoid", image.get("imgid"))
        yield Row(where, name, texts, _split(where, split), image_id)


# --- Flickr8k -------------------------------------------------------------------------------------

_FLICKR8K_LISTS = ("train", "dev", "test")
_TOKEN_FILES = (".token.txt", ".token")
_DUPLICATE = re.compile(r"(\.jpe?g)\.\d+$", re.IGNORECASE)


def _read_flickr8k(path: Path, _: Columns) -> Iterator[Row]:
    """Flickr8k as published; Flickr30k's .token file has the same format.

    Captions of a duplicate file (``2258277193_586949ec62.jpg.1``) are used only if its photo has
    none. If there are split lists, photos that are in none of them are left out.
    """
    captions: dict[str, list[str]] = {}
    duplicates: dict[str, list[str]] = {}
    for number, line in _lines(_read_text(path)):
        if not (fields := re.fullmatch(r"(.+)#\d+\t(.*)", line)):
            raise DataError(
                f"{path}:{number}: expected 'name.jpg#0<tab>caption', got {line[:40]!r}"
            )
        photo = _DUPLICATE.sub(r"\1", fields[1])
        (captions if photo == fields[1] else duplicates).setdefault(photo, []).append(fields[2])
    captions = duplicates | captions
    files = {name: path.with_name(f"Flickr_8k.{name}Images.txt") for name in _FLICKR8K_LISTS}
    lists = {name: file for name, file in files.items() if file.is_file()}
    if not lists:
        yield from (Row(str(path), name, texts) for name, texts in captions.items())
    for split, file in lists.items():
        names = (_DUPLICATE.sub(r"\1", line.strip()) for _, line in _lines(_read_text(file)))
        for name in dict.fromkeys(names):
            yield Row(str(file), name, captions.get(name, []), _SPLIT_NAMES[split])


# --- Tables ---------------------------------------------------------------------------------------

_USUAL_NAMES = {
    "file": ("file", "filename", "file_name", "image", "image_name", "path"),
    "caption": ("caption", "text", "sentence", "comment"),
}
_SEPARATORS = "\t|;,"
Rows: TypeAlias = Iterator[tuple[int, list[str]]]
"""Line number and fields."""
_SPLIT_NAMES = {
    **dict.fromkeys(("train", "training", "restval"), "train"),
    **dict.fromkeys(("val", "valid", "validation", "dev"), "val"),
    **dict.fromkeys(("test", "testing"), "test"),
}


def _read_kaggle(path: Path, columns: Columns) -> Iterator[Row]:
    """Kaggle's captions.txt, where the caption is all that follows a line's first comma."""
    (_, header), *lines = _lines(_read_text(path))
    rows = ((number, [_unquote(cell) for cell in line.split(",", 1)]) for number, line in lines)
    return _table(path, header.split(","), ",", rows, columns)


def _read_csv(path: Path, columns: Columns) -> Iterator[Row]:
    """A table with one caption per row.

    The separator is that of tab, ``|``, ``;`` and ``,`` that splits the header into a file and a
    caption column. With comma and semicolon, quotes work as in RFC 4180; with tab and ``|`` they
    matter only around a whole field, as in Flickr30k's results.csv.
    """
    text = _read_text(path)
    headers = {separator: _header(text, separator) for separator in _SEPARATORS}
    separator, names = max(
        headers.items(), key=lambda one: (len(_find(one[1], columns)), len(one[1]))
    )
    _found(f"{path}:1", names, columns)
    rows = _records(path, text, separator)
    next(rows)
    if separator == "|" and len(names) == 3:
        rows = map(_with_lost_separator, rows)
    return _table(path, names, separator, rows, columns)


def _records(path: Path, text: str, separator: str) -> Rows:
    verbatim = separator in "\t|"
    reader = csv.reader(
        io.StringIO(text, newline=""),
        delimiter=separator,
        strict=True,
        quoting=csv.QUOTE_NONE if verbatim else csv.QUOTE_MINIMAL,
    )
    try:
        for row in reader:
            if any(cell.strip() for cell in row):
                yield reader.line_num, [_unquote(cell) for cell in row] if verbatim else row
    except csv.Error as error:
        raise DataError(f"{path}:{reader.line_num}: not valid CSV ({error})") from error


def _with_lost_separator(row: tuple[int, list[str]]) -> tuple[int, list[str]]:
    """Flickr30k's results.csv has three columns, and lacks one ``|`` in one line."""
    number, cells = row
    lost = re.fullmatch(r"(\d+)\s+(.*)", cells[1]) if len(cells) == 2 else None
    return (number, [cells[0], *lost.groups()]) if lost else row


def _table(
    path: Path, names: list[str], separator: str, rows: Rows, columns: Columns
) -> Iterator[Row]:
    for number, row in rows:
        if len(row) != len(names):
            raise DataError(
                f"{path}:{number}: {len(row)} fields, but the header has {len(names)};"
                f" put quotes around a field that holds {separator!r}"
            )
        yield _row(f"{path}:{number}", dict(zip(names, row, strict=True)), columns)


def _read_jsonl(path: Path, columns: Columns) -> Iterator[Row]:
    """One object per photo or caption; the caption may be a list of captions."""
    for number, line in _lines(_read_text(path)):
        try:
            record = dict(json.loads(line))
        except (TypeError, ValueError) as error:
            raise DataError(f"{path}:{number}: not a JSON object ({error})") from error
        yield _row(f"{path}:{number}", record, columns)


def _row(where: str, record: dict[str, Any], columns: Columns) -> Row:
    """A row of a table, from its values by column."""
    found = _found(where, record, columns)
    name, caption = record[found["file"]], record[found["caption"]]
    texts = caption if isinstance(caption, list) else [caption]
    if not isinstance(name, str) or not all(isinstance(text, str) for text in texts):
        raise DataError(f"{where}: file name and caption are not text")
    return Row(where, name, texts, _split(where, record.get("split")))


def _split(where: str, name: Any) -> str:
    known = UNSPLIT if name is None else _SPLIT_NAMES.get(str(name).strip().lower())
    if known is None:
        raise DataError(f"{where}: unknown split {name!r}; allowed: {', '.join(_SPLIT_NAMES)}")
    return known


def _read_imagefolder(path: Path, columns: Columns) -> Iterator[Row]:
    """An image folder of Hugging Face ``datasets``: its metadata, or that of its split folders."""
    files = _metadata_files(path)
    if not files:
        raise DataError(
            f"{path} is not a folder with metadata.jsonl or metadata.csv; give an image folder of "
            "Hugging Face datasets"
        )
    for file in files:
        read = _read_jsonl if file.suffix == ".jsonl" else _read_csv
        for row in read(file, columns):
            if file.parent == path:
                yield row
            else:
                folder = file.parent.name
                split = _SPLIT_NAMES[folder.lower()]
                yield row._replace(file_name=f"{folder}/{row.file_name}", split=split)


def _metadata_files(folder: Path) -> list[Path]:
    """The metadata of an image folder: its own, or else that of its split folders."""
    if not folder.is_dir():
        return []
    splits = [path for path in sorted(folder.iterdir()) if path.name.lower() in _SPLIT_NAMES]
    names = ("metadata.jsonl", "metadata.csv")
    own, of_splits = (
        [path / name for path in paths for name in names if (path / name).is_file()]
        for paths in ([folder], splits)
    )
    return own[:1] or of_splits


def _header(text: str, separator: str) -> list[str]:
    """The column names, in lower case."""
    line = text.lstrip("\n").split("\n", 1)[0]
    return [_unquote(name).strip().lower() for name in line.split(separator)]


def _find(names: Iterable[str], columns: Columns) -> dict[str, str]:
    """The names of the file and of the caption column, as far as they are there."""
    lower = {name.strip().lower(): name for name in reversed(list(names))}
    found = {}
    for kind, usual in _USUAL_NAMES.items():
        given = getattr(columns, kind)
        accepted = usual if given is None else (given.strip().lower(),)
        if present := [lower[name] for name in accepted if name in lower]:
            found[kind] = present[0]
    return found


def _found(where: str, names: Iterable[str], columns: Columns) -> dict[str, str]:
    """See `_find`; both must be there."""
    found = _find(names, columns)
    if missing := [kind for kind in _USUAL_NAMES if kind not in found]:
        wanted = (repr(getattr(columns, kind) or kind) for kind in missing)
        options = " and ".join(f"--{kind}-column" for kind in missing)
        raise DataError(
            f"{where}: no column {' or '.join(wanted)}; the columns are {', '.join(names)[:200]}: "
            f"name the right one with {options}"
        )
    return found


def _unquote(text: str) -> str:
    """Remove quotes around a whole field (``"a ""b"" c"``); others belong to the text."""
    text = text.strip()
    inner = text[1:-1]
    enclosed = len(text) >= 2 and text[0] == text[-1] == '"'
    return inner.replace('""', '"') if enclosed and '"' not in inner.replace('""', "") else text


def _read_text(path: Path) -> str:
    """The text of a UTF-8 file, with or without a byte order mark."""
    try:
        text = read_input(path, "the file with the captions").decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: not UTF-8 ({error}); save the file as UTF-8") from error
    if not text.strip():
        raise DataError(f"{path}: the file is empty")
    return text.replace("\r\n", "\n").replace("\r", "\n")


def _lines(text: str) -> Iterator[tuple[int, str]]:
    """Number and text of every non-blank line."""
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            yield number, line


# --- All layouts ----------------------------------------------------------------------------------

TABLES = ("csv", "jsonl", "imagefolder")
"""Layouts that have `Columns`."""

IMPORTERS: dict[str, Reader] = {
    "karpathy": _read_karpathy,
    "flickr8k": _read_flickr8k,
    "kaggle": _read_kaggle,
    "csv": _read_csv,
    "jsonl": _read_jsonl,
    "imagefolder": _read_imagefolder,
    "coco": _read_coco,
}
"""Reader by layout."""


def find_source(path: str | Path, layout: str = "auto") -> Path:
    """The captions file of a folder; a file is returned as it is, and so is an image folder.

    Args:
        path: File or folder.
        layout: A key of `IMPORTERS`, or auto.

    Raises:
        DataError: The folder has none, or several token files, none of them Flickr8k.token.txt.
    """
    path = Path(path)
    if not path.is_dir() or (layout in ("auto", "imagefolder") and _metadata_files(path)):
        return path
    tokens = [file for file in path.iterdir() if file.name.endswith(_TOKEN_FILES)]
    published = [file for file in tokens if file.name == "Flickr8k.token.txt"]
    found = (published or tokens) if layout in ("auto", "flickr8k") else []
    if not found and layout in ("auto", "kaggle", "csv"):
        found = [file for file in [path / "captions.txt"] if file.is_file()]
    if len(found) != 1:
        problem = f"with {len(found)} token files" if found else "without captions"
        raise DataError(
            f"{path} is a folder {problem} (metadata.jsonl, metadata.csv, captions.txt or"
            " Flickr8k.token.txt); give the file with the captions of its photos, such as a CSV"
            " file with the columns file and caption"
        )
    return found[0]


def detect_layout(path: str | Path, columns: Columns = USUAL) -> str:
    """Detect the layout of a file, a key of `IMPORTERS`, from its name and content.

    Args:
        path: The file, or an image folder.
        columns: Columns that are named make a text file a table.

    Raises:
        DataError: The layout is unknown, or the file cannot be read.
    """
    path = Path(path)
    if _metadata_files(path) or path.suffix.lower() == ".jsonl":
        return "imagefolder" if path.is_dir() else "jsonl"
    text = _read_text(path)
    first = text.split("\n", 1)[0]
    if text.lstrip().startswith(("{", "[")):
        data = read_json(path)
        if "images" in data and "annotations" in data:
            return "coco"
        if "images" in data and '"sentences"' in text:
            return "karpathy"
    elif path.name.endswith(_TOKEN_FILES) or re.match(r".+#\d+\t", first):
        return "flickr8k"
    elif first.strip().lower() == "image,caption" and columns == USUAL:
        return "kaggle"
    elif (
        columns != USUAL
        or path.suffix.lower() in {".csv", ".tsv"}
        or any(len(_find(_header(text, separator), USUAL)) == 2 for separator in _SEPARATORS)
    ):
        return "csv"
    raise DataError(
        f"{path}: unknown layout; give a CSV or JSON Lines file with a file and a caption column"
        " (others are named with --file-column and --caption-column), an image folder with"
        " metadata.jsonl, COCO captions, Karpathy's dataset_*.json, Flickr8k.token.txt or its"
        " folder, or Kaggle's captions.txt"
    )
