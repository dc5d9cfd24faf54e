"""The search runs with torch tensors and with NumPy arrays; its tests run with both."""

from __future__ import annotations

from collections.abc import Iterator

import array_api_compat.numpy
import array_api_compat.torch
import pytest
from table_stepper import TableStepper

LIBRARIES = {"torch": array_api_compat.torch, "numpy": array_api_compat.numpy}


@pytest.fixture(scope="module", params=LIBRARIES)
def array_library(request: pytest.FixtureRequest) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TableStepper, "xp", LIBRARIES[request.param])
        yield
