"""The file ``config.json``: a model's architecture, preprocessing, vocabulary, search defaults."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from captioner.errors import CaptionerError, ConfigError, ModelError
from captioner.files import json_values
from captioner.inference.find_model import find_model
from captioner.inference.names import CONFIG, EXPORTED, GRAPHS, TOKENIZER, WEIGHTS
from captioner.options import DecoderConfig, SearchOptions
from captioner.schema import build_options, option_fields
from captioner.text.vocabulary import Subwords, Vocabulary

FORMAT_VERSION = 1
REMOVED_SEARCH = ("guidance",)
"""Search options that no longer exist. Model folders of earlier versions may contain them, so they
are ignored."""


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
            f"the model folder {path} {kind}; use a folder with {CONFIG} and {WEIGHTS}, or "
            "hf:user/name for a model on the Hugging Face hub"
        )
    _require(path, CONFIG)
    try:
        config = json.loads((path / CONFIG).read_text(encoding="utf-8"))
    except (ValueError, OSError, RecursionError) as error:
        raise ModelError(
            f"cannot read {path / CONFIG} ({error}); copy the whole folder again"
        ) from error
    version = config.get("format_version") if isinstance(config, dict) else None
    if not isinstance(version, int):
        raise ModelError(
            f"{path / CONFIG} is not a captioner model config ('format_version' is missing); use a "
            f"model folder that captioner has saved"
        )
    if version != FORMAT_VERSION:
        raise ModelError(
            f"{path} was written by a newer captioner (format {version}, supported: "
            f"{FORMAT_VERSION}); update captioner"
        )
    _require(path, *(GRAPHS if EXPORTED in config else (WEIGHTS,)))
    return dict(config)


def _require(path: Path, *names: str) -> None:
    for name in names:
        if not (path / name).is_file():
            raise ModelError(f"the model folder {path} has no {name}; copy the whole folder again")


def read_search(folder: str | Path) -> tuple[SearchOptions, Vocabulary]:
    """Read a model's default search options and its vocabulary. For errors see `read_config`."""
    path = find_model(folder)
    config = read_config(path)
    with config_errors(path):
        return search_of(config), read_vocabulary(path, config)


def read_settings(folder: str | Path) -> dict[str, Any]:
    """Return the settings that fine-tuning takes over from a model, keyed as in ``TrainConfig``."""
    path = find_model(folder)
    config = read_config(path)
    with config_errors(path):
        decoder = dataclasses.asdict(build_options(DecoderConfig, config["decoder"]))
        del decoder["dropout"]  # a setting of the run, not of the model
        tokenizer = config.get("tokenizer", "words")
        # The new model is not calibrated, and certainty needs calibrated probabilities of words.
        search = dataclasses.replace(search_of(config), certainty=0.0)
        return {"search": search, "decoder": decoder, "data": {"tokenizer": tokenizer}}


def search_of(config: dict[str, Any]) -> SearchOptions:
    """Return the model's default search options.

    Raises:
        ConfigError: A default is so large that a search could take almost forever.
    """
    given = {name: value for name, value in config["search"].items() if name not in REMOVED_SEARCH}
    search = SearchOptions(**given)
    for name, option in option_fields(SearchOptions).items():
        limit = option.untrusted and option.untrusted.model
        if limit and getattr(search, name) > limit:
            value = getattr(search, name)
            raise ConfigError(f"search.{name} is {value}, which is above the limit of {limit}")
    return search


def read_vocabulary(folder: Path, config: dict[str, Any]) -> Vocabulary:
    """Return the vocabulary of a model folder.

    Raises:
        ModelError: The sub-word tokenizer cannot be used.
    """
    words, styles = config["vocabulary"], config.get("styles", ())
    "".join(words).encode()  # raises an error if a word contains half of a surrogate pair
    if config.get("tokenizer", "words") == "words":
        return Vocabulary(words, styles)
    path = folder / TOKENIZER
    try:
        subwords = Subwords(path.read_text(encoding="utf-8"))
        pieces = subwords.pieces
    except (OSError, ValueError, TypeError, ModelError) as error:
        raise ModelError(f"cannot read {path} ({error}); copy the whole folder again") from error
    if pieces != tuple(words):
        raise ModelError(f"{path} does not match {CONFIG}; copy both files from the same model")
    return Vocabulary(words, styles, subwords)


@contextmanager
def config_errors(folder: Path) -> Iterator[None]:
    """Turn errors about a missing or invalid entry of the config into a one-line `ModelError`.

    Raises:
        ModelError: The block reads an entry that is missing or invalid.
    """
    try:
        yield
    except ModelError:
        raise
    except (KeyError, TypeError, ValueError, AttributeError, CaptionerError) as error:
        reason = f"{error} is missing" if isinstance(error, KeyError) else str(error)
        raise ModelError(
            f"{folder / CONFIG} is not a valid captioner model config ({reason}); correct "
            "the file, or copy the whole folder again"
        ) from error


def write_config(folder: Path, config: dict[str, Any]) -> None:
    """Write the config into a new model folder. NaN, as in training scores, becomes null."""
    text = json.dumps(json_values(config), indent=1, ensure_ascii=False) + "\n"
    (folder / CONFIG).write_text(text, encoding="utf-8")
