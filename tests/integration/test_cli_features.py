"""``captioner prepare features``, alone and with ``--engine ray``."""

from __future__ import annotations

import shutil
from collections import namedtuple
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from tiny_data import run_settings, write_captions

from captioner.cli.main import INTERRUPTED, NOT_DONE, OK, SOME_FAILED
from captioner.data.features import HEADER, INDEX, RECORD, ROWS, FeatureCache, feature_fingerprint
from captioner.data.images import open_image
from captioner.training.config import build_config
from captioner.training.data import read_data
from captioner.training.setup import prepare

PHOTOS = 4


@pytest.fixture
def config(tiny, tmp_path: Path) -> Path:
    """Of a run with random weights: three training photos, two validation photos; 3 is in both."""
    shutil.copytree(tiny.photos, tmp_path / "photos")
    for name, ids in (("train", (1, 2, 3)), ("val", (3, 4))):
        captions = {f"{number}.png": ["A dog runs."] for number in ids}
        write_captions(tmp_path / f"{name}.json", captions, first=ids[0])
    settings = run_settings(
        tmp_path / "train.json",
        tmp_path / "photos",
        data={"val_annotations": [str(tmp_path / "val.json")], "horizontal_flip": True},
        training={"precision": "fp32", "seed": 3},  # as conftest.py's "auto", in all processes
    )
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(settings))
    return tmp_path / "config.yaml"


@pytest.fixture
def command(config: Path, tmp_path: Path) -> Callable[..., list[str]]:
    """``command("folder", "--workers", "2")``: the arguments of the command."""

    def arguments(folder: str, *options: str) -> list[str]:
        output = ["-o", str(tmp_path / folder), "--device", "cpu"]
        return ["prepare", "features", str(config), *output, *options]

    return arguments


@pytest.fixture
def prepared(command: Any, run: Any) -> Callable[..., tuple[int, str, str]]:
    """The command: exit code, standard output and error."""
    return lambda *arguments: run(*command(*arguments))


FEATURES = {
    "timm/test_resnet": "96 float32: 10,752 bytes",
    "timm/tf_efficientnet_lite0": "1280 float32: 143,360 bytes",
}


@pytest.mark.parametrize("encoder", FEATURES)
def test_cached_features_equal_those_of_the_run(encoder, config, prepared, tmp_path) -> None:
    """The run's model, with its random weights, gives the cached features bit for bit.

    One photo at a time, since rounding may depend on the size of the batch.
    """
    options = ("--dtype", "float32", "--batch-size", "1")
    code, out, err = prepared("f", f"encoder.name={encoder}", *options)
    assert (code, out) == (OK, f"{tmp_path / 'f'}: features of {PHOTOS} photos\n")
    assert f"4 photos and 3 flipped, each 2 x 2 regions of {FEATURES[encoder]}" in err

    settings = build_config(config, encoder={"name": encoder})
    model = prepare(settings).stored.model.eval()
    key = feature_fingerprint(model.encoder, model.preprocessing)
    cache = FeatureCache(tmp_path / "f", key)
    train, val = read_data(settings.data)
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


def test_a_full_disk_is_reported_before_encoding(prepared, tmp_path, monkeypatch) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(10_000, 0, 10_000))

    code, out, err = prepared("f", "--dtype", "float32")
    assert (code, out) == (NOT_DONE, "")
    assert "needs 10,752 bytes, but only 10,000 are free" in err
    assert not (tmp_path / "f").exists()
    assert prepared("f", "--dtype", "bfloat16")[0] == OK


# --- Ray -----------------------------------------------------------------------------------------

SAME = ("--batch-size", "2")
RAY = (*SAME, "--engine", "ray", "--workers", "2", "--part-photos", "1")  # parts are whole batches


def contents_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture
def broken(tmp_path: Path, config: Path) -> None:
    (tmp_path / "photos" / "2.png").write_bytes(b"no photo")


@pytest.mark.slow
@pytest.mark.usefixtures("broken")
def test_the_folder_is_that_of_the_plain_command(prepared, command, on_ray, tmp_path) -> None:
    assert prepared("plain", *SAME)[0] == SOME_FAILED  # one photo is broken

    code, _, err = on_ray(*command("ray", *RAY))

    assert code == SOME_FAILED, err
    [warning] = [line for line in err.splitlines() if "skipped" in line]
    assert "2.png: the file is not a supported image" in warning
    assert contents_of(tmp_path / "ray") == contents_of(tmp_path / "plain")


@pytest.mark.usefixtures("broken")
def test_an_interrupted_job_is_continued_by_either_engine(prepared, tmp_path, workers_here) -> None:
    assert prepared("plain", *SAME)[0] == SOME_FAILED
    workers_here.stop_after = 1
    assert prepared("f", *RAY)[0] == INTERRUPTED
    assert (tmp_path / "f" / INDEX).stat().st_size == 2 * RECORD.itemsize

    assert prepared("f", *SAME)[0] == SOME_FAILED

    assert contents_of(tmp_path / "f") == contents_of(tmp_path / "plain")


@pytest.mark.usefixtures("workers_here")
def test_an_encoder_that_differs_on_a_machine_stops_the_job(
    prepared, tmp_path, monkeypatch
) -> None:
    """As with another version of timm there."""
    from captioner.bulk import features

    own = features.open_feature_encoder

    def other(*arguments: Any, **options: Any) -> Any:
        encoder = own(*arguments, **options)
        return encoder._replace(fingerprint={**encoder.fingerprint, "weights": "other"})

    monkeypatch.setattr(features, "open_feature_encoder", other)
    code, _, err = prepared("f", *RAY)
    assert code == NOT_DONE
    assert "has a different encoder from the machine that started the job (" in err
    assert sorted(contents_of(tmp_path / "f")) == [ROWS, INDEX, HEADER]
