"""Pictures of captions and attention: pure functions from arrays and words to images."""

from captioner.visualization.heatmap import (
    COLORMAPS,
    attention_image,
    attention_map,
    fit_photo,
    scale_bar,
    shared_scale,
)
from captioner.visualization.overlay import overlay

__all__ = [
    "COLORMAPS",
    "attention_image",
    "attention_map",
    "fit_photo",
    "overlay",
    "scale_bar",
    "shared_scale",
]
