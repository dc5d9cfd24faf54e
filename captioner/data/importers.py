"""Readers of caption data sets. They return photos with captions and splits from many layouts.

A layout is a combination of files and a file format:

    layout      source                                                            splits
    karpathy    dataset_coco.json, dataset_flickr8k.json, dataset_flickr30k.json  train, val, test
    flickr8k    Flickr8k.token.txt with Flickr_8k.*Images.txt next to it          as listed
    kaggle      captions.txt of Kaggle's Flickr8k (``image,caption``)             none
    csv         table with the columns file, caption and split                    optional
    jsonl       JSON Lines with the fields file, caption and split                optional
    json        list of such objects (BLIP, LAVIS), or captions by file name      optional
    imagefolder Hugging Face's image folder with metadata.jsonl or metadata.csv   optional
    pairs       folder of photos, each with its captions in a text file           none
    coco        COCO captions file                                                none

The column "splits" shows which splits a layout may contain. Photos without a split get the split
``"all"``. Empty captions are kept, except in COCO files.
`captioner.data.dataset` splits, filters and writes the photos.
"""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeAlias

from captioner.data.cells import DIGEST, digest_cell, plain_cell
from captioner.data.coco import caption_text, read_json, read_photos, whole_number
from captioner.data.example import NO_ID, UNSPLIT, Example
from captioner.data.folders import NamedFiles, find_images
from captioner.data.formats import format_by_name
from captioner.data.options import ColumnOptions
from captioner.errors import ConfigError, DataError
from captioner.files import read_input
from captioner.messages import either

USUAL = ColumnOptions()
"""Options that select columns by their usual names, such as ``file`` and ``caption``."""

Reader: TypeAlias = Callable[[Path, ColumnOptions], Iterator[tuple[str, Example]]]
"""Function that yields photos. Each photo comes with its place for messages, such as
``captions.csv:12``. A photo may be yielded several times with different captions."""


def import_captions(
    source: str | Path, layout: str = "auto", columns: ColumnOptions = USUAL
) -> list[Example]:
    """Read the photos and captions from a file or folder.

    Args:
        source: The file or folder. In a folder, `find_source` finds the captions file.
        layout: A key of `IMPORTERS`, or ``auto`` to detect the layout.
        columns: Names of the columns in a table.

    Returns:
        The photos in the order of the source, each with all its captions.

    Raises:
        ConfigError: Columns are named for a layout without columns.
        DataError: A file is missing or not of this layout, or a photo is in two splits.
    """
    path = find_source(source, layout)
    layout = detect_layout(path, columns) if layout == "auto" else layout
    named = columns.file_column or columns.caption_column
    if named and layout not in ("kaggle", "csv", "jsonl", "json", "imagefolder"):
        raise ConfigError(
            f"{path} has no columns, because its layout is {layout}; leave out --file-column "
            "and --caption-column"
        )
    photos: dict[tuple[Path, int], Example] = {}
    splits: dict[Path, str] = {}
    for where, found in IMPORTERS[layout](path, columns):
        if (other := splits.setdefault(found.path, found.split)) != found.split:
            raise DataError(
                f"{where}: {found.path} is in two splits, {other!r} and {found.split!r}; keep it "
                "in only one of them"
            )
        key = found.path, found.image_id
        held = photos[key].captions if key in photos else ()
        photos[key] = replace(found, captions=held + found.captions)
    return [*photos.values()]


def _example(
    name: str, captions: Iterable[str], split: str = UNSPLIT, image_id: int = NO_ID
) -> Example:
    """Return a photo by its name in the source, with all its captions, even if they are empty."""
    return Example(image_id, Path(name.strip()), tuple(captions), split=split)


# --- JSON files -----------------------------------------------------------------------------------


def _read_coco(path: Path, _: ColumnOptions) -> Iterator[tuple[str, Example]]:
    """Read a COCO captions file."""
    for image_id, photo in read_photos([path]).items():
        yield str(path), _example(str(photo.path), photo.captions, image_id=image_id)


