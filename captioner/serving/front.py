"""The front page: drop, paste or choose a photo, see its caption and where the model looked."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

from captioner.config import SearchOptions
from captioner.serving.limits import Limits
from captioner.visualization import document as documents
from captioner.visualization.document import asset, document, embedded
from captioner.visualization.pages import viewer_look

_WEB = Path(__file__).parent / "web"


def front_page(limits: Limits, options: SearchOptions) -> str:
    """The document, with its styles and scripts inside; ``policy`` tells what it may do.

    Args:
        limits: What the server takes on, so that the page can say so before it sends.
        options: The model's own search options, shown as what an empty field means.
    """
    data = {"limits": asdict(limits), "look": viewer_look()}
    return document(
        "captioner",
        _body(limits, options, embedded(data, "captioner-data")),
        styles=[asset("viewer.css"), asset("front.css", _WEB)],
        scripts=[asset("viewer.js"), asset("front.js", _WEB)],
    )


def policy(page: str) -> str:
    """The Content-Security-Policy of the page: its own scripts, requests to its own server."""
    return documents.policy(page, connect="'self'") + "; frame-ancestors 'none'"


def _body(limits: Limits, options: SearchOptions, data: str) -> str:
    number = f'type="number" min="1" max="{limits.max_beam}"'
    return f"""<body class="empty">
<main>
<h1>captioner</h1>
<p class="quiet">Captions a photo and shows where it looked. The photo goes to this server only, is
kept in memory until it is answered, and is then forgotten.</p>
<div class="drop">
<span><input id="file" type="file" accept="image/*" multiple>
<label class="pick" for="file">Choose photos</label></span>
<span class="hint">or drop them here, or paste</span>
</div>
<form class="wishes" autocomplete="off">
<label>beam size
<input name="beam_size" {number} placeholder="{options.beam_size}"></label>
<label>captions
<input name="num_captions" {number} placeholder="{options.num_captions}"></label>
<label class="own">own words instead
<input name="words" type="text" maxlength="400" placeholder="a dog runs through the grass"></label>
<button type="submit">Caption</button>
</form>
<div class="strip" role="group" aria-label="Photos" hidden></div>
<div class="complaints" role="alert"></div>
<p class="status" role="status"></p>
<div class="stand"></div>
<footer>Brighter: more attention while the word was chosen. β, the gate: how much of what was seen
went into the word. The model guesses; where it looked is no proof of why it chose a word.</footer>
</main>
{data}
</body>"""
