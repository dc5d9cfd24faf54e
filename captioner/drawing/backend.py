"""An import of matplotlib that works with any value of ``MPLBACKEND``.

Jupyter, Colab and Kaggle set ``MPLBACKEND`` for every program that is started from a notebook. If
that backend is not installed, importing matplotlib fails. Drawings need no backend, so matplotlib
is imported without the variable. Afterwards, the backend is set if it is installed, so that other
code in the process can use pyplot as usual.
"""

from __future__ import annotations

import os
import sys
from contextlib import suppress

_named = None if "matplotlib" in sys.modules else os.environ.pop("MPLBACKEND", None)
try:
    import matplotlib
finally:
    if _named is not None:
        os.environ["MPLBACKEND"] = _named
if _named:
    with suppress(ValueError):
        matplotlib.rcParams["backend"] = _named

__all__ = ["matplotlib"]
