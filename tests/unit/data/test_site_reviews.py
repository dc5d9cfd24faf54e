"""A review that is continued after the site was built again loses no text."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from captioner.data.site_images import SiteImages, find_site_images
from captioner.data.site_reviews import continue_review
from captioner.data.site_texts import OUTDATED
from captioner.errors import DataError


@pytest.fixture
def site(tmp_path: Path) -> Path:
    (tmp_path / "site").mkdir()
    for name in "abc":
        (tmp_path / "site" / f"{name}.jpg").touch()
    return tmp_path / "site"


def review(site: Path, page: str, texts: list[str], **options: bool) -> Path:
    """Write the table of a page, with a reviewed text per image and a column of the user's own."""
    (site / "index.html").write_text(page)
    found = SiteImages(site)
    find_site_images(found, **options)
    rows = [one.row() for one in found.images]
    for row, text in zip(rows, texts, strict=True):
        row |= {"alt": text, "suggested": "A thing.", "confidence": "0,5", "reviewed": "yes"}
        row["comment"] = f"on {text}"
    return written(site, rows)


def written(site: Path, rows: list[dict[str, str]]) -> Path:
    table = site.parent / "alt.csv"
    with table.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(rows)
    return table


def continued(site: Path, page: str, table: Path) -> SiteImages:
    (site / "index.html").write_text(page)
    found = SiteImages(site)
    find_site_images(found)
    continue_review(found, table)
    return found


A, B, C = "<img src=a.jpg>", "<img src=b.jpg>", "<img src=c.jpg>"
KEPT, NEW, DOUBT, GONE = "kept", "new", "doubt", "gone"


@pytest.mark.parametrize(
    ("before", "texts", "after", "expected"),
    [
        (B + A, "12", f"\n{A}\n{C}\n{B}", [("1", KEPT), ("2", KEPT), ("", NEW)]),
        (A, "1", "<img class=x src=./a.jpg?v=2>", [("1", KEPT)]),
        (A + B, "12", A, [("1", KEPT), ("2", GONE)]),
        (A + B, "12", A + '<img src=b.jpg alt="By hand">', [("1", KEPT), ("2", GONE)]),
        (A + B, "12", A + '<img src=b.jpg alt="2">', [("1", KEPT), ("2", KEPT)]),  # applied
        (A, "1", A + A, [("1", KEPT), ("", NEW)]),
        (A + A, "12", A + A + A, [("1", DOUBT), ("2", DOUBT), ("", NEW)]),
        (A + A, "12", A, [("1", DOUBT), ("2", GONE)]),
        (A + A, "11", A, [("1", KEPT), ("1", GONE)]),
        (A + A, "12", f'{A}<img src=a.jpg alt="2">{A}', [("1", KEPT), ("2", KEPT), ("", NEW)]),
        (f"<a href=x>{A}</a>", "1", f"<a href=x>{A} Home</a>", [("1", DOUBT)]),
        (f"<a href=x>{A}</a>", "1", f"<a href=y>{A}</a>", [("1", GONE), ("", NEW)]),
    ],
)
def test_texts_stay_with_their_images(before, texts, after, expected, site) -> None:
    table = review(site, before, [*texts])
    found = continued(site, after, table)
    rows = []
    for number, one in enumerate(found.images):
        state = KEPT if one.reviewed else DOUBT if one in found.unsure else NEW
        rows.append((one.alt, GONE if one.note == OUTDATED else state))
        assert one.reviewed == (rows[-1][1] in (KEPT, GONE))
        assert (number < found.kept) == (state != NEW)
        assert one.other == ({"comment": f"on {one.alt}"} if one.alt else {})
        assert one.confidence == (0.5 if one.alt else None)
    assert rows == expected


def test_a_returning_image_gets_its_text_back(site) -> None:
    found = continued(site, A, review(site, A + B, ["1", "2"]))
    table = written(site, [one.row() for one in found.images])
    for page, note in ((A, OUTDATED), (B + A, "")):
        row = continued(site, page, table).images[1]
        assert (row.alt, row.reviewed, row.note) == ("2", True, note)


def test_only_rows_without_work_are_removed(site) -> None:
    table = review(site, A + B + C, ["A thing.", "A thing.", "A thing."])
    rows = list(csv.DictReader(table.read_text("utf-8").splitlines()))
    for row in rows:
        row |= {"reviewed": "", "comment": ""}
    rows[0]["alt"], rows[1]["comment"] = "A typed text", "ask Zoë"
    (site / "other.html").write_text(A)
    found = continued(site, "", written(site, rows))
    assert [one.alt for one in found.images[: found.kept]] == ["A typed text", "A thing."]


def test_rows_of_a_page_that_cannot_be_read_stay(site) -> None:
    table = review(site, A, ["1"])
    (site / "other.html").write_text(B)
    [one, _] = continued(site, "{{ template }}", table).images
    assert (one.alt, one.reviewed, one.note) == ("1", True, "")


def test_images_with_an_empty_text_stay_without_a_request(site) -> None:
    page = "<img src=a.jpg alt=''>"
    found = continued(site, f"\n{page}", review(site, page, ["1"], empty=True))
    assert [(one.line, one.alt, one.note) for one in found.images] == [(2, "1", "")]


@pytest.mark.parametrize("table", ["a,b\n1,2\n", "page,alt,reviewed,tag\nindex.html,A,maybe,<img>"])
def test_a_table_that_cannot_be_kept_is_an_error(table, site) -> None:
    file = site.parent / "alt.csv"
    file.write_text(table)
    with pytest.raises(DataError):
        continued(site, A, file)