def _read_karpathy(path: Path, _: ColumnOptions) -> Iterator[tuple[str, Example]]:
    """Read the splits of Karpathy and Fei-Fei (2015). The split ``restval`` becomes ``train``."""
    for number, image in enumerate(read_json(path).get("images") or [None]):
        where = f"{path}: images[{number}]"
        try:
            name = "/".join(part for part in (image.get("filepath"), image["filename"]) if part)
            texts = [caption_text(sentence["raw"]) for sentence in image["sentences"]]
            split = _split(where, image["split"])
            image_id = image.get("cocoid", image.get("imgid"))
            image_id = NO_ID if image_id is None else whole_number(image_id)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise DataError(
                f"{where} lacks the fields of Karpathy's files ({error}); use a dataset_*.json by "
                "Karpathy"
            ) from error
        yield where, _example(name, texts, split, image_id)


# --- Flickr8k -------------------------------------------------------------------------------------

_TOKEN_FILES = (".token.txt", ".token")
_DUPLICATE = re.compile(r"(\.jpe?g)\.\d+$", re.IGNORECASE)


def _read_flickr8k(path: Path, _: ColumnOptions) -> Iterator[tuple[str, Example]]:
    """Read Flickr8k as published. Flickr30k's .token file has the same format.

    A duplicate name (``2258277193_586949ec62.jpg.1``) counts as the original photo. If files
    next to the source list the photos of each split, unlisted photos are left out.
    """
    captions: dict[str, list[str]] = {}
    for number, line in _lines(read_text(path)):
        if not (fields := re.fullmatch(r"(.+)#\d+\t(.*)", line)):
            raise DataError(
                f"{path}:{number} is {line[:40]!r}; use the form 'name.jpg#0<tab>caption'"
            )
        captions.setdefault(_DUPLICATE.sub(r"\1", fields[1]), []).append(fields[2])
    files = {
        name: path.with_name(f"Flickr_8k.{name}Images.txt") for name in ("train", "dev", "test")
    }
    lists = {
        _SPLITS[name]: [line.strip() for _, line in _lines(read_text(file))]
        for name, file in files.items()
        if file.is_file()
    }
    for split, names in (lists or {UNSPLIT: [*captions]}).items():
        for name in dict.fromkeys(_DUPLICATE.sub(r"\1", name) for name in names):
            yield str(path), _example(name, captions.get(name, []), split)


# --- Tables ---------------------------------------------------------------------------------------

_USUAL_NAMES = {
    "file": ("file", "filename", "file_name", "image", "image_name", "path"),
    "caption": ("caption", "text", "sentence", "comment"),
}
_SPLITS = {
    **dict.fromkeys(("train", "training", "restval"), "train"),
    **dict.fromkeys(("val", "valid", "validation", "dev"), "val"),
    **dict.fromkeys(("test", "testing"), "test"),
}


def _read_csv(path: Path, columns: ColumnOptions) -> Iterator[tuple[str, Example]]:
    """Read a table with one caption per row."""
    for where, row in read_table(path, columns):
        yield where, _row(where, row, columns)


def read_table(
    path: str | Path, columns: ColumnOptions = USUAL
) -> Iterator[tuple[str, dict[str, str]]]:
    """Yield each row of a table with its place for messages, such as ``captions.csv:12``.

    A row maps column names in lower case to values. In tables separated by commas or semicolons,
    quotes work as in RFC 4180. In tables separated by tabs or ``|``, such as Flickr30k's
    results.csv, only quotes around a whole field count.

    Raises:
        DataError: The table cannot be read, or a row has too few or too many fields.
    """
    text = read_text(path, line_ends=True)
    separator, _ = _header(text, columns)
    quoting: Any = csv.QUOTE_NONE if separator in "\t|" else csv.QUOTE_MINIMAL
    clean = _unquote if separator in "\t|" else str.strip
    lines = io.StringIO(text, newline="")
    reader = csv.reader(lines, delimiter=separator, quoting=quoting, strict=True)
    rows = (row for row in reader if any(cell.strip() for cell in row))
    try:
        names = [clean(name).lower() for name in next(rows)]
        for row in rows:
            where = f"{path}:{reader.line_num}"
            if separator == "|" and len(row) == len(names) - 1:  # occurs in Flickr30k's results.csv
                row[-1:] = row[-1].split(maxsplit=1)
            if len(row) != len(names):
                raise DataError(
                    f"{where} has {len(row)} fields, but the header has {len(names)}; put quotes "
                    f"around each field that contains {separator!r}"
                )
            yield where, dict(zip(names, (plain_cell(clean(cell)) for cell in row), strict=True))
    except csv.Error as error:
        raise DataError(
            f"{path}:{reader.line_num} is not valid CSV ({error}); correct the line"
        ) from error


