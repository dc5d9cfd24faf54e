"""A page to explore attention: one HTML file that opens offline, for one photo or a folder of them.

Without scripts it is a list of photos and captions. With them a photo opens in the viewer: words
that are hovered, tapped or reached by arrow keys move the light over the photo.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from PIL import Image

from captioner.caption import Caption
from captioner.data.images import open_image
from captioner.errors import ConfigError
from captioner.files import atomic_write
from captioner.visualization.document import (
    MOST_PIXELS,
    asset,
    closed,
    data_uri,
    document,
    embedded,
    escaped,
)
from captioner.visualization.heatmap import LIGHT, fit_photo, palette
from captioner.visualization.maps import check_caption

PAGES = (".html", ".htm")
"""File name endings of pages."""

Photo = Image.Image | str | Path
Theme = Literal["auto", "light", "dark"]


@dataclass(frozen=True)
class Entry:
    """A photo of a page."""

    photo: Photo
    captions: Sequence[Caption]
    """Shown under each other, on one scale."""
    title: str = ""
    """What the page calls the photo, e.g. its file's name."""
    labels: Sequence[str] = ()
    """What the page calls each caption, e.g. the models that said them."""


@dataclass(frozen=True)
class Page:
    """An HTML document; shows itself in a notebook."""

    html: str

    def save(self, path: str | Path) -> None:
        """Write the page, whole or not at all.

        Raises:
            ConfigError: The file's name does not end in .html.
        """
        if Path(path).suffix.lower() not in PAGES:
            raise ConfigError(f"{path}: a page is an HTML file; give a name that ends in .html")
        atomic_write(path, self.html.encode())

    def _repr_html_(self) -> str:
        """In a frame of its own: its styles and scripts touch nothing else."""
        return (
            f'<iframe srcdoc="{escaped(self.html)}" sandbox="allow-scripts" loading="lazy" '
            'style="width:100%;height:720px;border:0" title="attention viewer"></iframe>'
        )


def page(
    photo: Photo,
    captions: Caption | Sequence[Caption],
    *,
    title: str = "",
    labels: Sequence[str] = (),
    panel_size: int = 1280,
    smooth: bool = True,
    colormap: str = "inferno",
    theme: Theme = "auto",
) -> Page:
    """A page of one photo.

    Args:
        photo: The photo that was captioned, or its path.
        captions: One caption or several, with their attention; ``alternatives`` are shown where a
            caption has them.
        title: What the page is called.
        labels: What each caption is called.
        panel_size: Longest side of the photo in the page, pixels; 0: its own.
        smooth: Interpolate the maps at first; the reader can change it.
        colormap: One of ``COLORMAPS``.
        theme: auto follows the reader's system; light; dark.

    Raises:
        ConfigError: There is no caption, or something else; the labels are not as many.
        ImageError: The photo cannot be read.
    """
    several = captions if isinstance(captions, Sequence) else [captions]
    entry = Entry(photo, several, title, labels)
    return gallery(
        [entry], title=title, panel_size=panel_size, smooth=smooth, colormap=colormap, theme=theme
    )


def gallery(
    entries: Iterable[Entry],
    *,
    title: str = "",
    panel_size: int = 800,
    smooth: bool = True,
    colormap: str = "inferno",
    theme: Theme = "auto",
) -> Page:
    """A page of many photos; see ``page``.

    Args:
        entries: The photos with their captions; read one by one.
        title: What the page is called.
        panel_size: Longest side of each photo in the page, pixels; 0: its own.
        smooth: Interpolate the maps at first.
        colormap: One of ``COLORMAPS``.
        theme: auto follows the reader's system; light; dark.

    Raises:
        ConfigError: There is no photo, or no `Entry`; a photo has no caption, or something else;
            the labels are not as many as the captions.
        ImageError: A photo cannot be read.
    """
    look = viewer_look(colormap, smooth=smooth)
    items: list[str] = []
    told: list[dict[str, Any]] = []
    for number, entry in enumerate(entries, 1):
        _check(entry, number)
        items.append(_item(entry, number, panel_size))
        told.append(
            {
                "title": entry.title,
                "labels": list(entry.labels),
                "captions": [caption.as_dict(attention=True) for caption in entry.captions],
            }
        )
    if not items:
        raise ConfigError("a page needs one photo or more")
    called = title or (told[0]["title"] if len(told) == 1 else f"{len(told)} photos")
    body = _body(called, items, embedded({"entries": told, "look": look}, "captioner-data"))
    styles = [asset("viewer.css"), asset("page.css")]
    scripts = [asset("viewer.js"), asset("page.js")]
    made = document(called or "captioner", body, styles=styles, scripts=scripts, theme=theme)
    return Page(closed(made))


