"""What the server makes of the captions of a photo.

    POST /v1/captions            JSON
    POST /v1/overlay.png, .svg   a figure, drawn by `captioner.overlay`
    POST /v1/overlay.html        an interactive page, made by `captioner.page`
    POST /v1/maps.npy            the attention maps of a caption as a NumPy array

All take the same requests, with the options of a picture beside those of the search; ``words``
explains or draws a caption of the client's own.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from pydantic import Field

from captioner.caption import Caption
from captioner.drawing import document
from captioner.drawing.figure import overlay
from captioner.drawing.options import FigureOptions, PageOptions
from captioner.drawing.pages import page
from captioner.errors import ConfigError
from captioner.option_fields import option_fields
from captioner.serving.options import MAX_TEXT, MAX_WORDS
from captioner.serving.responses import captions_json
from captioner.serving.service import Decoded, Renderer

MAX_PANEL = 1280
"""Maximum size of a panel in pixels."""

MAX_FIGURE = 24_000_000
"""Maximum number of pixels of a figure's panels; each takes about 30 bytes while it is drawn."""

_LIMITS: dict[str, dict[str, Any]] = {
    "panel_size": {"ge": 32, "le": MAX_PANEL},
    "columns": {"ge": 1, "le": 50},
    "title": {"max_length": MAX_TEXT},
    "only": {"max_length": MAX_WORDS},
}


def _options(drawing: type) -> dict[str, Any]:
    """Pydantic fields of a picture's options; ``alternatives`` is one of every request."""
    fields = {}
    for name, option in option_fields(drawing).items():
        if name != "alternatives":
            text = option.help.replace(" (0: never scale)", "")  # a request may not
            kind = option.type | None if option.optional or name == "only" else option.type
            default = None if name == "only" else option.default
            fields[name] = (kind, Field(default, description=text, **_LIMITS.get(name, {})))
    return fields


class Output(NamedTuple):
    """An endpoint that takes a photo: its options, and what it makes of the captions."""

    path: str
    summary: str
    media_type: str
    renderer: Renderer
    options: Mapping[str, Any] | None = None
    """pydantic fields of the options beside those of the search, if it draws; None: it does not."""
    policy: Callable[[bytes], str] | None = None
    """Content-Security-Policy for opening it in a browser; None: the server's default."""


_FIGURE, _PAGE = _options(FigureOptions), _options(PageOptions)


def _figure(suffix: str) -> Renderer:
    """A renderer of figures in the format of a file name extension."""

    def render(photo: Decoded, captions: Sequence[Caption], options: Any) -> bytes:
        """Draw the figure; ConfigError if it has too many pixels."""
        assert photo.picture is not None
        look = options.model_dump(include=set(_FIGURE))
        look["only"] = [word.strip() for given in look["only"] or () for word in given.split(",")]
        width, height = photo.picture.size
        panels = sum(2 + len(look["only"] or caption.words) for caption in captions)
        if panels * width * height > MAX_FIGURE:
            raise ConfigError(
                f"the figure would have {panels} panels of {width} x {height} pixels (limit: "
                f"{MAX_FIGURE:,} pixels); give a smaller panel_size, fewer captions, or only=WORD"
            )
        alternatives = options.alternatives
        return overlay(photo.picture, captions, alternatives=alternatives, **look).encode(suffix)

    return Renderer(render, draws=True)


def _page(photo: Decoded, captions: Sequence[Caption], options: Any) -> bytes:
    assert photo.picture is not None
    return page(photo.picture, captions, **options.model_dump(include=set(_PAGE))).html.encode()


def _maps(_: Decoded, captions: Sequence[Caption], __: Any) -> bytes:
    if len(captions) > 1:
        raise ConfigError(
            f"an array holds the maps of one caption, not of {len(captions)}; give num_captions=1, "
            "or POST /v1/captions with attention=true to get all of them as JSON"
        )
    file = io.BytesIO()
    np.save(file, captions[0].alphas)
    return file.getvalue()


# Sandboxed: an opened document cannot send requests in the name of this server's page.
def _svg_policy(_: bytes) -> str:
    allowed = "style-src 'unsafe-inline'; img-src data:; font-src data:"
    return f"default-src 'none'; {allowed}; frame-ancestors 'none'; sandbox"


def _page_policy(html: bytes) -> str:
    return document.policy(html.decode()) + "; frame-ancestors 'none'; sandbox allow-scripts"


def _json(photo: Decoded, captions: Sequence[Caption], options: Any) -> bytes:
    least = options.min_confidence
    return captions_json(photo.size, captions, options.attention, min_confidence=least)


CAPTIONS = Output("/v1/captions", "Caption a photo", "application/json", Renderer(_json))

OVERLAYS = (
    Output(
        "/v1/overlay.png",
        "Draw where the model looked, as PNG",
        "image/png",
        _figure(".png"),
        _FIGURE,
    ),
    Output(
        "/v1/overlay.svg",
        "Draw where the model looked, as SVG",
        "image/svg+xml",
        _figure(".svg"),
        _FIGURE,
        _svg_policy,
    ),
    Output(
        "/v1/overlay.html",
        "Make an interactive page of where the model looked",
        "text/html",
        Renderer(_page, draws=True),
        _PAGE,
        _page_policy,
    ),
    Output(
        "/v1/maps.npy",
        "Return the attention maps of a caption, a NumPy array (T, Gh, Gw)",
        "application/octet-stream",
        Renderer(_maps),
        {},
    ),
)
