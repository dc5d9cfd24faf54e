"""Rows of an output file of ``captioner caption`` that ``--resume`` keeps as they are.

A file that was written without ``--resume``, or that somebody has corrected since, is continued:
its rows stay, in their order and with columns of their own, and rows of new photos follow.
"""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from captioner.data.cells import plain_cell
from captioner.errors import ConfigError
from captioner.messages import first_line, printable

Kept = dict[str, Any]
"""A row: ``image``, the photo's name or None; ``text``, its caption; ``kept``, its content."""


def read_rows(path: Path, kind: str, names: Iterable[str | int]) -> list[Kept]:
    """Read the rows of an output file; ``names`` are what its photos may be called in it.

    Raises:
        ConfigError: It is damaged, or not such a file.
    """
    try:
        text = path.read_bytes().decode("utf-8-sig")
        return [*_READERS[kind](text, names)] if text.strip() else []
    except (ValueError, TypeError, LookupError, csv.Error) as error:
        reason = f"it lacks {error.args[0]}" if isinstance(error, KeyError) else first_line(error)
        raise ConfigError(
            f"{path} cannot be continued as a {kind} file of captions ({reason}); repair it, or "
            "give --force to overwrite it, or another name"
        ) from error


def _csv_rows(text: str, _: Iterable[str | int]) -> Iterator[Kept]:
    text = re.sub(r'\A"?sep=.?"?\r?\n', "", text)
    delimiter = max(",;\t", key=text.split("\n", 1)[0].count)
    reader = csv.DictReader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True)
    for name in ("image", "caption"):
        if name not in (reader.fieldnames or ()):
            raise KeyError(f"a column {name}")
    for row in reader:
        if None in row or None in row.values():
            raise ValueError(f"line {reader.line_num} has more or fewer cells than the header")
        yield {
            "image": plain_cell(row["image"]), "text": plain_cell(row["caption"]), "kept": row,
            "delimiter": delimiter,
        }  # fmt: skip


def _text_rows(text: str, names: Iterable[str | int]) -> Iterator[Kept]:
    beginnings = {printable(f"{name}: "): name for name in names}
    if not any(beginning in text for beginning in beginnings):
        raise ValueError("no line begins with the name of one of these photos")
    for line in text.split("\n"):
        ends = (found.end() for found in re.finditer(": ", line))
        end = next((end for end in ends if line[:end] in beginnings), 0)
        if line.strip():
            yield {"image": beginnings.get(line[:end]), "text": line[end:].strip(), "kept": line}


def _json_rows(text: str, _: Iterable[str | int]) -> Iterator[Kept]:
    return map(_json_row, json.loads(text))


def _jsonl_rows(text: str, _: Iterable[str | int]) -> Iterator[Kept]:
    return (_json_row(json.loads(line)) for line in text.split("\n") if line.strip())


def _json_row(photo: Any) -> Kept:
    first = photo["captions"][0]["text"] if photo["captions"] else ""
    return {"image": photo["image"], "text": first, "kept": photo}


def _coco_rows(text: str, _: Iterable[str | int]) -> Iterator[Kept]:
    return ({"image": p["image_id"], "text": p["caption"], "kept": p} for p in json.loads(text))


_READERS: dict[str, Callable[[str, Iterable[str | int]], Iterator[Kept]]] = {
    "csv": _csv_rows,
    "text": _text_rows,
    "json": _json_rows,
    "jsonl": _jsonl_rows,
    "coco": _coco_rows,
}
