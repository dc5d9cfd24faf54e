"""Functions that find the images of a static site that lack an alternative text.

Alternative texts (the attribute ``alt``) are suggested by a model and reviewed by a person in a
table. `captioner.data.site_texts` then writes them into the pages.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from urllib.parse import quote, unquote, urljoin

from captioner.data.folders import NamedFiles, unsafe_name
from captioner.data.html_images import (
    DECORATIVE,
    EMPTY,
    WITHOUT_TEXT,
    HtmlImage,
    HtmlPage,
    goal_of,
    is_tiny,
)
from captioner.data.images import image_size
from captioner.errors import DataError, ImageError

PAGES = (".html", ".htm")
"""File name extensions of pages."""
_NO_URL = "http://site.invalid/"
_ALONE = f"{EMPTY} in a link or button without text"
_MISSING = "without alternative text"
_REMEDY = "add the picture to the site, or correct its address in the page"


@dataclass
class SiteImage:
    """An image in a page of a site, with its alternative text: a row of the review table."""

    page: str
    """Path of the page, relative to the site's folder."""
    line: int
    """Line of the image's tag in the page, from 1."""
    image: str
    """Path of the picture, relative to the site's folder, or URL of a picture outside the site."""
    link: str
    """Description of the link or button around the image (see ``HtmlImage.link``)."""
    note: str
    """The reason why no text can be suggested, such as a missing file. Otherwise empty."""
    before: str
    """State of the attribute ``alt`` in the page: ``missing``, or ``empty`` for ``alt=""``."""
    alt: str = ""
    """The alternative text to write. An empty text marks a decorative image."""
    confidence: float | None = None
    """Probability that the suggestion has no mistake, 0 to 1, or None if it is unknown."""
    reviewed: bool = False
    """True if a person has reviewed the text. Other texts are not written."""
    tag: str = ""
    """The image's tag and picture (see ``HtmlImage.key``). With ``link`` and ``number``, it
    identifies the image in its page, so that its line may change."""
    number: str = "1 of 1"
    """Number of the image among the page's images with the same picture and link."""
    suggested: str | None = ""
    """The text that the model suggested: the initial value of ``alt``, except in `needs_text`. It
    shows whether a person has changed the text. None if the table lacks it."""
    other: dict[str, str] = field(default_factory=dict)
    """Values of the columns that somebody added to the table."""

    def row(self) -> dict[str, str]:
        """Return the image as a row of the review table."""
        sure = "" if self.confidence is None else f"{self.confidence:.4f}"
        changed = {"confidence": sure, "reviewed": "yes" if self.reviewed else ""}
        values = asdict(self) | changed | {"suggested": self.suggested or ""}
        return {name: str(values[name]) for name in COLUMNS} | self.other

    @property
    def identity(self) -> tuple[str, str, str]:
        """The identity of the image in its page (see ``HtmlImage.identity``)."""
        return self.tag, goal_of(self.link), self.number

    @property
    def text(self) -> str:
        """The alternative text as it is written into the page, without superfluous spaces."""
        return " ".join(self.alt.split())

    @property
    def needs_text(self) -> bool:
        """True if the image is the only content of a link or button.

        Its text should say where the link leads. The model describes only the picture, so ``alt``
        is empty until a person writes a text.
        """
        return self.link.endswith(WITHOUT_TEXT)

    @property
    def changed(self) -> bool:
        """True if the text differs from the suggestion and from the initial text."""
        if self.suggested is None or (self.needs_text and not self.text):
            return False
        return self.text != " ".join(self.suggested.split())

    def lacks_text(self, image: HtmlImage) -> bool:
        """Return whether an image in a page still lacks this text, as it did in the review.

        Args:
            image: The image as it is in the page now.
        """
        if image.needs_text != self.needs_text:
            return False
        if image.alt == "" and self.before == "empty":
            return image.reason in ("", EMPTY)
        return image.alt is None and not image.reason


COLUMNS = tuple(one.name for one in fields(SiteImage) if one.name != "other")
"""Columns of the review table."""


