"""A reader of HTML files that finds images and writes alternative texts into their tags.

An alternative text is the value of a tag's attribute ``alt``. This module adds or replaces only
this attribute and keeps all other bytes. It uses Python's ``html.parser``, because this parser
reports the position of a tag and the tag as it was written. html5lib, lxml and selectolax report at
most the line of a tag, and they rewrite the whole page.
"""

from __future__ import annotations

import codecs
import hashlib
import html
import re
from collections import Counter
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from html.parser import HTMLParser
from pathlib import Path

from captioner.errors import DataError
from captioner.files import read_input

HAS_TEXT = "with alternative text"
"""Category of images that already have a text."""
LABELLED = "with a label or caption"
"""Category of images with a label, a title or a figure caption in place of a text."""
DECORATIVE = "decorative"
"""Category of images that the page hides from screen readers, and of tracking pixels."""
EMPTY = 'with alt=""'
"""Category of images with an empty text. The image is decorative, or its Markdown source,
``![](a.jpg)``, contains no text."""

WITHOUT_TEXT = " without text"
"""End of ``HtmlImage.link`` if the image is the only content of its link or button. The review page
has the same text."""

_TEMPLATE = re.compile(r"\A\ufeff?---\r?\n|\{\{|\{%|<%|%>|<\?(?:php|=)")
"""Front matter, and the syntax of Jinja, Liquid, Go templates, Vue, ERB and PHP."""
_CODE = re.compile(r"<!--.*?-->|<(code|pre|script|style)\b.*?</\1\b", re.DOTALL | re.IGNORECASE)
"""Parts of a finished page that may contain template syntax."""
_VOID = {"area", "base", "br", "col", "hr", "img", "input", "link", "meta", "source", "wbr"}
"""Elements without content and end tag."""
_CANDIDATE = re.compile(r"([^\s,]\S*[^\s,])(?:\s+[\d.]+[wx])?\s*(?:,|$)")
"""A URL in a ``srcset``, with the width or density of its picture. Group 1 is the URL."""
_BOMS = {codecs.BOM_UTF8: "utf-8", b"\xff\xfe": "utf-16-le", b"\xfe\xff": "utf-16-be"}
_CHARSET = re.compile(rb"<meta[^>]*charset\s*=\s*[\"']?\s*([\w-]+)", re.IGNORECASE)
_ATTRIBUTE = re.compile(
    r"""(?<=['"\s/])([^\s/>][^\s/=>]*)(?:\s*=+\s*(?:'[^']*'|"[^"]*"|(?!['"])[^>\s]*))?"""
)
"""An attribute of a tag, as ``html.parser`` reads it. Group 1 is its name."""


@dataclass
class _Element:
    """An element of a page that may contain an image."""

    name: str
    """Name of the tag in lower case."""
    attributes: dict[str, str]
    """Value of each attribute by its name."""
    text: str = ""
    """Text inside a link or button, or the caption of a figure."""

    @property
    def is_control(self) -> bool:
        """True if the element is a link or a button."""
        is_link = self.name == "a" and "href" in self.attributes
        roles = self.attributes.get("role") in ("button", "link")
        return is_link or roles or self.name in ("button", "summary")

    @property
    def label(self) -> str:
        """The label of a link or button. Screen readers use it if the element has no text."""
        given = (self.attributes.get(name) for name in ("aria-label", "title", "aria-labelledby"))
        # The label of <input type=image> belongs to the image itself (see `HtmlImage.reason`).
        return next(filter(None, given), "") if self.name not in _VOID else ""


@dataclass(eq=False)
class HtmlImage:
    """An image in a page: an ``img``, ``input type=image`` or linked ``area``."""

    line: int
    """Line of the tag, from 1."""
    place: tuple[int, int]
    """Start and end of the attribute ``alt`` in the page's text. Without this attribute, both are
    the position after the tag's name."""
    key: str
    """The name of the tag and the URL of its picture, such as ``<img src="a.jpg">``, or the tag
    without ``alt`` if it has no picture. Short and printable for a table. `HtmlPage.with_texts`
    does not change it, and neither do programs that minify a page."""
    sources: list[str]
    """URLs of the picture as in the source, starting with the most likely one."""
    alt: str | None
    """The alternative text, or None if the attribute is missing."""
    reason: str
    """The reason why the image needs no text: `HAS_TEXT`, `LABELLED`, `DECORATIVE` or `EMPTY`. It
    is empty if the image needs a text."""
    link: str = ""
    """Description of the link or button around the image, such as ``button without text``. Empty
    for an image outside of links and buttons."""
    needs_text: bool = False
    """True if the image is the only content of its link or button."""
    number: str = ""
    """Number of the image among the page's images with the same ``key`` and the same link, such as
    ``1 of 2``."""

    @property
    def identity(self) -> tuple[str, str, str]:
        """The picture, the link and the number. It identifies the image in its page.

        A page that is built again keeps the identity, even if the image moves to another line.
        """
        return self.key, goal_of(self.link), self.number


