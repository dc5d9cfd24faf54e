"""The optional packages of each extra, and checks that they are installed."""

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
"""Modules that each extra installs. An extra for a single command has the name of the command."""


def is_installed(module: str) -> bool:
    """Return whether a top-level module can be imported, without importing it."""
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # raised by an import hook that hides the module
        return False


def require_extra(extra: str, needed_by: str | None = None) -> None:
    """Check that the modules of an extra are installed.

    Args:
        extra: Name of the extra. Unknown names are accepted, because they need no modules.
        needed_by: The feature that needs the extra, for the message (default: the command with the
            name of the extra).

    Raises:
        ConfigError: A module is missing.
    """
    absent = [name for name in EXTRAS.get(extra, ()) if not is_installed(name)]
    if absent:
        raise ConfigError(
            f"{needed_by or f'captioner {extra}'} needs {', '.join(absent)}; run: "
            f"pip install 'captioner[{extra}]'"
        )
