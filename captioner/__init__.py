"""Image captioning with visual attention.

    import captioner
    caption = captioner.caption("photo.jpg")
    print(caption)
    caption.show()  # where the model looked for each word

Names are imported on first use, so that ``import captioner`` is fast.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from captioner.version import __version__ as __version__

if TYPE_CHECKING:
    from captioner.caption_types import Caption as Caption
    from captioner.caption_types import CropBox as CropBox
    from captioner.data.write_captions import apply_captions as apply_captions
    from captioner.data.write_captions import remove_caption as remove_caption
    from captioner.data.write_captions import write_caption as write_caption
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
    from captioner.inference.alt_texts import apply_alt as apply_alt
    from captioner.inference.alt_texts import suggest_alt as suggest_alt
    from captioner.inference.captioner import Captioner as Captioner
    from captioner.inference.captioner import caption as caption
    from captioner.inference.captioner import load as load
    from captioner.model.backbones import register_encoder as register_encoder
    from captioner.model.build import register_scorer as register_scorer
    from captioner.options import FaithfulnessOptions as FaithfulnessOptions
    from captioner.options import SearchOptions as SearchOptions
    from captioner.options import TrainConfig as TrainConfig
    from captioner.text.tokenizer import tokenize as tokenize
    from captioner.training.api import train as train

_NAMES: dict[str, tuple[str, ...]] = {
    "captioner.caption_types": ("Caption", "CropBox"),
    "captioner.data.write_captions": ("apply_captions", "remove_caption", "write_caption"),
    "captioner.drawing.animation": ("animate",),
    "captioner.drawing.archive": ("MapArchive",),
    "captioner.drawing.figure": ("overlay",),
    "captioner.drawing.heatmap": ("attention_map",),
    "captioner.drawing.pages": ("Entry", "gallery", "page"),
    "captioner.errors": (
        "CaptionerError", "CheckpointError", "ConfigError", "DataError", "ImageError", "ModelError",
    ),
    "captioner.evaluation.api": ("evaluate",),
    "captioner.inference.alt_texts": ("apply_alt", "suggest_alt"),
    "captioner.inference.captioner": ("Captioner", "caption", "load"),
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
    if name.startswith("_"):
        raise AttributeError(f"module 'captioner' has no attribute {name!r}")
    from captioner.hints import FUNCTIONS, hint_for

    hint = hint_for(name, __all__[1:], FUNCTIONS)
    raise AttributeError(f"module 'captioner' has no attribute {name!r}; {hint}")


def __dir__() -> list[str]:
    return sorted(__all__)
