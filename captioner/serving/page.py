"""The web page, on which users caption photos and explore the attention maps."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from captioner.drawing.options import PageOptions
from captioner.drawing.pages import (
    VIEWER,
    WEB,
    asset,
    document,
    embedded,
    gallery_template,
    viewer_look,
)
from captioner.errors import ConfigError
from captioner.inference.captioner import Captioner
from captioner.inference.reading import has_keywords
from captioner.inference.stored_model import StoredModel
from captioner.options import METHOD_TITLES
from captioner.serving.options import Limits

MAX_PHOTOS = 100
"""Maximum number of photos on the page. It is limited, because the browser keeps their captions and
maps in memory."""

_WEB = Path(__file__).parent / "web"
_INTRO = """<p class="quiet">Caption your photos, and see where the model looked for each word.
Photos are sent only to this server, kept in memory while they are processed, and never
stored.</p>"""


def index_page(limits: Limits, model: Captioner) -> str:
    """Return the page that the server shows, with inline styles and scripts.

    The page shrinks large photos before it uploads them. The sides of a smaller photo are at least
    twice as long as the sides of the model's input. The page does not upload photos beyond the
    server's limits.
    """
    methods = []
    for method in METHOD_TITLES:
        with suppress(ConfigError):
            model.check_method(method)
            methods.append(method)
    return caption_page(
        model.stored,
        methods,
        intro=_INTRO,
        files=[_WEB / name for name in ("key.js", "upload.js", "requests.js")],
        fields=["words", *(["keywords"] if has_keywords(model.stored.reading) else [])],
        data={
            "maxBeam": limits.max_beam,
            "limits": {"max_bytes": limits.max_bytes, "max_pixels": limits.max_pixels},
            "imageSize": model.ensemble.image_size,
        },
    )


def caption_page(
    model: StoredModel,
    methods: Iterable[str],
    *,
    intro: str,
    files: Sequence[Path],
    fields: Sequence[str],
    data: Mapping[str, Any],
    head: Sequence[str] = (),
) -> str:
    """Return the page that the server and the static site share.

    The scripts in ``files`` send photos to the model.

    Args:
        model: The model. Empty fields of the form show its search options.
        methods: Explanation methods that this model supports.
        intro: HTML below the title.
        files: Additional style sheets, and scripts that define ``Upload`` and ``Pool``. ``Pool`` is
            a ``JobPool`` with a method ``captions(body, query, signal)``.
        fields: Names of optional form fields to show: words, keywords.
        data: Data for the scripts, such as maxBeam, the maximum beam size and number of captions.
        head: Additional elements of the HTML head.
    """
    vocabulary = model.vocabulary
    settings = {
        **data,
        "fields": [
            *("beam_size", "num_captions", *fields),
            *(["style"] if len(vocabulary.styles) > 1 else []),
            *(["neutral"] if vocabulary.subwords is None else []),
        ],
        "search": vars(model.search),
        "styles": vocabulary.styles,
        "look": viewer_look(PageOptions()),
        "maxPhotos": MAX_PHOTOS,
        "methods": {name: METHOD_TITLES[name] for name in methods},
        "template": gallery_template(),
    }
    body = asset(_WEB / "page.html").rstrip().format(intro=intro, data=embedded(settings))
    base = ("page.css", "folders.js", "kinds.js", "pictures.js", "jobs.js")
    own = ("form.js", "cards.js", "figure.js", "downloads.js", "page.js")
    every = [
        *VIEWER,
        WEB / "cells.js",
        *(_WEB / name for name in base),
        *files,
        *(_WEB / name for name in own),
    ]
    return document("captioner", body, every, head=head)
