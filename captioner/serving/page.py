"""The web page: drop, paste or choose photos, and explore their captions and attention maps."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import asdict
from pathlib import Path

from captioner.config import METHOD_TITLES, SearchOptions
from captioner.serving.limits import Limits
from captioner.visualization import document as documents
from captioner.visualization.document import asset, document, embedded
from captioner.visualization.pages import (
    FOOTERS,
    VIEWER_ASSETS,
    gallery_template,
    viewer_look,
    viewer_scripts,
    viewer_styles,
)

MAX_PHOTOS = 100
"""Maximum number of photos on the page, whose browser keeps their captions and maps."""

_WEB = Path(__file__).parent / "web"
_SCRIPTS = (
    "key.js",
    "kinds.js",
    "upload.js",
    "requests.js",
    "form.js",
    "cards.js",
    "figure.js",
    "downloads.js",
    "page.js",
)


def index_page(
    limits: Limits, options: SearchOptions, image_size: int, methods: Collection[str]
) -> str:
    """The HTML document with its styles and scripts inline.

    Args:
        limits: The server's limits, which the page checks before it uploads a photo.
        options: The model's default search options, shown in empty fields.
        image_size: Height and width of the model's input (pixels); the page uploads no photo
            with less than twice as many if the original has them.
        methods: How the model can compute maps.
    """
    data = {
        "limits": asdict(limits),
        "look": viewer_look(),
        "imageSize": image_size,
        "maxPhotos": MAX_PHOTOS,
        "methods": {name: METHOD_TITLES[name] for name in methods},
        "template": gallery_template(),
        "footers": FOOTERS,
        "viewerAssets": VIEWER_ASSETS,
    }
    return document(
        "captioner",
        _body(limits, options, embedded(data, "captioner-data")),
        styles=[*viewer_styles(), asset("page.css", _WEB)],
        scripts=[*viewer_scripts(), *(asset(name, _WEB) for name in _SCRIPTS)],
    )


def policy(page: str) -> str:
    """The page's Content-Security-Policy: inline scripts by hash, requests to this server only."""
    return documents.policy(page, connect="'self'") + "; frame-ancestors 'none'"


def _body(limits: Limits, options: SearchOptions, data: str) -> str:
    number = f'type="number" min="1" max="{limits.max_beam}"'
    return f"""<body class="empty">
<main>
<h1>captioner</h1>
<p class="quiet">Captions photos and shows where the model looked. Your photos are sent to this
server only, kept in memory while they are processed, and never stored.</p>
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
<label class="own-caption">test your own caption
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
