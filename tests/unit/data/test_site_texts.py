"""Reviewed texts are read from a table."""

from __future__ import annotations

from captioner.data.site_texts import read_reviewed


def test_marks_of_spreadsheets_are_read(tmp_path) -> None:
    yes, no = ["yes", "X", "TRUE", "True", "1"], ["", "No", "FALSE", "0"]
    rows = [f"a.html,A,{mark},<img>" for mark in [*yes, *no, "maybe"]]
    table = tmp_path / "alt.csv"
    table.write_text("\n".join(["page,alt,reviewed,tag", *rows]))
    images, problems = read_reviewed(table)
    assert (len(images), len(problems)) == (len(yes), 1)
