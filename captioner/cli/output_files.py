"""Checks of the files that a command is asked to write, before it starts to work."""

from __future__ import annotations

import shlex
from pathlib import Path

from captioner.errors import ConfigError


def refuse_overwrite(path: Path, force: bool) -> None:
    """Raise ConfigError if an output file exists and ``--force`` was not given."""
    if path.is_dir():
        raise ConfigError(f"{path} is a folder; give a file name")
    if path.exists() and not force:
        raise ConfigError(f"{path} exists; give --force to overwrite it, or another name")


def require_parent(path: Path) -> None:
    """Raise ConfigError if the folder of a new file does not exist."""
    if not path.parent.is_dir():
        raise ConfigError(
            f"cannot write {path}: the folder {path.parent} does not exist; create it first "
            f"(mkdir -p {shlex.quote(str(path.parent))}), or give another name"
        )


def new_file(name: str | Path | None, force: bool) -> Path | None:
    """Return the path of an output file, or None without a name.

    Raises:
        ConfigError: The file cannot be created, or exists and would be overwritten.
    """
    if name is None:
        return None
    path = Path(name)
    require_parent(path)
    refuse_overwrite(path, force)
    return path
