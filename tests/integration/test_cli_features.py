"""``captioner prepare features`` as a user runs it."""

from __future__ import annotations

import json
import shutil
from collections import namedtuple
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from captioner.cli.main import FAILED, OK, main
from captioner.data.features import (
    FeatureCache,
    feature_fingerprint,
)
from captioner.data.images import open_image
from captioner.options import DataConfig, EncoderConfig, TrainConfig, TrainingConfig
from captioner.training.data import read_data
from captioner.training.setup import prepare

SETTINGS: dict[str, Any] = {
    "encoder": {"name": "timm/test_resnet", "weights": "none", "image_size": 48},
    "training": {"precision": "fp32", "seed": 3},
}


@pytest.fixture
def data(tiny, tmp_path: Path) -> dict[str, Any]:
    """Three training photos, two validation photos; photo 3 is in both."""
    data = json.loads(tiny.captions.read_text())
    shutil.copytree(tiny.photos, tmp_path / "photos")
    for name, ids in (("train", (1, 2, 3)), ("val", (3, 4))):
        part = {
            "images": [image for image in data["images"] if image["id"] in ids],
            "annotations": [one for one in data["annotations"] if one["image_id"] in ids],
        }
        (tmp_path / f"{name}.json").write_text(json.dumps(part))
    return {
        "train_annotations": [str(tmp_path / "train.json")],
        "val_annotations": [str(tmp_path / "val.json")],
        "images": [str(tmp_path / "photos")],
        "horizontal_flip": True,
        "vocabulary_threshold": 1,
    }


@pytest.fixture
def config(data: dict[str, Any], tmp_path: Path) -> str:
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump({**SETTINGS, "data": data}))
    return str(path)


Run = Callable[..., int]


@pytest.fixture
def run(config: str, tmp_path: Path) -> Run:
    """The command with this config, into ``tmp_path / "f"``."""

    def prepare_features(*arguments: str, dtype: str = "float32") -> int:
        options = ("-o", str(tmp_path / "f"), "--dtype", dtype, "--device", "cpu")
        return main(["prepare", "features", config, *options, *arguments])

    return prepare_features


def whole(data: dict[str, Any], **encoder: Any) -> TrainConfig:
    return TrainConfig(
        data=DataConfig(**data),
        encoder=EncoderConfig(**SETTINGS["encoder"] | encoder),
        training=TrainingConfig(**SETTINGS["training"]),
    )


def only_line(capsys: pytest.CaptureFixture[str]) -> str:
    out, err = capsys.readouterr()
    assert out == ""
    line = next(line for line in err.splitlines() if line.startswith("captioner: "))
    assert "Traceback" not in err
    return line


FEATURES = {
    "timm/test_resnet": "96 float32: 10,752 bytes",
    "timm/tf_efficientnet_lite0": "1280 float32: 143,360 bytes",
}


@pytest.mark.parametrize("encoder", FEATURES)
def test_cached_features_equal_those_of_the_run(encoder, data, run, tmp_path, capsys) -> None:
    """The run's model, with its random weights, gives the cached features bit for bit.

    One photo at a time, since rounding may depend on the size of the batch.
    """
    assert run("--encoder.name", encoder, "--batch-size", "1") == OK
    out, err = capsys.readouterr()
    assert out == f"{tmp_path / 'f'}: features of 4 photos\n"
    assert f"4 photos and 3 flipped, each 2 x 2 regions of {FEATURES[encoder]}" in err

    model = prepare(whole(data, name=encoder)).stored.model.eval()
    key = feature_fingerprint(model.encoder.name, model.encoder.state_dict(), model.preprocessing)
    cache = FeatureCache.open(tmp_path / "f", key)
    train, val = read_data(whole(data).data)
    cache.check(train, flipped=True)
    cache.check(val)

    paths = {image.image_id: image.path for image in [*train, *val]}
    photos = [model.preprocessing.pixels(open_image(paths[i])).copy() for i in (1, 2, 3, 4)]
    pixels = torch.stack([torch.from_numpy(photo) for photo in photos])
    with torch.inference_mode():
        live = torch.cat([model.encode(photo) for photo in pixels.split(1)])
        flipped = torch.cat([model.encode(photo.flip(2)) for photo in pixels[:3].split(1)])
    assert torch.equal(cache.read([(i, False) for i in (1, 2, 3, 4)]), live)
    assert torch.equal(cache.read([(i, True) for i in (1, 2, 3)]), flipped)
    assert not torch.equal(live[:3], flipped)


def test_a_full_disk_is_reported_before_encoding(run, tmp_path, monkeypatch, capsys) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(10_000, 0, 10_000))

    assert run() == FAILED
    line = only_line(capsys)
    assert "10,752 bytes are needed, but 10,000 are free" in line
    assert not (tmp_path / "f").exists()
    assert run(dtype="bfloat16") == OK