def viewer_look(colormap: str = "inferno", *, smooth: bool = True) -> dict[str, Any]:
    """What the viewer has to know to draw light as ``heatmap`` does."""
    return {"palette": palette(colormap), "light": LIGHT._asdict(), "smooth": smooth}


def _body(title: str, items: Sequence[str], data: str) -> str:
    kind = "single" if len(items) == 1 else "many"
    heading = f"<h1>{escaped(title)}</h1>" if title else ""
    return f"""<body>
<main class="{kind}">
{heading}
<div class="bar-of-gallery">
<input type="search" placeholder="words in a caption" aria-label="show photos whose captions hold">
<output class="quiet"></output>
</div>
<section class="alone" aria-label="Attention viewer" hidden>
<nav aria-label="Photos">
<button type="button" class="back">All photos</button>
<button type="button" class="previous" aria-label="previous photo">‹</button>
<button type="button" class="next" aria-label="next photo">›</button>
<h2></h2>
</nav>
<div class="stand"></div>
</section>
<ol class="gallery">
{chr(10).join(items)}
</ol>
<footer>Brighter: more attention while the word was chosen. β, the gate: how much of what was seen
went into the word. Where the model looked is no proof of why it chose a word.</footer>
</main>
{data}
</body>"""


def _check(entry: Entry, number: int) -> None:
    """Refuse what cannot be shown truthfully."""
    if not isinstance(entry, Entry):
        raise ConfigError(
            f"photo {number} of the page is given as {type(entry).__name__}; give "
            "captioner.Entry(photo, [caption])"
        )
    if entry.labels and len(entry.labels) != len(entry.captions):
        raise ConfigError(
            f"{len(entry.labels)} labels for {len(entry.captions)} captions; give one each"
        )
    if not entry.captions:
        raise ConfigError(f"photo {number} of the page has no caption; give one or more")
    for caption in entry.captions:
        check_caption(caption)
        if not np.isfinite([*caption.log_probs, *caption.gates, caption.log_prob]).all():
            raise ConfigError(
                f"the log_probs or gates of {caption.text!r} hold NaN or infinity; a page shows "
                "numbers"
            )


def _item(entry: Entry, number: int, panel_size: int) -> str:
    """What there is of a photo without a script."""
    picture = fit_photo(open_image(entry.photo), panel_size)
    if max(picture.size) > MOST_PIXELS:
        raise ConfigError(
            f"photo {number}: {picture.width} x {picture.height} pixels, and a page holds up to "
            f"{MOST_PIXELS} a side; give a panel-size above 0"
        )
    texts = [caption.text or "no words" for caption in entry.captions]
    labels = [f"{label}: " for label in entry.labels] or [""] * len(texts)
    said = "<br>".join(
        f'<span class="text">{escaped(label + text)}</span>'
        for label, text in zip(labels, texts, strict=True)
    )
    name = f'<span class="name">{escaped(entry.title)}</span>' if entry.title else ""
    alt = escaped(texts[0])
    size = f'width="{picture.width}" height="{picture.height}"'
    image = f'<img src="{data_uri(picture)}" alt="{alt}" {size} decoding="async">'
    return (
        f'<li class="entry" id="entry-{number}"><figure><a href="#photo-{number}">{image}'
        f"<figcaption>{said}{name}</figcaption></a></figure></li>"
    )
