"""The web page: drop, paste or choose photos, and explore their captions and attention maps."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from captioner.drawing import pages
from captioner.drawing.options import PageOptions
from captioner.drawing.pages import (
    FOOTERS,
    VIEWER,
    asset,
    document,
    embedded,
    escaped,
    gallery_template,
    viewer_look,
)
from captioner.errors import ConfigError
from captioner.inference.captioner import Captioner
from captioner.inference.folder import StoredModel
from captioner.options import METHOD_TITLES
from captioner.serving.options import Limits

MAX_PHOTOS = 100
"""Maximum number of photos on the page, whose browser keeps their captions and maps."""

_WEB = Path(__file__).parent / "web"
_INTRO = """<p class="quiet">Captions photos and shows where the model looked. Your photos are sent
to this server only, kept in memory while they are processed, and never stored.</p>"""


def index_page(limits: Limits, model: Captioner) -> str:
    """The served page, with its styles and scripts inline.

    It uploads no photo with less than twice the sides of the model's input if the original has
    them, nor one beyond the server's limits.
    """
    methods = []
    for method in METHOD_TITLES:
        with suppress(ConfigError):
            model.check_method(method)
            methods.append(method)
    return caption_page(
        model.stored,
        methods,
        max_beam=limits.max_beam,
        intro=_INTRO,
        files=[_WEB / name for name in ("key.js", "upload.js", "requests.js")],
        with_keywords=model.stored.keywords is not None,
        data={
            "limits": {"max_bytes": limits.max_bytes, "max_pixels": limits.max_pixels},
            "imageSize": model.ensemble.image_size,
        },
    )


def caption_page(
    model: StoredModel,
    methods: Iterable[str],
    *,
    max_beam: int,
    intro: str,
    files: Sequence[Path],
    data: Mapping[str, Any],
    own_words: bool = True,
    with_keywords: bool = False,
    head: Sequence[str] = (),
) -> str:
    """The page without what brings photos to the model: the served page and the static site.

    Args:
        model: Its search options are shown in empty fields.
        methods: How the model can compute maps.
        max_beam: Maximum beam size and number of captions.
        intro: Markup below the title.
        files: Scripts that define ``Pool``, a ``JobPool`` with ``captions(body, query, signal)``,
            and ``Upload``; and more style sheets.
        data: What the scripts need.
        own_words: Whether captions of the reader's own can be tested.
        with_keywords: Whether keywords can be requested.
        head: More elements of the head.
    """
    options, vocabulary = model.search, model.vocabulary
    settings = {
        **data,
        "look": viewer_look(PageOptions()),
        "maxPhotos": MAX_PHOTOS,
        "methods": {name: METHOD_TITLES[name] for name in methods},
        "template": gallery_template(),
        "footers": FOOTERS,
        "viewerAssets": [path.name for path in VIEWER],
    }
    names = "".join(
        f"<option{' selected' if style == options.style else ''}>{escaped(style)}</option>"
        for style in vocabulary.styles
    )
    choice = f'<label>style\n<select name="style">{names}</select></label>\n'
    checked = " checked" if options.neutral else ""
    box = f'<input name="neutral" type="checkbox"{checked}>'
    neutral = f"<label>neutral words for people\n{box}</label>\n"
    count = f'name="keywords" type="number" min="0" max="100" placeholder="{options.keywords}"'
    keywords = f"<label>keywords\n<input {count}></label>\n"
    body = asset(_WEB / "page.html").rstrip()
    for name, value in {
        "intro": intro,
        "number": f'type="number" min="1" max="{max_beam}"',
        "beam_size": str(options.beam_size),
        "num_captions": str(options.num_captions),
        "keywords": keywords if with_keywords else "",
        "styles": choice if len(vocabulary.styles) > 1 else "",
        "neutral": neutral if vocabulary.subwords is None else "",
        "hidden": "" if own_words else " hidden",
        "data": embedded(settings),
    }.items():
        body = body.replace(f"@@{name}@@", value)
    base = ("page.css", "kinds.js", "pictures.js", "jobs.js")
    own = ("form.js", "cards.js", "figure.js", "downloads.js", "page.js")
    every = [*VIEWER, *(_WEB / name for name in base), *files, *(_WEB / name for name in own)]
    return document("captioner", body, every, head=head)


def policy(page: str) -> str:
    """The page's Content-Security-Policy: inline scripts by hash, requests to this server only."""
    return pages.policy(page, connect="'self'") + "; frame-ancestors 'none'"
