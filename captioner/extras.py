"""Packages that only some commands and functions need, by the extra that installs them."""

from __future__ import annotations

import importlib.util

from captioner.errors import ConfigError

EXTRAS = {
    "torch": ("torch", "torchvision"),
    "serve": (
        "fastapi",
        "fastapi_offline",
        "prometheus_client",
        "python_multipart",
        "starlette",
        "granian",
    ),
    "train": ("torch", "torchvision", "accelerate", "pycocoevalcap"),
    "export": ("torch", "onnx", "onnxscript"),
    "evaluate": ("pycocoevalcap",),
    "hub": ("huggingface_hub",),
    "ray": ("ray", "pyarrow", "fsspec"),
}
"""Modules by extra. An extra that only one command needs has the command's name."""


def is_installed(module: str) -> bool:
    """Whether a top-level module can be imported; it is not."""
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # from a finder that hides it
        return False


def require_extra(extra: str, needed_by: str | None = None) -> None:
    """Check that the modules of an extra are installed.

    Args:
        extra: Its name, or that of a command; a command without an extra needs nothing.
        needed_by: What needs it, for the message; None: the command of that name.

    Raises:
        ConfigError: Some are not.
    """
    absent = [name for name in EXTRAS.get(extra, ()) if not is_installed(name)]
    if absent:
        raise ConfigError(
            f"{needed_by or f'captioner {extra}'} needs {', '.join(absent)}; run: "
            f"pip install 'captioner[{extra}]'"
        )
