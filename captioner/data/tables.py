"""Tables of photos and captions: CSV, JSON Lines, Kaggle's captions.txt, image folders."""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from captioner.errors import DataError

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


_USUAL_NAMES = {
    "file": ("file", "filename", "file_name", "image", "image_name", "path"),
    "caption": ("caption", "text", "sentence", "comment"),
}
SEPARATORS = "\t|;,"
_SPLIT_NAMES = {
    **dict.fromkeys(("train", "training", "restval"), "train"),
    **dict.fromkeys(("val", "valid", "validation", "dev"), "val"),
    **dict.fromkeys(("test", "testing"), "test"),
}


def read_kaggle(path: Path, _: Columns) -> Iterator[Row]:
    """Kaggle's captions.txt, where the caption is all that follows a line's first comma."""
    rows = numbered_lines(path)
    where, first = next(rows)
    if not is_kaggle(first):
        raise DataError(f"{where}: expected the header 'image,caption', got {first[:40]!r}")
    for where, line in rows:
        name, comma, caption = line.partition(",")
        if not comma:
            raise DataError(f"{where}: expected 'image,caption', got {line[:40]!r}")
        yield Row(where, name, [_unquote(caption.strip())])


def read_csv(path: Path, columns: Columns) -> Iterator[Row]:
    """A table with one caption per row.

    The separator is the first of tab, ``|``, ``;`` and ``,`` that splits the header into a file and
    a caption column. With comma and semicolon, quotes work as in RFC 4180; with tab and ``|`` they
    matter only around a whole field, as in Flickr30k's results.csv.
    """
    text = read_text(path)
    headers = {separator: column_names(text, separator) for separator in SEPARATORS}
    fitting = [s for s, names in headers.items() if len(find_columns(names, columns)) == 2]
    if not fitting:
        widest = max(headers.values(), key=len)
        raise DataError(f"{path}:1: {_missing_columns(widest, columns)}")
    separator = fitting[0]
    names = headers[separator]
    split_rows = _split_lines if separator in "\t|" else _parse_csv
    for number, row in split_rows(text, separator, len(names), path):
        if len(row) != len(names):
            raise DataError(
                f"{path}:{number}: {len(row)} fields, but the header has {len(names)};"
                f" put quotes around a field that holds {separator!r}"
            )
        yield _table_row(f"{path}:{number}", dict(zip(names, row, strict=True)), columns)


def read_jsonl(path: Path, columns: Columns) -> Iterator[Row]:
    """One object per photo or caption; the caption may be a list of captions."""
    for where, line in numbered_lines(path):
        try:
            record = json.loads(line)
        except ValueError as error:
            raise DataError(f"{where}: not JSON ({error})") from error
        if not isinstance(record, dict):
            raise DataError(f"{where}: not a JSON object")
        yield _table_row(where, record, columns)


def _table_row(where: str, record: dict[str, Any], columns: Columns) -> Row:
    """A row of a table, from its values by column."""
    keys = list(record)
    found = find_columns(keys, columns)
    if len(found) < 2:
        raise DataError(f"{where}: {_missing_columns(keys, columns)}")
    name, caption = (record[keys[found[kind]]] for kind in ("file", "caption"))
    texts = caption if isinstance(caption, list) else [caption]
    if not isinstance(name, str) or not all(isinstance(text, str) for text in texts):
        raise DataError(f"{where}: file name and caption are not text")
    split = record.get("split")
    if split is None:
        return Row(where, name, texts)
    known = _SPLIT_NAMES.get(str(split).strip().lower())
    if known is None:
        raise DataError(f"{where}: unknown split {split!r}; allowed: {', '.join(_SPLIT_NAMES)}")
    return Row(where, name, texts, known)


def read_imagefolder(path: Path, columns: Columns) -> Iterator[Row]:
    """An image folder of Hugging Face ``datasets``: its metadata, or that of its split folders."""
    files = metadata_files(path)
    if not files:
        raise DataError(
            f"{path}: cannot be read (No such folder with metadata.jsonl or metadata.csv); give an "
            "image folder of Hugging Face datasets"
        )
    for file in files:
        read = read_jsonl if file.suffix == ".jsonl" else read_csv
        folder = file.parent.name
        for row in read(file, columns):
            if file.parent == path:
                yield row
            else:
                split = _SPLIT_NAMES[folder.lower()]
                yield row._replace(file_name=f"{folder}/{row.file_name}", split=split)


def metadata_files(folder: Path) -> list[Path]:
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


def column_names(text: str, separator: str) -> list[str]:
    """Column names in the first line, in lower case."""
    line = text.split("\n", 1)[0]
    return [_unquote(name.strip()).strip().lower() for name in line.split(separator)]


def find_columns(names: Sequence[str], columns: Columns) -> dict[str, int]:
    """Index of the file and of the caption column, as far as they are there."""
    lower = [name.strip().lower() for name in names]
    found = {}
    for kind, usual in _USUAL_NAMES.items():
        given = getattr(columns, kind)
        accepted = usual if given is None else (given.strip().lower(),)
        if index := [lower.index(name) for name in accepted if name in lower]:
            found[kind] = index[0]
    return found


def _missing_columns(names: Sequence[str], columns: Columns) -> str:
    """Which columns are missing, which there are, and what to give."""
    found = find_columns(names, columns)
    missing = [kind for kind in _USUAL_NAMES if kind not in found]
    wanted = " and ".join(
        f"no {kind} column" if (given := getattr(columns, kind)) is None else f"no column {given!r}"
        for kind in missing
    )
    options = " and ".join(f"--{kind}-column" for kind in missing)
    return f"{wanted}; the columns are {', '.join(names)[:200]}: name the right one with {options}"


def _split_lines(
    text: str, separator: str, count: int, path: Path
) -> Iterator[tuple[int, list[str]]]:
    """Line number and fields of every non-blank line after the header."""
    del path
    for number, line in enumerate(text.split("\n")[1:], start=2):
        row = [_unquote(cell.strip()) for cell in line.rstrip("\r").split(separator)]
        # Flickr30k's results.csv has three columns, and lacks one '|' in one line.
        lacks_one = separator == "|" and (count, len(row)) == (3, 2)
        if lacks_one and (fields := re.match(r"(\d+)\s+(.*)", row[1])):
            row[1:] = fields.groups()
        if any(row):
            yield number, row


def _parse_csv(
    text: str, separator: str, count: int, path: Path
) -> Iterator[tuple[int, list[str]]]:
    """Line number and fields of every non-blank record after the header."""
    del count
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


# --- Text files ---


def is_kaggle(first: str) -> bool:
    """Whether the first line is the header of Kaggle's captions.txt."""
    return first.strip().lower() == "image,caption"


def read_text(path: Path) -> str:
    """The text of a UTF-8 file, with or without a byte order mark."""
    try:
        content = path.read_bytes()
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


def numbered_lines(path: Path) -> Iterator[tuple[str, str]]:
    """Location and text of every non-blank line."""
    for number, line in enumerate(read_text(path).split("\n"), start=1):
        if line.strip():
            yield f"{path}:{number}", line.rstrip("\r")