def unchanged_captions(
    source: str | Path, columns: ColumnOptions = USUAL
) -> dict[tuple[str, str], float | None]:
    """Return the captions of a CSV file that nobody has changed since captioner wrote it.

    The column ``digest`` shows this. For files without this column, the result is empty.

    Returns:
        The confidence of each caption, by photo and caption. It is None if it is unknown.
    """
    found: dict[tuple[str, str], float | None] = {}
    for photo, row in _csv_rows(source, columns):
        text = photo.captions[0].strip()
        if row.get(DIGEST) == digest_cell(text):
            sure = row.get("confidence", "")
            known = re.fullmatch(r"0(\.\d+)?|1(\.0+)?", sure)
            found[str(photo.path), text] = float(sure) if known else None
    return found


def shared_names(source: str | Path, columns: ColumnOptions = USUAL) -> set[str]:
    """Return the names in a CSV file of captioner that several photos share.

    The column ``rank`` numbers the captions of each photo. If a name occurs twice with the same
    rank but different captions, its rows belong to different photos, such as photos from two
    folders on the web page. For files without this column, the result is empty.
    """
    captions: dict[tuple[str, str], set[tuple[str, ...]]] = {}
    for photo, row in _csv_rows(source, columns):
        if rank := row.get("rank"):
            captions.setdefault((str(photo.path), rank), set()).add(photo.captions)
    return {name for (name, _), found in captions.items() if len(found) > 1}


def _csv_rows(
    source: str | Path, columns: ColumnOptions
) -> Iterator[tuple[Example, dict[str, str]]]:
    """Yield the photo and the cells of each row of a CSV file. Other sources yield nothing."""
    path = find_source(source)
    if not path.is_dir() and detect_layout(path, columns) == "csv":
        for where, row in read_table(path, columns):
            yield _row(where, row, columns), row


def _header(text: str, columns: ColumnOptions) -> tuple[str, list[str]]:
    """Return the separator of a table and its columns.

    The separator is the character that splits the header into a file column and a caption column.
    If no character does this, the character that results in the most columns is used.
    """
    header = re.split(r"[\r\n]", text.lstrip("\r\n"), maxsplit=1)[0].split("\0", 1)[0][
        : csv.field_size_limit()
    ]
    splits = [(one, next(csv.reader([header], delimiter=one))) for one in "\t|;,"]
    return max(splits, key=lambda split: (len(_find(split[1], columns)), len(split[1])))


def _read_jsonl(path: Path, columns: ColumnOptions) -> Iterator[tuple[str, Example]]:
    """Read JSON Lines with one object per photo or caption. An object may have several captions."""
    for number, line in _lines(read_text(path)):
        try:
            record = dict(json.loads(line))
        except (TypeError, ValueError) as error:
            raise DataError(
                f"{path}:{number} is not a JSON object ({error}); write one object per line"
            ) from error
        where = f"{path}:{number}"
        yield where, _row(where, record, columns)


