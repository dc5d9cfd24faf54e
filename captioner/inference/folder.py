"""Model folders: ``config.json`` and ``model.safetensors``.

The folder contains everything needed for captioning: architecture, preprocessing, vocabulary, and
the model's training data and scores. An optional ``document_frequencies.json.gz`` holds the n-gram
document frequencies of the training captions, so that CIDEr-D can be computed for a few captions.
An optional ``confidence.safetensors`` estimates the confidence of captions, see
``captioner.inference.confidence``.
A scorer or encoder that is not built in is recorded with its package, as ``requires``.
``tokenizer.json``, data of the `tokenizers` library, is the sub-word tokenizer of models that have
one. Nothing is pickled, and folders are written atomically. Weights are stored as float16 to halve
the size; training keeps its own float32 state.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor
from torch.overrides import TorchFunctionMode

from captioner.errors import ConfigError, ModelError
from captioner.files import FREQUENCIES, atomic_folder
from captioner.geometry import Geometry
from captioner.inference.confidence import Calibrator, read_calibrator
from captioner.inference.model_config import (
    CONFIDENCE,
    CONFIG,
    EXPORTED,
    FORMAT_VERSION,
    TOKENIZER,
    WEIGHTS,
    config_errors,
    find_model,
    read_config,
    read_vocabulary,
)
from captioner.model.attention import SCORERS
from captioner.model.captioner import CaptionModel
from captioner.model.efficientnet_lite import lite_size
from captioner.model.encoder import ENCODERS, Encoder
from captioner.model.preprocessing import Preprocessing
from captioner.model.registry import Registry, what_is_missing
from captioner.options import DecoderConfig, SearchOptions
from captioner.text.vocabulary import Vocabulary


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
    calibrator: Calibrator | None = None
    """Estimates the confidence of captions; None: the model was not calibrated."""


def save_model(folder: str | Path, stored: StoredModel) -> None:
    """Write a model folder; an existing one is replaced once the new one is complete.

    Raises:
        ModelError: The folder cannot be written (disk full, no permission).
    """
    model, subwords = stored.model, stored.vocabulary.subwords
    config: dict[str, Any] = {
        "format_version": 1 if subwords is None else FORMAT_VERSION,
        "encoder": {
            "name": model.encoder.name,
            "grid": model.grid,
            "geometry": model.geometry.as_dict(),
        },
        "decoder": dataclasses.asdict(stored.decoder),
        "preprocessing": dataclasses.asdict(model.preprocessing),
        "search": dataclasses.asdict(stored.search),
        "info": stored.info,
        **_required(stored),
        "styles": stored.vocabulary.styles,
        "vocabulary": stored.vocabulary.words,
    }
    if subwords is not None:
        config["tokenizer"] = stored.vocabulary.tokenizer
    tensors = {
        name: to_float16(tensor).cpu().contiguous() for name, tensor in model.state_dict().items()
    }
    try:
        with atomic_folder(folder) as new:
            (new / WEIGHTS).write_bytes(save(tensors))
            (new / CONFIG).write_text(
                json.dumps(config, indent=1, ensure_ascii=False) + "\n", encoding="utf-8"
            )
            if subwords is not None:
                (new / TOKENIZER).write_text(subwords.data, encoding="utf-8")
            if stored.frequencies is not None:
                (new / FREQUENCIES).write_bytes(stored.frequencies)
            if stored.calibrator is not None:
                (new / CONFIDENCE).write_bytes(stored.calibrator.to_bytes())
    except OSError as error:
        raise ModelError(
            f"cannot save {folder} ({error.strerror}); its previous contents are unchanged"
        ) from error


def _required(stored: StoredModel) -> dict[str, Any]:
    """Which packages a model needs, if its scorer or encoder is not built in."""
    records = (
        ENCODERS.provider(stored.model.encoder.name),
        SCORERS.provider(stored.decoder.attention),
    )
    required = [record for record in records if record is not None]
    return {"requires": required} if required else {}


def _check_required(path: Path, config: dict[str, Any]) -> None:
    """Raise ModelError if a scorer or encoder of another package is not available."""
    for record in config.get("requires", ()):
        registries: dict[str, Registry[Any]] = {"encoder": ENCODERS, "scorer": SCORERS}
        known = registries[record["kind"]]
        try:
            known[record["name"]]
        except KeyError:
            raise ModelError(f"{path} needs {what_is_missing(record)}") from None
        except ConfigError as error:
            raise ModelError(f"cannot load {path}: {error}") from error


def to_float16(tensor: torch.Tensor) -> torch.Tensor:
    """Convert to float16, unless a value would overflow."""
    half = tensor.half() if tensor.is_floating_point() else tensor
    return half if bool(half.isfinite().all()) else tensor


def load_model(folder: str | Path) -> StoredModel:
    """Read a model folder, or the best model of a run folder.

    Returns:
        The model in float32 and eval mode, on the CPU.

    Raises:
        ModelError: A file is missing, damaged or not from captioner, or the folder was written by
            a newer version.
    """
    path = find_model(folder)
    config = read_config(path)
    if EXPORTED in config:
        raise ModelError(
            f"{path} is an exported model, which can caption but has no weights for torch; give "
            "the model folder it was exported from"
        )
    with config_errors(path):
        _check_required(path, config)
        preprocessing = Preprocessing.from_dict(config["preprocessing"])
        vocabulary = read_vocabulary(path, config)
        decoder = DecoderConfig(**config["decoder"])
        encoder = config["encoder"]["name"]
        model = _without_weights(
            encoder,
            lambda: CaptionModel(
                Encoder(encoder, image_size=preprocessing.image_size),
                decoder,
                preprocessing,
                len(vocabulary),
                len(vocabulary.styles),
            ),
        )
        if "geometry" in config["encoder"]:  # folders of version 0.1 lack it: it is computed
            model.geometry = Geometry.from_dict(config["encoder"]["geometry"])
        search = SearchOptions(**config["search"])
    _load_weights(model, path / WEIGHTS)
    counted = path / FREQUENCIES
    frequencies = counted.read_bytes() if counted.is_file() else None
    info = config.get("info", {})
    calibrator = read_calibrator(path)
    return StoredModel(model.eval(), decoder, vocabulary, search, info, frequencies, calibrator)


def _without_weights(encoder: str, build: Callable[[], CaptionModel]) -> CaptionModel:
    """Build a model for `_load_weights`.

    Random weights take longer than captioning a photo; on the meta device they cost nothing. Models
    with tensors that are not in the file, such as a table that a scorer computes, are built as
    usual, and so are those with another library's encoder.
    """
    if lite_size(encoder) is None:
        return build()
    try:
        with torch.device("meta"), _NoInitialization():
            model = build()
    except (NotImplementedError, RuntimeError):  # an operation that needs numbers
        return build()
    stored = model.state_dict().keys()
    others = [name for name, _ in model.named_buffers() if name not in stored]
    others += [
        name
        for module in model.modules()
        for name, value in vars(module).items()
        if isinstance(value, torch.Tensor)
    ]
    return build() if others else model


class _NoInitialization(TorchFunctionMode):
    """Skips ``torch.nn.init``, whose first call on the meta device imports sympy."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if getattr(func, "__module__", None) == "torch.nn.init":
            return args[0] if args else (kwargs or {})["tensor"]
        return func(*args, **kwargs or {})


def _load_weights(model: CaptionModel, path: Path) -> None:
    try:
        tensors = load_file(path)
    except (SafetensorError, OSError) as error:
        raise ModelError(
            f"{path} is damaged or not a safetensors file ({error}); copy the whole folder again"
        ) from error
    own = model.state_dict()
    if _differences(own, tensors):
        # Early folders hold position embeddings at the size of timm's weights.
        prefix = "encoder.backbone."
        held = {n.removeprefix(prefix): v for n, v in tensors.items() if n.startswith(prefix)}
        tensors.update({prefix + name: v for name, v in model.encoder.resampled(held).items()})
    if wrong := _differences(own, tensors):
        raise ModelError(
            f"{path} does not match its {CONFIG} ({len(wrong)} tensors, first: {wrong[0]}); "
            "copy both files from the same model"
        )
    tensors = {name: tensor.to(own[name].dtype, copy=True) for name, tensor in tensors.items()}
    model.load_state_dict(tensors, assign=True)


def _differences(own: Mapping[str, Tensor], given: Mapping[str, Tensor]) -> list[str]:
    """Names that only one has, or else those of tensors of different shapes."""
    return sorted(own.keys() ^ given.keys()) or [
        name for name in own if own[name].shape != given[name].shape
    ]
