"""Find the folder that the name of a model means."""

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
    """The model folder itself, or the folder of the best model if ``folder`` is a run folder.

    ``shipped`` is the model that is included in the package, unless there is such a folder.
    ``hf:user/name@revision`` is a model of the Hugging Face hub; it is downloaded by ``hub.fetch``.

    Raises:
        ConfigError: A name of the hub is invalid, or a revision is given for a folder.
        ModelError: The run has no best model yet, or the model cannot be downloaded.
    """
    if hub.is_hub_name(folder):
        return hub.fetch(hub.parse(folder, revision), MODEL_FILES, **hub_options)
    if revision is not None:
        raise ConfigError(
            f"{folder} has no revisions, but revision is {revision!r}; only models of the hub "
            "(hf:user/name) have them"
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
            f"the run folder {path} has no model yet; the first validation of captioner train "
            f"saves one in {path / BEST}"
        )
    return path
