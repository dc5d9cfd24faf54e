"""Reads a model folder's ``config.json`` without torch, so that wrong options fail at once."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from captioner.config import SearchOptions
from captioner.errors import CaptionerError, ModelError
from captioner.files import complete_folder
from captioner.vocabulary import Vocabulary

FORMAT_VERSION = 1
CONFIG = "config.json"
WEIGHTS = "model.safetensors"

SHIPPED_MODEL = Path(__file__).parent / "pretrained"
"""Folder of the model that is included in the package."""


def read_config(folder: str | Path) -> dict[str, Any]:
    """Read a model folder's config.

    Raises:
        ModelError: A file is missing, damaged or not from captioner, or the folder was written by
            a newer version.
    """
    path = complete_folder(folder)
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


def read_search(folder: str | Path) -> tuple[SearchOptions, Vocabulary]:
    """Read a model's default search options and its vocabulary.

    Raises:
        ModelError: See `read_config`.
    """
    config = read_config(folder)
    try:
        vocabulary = Vocabulary(config["vocabulary"], config.get("styles", ()))
        return SearchOptions(**config["search"]), vocabulary
    except (KeyError, TypeError, AttributeError, CaptionerError) as error:
        raise not_a_config(Path(folder), error) from error


def not_a_config(folder: Path, error: Exception) -> ModelError:
    """The error of a config that lacks an entry or has a wrong one."""
    reason = f"lacks {error}" if isinstance(error, KeyError) else str(error)
    return ModelError(f"{folder / CONFIG} is not a captioner model config: {reason}")


def fingerprint(folder: str | Path) -> str:
    """A short hash of a model folder's config and weights."""
    path = complete_folder(folder)
    digest = hashlib.sha256()
    for name in (CONFIG, WEIGHTS):
        with (path / name).open("rb") as file:
            while block := file.read(1 << 20):
                digest.update(block)
    return digest.hexdigest()[:12]
