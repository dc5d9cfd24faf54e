"""Images without alternative text in HTML files, and the text written into their tags.

Python's html.parser is the one well-kept parser that reports where a tag stands in the source and
how it was written (html5lib, lxml and selectolax report lines at most, and write the whole page
again). So an attribute can be added to a tag, and all other bytes of the file stay as they are.
"""

from __future__ import annotations

import codecs
import hashlib
import html
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path

from captioner.errors import DataError
from captioner.files import read_input

_TEMPLATE = re.compile(r"\{\{|\{%|<%|%>|<\?(?:php|=)")
"""Marks of Jinja, Liquid, Go templates, Vue, ERB and PHP."""
_VOID = {
    "area", "base", "br", "col", "embed", "hr", "img", "input", "link", "meta", "param", "source",
    "track", "wbr",
}  # fmt: skip
_NO_MARKUP = {"iframe", "noembed", "noframes", "script", "style", "textarea", "title", "xmp"}
_CODE = _NO_MARKUP | {"code", "kbd", "pre", "samp"}
_LAZY = ("data-src", "data-lazy-src", "data-original")
_CANDIDATE = re.compile(r"([^\s,]\S*[^\s,])(?:\s+(\d+(?:\.\d+)?)[wx])?\s*(?:,|$)")
_BOMS = {codecs.BOM_UTF8: "utf-8", b"\xff\xfe": "utf-16-le", b"\xfe\xff": "utf-16-be"}
CONTEXTS = ("in a ", "is a ")
"""What `HtmlImage.context` begins with, unless it is empty."""
_CHARSET = re.compile(rb"<meta[^>]*charset\s*=\s*[\"']?\s*([\w-]+)", re.IGNORECASE)


@dataclass
class _Element:
    name: str
    attributes: dict[str, str]
    text: str = ""
    captioned: bool = False
    """Of a figure: whether its figcaption has text."""
    sources: list[str] = field(default_factory=list)
    """Of a picture."""


@dataclass
class HtmlImage:
    """An ``img``, ``input type=image`` or linked ``area`` without alternative text."""

    tag: str
    """As in the source."""
    start: int
    """Position of the tag in the page's text."""
    line: int
    """Its line, from 1."""
    sources: list[str]
    """URLs of its picture as in the source, the likeliest first."""
    control: _Element | None
    """The link or button that it is in."""

    @property
    def key(self) -> str:
        """The tag as a table can keep it."""
        return _key(self.tag)

    @property
    def needs_text(self) -> bool:
        """Whether it is all that its link or button has."""
        return self.control is not None and not self.control.text.strip()

    @property
    def context(self) -> str:
        """What the image does, in words, if it is a link or button or in one."""
        if self.control is None:
            return ""
        own = self.control.name in ("area", "input")
        goal = self.control.attributes.get("href")
        what = "a button" if goal is None else f"a link to {goal}"
        text = " ".join(self.control.text.split())[:80]
        beside = f' with the text "{text}"' if text else "" if own else " without text"
        return f"{'is' if own else 'in'} {what}{beside}"


@dataclass
class HtmlPage:
    """The text of an HTML file, and its images without alternative text."""

    text: str
    encoding: str
    images: list[HtmlImage] = field(default_factory=list)
    others: Counter[str] = field(default_factory=Counter)
    """Images that need no text, by the reason."""
    described: Counter[str] = field(default_factory=Counter)
    """Keys of the tags with an ``alt`` attribute."""
    base: str = ""
    """The ``href`` of its ``base``."""
    template: bool = False
    """Whether it is a template, or a source with front matter, instead of a finished page."""

    def with_texts(self, texts: Iterable[tuple[HtmlImage, str]]) -> bytes:
        """The file with alternative texts; every byte outside the new attributes is the same."""
        pieces, last = [], 0
        for image, text in sorted(texts, key=lambda one: one[0].start):
            pieces += [self.text[last : image.start], self.tag_with(image.tag, text)]
            last = image.start + len(image.tag)
        return "".join([*pieces, self.text[last:]]).encode(self.encoding, "surrogateescape")

    def tag_with(self, tag: str, text: str) -> str:
        """A tag with an alternative text, as the page's encoding can write it."""
        value = html.escape(text).encode(self.encoding, "xmlcharrefreplace").decode(self.encoding)
        return re.sub(r"^<\w+", lambda name: f'{name[0]} alt="{value}"', tag)


def read_page(path: str | Path) -> HtmlPage:
    """Read an HTML file.

    Raises:
        DataError: It cannot be read, or not decoded so that its bytes can be restored.
    """
    data = read_input(path, "an HTML file")
    for encoding in _encodings(data):
        try:
            text = data.decode(encoding, "surrogateescape")
            if text.encode(encoding, "surrogateescape") == data:
                return _Scanner(HtmlPage(text, encoding)).page
        except (LookupError, UnicodeError):
            pass
        except AssertionError as error:  # of html.parser, for <![other[
            raise DataError(f"{path}: not valid HTML ({error}); correct it") from error
    raise DataError(f"{path}: unknown encoding; save the page as UTF-8")