def _read_json(path: Path, columns: ColumnOptions) -> Iterator[tuple[str, Example]]:
    """Read JSON: a list of objects as in JSON Lines, or an object with captions by file name."""
    content = _parse_json(path, read_text(path))
    if isinstance(content, dict):
        content = [{"file": name, "caption": texts} for name, texts in content.items()]
        columns = USUAL
    for number, record in enumerate(content):
        where = f"{path}: [{number}]"
        if not isinstance(record, dict):
            raise DataError(
                f"{where} is {record!r:.60}; use an object with a file name and a caption"
            )
        yield where, _row(where, record, columns)


def _parse_json(path: Path, text: str) -> Any:
    """Return the value in the text of a JSON file.

    Raises:
        DataError: The text is not valid JSON.
    """
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path} is not valid JSON ({error}); use a complete JSON file") from error


def _read_pairs(path: Path, _: ColumnOptions) -> Iterator[tuple[str, Example]]:
    """Read the captions of each photo from a text file of the same name, one caption per line.

    For example, the captions of photo.jpg are in photo.txt.
    """
    for photo in find_images([path], recursive=True):
        beside = photo.with_suffix(".txt")
        text = beside.read_bytes().strip() and read_text(beside) if beside.is_file() else ""
        lines = [line for _, line in _lines(text)] if text else []
        yield str(beside), _example(photo.relative_to(path).as_posix(), lines)


def _has_pairs(folder: Path) -> bool:
    """Return whether a folder or a subfolder contains a photo with a text file of the same name."""
    stems = {file.with_suffix("") for file in folder.rglob("*.txt")}
    return bool(stems) and any(
        file.with_suffix("") in stems and format_by_name(file.name) for file in folder.rglob("*")
    )


def _read_imagefolder(path: Path, columns: ColumnOptions) -> Iterator[tuple[str, Example]]:
    """Read an image folder of Hugging Face ``datasets``.

    The files metadata.jsonl or metadata.csv are in the folder itself, or else in a subfolder for
    each split.
    """
    files = _metadata_files(path)
    if not files:
        raise DataError(
            f"{path} contains neither metadata.jsonl nor metadata.csv; use an image folder of "
            "Hugging Face datasets"
        )
    for file in files:
        for where, photo in (_read_jsonl if file.suffix == ".jsonl" else _read_csv)(file, columns):
            if file.parent != path:
                below = Path(file.parent.name, photo.path)
                split = _SPLITS[file.parent.name.lower()]
                photo = replace(photo, path=below, split=split)  # noqa: PLW2901
            yield where, photo


def _metadata_files(folder: Path) -> list[Path]:
    """Return the metadata file of an image folder, or else the files of its split folders."""
    files = [file for kind in ("jsonl", "csv") for file in folder.glob(f"metadata.{kind}")]
    of_splits = [file for kind in ("jsonl", "csv") for file in folder.glob(f"*/metadata.{kind}")]
    return files[:1] or [file for file in sorted(of_splits) if file.parent.name.lower() in _SPLITS]


def _row(where: str, record: dict[str, Any], columns: ColumnOptions) -> Example:
    """Return the photo that a row describes.

    Args:
        where: Place of the row, for error messages.
        record: Values of the row by column.
        columns: Names of the columns.

    Raises:
        DataError: A column is missing, or a value has the wrong type.
    """
    found = _find(record, columns, where)
    name, caption = record[found["file"]], record[found["caption"]]
    texts = caption if isinstance(caption, list) else [caption]
    try:
        texts = [caption_text(text) for text in texts]
    except ValueError as error:
        raise DataError(f"{where}: {error}; use text or a list of texts") from error
    if not isinstance(name, str):
        raise DataError(
            f"{where}: the file name {name!r:.60} is not text; put quotes around the name"
        )
    return _example(name, texts, _split(where, record.get("split")))


def _split(where: str, name: Any) -> str:
    """Return a split by any of its usual names. None becomes ``UNSPLIT``.

    Raises:
        DataError: The name is unknown.
    """
    known = UNSPLIT if name is None else _SPLITS.get(str(name).strip().lower())
    if known is None:
        raise DataError(f"{where}: the split {name!r} is unknown; use one of: {', '.join(_SPLITS)}")
    return known


