"""Functions that write reviewed alternative texts into the pages of a static site."""

from __future__ import annotations

import errno
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from captioner.data.folders import NamedFiles
from captioner.data.html_images import HtmlImage, HtmlPage
from captioner.data.importers import read_table
from captioner.data.site_images import COLUMNS, PAGES, SiteImage
from captioner.errors import DataError
from captioner.files import atomic_write

OUTDATED = "the page no longer contains this image without a text"
"""Note on an image that a continued review table keeps, although no text is needed now."""
_MARKS = {
    **dict.fromkeys(("yes", "y", "x", "true", "1"), True),
    **dict.fromkeys(("", "no", "n", "false", "0"), False),
}
"""Values of the column ``reviewed``. Spreadsheets write TRUE for a tick."""
_UPDATE = "update the table with captioner alt --resume"


@dataclass
class WrittenTexts:
    """The result of writing reviewed alternative texts into pages."""

    written: int = 0
    """Number of texts written."""
    kept: int = 0
    """Number of texts that the pages already contained."""
    problems: list[str] = field(default_factory=list)
    """One line for each text or page that was not written, or that was changed without review."""


def read_reviewed(table: str | Path) -> tuple[list[SiteImage], list[str]]:
    """Return the images in a review table that a person has reviewed, and a list of problems.

    The table lists the images of a site with suggested alternative texts. A problem is one line
    about a row, such as a text that was changed but not marked as reviewed.

    Raises:
        DataError: The table cannot be read.
    """
    images, problems = [], []
    for where, problem, one in read_rows(table):
        if problem:
            problems.append(problem)
        elif one.reviewed:
            images.append(one)
        elif one.changed and one.note != OUTDATED:
            problems.append(
                f"{where}: the text was changed but is not reviewed; enter yes in the column "
                "'reviewed'"
            )
    return images, problems


def read_rows(table: str | Path) -> Iterator[tuple[str, str, SiteImage]]:
    """Yield the place of each row in a review table, its problem (or an empty text) and its image.

    Raises:
        DataError: The table cannot be read, or it is a different table.
    """
    for where, line in read_table(table):
        if missing := [name for name in ("page", "alt", "reviewed", "tag") if name not in line]:
            raise DataError(
                f"{table} has no column {missing[0]!r}; use the table that captioner alt wrote"
            )
        row = dict.fromkeys(COLUMNS, "") | line
        mark = _MARKS.get(row["reviewed"].lower())
        problem = (
            f"{where}: the column 'reviewed' has {row['reviewed']!r}; enter yes or leave it empty"
        )
        place = row["page"], _number(row["line"]), row["image"], row["link"], row["note"]
        one = SiteImage(*place, row["before"], row["alt"], tag=row["tag"], reviewed=bool(mark))
        one.confidence = _share(row["confidence"])
        one.suggested = line.get("suggested")
        one.number = row["number"] or one.number
        one.other = {name: value for name, value in line.items() if name not in COLUMNS}
        yield where, problem if mark is None else "", one


def _number(cell: str) -> int:
    """Return a line number, or 0 if the cell has no number."""
    return int(cell) if cell.isdecimal() else 0


def _share(cell: str) -> float | None:
    """Return a probability. Some spreadsheets write 0,5 for 0.5. None if the cell has no number."""
    try:
        return float(cell.replace(",", "."))
    except ValueError:
        return None


def write_texts(site: Path, images: Iterable[SiteImage]) -> WrittenTexts:
    """Write reviewed alternative texts of images into the HTML pages of a site.

    The image is found by its page, picture and link, and by its number if the page shows the
    picture more than once. The text is written only if the image still lacks a text. A page that
    cannot be edited does not stop the rest.

    Args:
        site: Folder of the finished site. Only pages below it are written.
        images: Images with alternative texts that a person has reviewed.

    Returns:
        The number of texts written, the number of texts that the pages already had, and one line
        for each problem.

    Raises:
        OSError: The disk is full or cannot be written.
    """
    done, files = WrittenTexts(), NamedFiles(site)
    by_page: dict[str, list[SiteImage]] = {}
    for image in images:
        by_page.setdefault(image.page, []).append(image)
    for name, listed in by_page.items():
        try:
            path = files.find_below(name)
            if path.suffix.lower() not in PAGES:
                raise DataError("the file is not an .html or .htm page")
        except DataError as error:
            if any(image.note != OUTDATED for image in listed):
                done.problems.append(
                    f"{site / name}: {error}; use only HTML pages below {site}, and if the page "
                    "was renamed, change its name in the column 'page' of the table"
                )
            continue
        try:
            page, problems = HtmlPage(path), list[str]()
            texts, kept = _texts(page, listed, problems)
            if texts:
                atomic_write(path, page.with_texts(texts))
        except (DataError, OSError) as error:
            if getattr(error, "errno", None) in (errno.ENOSPC, errno.EROFS):
                raise
            reason = getattr(error, "strerror", None)
            done.problems.append(f"{path}: {reason}" if reason else str(error))
        else:
            done.written, done.kept = done.written + len(texts), done.kept + kept
            done.problems += problems
    return done


def _texts(
    page: HtmlPage, listed: Sequence[SiteImage], problems: list[str]
) -> tuple[list[tuple[HtmlImage, str]], int]:
    """Return the texts to write into a page, and the number of texts already in the page.

    Args:
        page: The page as it is now.
        listed: Reviewed images of this page.
        problems: Receives one line for each text that cannot be written.
    """
    texts: list[tuple[HtmlImage, str]] = []
    kept, images, used = 0, {image.identity: image for image in page.images}, set()
    totals = {image.identity[:2]: image.number for image in page.images}
    for one in listed:
        image = images.get(one.identity)
        if image is None and one.identity[:2] in totals:
            now = totals[one.identity[:2]].split()[-1]
            problem = f"is number {one.number} in the table, but the page has {now}; {_UPDATE}"
        elif image is None:
            problem = f"was not found in the page with this picture and link; {_UPDATE}"
        elif image in used:
            problem = "has several reviewed rows in the table; delete all but one"
        elif not one.text and image.needs_text:
            problem = "is the only content of a link or button; write a text for it"
        elif image.alt == one.text:
            problem = ""
            kept += 1
        elif one.lacks_text(image):
            problem = ""
            texts.append((image, one.text))
        elif image.alt:
            problem = f"already has the text {image.alt[:80]!r}, which was kept; {_UPDATE}"
        else:
            problem = f"no longer lacks a text, or its link has changed; {_UPDATE}"
        used.add(image)
        if problem and one.note != OUTDATED:
            problems.append(f"{one.page}:{one.line}: {one.tag[:80]} {problem}")
    return texts, kept
