"""Interactive pages, each a single HTML file that shows one photo or many and works offline.

Without JavaScript, a page is a list of photos and captions. With JavaScript, a photo opens in the
viewer. The viewer shows the attention for the word that the user hovers over, taps or selects with
the arrow keys.

Styles, scripts, pictures and data are embedded. A Content-Security-Policy allows only the page's
own scripts, by hash, and blocks all requests. Text is escaped. Data is escaped JSON in a block that
is never executed.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from html import escape
from pathlib import Path
from typing import Any

from PIL import Image

from captioner.caption_types import DOUBTFUL, DOUBTFUL_TRUTH, Caption
from captioner.data.folders import unsafe_name
from captioner.data.images import Photo, open_image
from captioner.data.pixels import fit_photo
from captioner.drawing.drawing import Drawing, check_captions, check_size
from captioner.drawing.heatmap import CLOSED_GATE, HEATMAP_STYLE, palette
from captioner.drawing.options import PageOptions
from captioner.drawing.picture_files import base64_uri, encoded
from captioner.drawing.style import percent
from captioner.errors import ConfigError, ImageError
from captioner.hints import hinted
from captioner.schema import build_options

WEB = Path(__file__).parent / "web"

_QUALITY = 88  # JPEG quality of pictures

_PLAIN = ("text", "words", "corrected", "gates", "alphas", "geometry", "method", "keywords")
"""Keys of ``Caption.to_dict`` that a plain page contains: the caption and its maps. The gates are
needed for a common scale of the maps."""

VIEWER = [WEB / name for name in ("viewer.css", "zoom.js", "viewer.js")]
"""Files of the viewer, which every page includes."""


@hinted
@dataclass(frozen=True)
class Entry:
    """A photo on a page, with its captions."""

    photo: Photo
    """The photo, in any form that ``open_image`` reads."""
    captions: Sequence[Caption]
    """Captions, shown below each other."""
    title: str = ""
    """Title of the photo, e.g. its file name."""
    labels: Sequence[str] = ()
    """A name for each caption, e.g. the name of its model."""
    text: str = ""
    """The sentence that a person wrote, with capitals and punctuation, if ``captions`` explain its
    words. It is shown in place of their own text."""


@dataclass(frozen=True)
class Page(Drawing):
    """An HTML document."""

    kind, suffixes = "a page", (".html", ".htm")
    html: str
    """The text of the document."""

    def encode(self, suffix: str = ".html") -> bytes:  # noqa: ARG002 - there is only one format
        """Return the content of the file, in UTF-8.

        Characters that UTF-8 cannot encode, such as invalid bytes in a file name, become ``?``.
        """
        return self.html.encode(errors="replace")

    def _repr_html_(self) -> str:
        """Return the page in an iframe, so that it does not affect the styles of the notebook."""
        html = escape(self.encode().decode())
        return (
            f'<iframe srcdoc="{html}" sandbox="allow-scripts" loading="lazy" '
            'style="width:100%;height:720px;border:0" title="attention viewer"></iframe>'
        )


@hinted
def page(
    photo: Photo,
    captions: Caption | Sequence[Caption],
    *,
    labels: Sequence[str] = (),
    **options: Any,
) -> Page:
    """Make a page that shows one photo.

    Args:
        photo: The captioned photo: a path, bytes, PIL image, array or binary file.
        captions: One or several captions. If they have ``alternatives``, these are shown.
        labels: A name for each caption.
        **options: Fields of ``PageOptions``, e.g. ``title="A dog"``.

    Raises:
        ConfigError: An option or a caption is invalid, or the numbers of labels and captions
            differ.
        ImageError: The photo cannot be read.
    """
    entry = Entry(photo, check_captions(captions), options.get("title", ""), labels)
    return gallery([entry], **{"panel_size": PageOptions.panel_size} | options)


@hinted
def gallery(entries: Iterable[Entry], **options: Any) -> Page:
    """Make a page that shows many photos.

    Args:
        entries: The photos with their captions. Photos are read one by one.
        **options: Fields of ``PageOptions``. The default of ``panel_size`` is 800 here.

    Raises:
        ConfigError: An entry or an option is invalid, or ``entries`` is empty.
        ImageError: A photo cannot be read.
    """
    wanted = build_options(PageOptions, {"panel_size": 800}, options)
    items: list[str] = []
    data: list[dict[str, Any]] = []
    for number, entry in enumerate(entries if isinstance(entries, Iterable) else [entries], 1):
        if not isinstance(entry, Entry):
            raise ConfigError(
                f"entries contains an object of type {type(entry).__name__}; pass a list of "
                "captioner.Entry(photo, captions)"
            )
        captions = check_captions(entry.captions, entry.labels)
        if wanted.plain:
            captions = [replace(one, left_out=None, confidence=None) for one in captions]
        items.append(_item(replace(entry, captions=captions), number, wanted.panel_size))
        shown = [_shown(caption, entry.text) for caption in captions]
        if wanted.plain:
            shown = [{name: one[name] for name in _PLAIN if name in one} for one in shown]
        data.append({"title": entry.title, "labels": list(entry.labels), "captions": shown})
    if not items:
        raise ConfigError("entries is empty, but a page needs a photo; pass at least one entry")
    heading = wanted.title or (data[0]["title"] if len(data) == 1 else f"{len(data)} photos")
    parts = {
        "kind": "single" if len(items) == 1 else "many",
        "title": escape(heading or "captioner"),
        "items": "\n".join(items),
        "data": embedded({"entries": data, "look": viewer_look(wanted)}),
    }
    template = gallery_template(wanted.theme)
    if not heading:
        template = template.replace("<h1>@@title@@</h1>\n", "")
    if wanted.plain:
        template = re.sub(r'<span class="numbers">.*?</span>', "", template, flags=re.DOTALL)
    return Page(re.sub(r"@@(\w+)@@", lambda mark: parts[mark[1]], template))


def gallery_template(theme: str = "auto") -> str:
    """Return a page with placeholders: ``@@kind@@``, ``@@title@@``, ``@@items@@``, ``@@data@@``."""
    body, files = asset(WEB / "page.html").rstrip("\n"), [WEB / "page.css", WEB / "page.js"]
    return with_policy(document("@@title@@", body, [*VIEWER, *files], theme=theme))


def viewer_look(options: PageOptions) -> dict[str, Any]:
    """Return the settings with which the viewer draws maps exactly like the module ``heatmap``."""
    return {
        "palette": palette(options.colormap),
        "heatmap": HEATMAP_STYLE._asdict(),
        "closed_gate": CLOSED_GATE,
        "doubtful_below": DOUBTFUL,
        "doubtful_truth": DOUBTFUL_TRUTH,
        "scale": options.scale,
        "smooth": options.smooth,
        "plain": options.plain,
    }


def _shown(caption: Caption, text: str) -> dict[str, Any]:
    """Return a caption for the viewer. A ``text`` that a person wrote replaces the caption's text.

    The words are shown as the person wrote them, unless the model reads some of them as several
    words. ``asCorrected`` in cards.js does the same.
    """
    data = caption.to_dict(attention=True)
    if text:
        typed = text.split()
        words = typed if len(typed) == len(caption.words) else data["words"]
        data |= {"text": text, "words": words, "corrected": True}
    return data


def _item(entry: Entry, number: int, panel_size: int) -> str:
    """Return the HTML list item of a photo, which works without JavaScript.

    Args:
        entry: The photo with its captions.
        number: Number of the photo on the page, from 1.
        panel_size: Limit on the longer side of the photo (pixels).
    """
    picture = fit_photo(open_image(entry.photo), panel_size)
    texts = [entry.text or caption.text or "no words" for caption in entry.captions]
    labels = [f"{label}: " for label in entry.labels] or [""] * len(texts)
    lines = "<br>".join(
        f'<span class="text">{escape(label + text)}</span>{_left_out(caption)}{_sure(caption)}'
        for label, text, caption in zip(labels, texts, entry.captions, strict=True)
    )
    name = f'<span class="name">{escape(entry.title)}</span>' if entry.title else ""
    alt = escape(texts[0])
    size = f'width="{picture.width}" height="{picture.height}"'
    image = f'<img src="{data_uri(picture)}" alt="{alt}" {size} decoding="async">'
    return (
        f'<li class="entry" id="entry-{number}"><figure><a href="#photo-{number}">{image}'
        f"<figcaption>{lines}{name}</figcaption></a></figure></li>"
    )


def _left_out(caption: Caption) -> str:
    """Return HTML for a caption's left-out words in grey, the same as ``leftOut`` in viewer.js."""
    if caption.left_out is None:
        return ""
    name = '<span class="hidden-text">left out: </span>'
    return f' <span class="left-out">{name}{escape(caption.left_out.text)}</span>'