@dataclass
class SiteImages:
    """The images of a site that lack an alternative text."""

    site: Path
    """Folder of the finished site."""
    images: list[SiteImage] = field(default_factory=list)
    """The images, in the order of the pages. With a continued review table, the images in the
    table come first, in the order of the table."""
    kept: int = 0
    """Number of images, from the first, with texts from a continued review table."""
    unsure: list[SiteImage] = field(default_factory=list)
    """Images that somebody has to review again, because the page has changed around them."""
    counts: Counter[str] = field(default_factory=Counter)
    """Number of all images of the site by category, such as ``decorative``."""
    problems: list[str] = field(default_factory=list)
    """One line for each page or picture that cannot be read. Pictures on other servers, inside the
    page or in unsupported formats only have a note."""
    pages: dict[str, Sequence[HtmlImage]] = field(default_factory=dict)
    """All images in each page that could be read, by the path of the page."""
    unread: set[str] = field(default_factory=set)
    """The pages that cannot be read."""

    @property
    def new(self) -> list[SiteImage]:
        """The images that are not from a continued review table."""
        return self.images[self.kept :]

    def files(self) -> list[Path]:
        """Return the files of the images that the model has to describe, without duplicates."""
        named = (self.site / one.image for one in self.new if not one.note)
        return list(dict.fromkeys(named))


def find_site_images(found: SiteImages, url: str | None = None, *, empty: bool = False) -> None:
    """Find the images of a site that lack an alternative text, and add them to ``found``.

    Images with ``alt=""`` are added if they are the only content of a link or button.

    Args:
        found: The site. Its images, counts and problems are filled in.
        url: Web address of the site folder, if pages refer to pictures by full URLs.
        empty: Add all other images with ``alt=""`` too.

    Raises:
        DataError: The pages have no images.
    """
    files, root = NamedFiles(found.site), (url or _NO_URL).rstrip("/") + "/"
    reported: set[str] = set()
    for path in sorted(found.site.rglob("*.[hH][tT][mM]*")):
        name = path.relative_to(found.site).as_posix()
        if path.suffix.lower() not in PAGES or "/." in f"/{name}" or path.is_dir():
            continue
        try:
            page = HtmlPage(path)
        except DataError as error:
            found.problems.append(str(error))
            found.unread.add(name)
            continue
        found.pages[name] = page.images
        for image in page.images:
            if image.reason and not (empty and image.reason == EMPTY):
                found.counts[image.reason] += 1
                continue
            file, note, missing = _find(files, root, name, page, image)
            if not note and _is_pixel(found.site / file):
                found.counts[DECORATIVE] += 1
                continue
            before = "missing" if image.alt is None else "empty"
            listed = _ALONE if image.needs_text and before == "empty" else EMPTY
            found.counts[_MISSING if before == "missing" else listed] += 1
            place = name, image.line, file, image.link, note, before
            one = SiteImage(*place, tag=image.key, number=image.number)
            found.images.append(one)
            if missing and file not in reported:
                reported.add(file)
                found.problems.append(f"{name}:{image.line}: {file}: {note}; {_REMEDY}")
    if not found.counts:
        message = "has no images in its .html pages; pass the folder of a finished site"
        raise DataError(f"{found.site} {message}")


def _find(
    files: NamedFiles, root: str, name: str, page: HtmlPage, image: HtmlImage
) -> tuple[str, str, bool]:
    """Find the file of an image.

    Args:
        files: Files of the site.
        root: Web address of the site folder, with a slash at its end.
        name: Path of the page, relative to the site folder.
        page: The page.
        image: The image.

    Returns:
        The path of the file in the site, or else its name or URL. Then the reason why the file
        cannot be used (or an empty text), and True if the file is missing from the site.
    """
    problems = []
    for source in image.sources:
        try:
            base = urljoin(root + quote(name, errors="surrogateescape"), page.base)
            full = urljoin(base, source.replace("\\", "/"))
        except ValueError:  # an invalid URL, such as http://[x
            full = source
        address = re.split("[?#]", full)[0]
        inside = unquote(address.removeprefix(root), errors="surrogateescape")
        if source.startswith("data:"):
            problems.append(("", "the picture is stored inside the page", False))
        elif not address.startswith(root):
            problems.append(
                (full, "the picture is on a different server and is not fetched", False)
            )
        elif problem := unsafe_name(inside):
            problems.append((inside, f"the name {problem}", True))
        elif (found := files.find(inside)) and found.is_file():
            return found.relative_to(files.folder).as_posix(), "", False
        else:
            problems.append((inside, "the file does not exist", True))
    return problems[0] if problems else ("", "the tag does not name a picture", False)


def _is_pixel(file: Path) -> bool:
    """Return whether an image file is at most one pixel wide or high, as tracking pixels are."""
    try:
        return is_tiny(*image_size(file))
    except ImageError:
        return False  # the error is reported when the file is captioned
