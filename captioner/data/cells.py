"""Cells of CSV files that are safe to open in a spreadsheet.

A spreadsheet computes a cell that begins with =, +, - or @, also after white space, and may send
the result to a server. Texts in our tables may come from strangers. An apostrophe is therefore
written before such a text, and `captioner.data.importers.read_table` removes it. Numbers are left
as they are. `csvCell` in ``drawing/web/cells.js`` does the same.

Source: OWASP, CSV Injection.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Iterable, Mapping
from typing import IO, Any

_FORMULA = re.compile("'*[=+\\-@\t\r\n\uff1d\uff0b\uff0d\uff20]")
_NUMBER = re.compile(r"-?\d+(\.\d+)?")


def safe_cell(text: str) -> str:
    """Return text as a cell that no spreadsheet computes."""
    return f"'{text}" if _FORMULA.match(text) and not _NUMBER.fullmatch(text) else text


def plain_cell(cell: str) -> str:
    """Return the original text of a cell that `safe_cell` may have changed."""
    return cell[1:] if cell.startswith("'") and _FORMULA.match(cell) else cell


class SafeWriter:
    """A writer of CSV tables with safe cells."""

    def __init__(self, file: IO[str], columns: Iterable[str], delimiter: str = ",") -> None:
        """Write the header of the table."""
        self._columns = [*columns]
        # Older versions of Python quote text with "\r" only if the line end contains "\r".
        self._file, self._writer = (
            file,
            csv.writer(self, delimiter=delimiter, lineterminator="\r\n"),
        )
        self._writer.writerow(self._columns)

    def write_row(self, row: Mapping[str, Any]) -> None:
        """Write a row from values by column."""
        self._writer.writerow([safe_cell(str(row.get(name, ""))) for name in self._columns])

    def write_cells(self, row: Mapping[str, str]) -> None:
        """Write a row of cells from another table, without changing them."""
        self._writer.writerow([row.get(name, "") for name in self._columns])

    def write(self, line: str) -> None:
        """Write a line with the line end that the other output formats have."""
        self._file.write(line.removesuffix("\r\n") + "\n")