def _find(names: Iterable[str], columns: ColumnOptions, where: str = "") -> dict[str, str]:
    """Return the names of the file column and the caption column, by ``file`` and ``caption``.

    Args:
        names: Names of all columns.
        columns: Names that the user chose.
        where: Place in the file for error messages. If it is empty, a missing column is left out of
            the result instead of causing an error.

    Raises:
        DataError: A column is missing.
    """
    lower = {name.strip().lower(): name for name in reversed(list(names))}
    found = {}
    for kind, usual in _USUAL_NAMES.items():
        given = getattr(columns, f"{kind}_column")
        accepted = usual if given is None else (given.strip().lower(),)
        if present := [lower[name] for name in accepted if name in lower]:
            found[kind] = present[0]
    if where and (missing := [kind for kind in _USUAL_NAMES if kind not in found]):
        wanted = (repr(getattr(columns, f"{kind}_column") or kind) for kind in missing)
        options = " and ".join(f"--{kind}-column" for kind in missing)
        raise DataError(
            f"{where} has no column {' or '.join(wanted)} (found: {', '.join(names)[:200]}); name "
            f"the right column with {options}"
        )
    return found


def _unquote(text: str) -> str:
    """Remove quotes around a whole field (``"a ""b"" c"``). Other quotes belong to the text."""
    text = text.strip()
    fields = re.fullmatch(r'"((?:[^"]|"")*)"', text)
    return fields[1].replace('""', '"') if fields else text


def read_text(path: str | Path, *, line_ends: bool = False) -> str:
    """Return the text of a UTF-8 file, without a byte order mark and Excel's first line ``sep=;``.

    Line ends become ``\\n``. If ``line_ends`` is True, they are kept, because a name in a CSV file
    may contain a line end.

    Raises:
        DataError: The file cannot be read, is empty, or does not contain UTF-8 text.
    """
    content = read_input(path, "the file with the captions")
    for beginning, kind in _BINARY.items():
        if beginning.match(content):
            raise DataError(f"{path} is {kind}")
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not encoded in UTF-8 ({error}); save it as UTF-8") from error
    if not text.strip():
        raise DataError(f"{path} is empty; use a file with captions")
    if not line_ends:
        text = text.replace("\r\n", "\n").replace("\r", "\n")
    return _EXCEL_SEPARATOR.sub("", text, count=1)


def _lines(text: str) -> Iterator[tuple[int, str]]:
    """Yield the number (from 1) and the text of every line that is not blank."""
    return ((n, line) for n, line in enumerate(text.split("\n"), start=1) if line.strip())


_EXCEL_SEPARATOR = re.compile(r'\A"?sep=[,;|\t]"?(?=\r?\n)', re.IGNORECASE)
_UNPACK = "; unpack it and pass the unpacked folder or its captions file"
_TAR = f"a tar file, such as WebDataset's{_UNPACK}"
_BINARY = {
    re.compile(rb"PAR1"): "a Parquet file; save it as JSON Lines with pandas: "
    "read_parquet(FILE).to_json('captions.jsonl', orient='records', lines=True)",
    re.compile(rb"PK\x03\x04.{26,400}?(xl/|\[Content_Types\])", re.DOTALL):
        "an Excel workbook; save it as CSV UTF-8",
    re.compile(rb"PK\x03\x04"): f"a zip file{_UNPACK}",
    re.compile(rb".{257}ustar", re.DOTALL): _TAR,
    re.compile(rb"\x1f\x8b"): f"compressed with gzip{_UNPACK}",
}  # fmt: skip
"""Kinds of binary files and the remedy for each, by the first bytes of the file."""


# --- All layouts ----------------------------------------------------------------------------------

IMPORTERS: dict[str, Reader] = {
    "karpathy": _read_karpathy,
    "flickr8k": _read_flickr8k,
    "kaggle": _read_csv,
    "csv": _read_csv,
    "jsonl": _read_jsonl,
    "json": _read_json,
    "imagefolder": _read_imagefolder,
    "pairs": _read_pairs,
    "coco": _read_coco,
}
"""The reader of each layout."""