class HtmlPage(HTMLParser):
    """A finished HTML page with its images."""

    def __init__(self, path: str | Path) -> None:
        """Read a page and find its images.

        A byte order mark or ``meta`` tag sets the encoding. The default is UTF-8. Text that is not
        valid in these encodings is read as ASCII, and all other bytes are kept.

        Raises:
            DataError: The file cannot be read, or is a template.
        """
        super().__init__()
        self.images: list[HtmlImage] = []
        self.base = ""
        """The ``href`` of the page's ``base`` element. Empty if the page has no such element."""
        self.text, self.encoding = _decoded(path)
        if _TEMPLATE.search(_CODE.sub("", self.text)):
            raise DataError(
                f"{path} is a template; build the site, and pass the folder with the built HTML "
                "pages"
            )
        self._open: list[_Element] = []
        self._sources: list[str] = []  # URLs in the <picture> around the next image
        self._around: list[tuple[HtmlImage, _Element]] = []
        self._lines = [0, *(end.end() for end in re.finditer("\n", self.text))]
        self.feed(self.text.replace("<![", "<! "))  # begins a comment, as in browsers
        self.close()
        for image, element in self._around:  # at the end, because the texts may follow the image
            self._describe(image, element)
        totals = Counter(image.identity[:2] for image in self.images)
        counts = Counter[tuple[str, str]]()
        for image in self.images:
            counts[equal := image.identity[:2]] += 1
            image.number = f"{counts[equal]} of {totals[equal]}"

    def _describe(self, image: HtmlImage, element: _Element) -> None:
        """Record in ``image`` the link, button or figure that contains it (``element``)."""
        text = _plain(element.text)[:80]
        if element.name == "figure":
            image.reason = LABELLED if text and image.reason in ("", EMPTY) else image.reason
            return
        goal = element.attributes.get("href")
        what = "button" if goal is None else f"link to {_plain(goal)}"
        label = _plain(element.label)[:80]
        name = f'the text "{text}"' if text else f'the label "{label}"' if label else ""
        image.link = f"{what} with {name}" if name else f"{what}{WITHOUT_TEXT}"
        image.needs_text = not name
        if image.needs_text and image.reason == EMPTY:
            image.reason = ""

    def with_texts(self, texts: Iterable[tuple[HtmlImage, str]]) -> bytes:
        """Return the bytes of the page with these alternative texts, and without other changes."""
        pieces, last = [], 0
        for image, text in sorted(texts, key=lambda one: one[0].place):
            start, end = image.place
            value = html.escape(text).encode(self.encoding, "xmlcharrefreplace")
            space = " " if start == end else ""
            pieces += [self.text[last:start], f'{space}alt="{value.decode(self.encoding)}"']
            last = end
        return "".join([*pieces, self.text[last:]]).encode(self.encoding, "surrogateescape")

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Record an image, and remember elements that have to be closed."""
        attributes = {name: (value or "").strip() for name, value in reversed(attrs)}
        element = _Element(tag, attributes)
        is_button = tag == "input" and attributes.get("type", "").lower() == "image"
        if tag == "base":
            self.base = self.base or attributes.get("href", "")
        elif tag == "source":
            self._sources += _candidates(attributes)
        elif tag == "img" or is_button or (tag == "area" and "href" in attributes):
            self._add_image(element, [name for name, _ in attrs])
        if tag not in _VOID:
            self._open.append(element)

    def handle_endtag(self, tag: str) -> None:
        """Close an element and all elements inside it."""
        names = [element.name for element in self._open]
        if tag in names:
            del self._open[len(names) - 1 - names[::-1].index(tag) :]

    def handle_data(self, data: str) -> None:
        """Add text to the links, buttons and figure captions that are open."""
        in_caption = any(element.name == "figcaption" for element in self._open)
        for element in self._open:
            if element.is_control or (in_caption and element.name == "figure"):
                element.text += data

    def _add_image(self, element: _Element, names: list[str]) -> None:
        """Add an image. ``names`` are the names of its attributes, in the order of the source."""
        given, alt = element.attributes, element.attributes.get("alt")
        line, column = self.getpos()
        start = self._lines[line - 1] + column
        tag = self.get_starttag_text() or ""
        place = _alt_place(tag, names)
        sources = [given[name] for name in ("data-src", "data-lazy-src", "src") if given.get(name)]
        sources += [*_candidates(given), *self._sources]
        sources.sort(key=lambda url: url.startswith("data:"))  # placeholders last
        self._sources = []
        key = f'<{element.name} src="{sources[0]}">' if sources else _without(tag, place)
        key = _plain(key)
        if len(key) > 1000:
            key = f"{key[:200]} {hashlib.sha256(key.encode()).hexdigest()}"
        at = start + len(f"<{element.name}")
        where = (start + place[0], start + place[1]) if place else (at, at)
        reason = self._reason(given, place is not None)
        image = HtmlImage(line, where, key, sources, alt, reason)
        self.images.append(image)
        around = [one for one in self._open if one.is_control or one.name == "figure"]
        around += [element] if element.name != "img" else []
        self._around += [(image, one) for one in around]
        for one in around:
            one.text += (alt or "") * one.is_control

    def _reason(self, given: dict[str, str], replaceable: bool) -> str:
        """Return why an image needs no text according to its attributes, or an empty text.

        ``replaceable`` is False if ``alt`` cannot be located in the tag, and so not be replaced.
        """
        alt, role = given.get("alt"), given.get("role")
        hidden = [one.attributes.get("aria-hidden") for one in self._open]
        hidden.append(given.get("aria-hidden"))
        tiny = is_tiny(given.get("width"), given.get("height"))
        if alt:
            return HAS_TEXT
        if role in ("presentation", "none") or "true" in hidden or tiny:
            return DECORATIVE
        if any(given.get(name) for name in ("aria-label", "aria-labelledby")):
            return LABELLED
        if alt == "":  # browsers then ignore a title
            return EMPTY if replaceable else DECORATIVE
        return LABELLED if given.get("title") else ""


def goal_of(link: str) -> str:
    """Return the beginning of a description of a link or button (see ``HtmlImage.link``).

    It names where the link leads. The rest is its text, which changes with alternative texts.
    """
    return re.split(r' without text$| with the (?:text|label) "', link, maxsplit=1)[0]


def is_tiny(*sides: object) -> bool:
    """Return whether a side of an image is at most one pixel, as in tracking pixels."""
    return any(str(side) in ("0", "1") for side in sides)


def _decoded(path: str | Path) -> tuple[str, str]:
    """Return the text of a file and its encoding."""
    data = read_input(path, "an HTML file")
    encodings = [name for mark, name in _BOMS.items() if data.startswith(mark)]
    encodings += [name.decode() for name in _CHARSET.findall(data[:1024])]
    for encoding in [*encodings, "utf-8"]:
        with suppress(LookupError, UnicodeError):
            text = data.decode(encoding)
            if text.encode(encoding) == data:
                return text, encoding
    return data.decode("ascii", "surrogateescape"), "ascii"  # new letters become &#233; and so on


def _alt_place(tag: str, names: list[str]) -> tuple[int, int] | None:
    """Return the start and end of the attribute ``alt`` in a tag, or None if it is not found.

    ``names`` are the names of the attributes that the parser found. In damaged markup, this
    function finds different attributes than the parser. It then returns None.
    """
    found = [*_ATTRIBUTE.finditer(tag, re.match(r"<[^\s/>]*", tag).end())]  # type: ignore[union-attr]
    if "alt" not in names or [one[1].lower() for one in found] != names:
        return None
    return found[names.index("alt")].span()


def _without(tag: str, place: tuple[int, int] | None) -> str:
    """Remove the attribute at a place, and the space before it, from a tag."""
    return tag[: place[0]].rstrip() + tag[place[1] :] if place else tag


def _plain(text: str) -> str:
    """Replace line ends and invalid bytes in a text, because spreadsheets change them."""
    return " ".join(text.split()).encode(errors="backslashreplace").decode()


def _candidates(attributes: dict[str, str]) -> list[str]:
    """Return the URLs in a ``srcset``. The last, usually of the largest picture, comes first."""
    given = attributes.get("srcset") or attributes.get("data-srcset", "")
    return _CANDIDATE.findall(given)[::-1]
