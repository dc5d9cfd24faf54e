"""The web page: drop, paste or choose photos, and explore their captions and attention maps."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

from captioner.drawing import document as documents
from captioner.drawing.document import asset, document, embedded, escaped
from captioner.drawing.pages import (
    FOOTERS,
    VIEWER_ASSETS,
    gallery_template,
    viewer_look,
    viewer_scripts,
    viewer_styles,
)
from captioner.errors import ConfigError
from captioner.inference.captioner import Captioner
from captioner.options import METHOD_TITLES, SearchOptions
from captioner.serving.options import Limits

MAX_PHOTOS = 100
"""Maximum number of photos on the page, whose browser keeps their captions and maps."""

_WEB = Path(__file__).parent / "web"
_BEFORE = ("kinds.js", "pictures.js", "jobs.js")
_SERVER_SCRIPTS = ("key.js", "upload.js", "requests.js")
_AFTER = ("form.js", "cards.js", "figure.js", "downloads.js", "page.js")
"""Scripts of the page, before and after those that bring photos to the model."""
_INTRO = """<p class="quiet">Captions photos and shows where the model looked. Your photos are sent
to this server only, kept in memory while they are processed, and never stored.</p>"""


class PageModel(NamedTuple):
    """What the page offers of a model."""

    options: SearchOptions
    """Default search options, shown in empty fields."""
    methods: Collection[str]
    """How the model can compute maps."""
    styles: Sequence[str]
    """The default first."""
    own_words: bool = True
    """Whether captions of the reader's own can be tested."""


def index_page(limits: Limits, model: Captioner) -> str:
    """The served page, with its styles and scripts inline.

    Args:
        limits: The server's limits, which the page checks before it uploads a photo.
        model: The model. The page uploads no photo with less than twice as many pixels as its input
            if the original has them.
    """
    methods = [method for method in METHOD_TITLES if _supports(model, method)]
    return caption_page(
        PageModel(model.options(), methods, model.stored.vocabulary.styles),
        max_beam=limits.max_beam,
        intro=_INTRO,
        scripts=[asset(name, _WEB) for name in _SERVER_SCRIPTS],
        data={"limits": asdict(limits), "imageSize": model.ensemble.image_size},
    )


def _supports(model: Captioner, method: str) -> bool:
    try:
        model.check_method(method)
    except ConfigError:
        return False
    return True


def caption_page(
    model: PageModel,
    *,
    max_beam: int,
    intro: str,
    scripts: Sequence[str],
    data: Mapping[str, Any],
    styles: Sequence[str] = (),
    head: Sequence[str] = (),
) -> str:
    """The page without what brings photos to the model: the served page and the static site.

    Args:
        model: The model.
        max_beam: Maximum beam size and number of captions.
        intro: Markup below the title.
        scripts: Scripts that define ``Pool``, a ``JobPool`` with ``captions(body, query, signal)``,
            and ``Upload``.
        data: What they need, in addition to what the page does.
        styles: More style sheets.
        head: More elements of the head.
    """
    settings = {
        **data,
        "look": viewer_look(),
        "maxPhotos": MAX_PHOTOS,
        "methods": {name: METHOD_TITLES[name] for name in model.methods},
        "template": gallery_template(),
        "footers": FOOTERS,
        "viewerAssets": VIEWER_ASSETS,
    }
    return document(
        "captioner",
        _body(model, max_beam, intro, embedded(settings, "captioner-data")),
        styles=[*viewer_styles(), asset("page.css", _WEB), *styles],
        scripts=[
            *viewer_scripts(),
            *(asset(name, _WEB) for name in _BEFORE),
            *scripts,
            *(asset(name, _WEB) for name in _AFTER),
        ],
        head=head,
    )


def policy(page: str) -> str:
    """The page's Content-Security-Policy: inline scripts by hash, requests to this server only."""
    return documents.policy(page, connect="'self'") + "; frame-ancestors 'none'"


def _style_field(model: PageModel) -> str:
    if len(model.styles) < 2:
        return ""
    default = model.options.style or model.styles[0]
    options = "".join(
        f"<option{' selected' if style == default else ''}>{escaped(style)}</option>"
        for style in model.styles
    )
    return f'<label>style\n<select name="style">{options}</select></label>\n'


def _body(model: PageModel, max_beam: int, intro: str, data: str) -> str:
    body = asset("page.html", _WEB).rstrip()
    for name, value in {
        "intro": intro,
        "number": f'type="number" min="1" max="{max_beam}"',
        "beam_size": str(model.options.beam_size),
        "num_captions": str(model.options.num_captions),
        "styles": _style_field(model),
        "hidden": "" if model.own_words else " hidden",
        "data": data,
    }.items():
        body = body.replace(f"@@{name}@@", value)
    return body
