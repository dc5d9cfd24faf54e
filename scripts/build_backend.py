"""Hatchling, which also lets a wheel of captioner require its other half, captioner-runtime.

    pip install .       the runtime of this checkout, which pip builds and installs too
    pip install -e .    the command alone: the checkout's modules are imported
    from an sdist       the runtime of the same version, from the package index

The requirement is known when a wheel is built, so there are no hooks that prepare metadata earlier.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hatchling.build import (
    build_editable,
    build_sdist,
    build_wheel,
    get_requires_for_build_editable,
    get_requires_for_build_sdist,
    get_requires_for_build_wheel,
)
from hatchling.builders.hooks.plugin.interface import BuildHookInterface

__all__ = [
    "build_editable",
    "build_sdist",
    "build_wheel",
    "get_requires_for_build_editable",
    "get_requires_for_build_sdist",
    "get_requires_for_build_wheel",
]


class RuntimeHook(BuildHookInterface[Any]):
    """Adds the requirement to a wheel."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Called by Hatchling before it writes a wheel.

        Args:
            version: ``standard`` or ``editable``.
            build_data: What is added to the wheel.
        """
        root = Path(self.root)
        folder = root / "runtime" / ("editable" if version == "editable" else "")
        checkout = not (root / "PKG-INFO").exists()
        source = f" @ {folder.as_uri()}" if checkout else f"=={self.metadata.version}"
        build_data["dependencies"].append(f"captioner-runtime{source}")
