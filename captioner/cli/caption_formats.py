"""The output formats of ``captioner caption``.

Each format is a class in this file. To add a format, write a class, add it to `FORMATS`, and add
its name to `FormatName`. Everything else follows, such as the help of ``--format`` and the format
that the extension of ``-o`` selects.

With ``--resume``, a file that the user has corrected keeps its rows, their order and additional
columns. A format supports this if it implements `CaptionFormat.read`.
"""

from __future__ import annotations

import csv
import html
import io
import json
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO, Any, Literal

from captioner.cli.rows import Name, Row
from captioner.data.cells import DIGEST, SafeWriter, digest_cell, plain_cell
from captioner.errors import ConfigError
from captioner.messages import clock, first_line, printable

FormatName = Literal["text", "json", "jsonl", "csv", "coco", "vtt"]
_DRAWN = (".html", ".png", ".jpg", ".jpeg", ".svg", ".pdf", ".gif", ".webp", ".npz")
"""Extensions of the files that ``captioner attend`` writes."""


class CaptionFormat:
    """An output format of captions."""

    name: FormatName
    extension: str
    one_caption = False
    """True if the format stores a single caption per photo, without keywords or marks for unsure
    captions."""
    has_errors = False
    """True if photos that failed have a row with their error."""
    medium: Literal["photos", "videos"] | None = None
    """The only kind of input that the format supports, or None if it supports both."""

    def write(self, file: IO[str], rows: Iterable[Row]) -> None:
        """Write each row as soon as it is generated.

        A row with ``kept`` comes from an earlier run's file and is written unchanged.
        """
        raise NotImplementedError

    def read(self, text: str, names: Iterable[Name]) -> Iterable[Row]:  # noqa: ARG002
        """Read the rows of a file, so that a later run can continue it.

        Args:
            text: The content of the file.
            names: Names of the photos that the file may contain.

        Raises:
            ValueError, TypeError, LookupError, csv.Error: The file is damaged, or not in this
                format. The argument of a KeyError names the missing part.
        """
        raise ValueError("captioner cannot read captions in this format")


class _Text(CaptionFormat):
    name, extension = "text", ".txt"

    def write(self, file: IO[str], rows: Iterable[Row]) -> None:
        """Write one line per caption. If the output is a terminal, show the confidence too."""
        for row in rows:
            if "kept" in row:
                print(row["kept"], file=file)
                continue
            for caption in row["captions"]:
                sure, mark = caption.get("confidence"), ""
                if caption.get("unsure"):
                    mark = f" (unsure: {sure:.2f})"
                elif sure is not None and file.isatty():
                    mark = f" ({sure:.0%} likely to be right)"
                time = f" {clock(row['start'])} --> {clock(row['end'])}" if "start" in row else ""
                keywords = f" [{_keywords(caption)}]" if caption.get("keywords") else ""
                line = f"{row['image']}{time}: {caption['text']}{mark}{keywords}"
                print(printable(line), file=file, flush=True)

    def read(self, text: str, names: Iterable[Name]) -> Iterator[Row]:
        beginnings = {printable(f"{name}: "): name for name in names}
        if not any(beginning in text for beginning in beginnings):
            raise ValueError("no line begins with the name of an input photo")
        for line in text.split("\n"):
            ends = (found.end() for found in re.finditer(": ", line))
            end = next((end for end in ends if line[:end] in beginnings), 0)
            if line.strip():
                name = beginnings.get(line[:end])
                yield {"image": name, "text": line[end:].strip(), "kept": line}


class _Json(CaptionFormat):
    name, extension = "json", ".json"
    has_errors = True

    def write(self, file: IO[str], rows: Iterable[Row]) -> None:
        _write_list(file, (row.get("kept", row) for row in rows))

    def read(self, text: str, names: Iterable[Name]) -> Iterator[Row]:  # noqa: ARG002
        return _kept_json(json.loads(text))


class _JsonLines(CaptionFormat):
    name, extension = "jsonl", ".jsonl"
    has_errors = True

    def write(self, file: IO[str], rows: Iterable[Row]) -> None:
        for row in rows:
            print(json.dumps(row.get("kept", row), ensure_ascii=False), file=file, flush=True)

    def read(self, text: str, names: Iterable[Name]) -> Iterator[Row]:  # noqa: ARG002
        return _kept_json(json.loads(line) for line in text.split("\n") if line.strip())


class _Csv(CaptionFormat):
    name, extension = "csv", ".csv"

    def write(self, file: IO[str], rows: Iterable[Row]) -> None:
        writer = None
        for row in rows:
            if "kept" in row:
                writer = writer or SafeWriter(file, row["kept"], row["delimiter"])
                writer.write_cells(row["kept"])
                continue
            times: Row = {name: f"{row[name]:.3f}" for name in ("start", "end") if name in row}
            for rank, caption in enumerate(row["captions"], 1):
                line: Row = {"image": row["image"], **times, "rank": rank}
                line["caption"] = caption["text"]
                line["log_prob"] = f"{caption['log_prob']:.4f}"
                sure = caption.get("confidence")
                line["confidence"] = "" if sure is None else f"{sure:.4f}"
                if "unsure" in caption:
                    line["unsure"] = {True: "yes", False: "no", None: ""}[caption["unsure"]]
                if "keywords" in row["captions"][0]:  # only the best caption has them
                    line["keywords"] = _keywords(caption)
                line[DIGEST] = digest_cell(caption["text"])
                writer = writer or SafeWriter(file, line)
                writer.write_row(line)
        if writer is None:
            print(f"image,rank,caption,log_prob,confidence,{DIGEST}", file=file)

    def read(self, text: str, names: Iterable[Name]) -> Iterator[Row]:  # noqa: ARG002
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


