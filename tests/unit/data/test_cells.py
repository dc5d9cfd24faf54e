"""Cells of CSV files: harmless in spreadsheets, and read back as they were."""

from __future__ import annotations

import csv
import io
from pathlib import Path
from typing import Any

import pytest

from captioner.cli.caption_formats import FORMATS
from captioner.data.cells import plain_cell, safe_cell
from captioner.data.importers import read_table
from captioner.drawing.pages import WEB
from captioner.files import atomic_open

FORMULAS = ["=1+1", "+1 dog", "-a", "@SUM(A1)", "\t=1", "\r=1", "\uff1d1", "'=1", "''-x"]
OTHERS = ["a dog", "-1.5", "12", "'s", "a=b", "", "'", 'a "red" dog', "a, b", "a\nb", "a\rb"]


def test_formulas_become_text_and_are_read_back() -> None:
    assert [safe_cell(text) for text in FORMULAS] == [f"'{text}" for text in FORMULAS]
    assert [safe_cell(text) for text in OTHERS] == OTHERS
    assert [plain_cell(safe_cell(text)) for text in FORMULAS + OTHERS] == FORMULAS + OTHERS


def test_names_and_captions_survive_a_table(tmp_path: Path) -> None:
    """Those that ``captioner caption -o captions.csv`` writes, also with bytes that are no text."""
    texts = [*FORMULAS, *(text for text in OTHERS if text.strip() == text and text)]
    entries = [
        {"image": f"{text}.jpg", "captions": [{"text": text, "log_prob": -1.5}]} for text in texts
    ]
    with atomic_open(tmp_path / "captions.csv") as file:
        FORMATS["csv"].write(file, entries)

    found = {row["image"]: row["caption"] for _, row in read_table(tmp_path / "captions.csv")}
    assert found == {f"{text}.jpg": text for text in texts}
    with (tmp_path / "captions.csv").open(encoding="utf-8", newline="") as file:
        rows = list(csv.reader(file))
    assert not any(cell[:1] in "=+@\t\r" for row in rows for cell in row if cell)
    assert {row[3] for row in rows[1:]} == {"-1.5000"}


def test_line_ends_of_spreadsheets_are_read(tmp_path: Path) -> None:
    for end in ("\n", "\r\n", "\r"):
        (tmp_path / "x.csv").write_bytes(f"image,caption{end}a.jpg,one{end}".encode())
        rows = list(read_table(tmp_path / "x.csv"))
        assert [row for _, row in rows] == [{"image": "a.jpg", "caption": "one"}]


@pytest.mark.slow
def test_pages_write_the_same_cells(browser: Any) -> None:
    texts, script = FORMULAS + OTHERS, (WEB / "cells.js").read_text("utf-8")
    tab = browser.new_page()
    lines = tab.evaluate(f"(texts) => {{ {script} return texts.map(csvCell); }}", texts)
    rows = (list(csv.reader(io.StringIO(f"{line}\n", newline=""))) for line in lines)
    cells = [(row or [""])[0] for (row,) in rows]
    assert cells == [safe_cell(text) for text in texts]
