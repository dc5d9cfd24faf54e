"""The web page: drop, paste or choose a photo, and explore its captions and attention maps."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

from captioner.config import SearchOptions
from captioner.serving.limits import Limits
from captioner.visualization import document as documents
from captioner.visualization.document import asset, document, embedded
from captioner.visualization.pages import viewer_look

_WEB = Path(__file__).parent / "web"


def index_page(limits: Limits, options: SearchOptions) -> str:
    """The HTML document with its styles and scripts inline.

    Args:
        limits: The server's limits, which the page checks before it uploads a photo.
        options: The model's default search options, shown in empty fields.
    """
    data = {"limits": asdict(limits), "look": viewer_look()}
    return document(
        "captioner",
        _body(limits, options, embedded(data, "captioner-data")),
        styles=[asset("viewer.css"), asset("page.css", _WEB)],
        scripts=[asset("viewer.js"), asset("key.js", _WEB), asset("page.js", _WEB)],
    )


def policy(page: str) -> str:
    """The page's Content-Security-Policy: inline scripts by hash, requests to this server only."""
    return documents.policy(page, connect="'self'") + "; frame-ancestors 'none'"


def _body(limits: Limits, options: SearchOptions, data: str) -> str:
    number = f'type="number" min="1" max="{limits.max_beam}"'
    return f"""<body class="empty">
<main>
<h1>captioner</h1>
<p class="quiet">Captions a photo and shows where the model looked. Your photo is sent to this
server only, kept in memory while it is processed, and never stored.</p>
<div class="drop">
<span><input id="file" type="file" accept="image/*" multiple>
<label class="pick" for="file">Choose photos</label></span>
<span class="hint">or drop them here, or paste</span>
</div>
<form class="options" autocomplete="off">
<label>beam size
<input name="beam_size" {number} placeholder="{options.beam_size}"></label>
<label>captions
<input name="num_captions" {number} placeholder="{options.num_captions}"></label>
<label class="own-caption">test your own caption
<input name="words" type="text" maxlength="400" placeholder="a dog runs through the grass"></label>
<button type="submit">Caption</button>
</form>
<div class="strip" role="group" aria-label="Photos" hidden></div>
<div class="errors" role="alert"></div>
<p class="status" role="status"></p>
<div class="result"></div>
<footer>Brighter regions got more attention when the word was chosen. β is the gate: how strongly
the attended features influenced the word. Captions can be wrong, and attention does not prove why
the model chose a word.</footer>
</main>
{data}
</body>"""
