"""Figures, animations, pages and archives of captions and their attention.

Names are imported on first use: captions need few of these modules.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

_MODULES = {
    "COLORMAPS": "heatmap",
    "Animation": "animation",
    "Entry": "pages",
    "Figure": "figure",
    "MapArchive": "archive",
    "Page": "pages",
    "PhotoCaption": "notebook",
    "animate": "animation",
    "attention_image": "heatmap",
    "attention_map": "heatmap",
    "fit_photo": "heatmap",
    "gallery": "pages",
    "overlay": "figure",
    "page": "pages",
    "scale_bar": "heatmap",
    "shared_scale": "heatmap",
}

__all__ = [
    "COLORMAPS",
    "Animation",
    "Entry",
    "Figure",
    "MapArchive",
    "Page",
    "PhotoCaption",
    "animate",
    "attention_image",
    "attention_map",
    "fit_photo",
    "gallery",
    "overlay",
    "page",
    "scale_bar",
    "shared_scale",
]

if TYPE_CHECKING:
    from captioner.drawing.animation import Animation, animate
    from captioner.drawing.archive import MapArchive
    from captioner.drawing.figure import Figure, overlay
    from captioner.drawing.heatmap import (
        COLORMAPS,
        attention_image,
        attention_map,
        fit_photo,
        scale_bar,
        shared_scale,
    )
    from captioner.drawing.notebook import PhotoCaption
    from captioner.drawing.pages import Entry, Page, gallery, page


def __getattr__(name: str) -> object:
    if name in _MODULES:
        return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