def _sure(caption: Caption) -> str:
    """Return HTML for a caption's confidence, or an empty text if the confidence is unknown.

    ``galleryItem`` in downloads.js writes the same HTML.
    """
    if caption.confidence is None:
        return ""
    return f' <span class="sure">{percent(caption.confidence)} likely to be right</span>'


def review_id(page: Path) -> str:
    """Return the id under which a browser stores the reviews of a review page.

    The id is empty if the page does not exist or contains no id.
    """
    try:
        found = re.search('"id":"([0-9a-f]{16})"', page.read_text("utf-8", errors="replace"))
    except OSError:
        return ""
    return found[1] if found else ""


def review_page(site: Path, file: str, rows: Sequence[dict[str, str]], known: str = "") -> str:
    """Return a page to review alternative texts, each with a picture, a text field and a tick box.

    Args:
        site: Folder of the site, with the pictures.
        file: Name of the table that the page offers for download.
        rows: Rows of the table, with a value for each column.
        known: Id of the page that this page replaces (see `review_id`), so that the browser shows
            the reviews that it has stored. By default, the id is new.
    """
    pictures = {}
    for name in {row["image"] for row in rows if row["suggested"]}:
        if unsafe_name(name):  # a table from a stranger must not show other files
            continue
        with suppress(ImageError):  # a continued table may contain rows of deleted pictures
            pictures[name] = data_uri(fit_photo(open_image(site / name), 320))
    values = {"title": escape(str(site)), "file": escape(file)}
    text = json.dumps(rows, sort_keys=True).encode()
    digest = hashlib.sha256(text).hexdigest()[:16]  # the browser stores reviews by this id
    data = embedded({"id": known or digest, "rows": rows, "pictures": pictures})
    body = asset(WEB / "review.html").rstrip().format(data=data, **values)
    files = [*VIEWER, *(WEB / name for name in ("page.css", "review.css", "cells.js", "review.js"))]
    return with_policy(document(f"Review: {site}", body, files))


