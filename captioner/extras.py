"""Optional dependencies: what only some commands and functions need."""

from __future__ import annotations

import importlib.util

from captioner.errors import ConfigError

EXTRAS = {
    "serve": ("fastapi", "starlette", "uvicorn", "prometheus_client"),
    "train": ("accelerate", "pycocoevalcap"),
    "evaluate": ("pycocoevalcap",),
    "ray": ("ray", "pyarrow", "fsspec"),
}
"""Modules that only one command or option imports, by the extra that installs them; a command's
extra has its name."""


def require_extra(extra: str, user: str | None = None) -> None:
    """Check that the modules of an extra are installed.

    Args:
        extra: The extra; without one of this name there is nothing to check.
        user: What needs it, for the message; None: the command of that name.

    Raises:
        ConfigError: Some are not.
    """
    absent = [name for name in EXTRAS.get(extra, ()) if importlib.util.find_spec(name) is None]
    if absent:
        raise ConfigError(
            f"{user or f'captioner {extra}'} needs {', '.join(absent)}; run: "
            f"pip install 'captioner[{extra}]'"
        )
