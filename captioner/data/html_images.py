"""Images in HTML files, and alternative texts written into their tags.

Python's html.parser is the one well-kept parser that reports where a tag stands in the source and
how it was written (html5lib, lxml and selectolax report lines at most, and write the whole page
again). So an attribute can be added to a tag, and all other bytes of the file stay as they are.
"""

from __future__ import annotations

import codecs
import hashlib
import html
import re
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from html.parser import HTMLParser
from pathlib import Path

from captioner.errors import DataError
from captioner.files import read_input

_TEMPLATE = re.compile(r"\A\ufeff?---\r?\n|\{\{|\{%|<%|%>|<\?(?:php|=)")
"""Front matter, and marks of Jinja, Liquid, Go templates, Vue, ERB and PHP."""
_CODE = re.compile(r"<!--.*?-->|<(code|pre|script|style)\b.*?</\1\b", re.DOTALL | re.IGNORECASE)
"""Where a finished page may have such marks."""
_VOID = {"area", "base", "br", "col", "hr", "img", "input", "link", "meta", "source", "wbr"}
_CANDIDATE = re.compile(r"([^\s,]\S*[^\s,])(?:\s+[\d.]+[wx])?\s*(?:,|$)")
_BOMS = {codecs.BOM_UTF8: "utf-8", b"\xff\xfe": "utf-16-le", b"\xfe\xff": "utf-16-be"}
_CHARSET = re.compile(rb"<meta[^>]*charset\s*=\s*[\"']?\s*([\w-]+)", re.IGNORECASE)


@dataclass
class _Element:
    name: str
    attributes: dict[str, str]
    text: str = ""
    """Of a link or button, and of a figure its caption."""

    @property
    def is_control(self) -> bool:
        is_link = self.name == "a" and "href" in self.attributes
        roles = self.attributes.get("role") in ("button", "link")
        return is_link or roles or self.name in ("button", "summary")


@dataclass(eq=False)
class HtmlImage:
    """An ``img``, ``input type=image`` or linked ``area``."""

    line: int
    """Line of the tag, from 1."""
    at: int
    """Position in the page's text for an attribute, behind the name of the tag."""
    key: str
    """The tag, short and printable for a table; the same after `HtmlPage.with_texts`."""
    sources: list[str]
    """URLs of its picture as in the source, the likeliest first."""
    alt: str | None
    reason: str
    """Why it needs no text; empty: it does."""
    link: str = ""
    """The link or button that it is in, and the text beside it; empty without one."""
    needs_text: bool = False
    """Whether it is all that its link or button has."""


