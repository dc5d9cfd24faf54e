"""Image captioning with visual attention.

    import captioner
    model = captioner.load()
    caption = model.caption("photo.jpg")
    captioner.overlay("photo.jpg", caption).save("photo_attention.png")

Names are imported on first use, so that ``import captioner`` is fast.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from captioner.version import __version__

_MODULES = {
    "Caption": "captioner.caption",
    "Captioner": "captioner.inference.captioner",
    "CaptionerError": "captioner.errors",
    "CheckpointError": "captioner.errors",
    "ConfigError": "captioner.errors",
    "DataError": "captioner.errors",
    "Entry": "captioner.drawing.pages",
    "FaithfulnessOptions": "captioner.options",
    "ImageError": "captioner.errors",
    "MapArchive": "captioner.drawing.archive",
    "ModelError": "captioner.errors",
    "CropBox": "captioner.caption",
    "SearchOptions": "captioner.options",
    "TrainConfig": "captioner.options",
    "animate": "captioner.drawing.animation",
    "attention_map": "captioner.drawing.heatmap",
    "gallery": "captioner.drawing.pages",
    "evaluate": "captioner.evaluation.api",
    "load": "captioner.inference.captioner",
    "overlay": "captioner.drawing.figure",
    "page": "captioner.drawing.pages",
    "register_encoder": "captioner.model.backbones",
    "register_scorer": "captioner.model.build",
    "tokenize": "captioner.text.tokenizer",
    "train": "captioner.training.api",
}

__all__ = [
    "Caption",
    "Captioner",
    "CaptionerError",
    "CheckpointError",
    "ConfigError",
    "CropBox",
    "DataError",
    "Entry",
    "FaithfulnessOptions",
    "ImageError",
    "MapArchive",
    "ModelError",
    "SearchOptions",
    "TrainConfig",
    "__version__",
    "animate",
    "attention_map",
    "evaluate",
    "gallery",
    "load",
    "overlay",
    "page",
    "register_encoder",
    "register_scorer",
    "tokenize",
    "train",
]

if TYPE_CHECKING:
    from captioner.caption import Caption, CropBox
    from captioner.drawing.animation import animate
    from captioner.drawing.archive import MapArchive
    from captioner.drawing.figure import overlay
    from captioner.drawing.heatmap import attention_map
    from captioner.drawing.pages import Entry, gallery, page
    from captioner.errors import (
        CaptionerError,
        CheckpointError,
        ConfigError,
        DataError,
        ImageError,
        ModelError,
    )
    from captioner.evaluation.api import evaluate
    from captioner.inference.captioner import Captioner, load
    from captioner.model.backbones import register_encoder
    from captioner.model.build import register_scorer
    from captioner.options import FaithfulnessOptions, SearchOptions, TrainConfig
    from captioner.text.tokenizer import tokenize
    from captioner.training.api import train


def __getattr__(name: str) -> object:
    if name in _MODULES:
        module = importlib.import_module(_MODULES[name])
        return getattr(module, name)
    raise AttributeError(f"module 'captioner' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
