"""Optional dependencies: what only some commands and functions need."""

from __future__ import annotations

import importlib.util

from captioner.errors import ConfigError

EXTRAS = {
    "serve": ("fastapi", "starlette", "uvicorn", "prometheus_client"),
    "train": ("accelerate", "pycocoevalcap"),
    "export": ("onnx", "onnxscript", "onnxruntime"),
    "evaluate": ("pycocoevalcap",),
}
"""Modules that only one command imports; the extra that installs them has the command's name."""


def require_extra(command: str) -> None:
    """Check that the modules of a command are installed.

    Raises:
        ConfigError: Some are not.
    """
    absent = [name for name in EXTRAS.get(command, ()) if importlib.util.find_spec(name) is None]
    if absent:
        raise ConfigError(
            f"captioner {command} needs {', '.join(absent)}; run: "
            f"pip install 'captioner[{command}]'"
        )
