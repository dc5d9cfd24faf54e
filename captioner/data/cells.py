"""CSV cells that are safe to open in a spreadsheet.

A spreadsheet treats a cell as a formula if it begins with =, +, - or @, even after white space. A
formula can send data to a server, and texts in captioner's tables may come from strangers. An
apostrophe is therefore written before such a text, and `captioner.data.importers.read_table`
removes the apostrophe. Numbers are not changed. ``csvCell`` in ``drawing/web/cells.js`` works in
the same way.

Source: OWASP, CSV Injection.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Iterable, Mapping
from typing import IO, Any

from captioner.data.xmp import text_digest

DIGEST = "digest"
"""The column with the digest of a caption that captioner wrote (see `digest_cell`)."""

_FORMULA = re.compile("'*[=+\\-@\t\r\n\uff1d\uff0b\uff0d\uff20]")
_NUMBER = re.compile(r"-?\d+(\.\d+)?")


def safe_cell(text: str) -> str:
    """Return text as a cell that spreadsheets do not treat as a formula."""
    return f"'{text}" if _FORMULA.match(text) and not _NUMBER.fullmatch(text) else text


def plain_cell(cell: str) -> str:
    """Return the original text of a cell that `safe_cell` may have changed."""
    return cell[1:] if cell.startswith("'") and _FORMULA.match(cell) else cell


def digest_cell(text: str) -> str:
    """Return a digest (hash) of a caption, which shows later whether somebody has changed the text.

    The prefix prevents spreadsheets from reading the digest as a number.
    """
    return f"sha256:{text_digest(text)}"


class SafeWriter:
    """A writer of CSV tables that are safe to open in a spreadsheet."""

    def __init__(self, file: IO[str], columns: Iterable[str], delimiter: str = ",") -> None:
        """Write the header of the table to a file that is open for text."""
        self._columns = [*columns]
        # Older versions of Python quote text with "\r" only if the line end contains "\r".
        self._file, self._writer = (
            file,
            csv.writer(self, delimiter=delimiter, lineterminator="\r\n"),
        )
        self._writer.writerow(self._columns)

    def write_row(self, row: Mapping[str, Any]) -> None:
        """Write a row. ``row`` maps columns to values. Missing values become empty cells."""
        self._writer.writerow([safe_cell(str(row.get(name, ""))) for name in self._columns])

    def write_cells(self, row: Mapping[str, str]) -> None:
        """Write a row of cells from an existing table, without changing the cells."""
        self._writer.writerow([row.get(name, "") for name in self._columns])

    def write(self, line: str) -> None:
        """Write an encoded row. ``csv.writer`` calls this method.

        The line end becomes a line feed, as in the other output formats.
        """
        self._file.write(line.removesuffix("\r\n") + "\n")
