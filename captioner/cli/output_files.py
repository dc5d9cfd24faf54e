"""Checks of a command's output files, made before the work starts."""

from __future__ import annotations

import shlex
from pathlib import Path

from captioner.errors import ConfigError


def refuse_overwrite(path: Path, force: bool) -> None:
    """Raise an error if an output file exists and ``--force`` is not set.

    Pipes and devices such as ``/dev/stdout`` may exist, because writing does not replace them.
    """
    if path.is_dir():
        raise ConfigError(f"the output {path} is a folder; use the name of a file")
    if path.is_file() and not force:
        raise ConfigError(f"{path} exists; add --force to overwrite it, or use a different name")


def require_parent(path: Path) -> None:
    """Raise an error if the folder of a new file does not exist."""
    if not path.parent.is_dir():
        raise ConfigError(
            f"{path} cannot be written, because the folder {path.parent} does not exist; "
            f"create it (mkdir -p {shlex.quote(str(path.parent))}), or use a different name"
        )


def new_file(name: str | Path | None, force: bool) -> Path | None:
    """Return the path of an output file, or None without a name.

    Raises:
        ConfigError: The file cannot be created, or it exists and would be overwritten.
    """
    if name is None:
        return None
    path = Path(name)
    require_parent(path)
    refuse_overwrite(path, force)
    return path
