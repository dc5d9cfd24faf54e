"""Figures, animations, pages and archives of captions and their attention."""

from captioner.visualization.animation import Animation, animate
from captioner.visualization.archive import MapArchive
from captioner.visualization.figure import Figure, overlay
from captioner.visualization.heatmap import (
    COLORMAPS,
    attention_image,
    attention_map,
    fit_photo,
    scale_bar,
    shared_scale,
)
from captioner.visualization.notebook import PhotoCaption
from captioner.visualization.pages import Entry, Page, gallery, page

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
