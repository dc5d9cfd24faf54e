"""Interactive pages: one HTML file, usable offline, for one photo or many.

Without JavaScript a page is a list of photos and captions. With it, a photo opens in the viewer,
which shows the attention of the word that is hovered, tapped or selected by arrow keys.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from captioner.caption import DOUBTFUL, Caption
from captioner.data.images import Photo, open_image
from captioner.drawing.document import (
    MAX_SIDE,
    WEB,
    ThemeName,
    asset,
    data_uri,
    document,
    embedded,
    escaped,
    with_policy,
)
from captioner.drawing.heatmap import CLOSED_GATE, HEATMAP_STYLE, fit_photo, palette
from captioner.drawing.options import PAGES, Drawing, PageOptions, check_captions, check_size
from captioner.errors import ConfigError
from captioner.option_fields import build_options

VIEWER = [WEB / name for name in ("viewer.css", "zoom.js", "viewer.js")]
"""Files of the viewer, which every page includes."""


@dataclass(frozen=True)
class Entry:
    """A photo of a page with its captions."""

    photo: Photo
    captions: Sequence[Caption]
    """Shown below each other."""
    title: str = ""
    """Title of the photo, e.g. its file name."""
    labels: Sequence[str] = ()
    """A name for each caption, e.g. its model's."""


@dataclass(frozen=True)
class Page(Drawing):
    """An HTML document."""

    kind, suffixes = "a page", PAGES
    html: str

    def encode(self, suffix: str = ".html") -> bytes:  # noqa: ARG002 - there is only one format
        """The content of the file."""
        return self.html.encode()

    def _repr_html_(self) -> str:
        """In an iframe, so that styles and scripts do not affect the notebook."""
        return (
            f'<iframe srcdoc="{escaped(self.html)}" sandbox="allow-scripts" loading="lazy" '
            'style="width:100%;height:720px;border:0" title="attention viewer"></iframe>'
        )


def page(
    photo: Photo,
    captions: Caption | Sequence[Caption],
    *,
    labels: Sequence[str] = (),
    **options: Any,
) -> Page:
    """Make a page of one photo.

    Args:
        photo: The captioned photo: a path, bytes, PIL image, array or binary file.
        captions: One or several captions; their ``alternatives`` are shown if they have any.
        labels: A name for each caption.
        **options: Fields of ``PageOptions``, e.g. ``title="A dog"``.

    Raises:
        ConfigError: An option or a caption is invalid, or labels and captions differ in number.
        ImageError: The photo cannot be read.
    """
    wanted = build_options(PageOptions, options)
    return _page([Entry(photo, check_captions(captions), wanted.title, labels)], wanted)


def gallery(entries: Iterable[Entry], **options: Any) -> Page:
    """Make a page of many photos.

    Args:
        entries: The photos with their captions; photos are read one by one.
        **options: Fields of ``PageOptions``; ``panel_size`` is 800 if not given.

    Raises:
        ConfigError: An entry or option is invalid, or there are no entries.
        ImageError: A photo cannot be read.
    """
    return _page(entries, build_options(PageOptions, {"panel_size": 800}, options))


def _page(entries: Iterable[Entry], options: PageOptions) -> Page:
    items: list[str] = []
    data: list[dict[str, Any]] = []
    for number, entry in enumerate(entries, 1):
        captions = check_captions(entry.captions, entry.labels)
        items.append(_item(entry, number, options.panel_size))
        shown = [caption.as_dict(attention=True) for caption in captions]
        data.append({"title": entry.title, "labels": list(entry.labels), "captions": shown})
    if not items:
        raise ConfigError("a page needs at least one photo")
    heading = options.title or (data[0]["title"] if len(data) == 1 else f"{len(data)} photos")
    only_attention = all(c.get("method") is None for entry in data for c in entry["captions"])
    look = viewer_look(options)
    parts = {
        "kind": "single" if len(items) == 1 else "many",
        "title": escaped(heading or "captioner"),
        "items": "\n".join(items),
        "data": embedded({"entries": data, "look": look}),
        "footer": FOOTERS[0 if only_attention else 1],
    }
    template = _template(options.theme)
    if not heading:
        template = template.replace("<h1>@@title@@</h1>\n", "")
    return Page(re.sub(r"@@(\w+)@@", lambda mark: parts[mark[1]], template))


def gallery_template() -> str:
    """A gallery page to be filled in a browser that shows a page with the viewer.

    ``@@kind@@``, ``@@title@@``, ``@@items@@``, ``@@data@@`` and ``@@footer@@`` (one of ``FOOTERS``)
    stand for what ``gallery`` puts there, and the name of each file of ``VIEWER`` for its text,
    which the browser already has.
    """
    html = _template("auto")
    for path in VIEWER:
        html = html.replace(asset(path), f"@@{path.name}@@")
    return html


def _template(theme: ThemeName) -> str:
    body, files = asset(WEB / "page.html").rstrip("\n"), [WEB / "page.css", WEB / "page.js"]
    return with_policy(document("@@title@@", body, [*VIEWER, *files], theme=theme))


def viewer_look(options: PageOptions) -> dict[str, Any]:
    """Settings with which the viewer draws heatmaps as ``heatmap`` does."""
    return {
        "palette": palette(options.colormap),
        "heatmap": HEATMAP_STYLE._asdict(),
        "closed_gate": CLOSED_GATE,
        "doubtful_below": DOUBTFUL,
        "scale": options.scale,
        "smooth": options.smooth,
    }


FOOTERS = (
    """Brighter means more attention while the word was chosen. The gate β is the
weight of the photo for the word. Attention does not explain why the model chose a word.""",
    """Brighter means that the region counts more for the word, by the method named.
The gate β is the weight of the photo for the word.""",
)
"""Below the captions of a page with attention only, and of one with other methods."""


def _item(entry: Entry, number: int, panel_size: int) -> str:
    """The list item of a photo, which needs no JavaScript."""
    picture = fit_photo(open_image(entry.photo), panel_size)
    check_size("page's photo", *picture.size, MAX_SIDE, MAX_SIDE**2)
    texts = [caption.text or "no words" for caption in entry.captions]
    labels = [f"{label}: " for label in entry.labels] or [""] * len(texts)
    lines = "<br>".join(
        f'<span class="text">{escaped(label + text)}</span>'
        for label, text in zip(labels, texts, strict=True)
    )
    name = f'<span class="name">{escaped(entry.title)}</span>' if entry.title else ""
    alt = escaped(texts[0])
    size = f'width="{picture.width}" height="{picture.height}"'
    image = f'<img src="{data_uri(picture)}" alt="{alt}" {size} decoding="async">'
    return (
        f'<li class="entry" id="entry-{number}"><figure><a href="#photo-{number}">{image}'
        f"<figcaption>{lines}{name}</figcaption></a></figure></li>"
    )


def review_page(site: Path, file: str, rows: Sequence[dict[str, str]]) -> str:
    """A page to review alternative texts: each with its picture, a field and a box to tick.

    ``file`` is the name of the table; its rows with a text have a picture in the folder ``site``.
    """
    names = {row["image"] for row in rows if row["alt"]}
    pictures = {name: data_uri(fit_photo(open_image(site / name), 320)) for name in names}
    values = {"title": escaped(str(site)), "file": escaped(file)}
    data = embedded({"rows": rows, "pictures": pictures})
    body = asset(WEB / "review.html").rstrip().format(data=data, **values)
    files = [*VIEWER, *(WEB / name for name in ("page.css", "review.css", "review.js"))]
    return with_policy(document(f"Review: {site}", body, files))
