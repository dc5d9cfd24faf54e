"""Fixtures that run the tests of the search with torch tensors and with NumPy arrays."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import array_api_compat.numpy
import array_api_compat.torch
import pytest
import torch

from captioner.search import arrays

LIBRARIES: dict[str, tuple[Any, Any]] = {
    "torch": (array_api_compat.torch, torch.device("cpu")),
    "numpy": (arrays.NUMPY, "cpu"),
    "numpy before 2.1": (array_api_compat.numpy, "cpu"),
}


@pytest.fixture(scope="module", params=["torch", "numpy"])
def array_library(request: pytest.FixtureRequest) -> Iterator[None]:
    """Let searches use one of the libraries; test_search.py runs with all three."""
    from table_stepper import TableStepper

    xp, device = LIBRARIES[request.param]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TableStepper, "xp", xp)
        patch.setattr(TableStepper, "device", device)
        if device == "cpu":
            patch.setattr(arrays, "NUMPY", xp)
        yield
