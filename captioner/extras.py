"""The optional packages that features need, and whether they are installed."""

import importlib.util

from captioner.errors import ConfigError

EXTRAS = {
    "torch": ("torch", "torchvision"),
    "serve": (
        "fastapi", "fastapi_offline", "prometheus_client", "starlette", "werkzeug",
        "granian",
    ),
    "train": ("torch", "torchvision", "accelerate"),
    "export": ("torch", "onnx", "onnxscript"),
    "hub": ("huggingface_hub",),
    "ray": ("ray", "pyarrow", "fsspec"),
    "video": ("av",),
}  # fmt: skip
"""Modules of each extra. An extra that only one command needs has the name of the command."""


def is_installed(module: str) -> bool:
    """Return whether a top-level module can be imported, without importing it."""
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # from a finder that hides it
        return False


def require_extra(extra: str, needed_by: str | None = None) -> None:
    """Check that the modules of an extra are installed.

    Args:
        extra: Name of the extra. Other names need nothing.
        needed_by: The feature that needs it, for the message (default: the command of that name).

    Raises:
        ConfigError: A module is missing.
    """
    absent = [name for name in EXTRAS.get(extra, ()) if not is_installed(name)]
    if absent:
        raise ConfigError(
            f"{needed_by or f'captioner {extra}'} needs {', '.join(absent)}; run: "
            f"pip install 'captioner[{extra}]'"
        )
