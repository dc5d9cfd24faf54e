"use strict";
/* Cells of CSV files; `captioner/data/cells.py`, which says why, writes the same. */

/** A text as a cell in quotes that no spreadsheet computes. */
function csvCell(text) {
  const formula = /^'*[=+\-@\t\r\n\uff1d\uff0b\uff0d\uff20]/.test(text) && !/^-?\d+(\.\d+)?$/.test(text);
  const safe = formula ? `'${text}` : text;
  return /[",\r\n]/.test(safe) ? `"${safe.replaceAll('"', '""')}"` : safe;
}
