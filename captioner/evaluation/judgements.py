"""Captions that people judged, in tables."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence

from captioner.errors import DataError
from captioner.files import read_input
from captioner.search.words import neutral_caption

GRADES = {"right": 1.0, "partly": 0.5, "wrong": 0.0}
"""Of a judged caption: nothing in it is false; the main thing is right; nothing."""


def read_judgements(
    files: Sequence[str], default_style: str, *, neutral: bool = False
) -> dict[str, dict[str, dict[str, float]]]:
    """Read tables of judged captions with the columns image, caption, grade and perhaps style.

    The grade is right, partly or wrong: 1, 0.5 or 0; of several judgements of a caption the mean
    counts. Rows with an empty grade are skipped. With ``neutral``, words for people are replaced as
    in `neutral_caption`, and captions with no ``errors`` but *person* become right.

    Returns:
        The grade by style, file name and caption.

    Raises:
        DataError: A file cannot be read, or lacks a column; or a grade is another.
    """
    found: dict[tuple[str, str, str], list[float]] = {}
    for path in files:
        rows = csv.DictReader(io.StringIO(read_input(path, "judged captions").decode("utf-8-sig")))
        for number, row in enumerate(rows, 2):
            try:
                if row["grade"]:
                    style, text, grade = row.get("style"), row["caption"], GRADES[row["grade"]]
                    if neutral:
                        text = neutral_caption(text)
                        grade = 1.0 if row.get("errors") == "person" else grade
                    found.setdefault((style or default_style, row["image"], text), []).append(grade)
            except KeyError as error:
                raise DataError(
                    f"{path}:{number}: {error} is missing or no grade; give the columns image, "
                    f"caption and grade ({', '.join(GRADES)})"
                ) from error
    judged: dict[str, dict[str, dict[str, float]]] = {}
    for (style, file, caption), grades in found.items():
        of_file = judged.setdefault(style, {}).setdefault(file, {})
        of_file[caption] = sum(grades) / len(grades)
    return judged
