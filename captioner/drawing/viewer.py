"""Functions that show a figure in a notebook or in the desktop's image viewer."""

from __future__ import annotations

import importlib
import os
import sys
from typing import Protocol

from PIL import Image, ImageShow

from captioner.errors import ConfigError


class Showable(Protocol):
    """A figure that notebooks can display."""

    def image(self) -> Image.Image:
        """Return the figure as a picture."""


def show_figure(figure: Showable) -> None:
    """Show a figure below the cell of a notebook, or else in the desktop's image viewer.

    Raises:
        ConfigError: Neither a notebook nor an image viewer is available.
    """
    if in_notebook():
        importlib.import_module("IPython.display").display(figure)
    elif not (_has_desktop() and ImageShow.show(figure.image(), title="captioner")):
        raise ConfigError(
            "show() found neither a notebook nor an image viewer; save the figure instead: "
            'captioner.overlay(photo, caption).save("attention.png")'
        )


def in_notebook() -> bool:
    """Return whether the code runs in a Jupyter kernel."""
    ipython = sys.modules.get("IPython")  # if no one imported it, this is not a notebook
    shell = ipython.get_ipython() if ipython is not None else None
    return hasattr(shell, "kernel")


def _has_desktop() -> bool:
    """Return whether an image viewer could open a window.

    On Linux, a viewer needs a display. Without a display, Pillow starts a viewer that fails
    silently, but Pillow reports success. The display is therefore checked first.
    """
    if sys.platform != "linux":
        return True
    return bool(os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY"))
