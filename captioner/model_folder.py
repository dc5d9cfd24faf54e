"""Model folders: ``config.json`` and ``model.safetensors``.

The folder contains everything needed for captioning: architecture, preprocessing, vocabulary, and
the model's training data and scores. An optional ``document_frequencies.json.gz`` holds the n-gram
document frequencies of the training captions, so that CIDEr-D can be computed for a few captions.
Nothing is pickled, and folders are written atomically. Weights are stored as float16 to halve the
size; training keeps its own float32 state.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save

from captioner.config import DecoderConfig, SearchOptions
from captioner.data.preprocessing import Preprocessing
from captioner.errors import CaptionerError, ModelError
from captioner.files import FREQUENCIES, atomic_folder, complete_folder
from captioner.geometry import Geometry
from captioner.models.captioner import CaptionModel
from captioner.models.encoder import Encoder
from captioner.vocabulary import Vocabulary

FORMAT_VERSION = 1
CONFIG = "config.json"
WEIGHTS = "model.safetensors"
CARD = "README.md"


@dataclass
class StoredModel:
    """The contents of a model folder."""

    model: CaptionModel
    decoder: DecoderConfig
    vocabulary: Vocabulary
    search: SearchOptions = field(default_factory=SearchOptions)
    """The model's default search options."""
    info: dict[str, Any] = field(default_factory=dict)
    """Training data and scores, for people to read."""
    frequencies: bytes | None = None
    """Contents of the document frequency file, see ``captioner.evaluation``; or None."""


def save_model(folder: str | Path, stored: StoredModel) -> None:
    """Write a model folder; an existing one is replaced once the new one is complete.

    Raises:
        ModelError: The folder cannot be written (disk full, no permission).
    """
    model = stored.model
    config = {
        "format_version": FORMAT_VERSION,
        "encoder": {
            "name": model.encoder.name,
            "grid": model.grid,
            "geometry": model.geometry.as_dict(),
        },
        "decoder": dataclasses.asdict(stored.decoder),
        "preprocessing": dataclasses.asdict(model.preprocessing),
        "search": dataclasses.asdict(stored.search),
        "info": stored.info,
        "styles": stored.vocabulary.styles,
        "vocabulary": stored.vocabulary.words,
    }
    tensors = {
        name: to_float16(tensor).cpu().contiguous() for name, tensor in model.state_dict().items()
    }
    try:
        with atomic_folder(folder) as new:
            (new / WEIGHTS).write_bytes(save(tensors))
            (new / CONFIG).write_text(
                json.dumps(config, indent=1, ensure_ascii=False) + "\n", encoding="utf-8"
            )
            if stored.frequencies is not None:
                (new / FREQUENCIES).write_bytes(stored.frequencies)
    except OSError as error:
        raise ModelError(
            f"cannot save {folder} ({error.strerror}); its previous contents are unchanged"
        ) from error


def to_float16(tensor: torch.Tensor) -> torch.Tensor:
    """Convert to float16, unless a value would overflow."""
    half = tensor.half() if tensor.is_floating_point() else tensor
    return half if bool(half.isfinite().all()) else tensor


def load_model(folder: str | Path) -> StoredModel:
    """Read a model folder.

    Returns:
        The model in float32 and eval mode, on the CPU.

    Raises:
        ModelError: A file is missing, damaged or not from captioner, or the folder was written by
            a newer version.
    """
    path = complete_folder(folder)
    config = _read_config(path)
    try:
        preprocessing = Preprocessing.from_dict(config["preprocessing"])
        vocabulary = Vocabulary(config["vocabulary"], config.get("styles", ()))
        decoder = DecoderConfig(**config["decoder"])
        encoder = Encoder(config["encoder"]["name"])
        model = CaptionModel(
            encoder, decoder, preprocessing, len(vocabulary), len(vocabulary.styles)
        )
        if "geometry" in config["encoder"]:  # folders of version 0.1 lack it: it is computed
            model.geometry = Geometry.from_dict(config["encoder"]["geometry"])
        search = SearchOptions(**config["search"])
    except (KeyError, TypeError, AttributeError, CaptionerError) as error:
        reason = f"lacks {error}" if isinstance(error, KeyError) else str(error)
        raise ModelError(f"{path / CONFIG} is not a captioner model config: {reason}") from error
    _load_weights(model, path / WEIGHTS)
    counted = path / FREQUENCIES
    frequencies = counted.read_bytes() if counted.is_file() else None
    info = config.get("info", {})
    return StoredModel(model.eval(), decoder, vocabulary, search, info, frequencies)


def _read_config(path: Path) -> dict[str, Any]:
    if not path.is_dir():
        kind = "is a file" if path.exists() else "does not exist"
        raise ModelError(
            f"the model folder {path} {kind}; give a folder with {CONFIG} and {WEIGHTS}"
        )
    for name in (CONFIG, WEIGHTS):
        if not (path / name).is_file():
            raise ModelError(f"the model folder {path} has no {name}; copy the whole folder again")
    try:
        config = json.loads((path / CONFIG).read_text(encoding="utf-8"))
    except (ValueError, OSError) as error:
        raise ModelError(
            f"cannot read {path / CONFIG} ({error}); copy the whole folder again"
        ) from error
    version = config.get("format_version") if isinstance(config, dict) else None
    if not isinstance(version, int):
        raise ModelError(f"{path / CONFIG} is not a captioner model config: no format_version")
    if version > FORMAT_VERSION:
        raise ModelError(
            f"{path} was written by a newer captioner (format {version}, supported up to "
            f"{FORMAT_VERSION}); pip install --upgrade captioner"
        )
    return dict(config)


def _load_weights(model: CaptionModel, path: Path) -> None:
    try:
        tensors = load_file(path)
    except (SafetensorError, OSError) as error:
        raise ModelError(
            f"{path} is damaged or not a safetensors file ({error}); copy the whole folder again"
        ) from error
    own = model.state_dict()
    wrong = sorted(own.keys() ^ tensors.keys()) or [
        name for name in own if own[name].shape != tensors[name].shape
    ]
    if wrong:
        raise ModelError(
            f"{path} does not match its {CONFIG} ({len(wrong)} tensors, first: {wrong[0]}); "
            "copy both files from the same model"
        )
    with torch.no_grad():
        model.load_state_dict(tensors)
