"""Reviewed texts are written into the images that they were reviewed for, and into no others."""

from __future__ import annotations

from pathlib import Path

import pytest

from captioner.data.site_images import SiteImages, find_site_images
from captioner.data.site_texts import read_reviewed, write_texts


def written(site: Path, before: str, texts: list[str], after: str) -> tuple[str, int]:
    """Review ``before``, build ``after``, and apply. Return the page and the number of problems."""
    page = site / "index.html"
    page.write_text(before)
    found = SiteImages(site)
    find_site_images(found, empty=True)
    for one, text in zip(found.images, texts, strict=True):
        one.alt, one.reviewed = text, True
    page.write_text(after)
    done = write_texts(site, found.images)
    assert done.written + done.kept + len(done.problems) == len(texts)
    return page.read_text(), len(done.problems)


@pytest.mark.parametrize(
    ("before", "texts", "after", "expected"),
    [
        ("<img src='a.jpg' />", ["A"], "<p>\n<img src=a.jpg>", '<p>\n<img alt="A" src=a.jpg>'),
        ('<img class="b" src="a.jpg" alt="">', ["A"], "<img alt src=a.jpg>",
         '<img alt="A" src=a.jpg>'),
        (
            "<img src=a.jpg><img src=a.jpg>", ["A", "B"], "<img src=a.jpg>\n<img src=a.jpg>",
            '<img alt="A" src=a.jpg>\n<img alt="B" src=a.jpg>',
        ),
        (  # the links differ, so the order does not matter
            "<a href=x><img src=a.jpg></a><a href=y><img src=a.jpg></a>", ["X", "Y"],
            "<a href=y><img src=a.jpg></a><a href=x><img src=a.jpg></a>",
            '<a href=y><img alt="Y" src=a.jpg></a><a href=x><img alt="X" src=a.jpg></a>',
        ),
        (
            "<a href=x><img src=a.jpg> 3 comments</a>", ["A"],
            "<a href=x><img src=a.jpg> 4 comments</a>",
            '<a href=x><img alt="A" src=a.jpg> 4 comments</a>',
        ),
    ],
)  # fmt: skip
def test_images_are_found_in_a_page_that_was_built_again(
    before, texts, after, expected, tmp_path
) -> None:
    assert written(tmp_path, before, texts, after) == (expected, 0)
    assert written(tmp_path, before, texts, expected) == (expected, 0)  # the texts were kept


@pytest.mark.parametrize(
    ("before", "texts", "after"),
    [
        ("<img src=a.jpg>", ["A"], "<img src=b.jpg>"),
        ("<img src=a.jpg>", ["A"], "<img src=a.jpg><img src=a.jpg>"),
        ("<img src=a.jpg><img src=a.jpg>", ["A", "B"], "<img src=a.jpg>"),
        ("<img src=a.jpg>", ["A"], '<img src=a.jpg alt="By hand">'),
        ("<img src=a.jpg>", ["A"], '<img src=a.jpg alt="">'),
        ("<img src=a.jpg>", ["A"], "<img src=a.jpg aria-hidden=true>"),
        ("<img src=a.jpg>", ["A"], "<a href=x><img src=a.jpg></a>"),
        ("<a href=x><img src=a.jpg></a>", ["X"], "<a href=y><img src=a.jpg></a>"),
        ("<a href=x><img src=a.jpg></a>", ["X"], "<a href=x><img src=a.jpg> Home</a>"),
        ("<a href=x><img src=a.jpg> Home</a>", [""], "<a href=x><img src=a.jpg></a>"),
    ],
)
def test_changed_images_are_reported_and_stay(before, texts, after, tmp_path) -> None:
    assert written(tmp_path, before, texts, after) == (after, len(texts))


def test_marks_of_spreadsheets_are_read(tmp_path) -> None:
    yes, no = ["yes", "X", "TRUE", "True", "1"], ["", "No", "FALSE", "0"]
    rows = [f"a.html,A,{mark},<img>" for mark in [*yes, *no, "maybe"]]
    table = tmp_path / "alt.csv"
    table.write_text("\n".join(["page,alt,reviewed,tag", *rows]))
    images, problems = read_reviewed(table)
    assert (len(images), len(problems)) == (len(yes), 1)
