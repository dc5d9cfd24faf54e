"""``captioner prepare shards`` as a user runs it, and streaming its shards."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from captioner.cli.main import OK, main
from captioner.data.batches import EncodedImage, PhotoReader
from captioner.data.shard_stream import ShardStream
from captioner.data.shards import read_manifest
from captioner.model.preprocessing import Preprocessing
from captioner.options import DataConfig
from captioner.training.data import read_data


@pytest.fixture
def config(tiny, tmp_path) -> Path:
    data = {
        "train_annotations": [str(tiny.captions)],
        "val_annotations": [str(tiny.captions)],
        "images": [str(tiny.photos)],
    }
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump({"data": data, "training": {"seed": 3}}))
    return path


def run(*arguments: object) -> int:
    return main(["prepare", "shards", *map(str, arguments)])


def test_written_shards_can_be_streamed(tiny, config, tmp_path, capsys):
    out = tmp_path / "shards"
    assert run(config, "-o", out, "--photos-per-shard", 3) == OK
    printed = capsys.readouterr()
    assert printed.out == f"{out}: 4 photos in 2 shards, 0.00 GB\n"

    images, _ = read_data(
        DataConfig(
            train_annotations=[str(tiny.captions)],
            val_annotations=[str(tiny.captions)],
            images=[str(tiny.photos)],
        )
    )
    items = {one.image_id: EncodedImage(one, ([3 + one.image_id],)) for one in images}
    reader = PhotoReader(Preprocessing(32), max_captions=5)
    stream = ShardStream(read_manifest(out), items, reader, batch_size=2)
    batches = list(stream.batches(stream.epoch, stream.start))
    assert len(batches) == stream.batches_in(0) == 2
    assert sorted(int(t) for batch in batches for t in batch.tokens[:, 0, 1]) == [4, 5, 6, 7]
    assert batches[0].images.shape == (2, 32, 32, 3)
