"""What may not be installed: the full package, and what only some commands and functions need.

The modules of captioner are installed by two distributions: captioner-runtime has those that run an
exported model, captioner adds those that need torch.
"""

from __future__ import annotations

import importlib.util

from captioner.errors import ConfigError

EXTRAS = {
    "attend": ("contourpy", "fontTools", "matplotlib"),  # of the runtime; the full package has them
    "serve": (
        "fastapi",
        "fastapi_offline",
        "prometheus_client",
        "python_multipart",
        "starlette",
        "uvicorn",
    ),
    "train": ("accelerate", "pycocoevalcap"),
    "export": ("onnx", "onnxscript"),
    "evaluate": ("pycocoevalcap",),
    "hub": ("huggingface_hub",),
    "ray": ("ray", "pyarrow", "fsspec"),
}
"""Modules that are not always needed, by the extra that installs them. An extra that only one
command needs has the command's name."""


def require_extra(extra: str, needed_by: str | None = None) -> None:
    """Check that the modules of an extra are installed.

    Args:
        extra: Its name, or that of a command; a command without an extra needs nothing.
        needed_by: What needs it, for the message; None: the command of that name.

    Raises:
        ConfigError: Some are not.
    """
    if absent := absent_modules(extra):
        package = "captioner" if has_full_package() else "captioner-runtime"
        raise ConfigError(
            f"{needed_by or f'captioner {extra}'} needs {', '.join(absent)}; run: "
            f"pip install '{package}[{extra}]'"
        )


def absent_modules(extra: str) -> list[str]:
    """The modules of an extra that are not installed."""
    return [name for name in EXTRAS.get(extra, ()) if importlib.util.find_spec(name) is None]


def has_full_package() -> bool:
    """Whether all of captioner is installed, and not captioner-runtime alone."""
    return importlib.util.find_spec("captioner.torch_engine") is not None


def require_full_package(needed_by: str) -> None:
    """Check that all of captioner is installed, and not captioner-runtime alone.

    Args:
        needed_by: What needs it, for the message.

    Raises:
        ConfigError: It is not.
    """
    if not has_full_package():
        raise ConfigError(
            f"{needed_by} needs torch and the full package, and captioner-runtime is installed; "
            "run: pip install captioner"
        )
