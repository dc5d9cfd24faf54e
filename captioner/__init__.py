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

from captioner.version import __version__ as __version__

if TYPE_CHECKING:
    from captioner.caption import Caption as Caption
    from captioner.caption import CropBox as CropBox
    from captioner.drawing.animation import animate as animate
    from captioner.drawing.archive import MapArchive as MapArchive
    from captioner.drawing.figure import overlay as overlay
    from captioner.drawing.heatmap import attention_map as attention_map
    from captioner.drawing.pages import Entry as Entry
    from captioner.drawing.pages import gallery as gallery
    from captioner.drawing.pages import page as page
    from captioner.errors import CaptionerError as CaptionerError
    from captioner.errors import CheckpointError as CheckpointError
    from captioner.errors import ConfigError as ConfigError
    from captioner.errors import DataError as DataError
    from captioner.errors import ImageError as ImageError
    from captioner.errors import ModelError as ModelError
    from captioner.evaluation.api import evaluate as evaluate
    from captioner.inference.captioner import Captioner as Captioner
    from captioner.inference.captioner import load as load
    from captioner.model.backbones import register_encoder as register_encoder
    from captioner.model.build import register_scorer as register_scorer
    from captioner.options import FaithfulnessOptions as FaithfulnessOptions
    from captioner.options import SearchOptions as SearchOptions
    from captioner.options import TrainConfig as TrainConfig
    from captioner.text.tokenizer import tokenize as tokenize
    from captioner.training.api import train as train

_NAMES: dict[str, tuple[str, ...]] = {
    "captioner.caption": ("Caption", "CropBox"),
    "captioner.drawing.animation": ("animate",),
    "captioner.drawing.archive": ("MapArchive",),
    "captioner.drawing.figure": ("overlay",),
    "captioner.drawing.heatmap": ("attention_map",),
    "captioner.drawing.pages": ("Entry", "gallery", "page"),
    "captioner.errors": (
        "CaptionerError", "CheckpointError", "ConfigError", "DataError", "ImageError", "ModelError",
    ),
    "captioner.evaluation.api": ("evaluate",),
    "captioner.inference.captioner": ("Captioner", "load"),
    "captioner.model.backbones": ("register_encoder",),
    "captioner.model.build": ("register_scorer",),
    "captioner.options": ("FaithfulnessOptions", "SearchOptions", "TrainConfig"),
    "captioner.text.tokenizer": ("tokenize",),
    "captioner.training.api": ("train",),
}  # fmt: skip
_MODULES = {name: module for module, names in _NAMES.items() for name in names}
__all__ = ["__version__", *_MODULES]  # noqa: PLE0604


def __getattr__(name: str) -> object:
    if name in _MODULES:
        return getattr(importlib.import_module(_MODULES[name]), name)
    raise AttributeError(f"module 'captioner' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