def _encodings(data: bytes) -> Iterator[str]:
    """By the byte order mark, the page itself or, as in browsers, UTF-8 or Windows-1252."""
    yield from (name for mark, name in _BOMS.items() if data.startswith(mark))
    if declared := _CHARSET.search(data[:1024]):
        yield declared[1].decode()
    try:
        data.decode()
        yield "utf-8"
    except UnicodeDecodeError:
        yield "cp1252"


class _Scanner(HTMLParser):
    def __init__(self, page: HtmlPage) -> None:
        super().__init__()
        self.page = page
        page.template = page.text.lstrip("\ufeff").startswith(("---\n", "---\r\n"))
        self._open: list[_Element] = []
        self._figures: list[tuple[HtmlImage, _Element | None]] = []
        self._lines = [0, *(end.end() for end in re.finditer("\n", page.text))]
        self.feed(page.text)
        self.close()
        for image, figure in self._figures:  # a figcaption may follow its image
            if figure and figure.captioned:
                page.others["with a label or caption"] += 1
            else:
                page.images.append(image)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if self._within(_NO_MARKUP):
            return
        attributes = {name: (value or "").strip() for name, value in reversed(attrs)}
        element = _Element(tag, attributes)
        self.page.template |= bool(_TEMPLATE.search(self.get_starttag_text() or ""))
        if tag == "base":
            self.page.base = self.page.base or attributes.get("href", "")
        elif tag == "source" and (picture := self._within({"picture"})):
            picture.sources += _largest(attributes, "srcset", "data-srcset")
        is_button = tag == "input" and attributes.get("type", "").lower() == "image"
        if tag == "img" or is_button or (tag == "area" and "href" in attributes):
            self._add_image(element)
        if self._open and self._open[-1].name == tag in ("p", "li", "td", "tr", "option"):
            self._open.pop()  # its end tag may be left out
        if tag not in _VOID:
            self._open.append(element)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if self._within({"svg", "math"}):  # elsewhere HTML ignores the slash
            self.handle_endtag(tag)

    def handle_endtag(self, tag: str) -> None:
        names = [element.name for element in self._open]
        if tag in names:
            del self._open[len(names) - 1 - names[::-1].index(tag) :]

    def handle_data(self, data: str) -> None:
        if not self._within(_CODE):
            self.page.template |= bool(_TEMPLATE.search(data))
        for element in self._open if data.strip() else ():
            if element.name == "figcaption" and (figure := self._within({"figure"})):
                figure.captioned = True
            if _is_control(element):
                element.text += data

    def handle_pi(self, data: str) -> None:
        self.page.template |= bool(_TEMPLATE.match(f"<?{data}"))

    def _within(self, names: Iterable[str]) -> _Element | None:
        return next((element for element in self._open[::-1] if element.name in names), None)

    def _add_image(self, element: _Element) -> None:
        given, others = element.attributes, self.page.others
        if "alt" in given:
            self.page.described[_key(self.get_starttag_text() or "")] += 1
        controls = [one for one in self._open if _is_control(one)]
        hidden = any(one.attributes.get("aria-hidden") == "true" for one in [*self._open, element])
        tiny = {"0", "1"} & {given.get("width"), given.get("height")}  # of tracking
        if given.get("alt") == "" or given.get("role") in ("presentation", "none"):
            others["decorative"] += 1
        elif any(name.strip("[]").rpartition(":")[2] == "alt" for name in given):
            others["with alternative text"] += 1
            for one in controls:
                one.text += given.get("alt", "")
        elif hidden or tiny:
            others["decorative"] += 1
        elif any(given.get(name) for name in ("aria-label", "aria-labelledby", "title")):
            others["with a label or caption"] += 1
        else:
            picture = self._within({"picture"})
            line, column = self.getpos()
            sources = [given[name] for name in (*_LAZY, "src") if given.get(name)]
            sources += _largest(given, "srcset", "data-srcset")
            sources += picture.sources if picture else []
            control = element if element.name != "img" else controls[-1] if controls else None
            image = HtmlImage(
                self.get_starttag_text() or "",
                self._lines[line - 1] + column,
                line,
                sorted(sources, key=lambda url: url.startswith("data:")),  # placeholders last
                control,
            )
            self._figures.append((image, self._within({"figure"})))


def _key(tag: str) -> str:
    """A tag without what spreadsheets change: line ends, bytes that are no text, great length."""
    tag = " ".join(tag.split()).encode(errors="backslashreplace").decode()
    return tag if len(tag) < 1000 else f"{tag[:200]} {hashlib.sha256(tag.encode()).hexdigest()}"


def _is_control(element: _Element) -> bool:
    is_link = element.name == "a" and "href" in element.attributes
    roles = element.attributes.get("role") in ("button", "link")
    return is_link or roles or element.name in ("button", "summary")


def _largest(attributes: dict[str, str], *names: str) -> list[str]:
    """The largest candidate of each ``srcset``."""
    found = (_CANDIDATE.findall(attributes.get(name, "")) for name in names)
    return [max(one, key=lambda c: float(c[1] or 1))[0] for one in found if one]
