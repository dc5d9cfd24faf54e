"use strict";
/* Cells of CSV files, written as in `captioner/data/cells.py`, which explains the rules. */

/** Return text as a cell, in quotes if needed, that no spreadsheet treats as a formula. */
function csvCell(text) {
  const formula = /^'*[=+\-@\t\r\n\uff1d\uff0b\uff0d\uff20]/.test(text) && !/^-?\d+(\.\d+)?$/.test(text);
  const safe = formula ? `'${text}` : text;
  return /[",\r\n]/.test(safe) ? `"${safe.replaceAll('"', '""')}"` : safe;
}