class HtmlPage(HTMLParser):
    """A finished HTML page; DataError: it cannot be read, or is a template."""

    def __init__(self, path: str | Path) -> None:
        """Read the file, in the encoding of its byte order mark or ``meta``, UTF-8 or as ASCII."""
        super().__init__()
        self.images: list[HtmlImage] = []
        self.base = ""
        """The ``href`` of its ``base``."""
        self.text, self.encoding = _decoded(path)
        if _TEMPLATE.search(_CODE.sub("", self.text)):
            raise DataError(f"{path}: a template; give the folder of the finished site")
        self._open: list[_Element] = []
        self._sources: list[str] = []  # of a picture
        self._around: list[tuple[HtmlImage, _Element]] = []
        self._lines = [0, *(end.end() for end in re.finditer("\n", self.text))]
        self.feed(self.text.replace("<![", "<! "))  # a comment, as in browsers
        self.close()
        for image, element in self._around:  # whose texts may follow the image
            text = _plain(element.text)[:80]
            if element.name == "figure":
                image.reason = image.reason or ("with a label or caption" if text else "")
            else:
                goal = element.attributes.get("href")
                what = "button" if goal is None else f"link to {_plain(goal)}"
                image.link = f'{what} with the text "{text}"' if text else f"{what} without text"
                image.needs_text = not text

    def with_texts(self, texts: Iterable[tuple[HtmlImage, str]]) -> bytes:
        """The file with alternative texts; every byte outside the new attributes is the same."""
        pieces, last = [], 0
        for image, text in sorted(texts, key=lambda one: one[0].at):
            value = html.escape(text).encode(self.encoding, "xmlcharrefreplace")
            pieces += [self.text[last : image.at], f' alt="{value.decode(self.encoding)}"']
            last = image.at
        return "".join([*pieces, self.text[last:]]).encode(self.encoding, "surrogateescape")

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Find images."""
        attributes = {name: (value or "").strip() for name, value in reversed(attrs)}
        element = _Element(tag, attributes)
        is_button = tag == "input" and attributes.get("type", "").lower() == "image"
        if tag == "base":
            self.base = self.base or attributes.get("href", "")
        elif tag == "source":
            self._sources += _candidates(attributes)
        elif tag == "img" or is_button or (tag == "area" and "href" in attributes):
            self._add_image(element)
        if tag not in _VOID:
            self._open.append(element)

    def handle_endtag(self, tag: str) -> None:
        """Close an element, and those in it."""
        names = [element.name for element in self._open]
        if tag in names:
            del self._open[len(names) - 1 - names[::-1].index(tag) :]

    def handle_data(self, data: str) -> None:
        """Add to the text of links, buttons and captions."""
        in_caption = any(element.name == "figcaption" for element in self._open)
        for element in self._open:
            if element.is_control or (in_caption and element.name == "figure"):
                element.text += data

    def _add_image(self, element: _Element) -> None:
        given, alt = element.attributes, element.attributes.get("alt")
        hidden = any(one.attributes.get("aria-hidden") == "true" for one in [*self._open, element])
        tiny = {"0", "1"} & {given.get("width"), given.get("height")}  # of tracking
        reason = ""
        if alt:
            reason = "with alternative text"
        elif alt == "" or given.get("role") in ("presentation", "none") or hidden or tiny:
            reason = "decorative"
        elif any(given.get(name) for name in ("aria-label", "aria-labelledby", "title")):
            reason = "with a label or caption"
        sources = [given[name] for name in ("data-src", "data-lazy-src", "src") if given.get(name)]
        sources += [*_candidates(given), *self._sources]
        sources.sort(key=lambda url: url.startswith("data:"))  # placeholders last
        self._sources = []
        line, column = self.getpos()
        at = self._lines[line - 1] + column + len(f"<{element.name}")
        key = _plain(re.sub(r'^(<\w+) alt="[^"]*"', r"\1", self.get_starttag_text() or ""))
        if len(key) > 1000:
            key = f"{key[:200]} {hashlib.sha256(key.encode()).hexdigest()}"
        image = HtmlImage(line, at, key, sources, alt, reason)
        self.images.append(image)
        around = [one for one in self._open if one.is_control or one.name == "figure"]
        around += [element] if element.name != "img" else []
        self._around += [(image, one) for one in around]
        for one in around:
            one.text += (alt or "") * one.is_control


def _decoded(path: str | Path) -> tuple[str, str]:
    data = read_input(path, "an HTML file")
    encodings = [name for mark, name in _BOMS.items() if data.startswith(mark)]
    encodings += [name.decode() for name in _CHARSET.findall(data[:1024])]
    for encoding in [*encodings, "utf-8"]:
        with suppress(LookupError, UnicodeError):
            text = data.decode(encoding)
            if text.encode(encoding) == data:
                return text, encoding
    return data.decode("ascii", "surrogateescape"), "ascii"  # others can be written as &#233;


def _plain(text: str) -> str:
    """A text without what spreadsheets change: line ends, and bytes that are no text."""
    return " ".join(text.split()).encode(errors="backslashreplace").decode()


def _candidates(attributes: dict[str, str]) -> list[str]:
    """The URLs of a ``srcset``, the last first, which usually is the largest."""
    given = attributes.get("srcset") or attributes.get("data-srcset", "")
    return _CANDIDATE.findall(given)[::-1]
