"""Reads a model folder's ``config.json`` without torch, so that wrong options fail at once.

An exported folder has the same config with one more entry, ``exported``, and graphs in place of the
weights.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from captioner.errors import CaptionerError, ConfigError, ModelError
from captioner.extras import is_installed
from captioner.files import FREQUENCIES, complete_folder
from captioner.inference import hub
from captioner.options import SearchOptions
from captioner.text.subwords import Subwords
from captioner.text.vocabulary import Vocabulary

FORMAT_VERSION = 2
"""2: the model may have a sub-word tokenizer; other models are written as format 1."""
CONFIG = "config.json"
WEIGHTS = "model.safetensors"
TOKENIZER = "tokenizer.json"
CONFIDENCE = "confidence.safetensors"
CARD = "README.md"
MODEL_FILES = (CONFIG, WEIGHTS, TOKENIZER, FREQUENCIES, CONFIDENCE, CARD)
"""Everything that a model folder holds: weights as safetensors, JSON, and the model card. Nothing
else is read from it, downloaded or pushed; exported folders have graphs for weights."""
EXPORTED = "exported"
"""Entry of the config of an exported folder: opset, precision, special tokens and source."""
SOURCE = "source"
"""Part of that entry: the fingerprint of the model folder that was exported."""
ENCODER_GRAPH, DECODER_GRAPH = "encoder.onnx", "decoder.onnx"
BEST = "best"
RUN_CONFIG = "config.yaml"
"""In a run folder: the folder of its best model, and its settings."""

SHIPPED, SHIPPED_INT8 = "shipped", "shipped-int8"
"""Names of the model that is included, in full precision and exported in 8 bits."""
PRETRAINED, PRETRAINED_INT8 = (
    Path(__file__).parents[1] / name for name in ("pretrained", "pretrained_int8")
)
"""Their folders."""
SHIPPED_MODEL = PRETRAINED if is_installed("torch") else PRETRAINED_INT8
"""The default model."""


def find_model(folder: str | Path, revision: str | None = None, **hub_options: Any) -> Path:
    """The model folder itself, or the folder of the best model if ``folder`` is a run folder.

    ``shipped`` is the model that is included in the package, ``shipped-int8`` the same model in 8
    bits, unless there are such folders.
    ``hf:user/name@revision`` is a model of the Hugging Face hub; it is downloaded.

    Args:
        folder: Folder or name.
        revision: Revision of a model of the hub, if it is not part of its name.
        **hub_options: See ``hub.fetch``.

    Raises:
        ConfigError: A name of the hub is invalid, or a revision is given for a folder.
        ModelError: The run has no best model yet, or the model cannot be downloaded.
    """
    if hub.is_hub_name(folder):
        return _download(hub.parse(folder, revision), hub_options)
    if revision is not None:
        raise ConfigError(
            f"{folder} has no revisions, but revision is {revision!r}; only models of the hub "
            "(hf:user/name) have them"
        )
    path = complete_folder(folder)
    if not path.exists() and str(folder) in (SHIPPED, SHIPPED_INT8):
        return SHIPPED_MODEL if str(folder) == SHIPPED else PRETRAINED_INT8
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


def _download(model: hub.HubModel, options: dict[str, Any]) -> Path:
    """The folder of a model of the hub; another kind of model is refused before its weights."""
    first = hub.fetch(model, [CONFIG], **options)
    weights = weight_files(require_captioner_model(model, first))
    files = [*(name for name in MODEL_FILES if name != WEIGHTS), *weights]
    # That commit, even if the branch moves on meanwhile.
    path = hub.fetch(model, files, commit=first.name, **options)
    for name in weights:
        if not (path / name).is_file():
            raise ModelError(f"{model} is not a captioner model: it has no {name}")
    return path


def require_captioner_model(model: hub.HubModel, folder: Path) -> dict[str, Any]:
    """The config among the files of a repository of the hub; ModelError if it is another's."""
    path = folder / CONFIG
    problem = "no format_version"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
        if isinstance(config, dict) and isinstance(config.get("format_version"), int):
            return config
    except FileNotFoundError:
        raise ModelError(f"{model} is not a captioner model: it has no {CONFIG}") from None
    except (ValueError, OSError) as error:
        problem = str(error)
    raise ModelError(f"{model} is not a captioner model: its {CONFIG} has {problem}")


def read_config(folder: str | Path) -> dict[str, Any]:
    """Read the config of a model folder, or of the best model of a run folder.

    Raises:
        ModelError: A file is missing, damaged or not from captioner, or the folder was written by
            a newer version.
    """
    path = find_model(folder)
    if not path.is_dir():
        kind = "is a file" if path.exists() else "does not exist"
        raise ModelError(
            f"the model folder {path} {kind}; give a folder with {CONFIG} and {WEIGHTS}, or "
            "hf:user/name for a model of the Hugging Face hub"
        )
    _require(path, CONFIG)
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
    _require(path, *weight_files(config))
    return dict(config)


def _require(path: Path, *names: str) -> None:
    for name in names:
        if not (path / name).is_file():
            raise ModelError(f"the model folder {path} has no {name}; copy the whole folder again")


def weight_files(config: dict[str, Any]) -> tuple[str, ...]:
    """The names of the files beside the config that hold a model's weights."""
    return (ENCODER_GRAPH, DECODER_GRAPH) if EXPORTED in config else (WEIGHTS,)


def is_exported(folder: str | Path) -> bool:
    """Whether this is an exported folder, which runs without torch.

    Raises:
        ModelError: See `read_config`.
    """
    return EXPORTED in read_config(folder)


def read_search(folder: str | Path) -> tuple[SearchOptions, Vocabulary]:
    """Read a model's default search options and its vocabulary.

    Raises:
        ModelError: See `read_config`.
    """
    path = find_model(folder)
    config = read_config(path)
    with config_errors(path):
        return SearchOptions(**config["search"]), read_vocabulary(path, config)


def read_vocabulary(folder: str | Path, config: dict[str, Any]) -> Vocabulary:
    """The vocabulary of a model folder.

    Raises:
        ModelError: Its sub-word tokenizer cannot be read, or does not match the config.
    """
    subwords = _subwords(find_model(folder), config)
    return Vocabulary(config["vocabulary"], config.get("styles", ()), subwords)


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


@contextmanager
def config_errors(folder: Path) -> Iterator[None]:
    """Raise ModelError if the config lacks an entry that the block reads, or has a wrong one."""
    try:
        yield
    except ModelError:
        raise
    except (KeyError, TypeError, AttributeError, CaptionerError) as error:
        reason = f"lacks {error}" if isinstance(error, KeyError) else str(error)
        raise ModelError(f"{folder / CONFIG} is not a captioner model config: {reason}") from error


def fingerprint(folder: str | Path) -> str:
    """A short hash of a model folder's config, tokenizer, weights and confidence.

    Raises:
        ModelError: See `read_config`.
    """
    path = find_model(folder)
    config = read_config(path)  # checks that the files are there
    digest = hashlib.sha256()
    for name in (CONFIG, TOKENIZER, *weight_files(config), CONFIDENCE):
        if not (path / name).exists():  # without sub-words, without confidence
            continue
        with (path / name).open("rb") as file:
            while block := file.read(1 << 20):
                digest.update(block)
    return digest.hexdigest()[:12]
