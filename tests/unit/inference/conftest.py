"""A small captioner and photos, made once for each file."""

from __future__ import annotations

from pathlib import Path

import pytest
from toy_captioner import build, make_photos

from captioner.inference.captioner import Captioner


@pytest.fixture(scope="module")
def captioner() -> Captioner:
    return build()


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return make_photos(tmp_path_factory.mktemp("photos"))
