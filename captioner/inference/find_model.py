"""Search for the folder of a model by its name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from captioner.errors import ConfigError, ModelError
from captioner.inference import hub
from captioner.inference.names import (
    BEST,
    CONFIG,
    MODEL_FILES,
    RUN_CONFIG,
    SHIPPED,
    SHIPPED_MODEL,
)


def find_model(folder: str | Path, revision: str | None = None, **hub_options: Any) -> Path:
    """Return the folder of a model.

    If the name is a run folder, the result is the folder of the run's best model. The name
    ``shipped`` refers to the model in the package, unless a folder of that name exists.
    ``hf:user/name@revision`` refers to a model on the Hugging Face hub, which ``hub.fetch``
    downloads.

    Raises:
        ConfigError: A name on the hub is invalid, or a revision was passed for a local folder.
        ModelError: The run has no best model yet, or the model cannot be downloaded.
    """
    if hub.is_hub_name(folder):
        return hub.fetch(hub.parse(folder, revision), MODEL_FILES, **hub_options)
    if revision is not None:
        raise ConfigError(
            f"revision is {revision!r}, but the local folder {folder} has no revisions; leave "
            "out revision, or use a model on the hub (hf:user/name)"
        )
    path = Path(folder)
    if not path.exists() and str(folder) == SHIPPED:
        return SHIPPED_MODEL
    if (path / CONFIG).exists():
        return path
    best = path / BEST
    if best.is_dir():
        return best
    if (path / RUN_CONFIG).is_file():
        raise ModelError(
            f"the run folder {path} has no model yet; wait until the first validation of captioner "
            f"train saves a model in {path / BEST}"
        )
    return path
