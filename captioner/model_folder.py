"""Model folders: ``config.json`` and ``model.safetensors``.

The folder contains everything needed for captioning: architecture, preprocessing, vocabulary, and
the model's training data and scores. An optional ``document_frequencies.json.gz`` holds the n-gram
document frequencies of the training captions, so that CIDEr-D can be computed for a few captions.
A scorer or encoder that is not built in is recorded with its package, as ``requires``.
``tokenizer.json``, data of the `tokenizers` library, is the sub-word tokenizer of models that have
one. Nothing is pickled, and folders are written atomically. Weights are stored as float16 to halve
the size; training keeps its own float32 state.
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
from captioner.errors import CaptionerError, ConfigError, ModelError
from captioner.files import FREQUENCIES, atomic_folder, complete_folder
from captioner.models.attention import SCORERS
from captioner.models.captioner import CaptionModel
from captioner.models.encoder import ENCODERS, Encoder
from captioner.registry import Registry, what_is_missing
from captioner.subwords import Subwords
from captioner.vocabulary import Vocabulary

FORMAT_VERSION = 2
"""2: the model may have a sub-word tokenizer; other models are written as format 1."""
CONFIG = "config.json"
WEIGHTS = "model.safetensors"
TOKENIZER = "tokenizer.json"
CARD = "README.md"
BEST = "best"
RUN_CONFIG = "config.yaml"
"""In a run folder: the folder of its best model, and its settings."""

SHIPPED = "shipped"
SHIPPED_MODEL = Path(__file__).parent / "pretrained"
"""Name and folder of the model that is included in the package."""


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
    model, subwords = stored.model, stored.vocabulary.subwords
    config: dict[str, Any] = {
        "format_version": 1 if subwords is None else FORMAT_VERSION,
        "encoder": {"name": model.encoder.name, "grid": model.grid},
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
    config = _read_config(path)
    subwords = _subwords(path, config)
    try:
        _check_required(path, config)
        preprocessing = Preprocessing.from_dict(config["preprocessing"])
        vocabulary = Vocabulary(config["vocabulary"], config.get("styles", ()), subwords)
        decoder = DecoderConfig(**config["decoder"])
        encoder = Encoder(config["encoder"]["name"])
        model = CaptionModel(
            encoder, decoder, preprocessing, len(vocabulary), len(vocabulary.styles)
        )
        search = SearchOptions(**config["search"])
    except ModelError:
        raise
    except (KeyError, TypeError, AttributeError, CaptionerError) as error:
        reason = f"lacks {error}" if isinstance(error, KeyError) else str(error)
        raise ModelError(f"{path / CONFIG} is not a captioner model config: {reason}") from error
    _load_weights(model, path / WEIGHTS)
    counted = path / FREQUENCIES
    frequencies = counted.read_bytes() if counted.is_file() else None
    info = config.get("info", {})
    return StoredModel(model.eval(), decoder, vocabulary, search, info, frequencies)


def find_model(folder: str | Path) -> Path:
    """The model folder itself, or the folder of the best model if ``folder`` is a run folder.

    ``shipped`` is the model that is included in the package, unless there is such a folder.

    Raises:
        ModelError: The run has no best model yet.
    """
    path = complete_folder(folder)
    if str(folder) == SHIPPED and not path.exists():
        return SHIPPED_MODEL
    if (path / CONFIG).exists():
        return path
    best = complete_folder(path / BEST)
    if best.is_dir():
        return best
    if (path / RUN_CONFIG).is_file():
        raise ModelError(
            f"the run folder {path} has no model yet; the first validation of captioner train "
            f"saves one in {path / BEST}"
        )
    return path


def read_search(folder: str | Path) -> SearchOptions | None:
    """The search options of a model, without loading it; None if it cannot be read."""
    try:
        return SearchOptions(**_read_config(find_model(folder))["search"])
    except (KeyError, TypeError, CaptionerError):
        return None


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


def _subwords(path: Path, config: dict[str, Any]) -> Subwords | None:
    """The sub-word tokenizer of a model that has one."""
    tokenizer = config.get("tokenizer", "words")
    if tokenizer == "words":
        return None
    if tokenizer != "bpe":
        raise ModelError(
            f"{path / CONFIG} has the unknown tokenizer {tokenizer!r}; pip install --upgrade "
            "captioner"
        )
    try:
        subwords = Subwords((path / TOKENIZER).read_text(encoding="utf-8"))
        matches = subwords.pieces == tuple(config.get("vocabulary", ()))
    except (OSError, ValueError, TypeError, ModelError) as error:
        raise ModelError(
            f"cannot read {path / TOKENIZER} ({error}); copy the whole folder again"
        ) from error
    if not matches:
        raise ModelError(
            f"{path / TOKENIZER} does not match {CONFIG}; copy both files from the same model"
        )
    return subwords


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
