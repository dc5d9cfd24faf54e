"""Read models from folders and the hub: those with weights for torch, and exported ones.

torch is imported for a model with weights only. `batch_captioner` runs what is read here.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from captioner.errors import ConfigError
from captioner.extras import require_extra
from captioner.inference.model_config import SHIPPED_MODEL, find_model, is_exported
from captioner.inference.onnx_engine import ExportedModel, read_exported

if TYPE_CHECKING:
    from captioner.inference.folder import StoredModel


def read_models(
    *folders: str | Path, revision: str | None = None
) -> list[StoredModel | ExportedModel]:
    """Read a model, or the models of an ensemble.

    Args:
        *folders: See ``captioner.load``.
        revision: See ``captioner.load``.

    Raises:
        ModelError: A folder cannot be loaded, or a model of the hub cannot be downloaded.
        ConfigError: Some folders are exported and others are not, torch is needed and not
            installed, or ``revision`` is not for a single model of the hub.
    """
    for folder in folders:
        if not isinstance(folder, str | Path):
            raise ConfigError(f"a model is {folder!r:.60}; give each folder by its own path")
    if revision is not None and len(folders) != 1:
        raise ConfigError(
            f"revision is {revision!r}, but there are {len(folders)} models; write "
            "hf:user/name@revision"
        )
    paths = [find_model(folder, revision) for folder in folders or (SHIPPED_MODEL,)]
    exported = [is_exported(path) for path in paths]
    if any(exported) and not all(exported):
        raise ConfigError(
            f"{folders[exported.index(True)]} is exported and "
            f"{folders[exported.index(False)]} is not; give folders of one kind"
        )
    return [read_model(path) for path in paths]


def read_model(path: Path) -> StoredModel | ExportedModel:
    """Read a model folder, or an exported one.

    Raises:
        ModelError: The folder cannot be loaded.
        ConfigError: torch is needed and not installed.
    """
    if is_exported(path):
        return read_exported(path)
    require_extra("torch", f"the model {path}, which is not exported,")
    from captioner.inference.folder import load_model

    return load_model(path)


def with_weights(stored: StoredModel | ExportedModel) -> StoredModel:
    """The model, if it has weights for torch.

    Raises:
        ConfigError: It is exported.
    """
    if isinstance(stored, ExportedModel):
        raise ConfigError(
            f"{stored.folder} is exported; this needs the model folder that it was exported from"
        )
    return stored
