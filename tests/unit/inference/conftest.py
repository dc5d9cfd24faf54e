"""A small captioner and photos, made once for each file."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from toy_captioner import build

from captioner.inference.captioner import Captioner


@pytest.fixture(scope="module")
def captioner() -> Captioner:
    return build()


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Ten photos of different shapes."""
    random = np.random.default_rng(0)
    folder = tmp_path_factory.mktemp("photos")
    paths = [folder / f"{number}.png" for number in range(10)]
    for path in paths:
        height, width = random.integers(40, 90, size=2).tolist()
        blocks = Image.fromarray(random.integers(256, size=(3, 4, 3), dtype=np.uint8))
        blocks.resize((width, height), Image.Resampling.NEAREST).save(path)
    return paths