def find_source(path: str | Path, layout: str = "auto") -> Path:
    """Return the captions file in a folder.

    The path itself is returned if it is a file, an image folder, or a folder of photos with text
    files.

    Raises:
        DataError: The folder has no captions file, or it has several files named *.token.txt or
            *.token, but not Flickr8k.token.txt.
    """
    path = Path(path)
    if not path.is_dir() or (layout in ("auto", "imagefolder") and _metadata_files(path)):
        return path
    tokens = [file for file in path.iterdir() if file.name.endswith(_TOKEN_FILES)]
    published = [file for file in tokens if file.name == "Flickr8k.token.txt"]
    found = (published or tokens) if layout in ("auto", "flickr8k") else []
    if not found and layout in ("auto", "kaggle", "csv"):
        found = [file for file in [path / "captions.txt"] if file.is_file()]
    if layout == "pairs" or (not found and layout == "auto" and _has_pairs(path)):
        return path
    if len(found) != 1:
        if tars := sorted(path.glob("*.tar")):
            raise DataError(f"{tars[0]} is {_TAR}")
        if found:
            raise DataError(
                f"{path} contains {len(found)} files with captions; pass one of these files: "
                f"{either(sorted(one.name for one in found))}"
            )
        raise DataError(
            f"{path} contains no captions in a known layout; pass the file with the captions, such "
            "as a CSV file with the columns file and caption"
        )
    return found[0]


def photo_folder(source: Path, given: str | None, columns: ColumnOptions = USUAL) -> Path:
    """Return the folder that contains the photos of a source.

    The source is the file or folder with the captions. If the user has chosen a folder (``given``),
    it is returned. Otherwise, the source's own folder is tried first, then the current folder. The
    first of them that contains a photo of the source is returned, or else the source's own folder.
    """
    own = source if source.is_dir() else source.parent
    if given:
        return Path(given)
    names = [str(photo.path) for photo in import_captions(source, columns=columns)]
    folders = map(NamedFiles, (own, Path()))
    return next((one.folder for one in folders if any(map(one.find, names))), own)


def _detect_json(path: Path, text: str) -> str | None:
    """Return the layout of a JSON file, or None if it is unknown."""
    first, _, rest = text.strip().partition("\n")
    if rest and first.startswith("{") and first.rstrip().endswith("}"):
        with suppress(ValueError):  # an error: the object continues in the next line
            json.loads(first)
            return "jsonl"
    data = _parse_json(path, text)
    if isinstance(data, list):
        return "json"
    if "images" in data:
        if "annotations" in data:
            return "coco"
        return "karpathy" if '"sentences"' in text else None
    texts = (one for of in data.values() for one in (of if isinstance(of, list) else [of]))
    return "json" if data and all(isinstance(one, str | None) for one in texts) else None


def detect_layout(path: Path, columns: ColumnOptions = USUAL) -> str:
    """Return the layout of a file or folder, a key of `IMPORTERS`, from its name and content.

    If the user names columns, a text file of unknown layout counts as a table.

    Raises:
        DataError: The layout is unknown, or the file cannot be read.
    """
    if path.is_dir():
        return "imagefolder" if _metadata_files(path) else "pairs"
    if path.suffix.lower() in (".jsonl", ".ndjson"):
        return "jsonl"
    text = read_text(path)
    if text.lstrip().startswith(("{", "[")):
        if found := _detect_json(path, text):
            return found
    elif path.name.endswith(_TOKEN_FILES) or re.match(r".+#\d+\t", text):
        return "flickr8k"
    elif (
        columns.file_column
        or columns.caption_column
        or path.suffix.lower() in {".csv", ".tsv"}
        or len(_find(_header(text, USUAL)[1], USUAL)) == 2
    ):
        return "csv"
    raise DataError(
        f"{path} has an unknown layout; use a CSV or JSON file with the columns file and caption, "
        "or name its columns with --file-column and --caption-column"
    )
