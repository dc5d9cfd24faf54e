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
from captioner.options import METHOD_TITLES, SearchOptions
from captioner.serving.limits import Limits

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


def index_page(
    limits: Limits,
    options: SearchOptions,
    image_size: int,
    methods: Collection[str],
    styles: Sequence[str] = (),
) -> str:
    """The HTML document with its styles and scripts inline.

    Args:
        limits: The server's limits, which the page checks before it uploads a photo.
        options: The model's default search options, shown in empty fields.
        image_size: Height and width of the model's input (pixels); the page uploads no photo
            with less than twice as many if the original has them.
        methods: How the model can compute maps.
        styles: The model's styles, the default first.
    """
    return caption_page(
        PageModel(options, methods, styles),
        max_beam=limits.max_beam,
        intro=_INTRO,
        scripts=[asset(name, _WEB) for name in _SERVER_SCRIPTS],
        data={"limits": asdict(limits), "imageSize": image_size},
    )


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
    number, options = f'type="number" min="1" max="{max_beam}"', model.options
    hidden = "" if model.own_words else " hidden"
    return f"""<body class="empty">
<main>
<h1>captioner</h1>
{intro}
<div class="drop">
<span><input id="file" type="file" accept="image/*" multiple>
<label class="pick" for="file">Choose photos</label></span>
<span class="camera"><input id="camera" type="file" accept="image/*" capture="environment">
<label class="pick" for="camera">Take a photo</label></span>
<span class="hint">or drop them here, or paste</span>
</div>
<form class="options" autocomplete="off">
<label>beam size
<input name="beam_size" {number} placeholder="{options.beam_size}" aria-describedby="beam-note">
</label>
<label>captions
<input name="num_captions" {number} placeholder="{options.num_captions}"></label>
{_style_field(model)}<label class="own-caption"{hidden}>test your own caption
<input name="words" type="text" maxlength="400" placeholder="a dog runs through the grass"></label>
<button type="submit">Caption</button>
<p class="quiet" id="beam-note" aria-live="polite"></p>
</form>
<div class="errors" role="alert"></div>
<section class="session" aria-label="Your photos" hidden>
<div class="bar-row">
<p class="count"></p>
<progress aria-label="Photos done" value="0" max="1"></progress>
<button type="button" class="cancel">Cancel</button>
<div class="downloads" role="group" aria-label="Download all results">
<span class="quiet" aria-hidden="true">Download all</span>
<button type="button" data-format="csv">CSV</button>
<button type="button" data-format="json">JSON</button>
<button type="button" data-format="html">Gallery</button>
</div>
<button type="button" class="clear">Remove all</button>
</div>
<ul class="cards" aria-label="Photos"></ul>
</section>
<section class="selected" aria-label="Selected photo" hidden>
<nav aria-label="Selected photo">
<button type="button" class="previous" aria-label="previous photo">‹</button>
<button type="button" class="next" aria-label="next photo">›</button>
<h2></h2>
</nav>
<p class="status" role="status"></p>
<div class="result"></div>
<div class="downloads overlay" role="group" aria-label="Download the overlay" hidden>
<span class="quiet">Download the selected words on the photo (every word if none is)</span>
<button type="button" data-format="png">PNG</button>
<button type="button" data-format="svg">SVG</button>
<button type="button" data-format="html">HTML</button>
</div>
</section>
<p class="hidden-text announcement" aria-live="polite"></p>
<footer>Brighter regions got more attention when the word was chosen, or count more for it by the
method chosen for the maps. β is the gate: how strongly the attended features influenced the word.
Captions can be wrong, and attention does not prove why the model chose a word.</footer>
</main>
{data}
</body>"""
