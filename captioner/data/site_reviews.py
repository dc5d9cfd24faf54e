"""Functions that continue a review of alternative texts after the site was built again."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

from captioner.data.html_images import HtmlImage, goal_of
from captioner.data.site_images import SiteImage, SiteImages
from captioner.data.site_texts import OUTDATED, read_rows
from captioner.errors import DataError

CHANGED = "the page has changed around this image, so review its text again"
"""Note on a row that has lost its mark."""
_Place = tuple[str, str, str, str]
"""The page and the identity of an image (see ``HtmlImage.identity``)."""
_Features = tuple[str, str, str]
"""The page, the picture and the target of the link of an image."""
_SIMILAR: tuple[Callable[[SiteImage], _Features], ...] = (
    lambda one: (one.page, one.tag, goal_of(one.link)),
    lambda one: (one.page, one.image or one.tag, goal_of(one.link)),
)
"""Functions that find a row's image although its number or the URL of its picture has changed."""


def continue_review(found: SiteImages, table: str | Path) -> None:
    """Carry over the rows of a review table to the images of a site that was built again.

    The rows stay in their order. There are two cases:

    - The row of an image that still lacks a text, or contains the text of the row, is updated.
    - The row of any other image gets the note `OUTDATED`. It is kept if somebody has worked on it,
      because the image may return.

    If it is unclear which image a reviewed text belongs to, the mark of the row is removed, and the
    row is added to ``found.unsure``.

    Args:
        found: The images that lack a text. The rows replace the images that they describe.
        table: The review table.

    Raises:
        DataError: The table cannot be read.
    """
    listed = {(one.page, *one.identity): one for one in found.images}
    present = {
        (page, *image.identity): image for page, images in found.pages.items() for image in images
    }
    kept, lost = list[SiteImage](), list[SiteImage]()
    for _, problem, row in read_rows(table):
        if problem:
            raise DataError(problem)
        place = row.page, *row.identity
        one = listed.get(place)
        if one and not one.note and not (row.suggested or row.alt or row.reviewed):
            one.other = row.other  # without a text: try again to caption the picture
            continue
        kept.append(row)
        if one:
            _update(found, row, listed.pop(place))
        elif image := present.get(place):
            _keep(row, image)
        elif row.page not in found.unread:
            lost.append(row)
    lost = _find_written(found, lost, {(row.page, *row.identity) for row in kept})
    for key in _SIMILAR:
        lost = _find_similar(found, lost, listed, key)
    for row in lost:
        row.note = OUTDATED
    kept = [row for row in kept if row.note != OUTDATED or _has_work(row)]
    found.images, found.kept = [*kept, *listed.values()], len(kept)


def _has_work(row: SiteImage) -> bool:
    """Return whether a row contains anything that a person has written."""
    return row.reviewed or row.changed or row.suggested is None or any(row.other.values())


def _update(found: SiteImages, row: SiteImage, one: SiteImage, *, sure: bool = True) -> None:
    """Update a row from the image ``one``, which lacks a text. Keep the row's text.

    The row's review is withdrawn if ``sure`` is False, or if the text had to say where a link leads
    and now has to describe a picture, or the reverse.
    """
    if row.needs_text != one.needs_text:
        sure = False
        if not (row.reviewed or row.changed):
            row.alt = "" if one.needs_text else row.suggested or ""
    row.line, row.image, row.link, row.note = one.line, one.image, one.link, one.note
    row.before, row.tag, row.number = one.before, one.tag, one.number
    if row.reviewed and not sure:
        row.reviewed = False
        # With a new note, the page does not restore the mark that the browser has stored.
        row.note = row.note or CHANGED
        found.unsure.append(row)


def _keep(row: SiteImage, image: HtmlImage) -> None:
    """Keep the row of an image that contains the row's text, or an empty text that may stay."""
    row.line = image.line
    row.note = "" if image.alt == row.text or row.lacks_text(image) else OUTDATED


def _find_written(
    found: SiteImages, lost: Iterable[SiteImage], used: set[_Place]
) -> list[SiteImage]:
    """Find images that contain the text of their row but have a different number now.

    Args:
        found: The site.
        lost: Rows without an image.
        used: Pages and identities of the images that have a row.

    Returns:
        The rows that are still without an image.
    """
    rest = []
    for row in lost:
        for image in found.pages.get(row.page, ()):
            place = row.page, *image.identity
            equal = place[:3] == (row.page, *row.identity[:2])
            if row.text and image.alt == row.text and equal and place not in used:
                used.add(place)
                row.number = image.number
                _keep(row, image)
                break
        else:
            rest.append(row)
    return rest


def _find_similar(
    found: SiteImages,
    lost: list[SiteImage],
    listed: dict[_Place, SiteImage],
    key: Callable[[SiteImage], _Features],
) -> list[SiteImage]:
    """Find images without a text that have the same ``key`` as a row, in the order of the page.

    Several rows with the same key and different texts may be confused, so they are not sure.

    Args:
        found: The site.
        lost: Rows without an image.
        listed: The images without a row, by page and identity. Found images are removed.
        key: The features that a row and its image have in common.

    Returns:
        The rows that are still without an image.
    """
    texts: dict[_Features, set[tuple[str, bool]]] = {}
    places: dict[_Features, list[_Place]] = {}
    for row in lost:
        texts.setdefault(key(row), set()).add((row.text, row.reviewed))
    for place, one in listed.items():
        places.setdefault(key(one), []).append(place)
    rest = []
    for row in lost:
        if free := places.get(key(row)):
            _update(found, row, listed.pop(free.pop(0)), sure=len(texts[key(row)]) == 1)
        else:
            rest.append(row)
    return rest
