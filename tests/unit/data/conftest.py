"""Grey photos, and the shards that hold them."""

from __future__ import annotations

from pathlib import Path

import pytest
from toy_shards import PER_SHARD, grey_photos

from captioner.data.coco import CaptionedImage
from captioner.data.shards import write_shards


@pytest.fixture(scope="session")
def images(tmp_path_factory: pytest.TempPathFactory) -> list[CaptionedImage]:
    return grey_photos(tmp_path_factory.mktemp("photos"))


@pytest.fixture(scope="session")
def folder(images: list[CaptionedImage], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Read-only shards of them."""
    made = tmp_path_factory.mktemp("shards") / "train"
    write_shards(images, made, photos_per_shard=PER_SHARD)
    return made