class _Coco(CaptionFormat):
    """COCO results, which name photos by image id."""

    name, extension = "coco", ".json"
    one_caption, medium = True, "photos"

    def write(self, file: IO[str], rows: Iterable[Row]) -> None:
        def result(row: Row) -> list[Row]:
            if "kept" in row:
                return [row["kept"]]
            return [{"image_id": row["image"], "caption": one["text"]} for one in row["captions"]]

        _write_list(file, (one for row in rows for one in result(row)[:1]))

    def read(self, text: str, names: Iterable[Name]) -> Iterator[Row]:  # noqa: ARG002
        found = json.loads(text)
        return ({"image": p["image_id"], "text": p["caption"], "kept": p} for p in found)


class _WebVtt(CaptionFormat):
    """Subtitles of one video. Source: https://www.w3.org/TR/webvtt1/."""

    name, extension = "vtt", ".vtt"
    one_caption, medium = True, "videos"

    def write(self, file: IO[str], rows: Iterable[Row]) -> None:
        print("WEBVTT", file=file)
        for row in rows:
            for caption in row["captions"]:
                text = html.escape(caption["text"], quote=False)
                print(f"\n{clock(row['start'])} --> {clock(row['end'])}\n{text}", file=file)


FORMATS: dict[str, CaptionFormat] = {
    one.name: one for one in (_Text(), _Json(), _JsonLines(), _Csv(), _Coco(), _WebVtt())
}
"""The formats by name. If several formats share an extension, the extension selects the first."""


def choose_format(given: str | None, target: Path | None) -> CaptionFormat:
    """Return the format of the output: from ``--format``, the file's extension, or else text.

    ``given`` is the value of ``--format``, and ``target`` is the output file. Both may be None.

    Raises:
        ConfigError: The extension is unknown, or does not belong to the format set by ``--format``.
    """
    suffix = "" if target is None else target.suffix.lower()
    extensions = dict.fromkeys(one.extension for one in FORMATS.values())
    possible = [one for one in FORMATS.values() if one.extension == suffix]
    if given == "parquet":
        raise ConfigError(
            "--format parquet needs --engine ray; add --engine ray, or use --format csv"
        )
    if given is None and suffix and not possible:
        attend = suffix in _DRAWN
        hint = f"; to show where the model looked, run captioner attend -o {target}" * attend
        raise ConfigError(
            f"-o {target} has an unknown extension; use {', '.join(extensions)}, or set --format"
            f"{hint}"
        )
    chosen = FORMATS[given] if given else (possible or [*FORMATS.values()])[0]
    if possible and chosen not in possible:
        raise ConfigError(
            f"--format {given} does not match -o {target}; leave out --format, or "
            "change the extension"
        )
    return chosen


def read_rows(path: Path, kind: CaptionFormat, names: Iterable[Name]) -> list[Row]:
    """Read the rows of an output file.

    Args:
        path: The file.
        kind: The format of the file.
        names: Names of the photos that the file may contain.

    Raises:
        ConfigError: The file is damaged, or not in this format.
    """
    try:
        text = path.read_bytes().decode("utf-8-sig")
        return [*kind.read(text, names)] if text.strip() else []
    except (ValueError, TypeError, LookupError, csv.Error) as error:
        remedy, reason = "repair the file", first_line(error)
        if isinstance(error, UnicodeDecodeError):
            remedy, reason = "save the file as UTF-8, in Excel as CSV UTF-8", "it is not UTF-8 text"
        elif isinstance(error, KeyError):
            reason = f"{error.args[0]} is missing"
        raise ConfigError(
            f"{path} cannot be continued as a {kind.name} caption file ({reason}); {remedy} "
            "(--force would replace the file and lose all corrections)"
        ) from error


def _keywords(caption: Row) -> str:
    """Return the keywords of a caption, separated by commas, or an empty string."""
    return ", ".join(keyword["word"] for keyword in caption.get("keywords", ()))


def _kept_json(photos: Iterable[Any]) -> Iterator[Row]:
    """Yield the rows to keep from JSON data. Photos that failed are left out and tried again."""
    for photo in photos:
        first = photo["captions"][0]["text"] if photo["captions"] else ""
        if photo["captions"] or "error" not in photo:
            yield {"image": photo["image"], "text": first, "kept": photo}


def _write_list(file: IO[str], values: Iterable[Any]) -> None:
    """Write a JSON list value by value, so that large folders do not fill the memory."""
    separator = "[\n"
    for value in values:
        file.write(separator + json.dumps(value, ensure_ascii=False))
        separator = ",\n"
    file.write("\n]\n" if separator == ",\n" else "[]\n")
