"""matplotlib, imported whatever backend the environment names.

Jupyter, Colab and Kaggle set ``MPLBACKEND`` for every program that is started from a notebook.
matplotlib stops with an error at its import if that backend is not installed. Nothing here needs a
backend, so matplotlib is imported without the variable. A backend that exists is set afterwards,
as matplotlib would have done, for whoever uses pyplot in the same process.
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
