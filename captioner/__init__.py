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

__version__ = "0.2.0"

_MODULES = {
    "Caption": "captioner.caption",
    "Captioner": "captioner.api",
    "CaptionerError": "captioner.errors",
    "CheckpointError": "captioner.errors",
    "ConfigError": "captioner.errors",
    "DataError": "captioner.errors",
    "Entry": "captioner.visualization",
    "FaithfulnessOptions": "captioner.config",
    "ImageError": "captioner.errors",
    "MapArchive": "captioner.visualization",
    "ModelError": "captioner.errors",
    "CropBox": "captioner.caption",
    "SearchOptions": "captioner.config",
    "TrainConfig": "captioner.config",
    "animate": "captioner.visualization",
    "attention_map": "captioner.visualization",
    "gallery": "captioner.visualization",
    "evaluate": "captioner.evaluation.api",
    "load": "captioner.api",
    "overlay": "captioner.visualization",
    "page": "captioner.visualization",
    "register_encoder": "captioner.models.encoder",
    "register_scorer": "captioner.models.attention",
    "tokenize": "captioner.tokenizer",
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
    from captioner.api import Captioner, load
    from captioner.caption import Caption, CropBox
    from captioner.config import FaithfulnessOptions, SearchOptions, TrainConfig
    from captioner.errors import (
        CaptionerError,
        CheckpointError,
        ConfigError,
        DataError,
        ImageError,
        ModelError,
    )
    from captioner.evaluation.api import evaluate
    from captioner.models.attention import register_scorer
    from captioner.models.encoder import register_encoder
    from captioner.tokenizer import tokenize
    from captioner.training.api import train
    from captioner.visualization import (
        Entry,
        MapArchive,
        animate,
        attention_map,
        gallery,
        overlay,
        page,
    )


def __getattr__(name: str) -> object:
    if name in _MODULES:
        try:
            module = importlib.import_module(_MODULES[name])
        except ModuleNotFoundError as error:
            if error.name is None or not _MODULES[name].startswith(error.name):
                raise
            raise ImportError(
                f"captioner.{name} needs torch and the full package, and captioner-runtime is "
                "installed; run: pip install captioner",
                name=error.name,
            ) from None
        return getattr(module, name)
    raise AttributeError(f"module 'captioner' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