# --- documents ------------------------------------------------------------------------------------


def document(
    title: str,
    body: str,
    files: Sequence[Path],
    *,
    theme: str = "auto",
    head: Sequence[str] = (),
) -> str:
    """Build an HTML document. Text in its ``body`` must be escaped.

    Args:
        title: Title of the document.
        body: HTML of the body.
        files: Style sheets and scripts to include. The scripts run in order, after the body.
        theme: ``light``, ``dark`` or ``auto`` (the setting of the reader's system).
        head: Elements of the head, such as an icon. They replace the default, an empty icon.
    """
    styles = [asset(path) for path in files if path.suffix == ".css"]
    scripts = [asset(path) for path in files if path.suffix == ".js"]
    elements = [
        '<meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        *(head or ['<link rel="icon" href="data:,">']),
        f"<title>{escape(title)}</title>",
        *(f"<style>{style}</style>" for style in styles),
    ]
    code = "".join(f"<script>{script}</script>" for script in scripts)
    root = '<html lang="en">' if theme == "auto" else f'<html lang="en" data-theme="{theme}">'
    return f"<!doctype html>\n{root}\n{chr(10).join(elements)}\n{body}\n{code}\n</html>\n"


def with_policy(page: str, rules: str | None = None) -> str:
    """Add a Content-Security-Policy to a page as an element of its head.

    A page that is opened as a file needs this, because it has no HTTP headers. ``rules`` is the
    policy (default: ``policy(page)``).
    """
    content = escape(rules or policy(page))
    rule = f'<meta http-equiv="Content-Security-Policy" content="{content}">'
    return page.replace('<meta charset="utf-8">', f'<meta charset="utf-8">\n{rule}', 1)


def policy(page: str, *, connect: str = "'none'", scripts: str = "", images: str = "") -> str:
    """Return a Content-Security-Policy that allows only the document's own scripts and styles.

    ``connect``, ``scripts`` and ``images`` add sources to ``connect-src``, ``script-src`` and
    ``img-src``.
    """
    return "; ".join(
        [
            "default-src 'none'",
            f"script-src {hashes('script', page)} {scripts}".rstrip(),
            f"style-src {hashes('style', page)}",
            f"img-src data: blob: {images}".rstrip(),
            f"connect-src {connect}",
            "base-uri 'none'",
            "form-action 'none'",
        ]
    )


def hashes(kind: str, page: str) -> str:
    """Return the hashes of a document's inline scripts or styles, in the form of a policy.

    ``kind`` is ``script`` or ``style``.
    """
    texts = re.findall(f"<{kind}>(.*?)</{kind}>", page, re.DOTALL)
    digests = (hashlib.sha256(text.encode()).digest() for text in texts)
    return " ".join(f"'sha256-{base64.b64encode(d).decode()}'" for d in digests) or "'none'"


def asset(path: Path) -> str:
    """Return the text of a script, style sheet or template in the package."""
    return path.read_text(encoding="utf-8")


def embedded(data: Any) -> str:
    """Return a script element with data as JSON, escaped so that no text can close the element."""
    text = json.dumps(data, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    for letter in "<>&\u2028\u2029":
        text = text.replace(letter, f"\\u{ord(letter):04x}")
    return f'<script type="application/json" id="captioner-data">{text}</script>'


def data_uri(image: Image.Image) -> str:
    """Return a picture as a JPEG data URI.

    Raises:
        ConfigError: The picture is larger than a JPEG file can be.
    """
    check_size("page's photo", *image.size, 65_500, 65_500**2)
    return base64_uri("jpeg", encoded(image, "JPEG", quality=_QUALITY))
