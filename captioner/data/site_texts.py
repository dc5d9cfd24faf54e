"""Functions that write reviewed alternative texts into the pages of a static site."""

from __future__ import annotations

import errno
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from captioner.data.folders import NamedFiles
from captioner.data.html_images import EMPTY, HtmlImage, HtmlPage
from captioner.data.importers import read_table
from captioner.data.site_images import COLUMNS, PAGES, SiteImage
from captioner.errors import DataError
from captioner.files import atomic_write

_MARKS = {
    **dict.fromkeys(("yes", "y", "x", "true", "1"), True),
    **dict.fromkeys(("", "no", "n", "false", "0"), False),
}
"""Values of the column ``reviewed``. Spreadsheets write TRUE for a tick."""


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
    for where, line in read_table(table):
        row = dict.fromkeys(COLUMNS, "") | line
        mark = _MARKS.get(row["reviewed"].lower())
        number = int(row["line"]) if row["line"].isdecimal() else 0
        place = row["page"], number, row["image"], row["link"], row["note"], row["before"]
        one = SiteImage(*place, row["alt"], tag=row["tag"], suggested=line.get("suggested"))
        if mark:
            images.append(one)
        elif mark is None:
            value = row["reviewed"]
            problems.append(
                f"{where}: the column 'reviewed' has {value!r}; enter yes or leave it empty"
            )
        elif one.changed:
            problems.append(
                f"{where}: the text was changed but is not reviewed; enter yes in the column "
                "'reviewed'"
            )
    return images, problems


def write_texts(site: Path, images: Iterable[SiteImage]) -> WrittenTexts:
    """Write reviewed alternative texts of images into the HTML pages of a site.

    A text is written only if the image's HTML tag has not changed since ``captioner alt`` wrote the
    review table with this image. A page that cannot be edited does not stop the rest.

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
            done.problems.append(f"{site / name}: {error}; use only pages below {site}")
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
    kept, free = 0, [*page.images]
    for one in listed:
        text = " ".join(one.alt.split())
        same = [image for image in free if (image.line, image.key) == (one.line, one.tag)]
        done = [image for image in same if image.alt == text]
        new = [image for image in same if _is_open(image, one)]
        # Other images with the same tag may have an empty text too, so new places come first.
        found = [*done, *new] if text else [*new, *done]
        if not found:
            lost = "was not found in the page; run captioner alt again"
            problems.append(f"{one.page}:{one.line}: {one.tag[:80]} {lost}")
        elif not text and found[0].needs_text:
            problem = "is the only content of a link or button; write a text for it"
            problems.append(f"{one.page}:{one.line}: {one.tag[:80]} {problem}")
        else:
            free.remove(found[0])
            if found[0].alt == text:
                kept += 1
            else:
                texts.append((found[0], text))
    return texts, kept


def _is_open(image: HtmlImage, wanted: SiteImage) -> bool:
    """Return whether an image in a page still lacks a text, as in the review table.

    ``wanted`` is the image's row in the table. It was made from an earlier state of the page.
    """
    if wanted.before == "empty":
        return image.alt == "" and image.reason in ("", EMPTY) and image.link == wanted.link
    return image.alt is None and not image.reason and image.link == wanted.link
