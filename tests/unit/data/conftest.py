"""Grey photos, their captions as tokens, and the shards that hold them."""

from __future__ import annotations

from pathlib import Path

import pytest
from toy_shards import PER_SHARD, grey_photos

from captioner.data.batches import EncodedImage
from captioner.data.coco import CaptionedImage
from captioner.data.shards import write_shards
from captioner.text.vocabulary import END


@pytest.fixture(scope="session")
def images(tmp_path_factory: pytest.TempPathFactory) -> list[CaptionedImage]:
    return grey_photos(tmp_path_factory.mktemp("photos"))


@pytest.fixture(scope="session")
def photos(images: list[CaptionedImage]) -> list[EncodedImage]:
    """Captions of one to three words, the first of which is the photo's id."""
    return [
        EncodedImage(one, tuple([one.image_id, *[5] * r, END] for r in range(len(one.captions))))
        for one in images
    ]


@pytest.fixture(scope="session")
def folder(images: list[CaptionedImage], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Read-only shards of them."""
    made = tmp_path_factory.mktemp("shards") / "train"
    write_shards(images, made, photos_per_shard=PER_SHARD)
    return made
