"""What the server makes of the captions of a photo: an endpoint for each `Output`.

All take the same requests, with the options of a picture beside those of the search; ``words``
explains or draws a caption of the client's own.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np

from captioner.caption import Caption
from captioner.drawing import pages
from captioner.drawing.figure import overlay
from captioner.drawing.options import FigureOptions, PageOptions
from captioner.drawing.pages import page
from captioner.errors import ConfigError
from captioner.option_fields import option_fields
from captioner.serving.schema import ResponseOptions, WordOptions, json_line
from captioner.serving.service import Decoded, Output

MAX_FIGURE = 24_000_000  # pixels of a figure's panels, each of 30 bytes while it is drawn


def _look(options: Any, schema: type) -> dict[str, Any]:
    """The options of a picture."""
    names = option_fields(schema).keys()
    return {name: value for name, value in options if name in names and value is not None}


def _figure(suffix: str, photo: Decoded, captions: Sequence[Caption], options: Any) -> bytes:
    """A figure in the format of a file name extension."""
    assert photo.picture is not None
    width, height = photo.picture.size
    words = [len(options.only or (*one.words, *(one.keywords or ()))) for one in captions]
    panels = sum(words) + 2 * len(captions)
    if panels * width * height > MAX_FIGURE:
        raise ConfigError(
            f"the figure would have {panels} panels of {width} x {height} pixels (limit: "
            f"{MAX_FIGURE:,} pixels); give a smaller panel_size, fewer captions, or only=WORD"
        )
    return overlay(photo.picture, captions, **_look(options, FigureOptions)).encode(suffix)


def _page(photo: Decoded, captions: Sequence[Caption], options: Any) -> bytes:
    assert photo.picture is not None
    return page(photo.picture, captions, **_look(options, PageOptions)).html.encode()


def _maps(_: Decoded, captions: Sequence[Caption], __: Any) -> bytes:
    if captions[0].keywords is not None:
        raise ConfigError("keywords is given, but an array holds the maps of a caption; omit it")
    if len(captions) > 1:
        raise ConfigError(
            f"an array holds the maps of one caption, not of {len(captions)}; give num_captions=1, "
            "or POST /v1/captions with attention=true to get all of them as JSON"
        )
    file = io.BytesIO()
    np.save(file, captions[0].alphas)
    return file.getvalue()


def captions_json(photo: Decoded, captions: Sequence[Caption], options: Any, **head: Any) -> bytes:
    """The captions in JSON, after the fields of ``head``."""
    how = {"attention": options.attention, "min_confidence": options.min_confidence}
    found = [one.as_dict(**how) for one in captions]
    return json_line({**head, "width": photo.size[0], "height": photo.size[1], "captions": found})


# Sandboxed: an opened document cannot send requests in the name of this server's page.
def _svg_policy(_: bytes) -> str:
    allowed = "style-src 'unsafe-inline'; img-src data:; font-src data:"
    return f"default-src 'none'; {allowed}; frame-ancestors 'none'; sandbox"


def _page_policy(html: bytes) -> str:
    return pages.policy(html.decode()) + "; frame-ancestors 'none'; sandbox allow-scripts"


_LOOKED = "Draw where the model looked, as"
_FIGURE, _PAGE = (FigureOptions, WordOptions), (PageOptions, WordOptions)
_PNG, _SVG = partial(_figure, ".png"), partial(_figure, ".svg")
_JSON, _HTML = "application/json", "Make an interactive page of where the model looked"
_ARRAY = "Return the attention maps of a caption, a NumPy array (T, Gh, Gw)"

CAPTIONS = Output("/v1/captions", "Caption a photo", _JSON, (ResponseOptions,), captions_json)
OUTPUTS = (
    CAPTIONS,
    Output("/v1/overlay.png", f"{_LOOKED} PNG", "image/png", _FIGURE, _PNG),
    Output("/v1/overlay.svg", f"{_LOOKED} SVG", "image/svg+xml", _FIGURE, _SVG, _svg_policy),
    Output("/v1/overlay.html", _HTML, "text/html", _PAGE, _page, _page_policy),
    Output("/v1/maps.npy", _ARRAY, "application/octet-stream", (WordOptions,), _maps),
)
