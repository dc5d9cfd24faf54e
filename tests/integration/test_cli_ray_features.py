"""``captioner prepare features --engine ray``: the folder of the plain command, byte for byte."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from PIL import Image

from captioner.cli.main import FAILED, INTERRUPTED, main
from captioner.data.features import JOURNAL, ROWS

pytest.importorskip("ray")
from captioner.bulk import features

PHOTOS = 11


def make_config(folder: Path, count: int) -> Path:
    """Photos, one of them broken, their captions, and a config of a run with random weights."""
    (folder / "photos").mkdir()
    noise = np.random.default_rng(0).integers(256, size=(count, 30, 40, 3), dtype=np.uint8)
    for number, pixels in enumerate(noise):
        Image.fromarray(pixels).save(folder / "photos" / f"{number}.png")
    (folder / "photos" / "5.png").write_bytes(b"no photo")
    for name, ids in (("train", range(count - 2)), ("val", range(count - 2, count))):
        coco = {
            "images": [{"id": n, "file_name": f"{n}.png"} for n in ids],
            "annotations": [{"id": n, "image_id": n, "caption": "a dog"} for n in ids],
        }
        (folder / f"{name}.json").write_text(json.dumps(coco))
    config = {
        "encoder": {"name": "timm/test_resnet", "weights": "none", "image_size": 48},
        "training": {"seed": 3, "precision": "fp32"},  # as conftest.py's "auto", in all processes
        "data": {
            "train_annotations": [str(folder / "train.json")],
            "val_annotations": [str(folder / "val.json")],
            "images": [str(folder / "photos")],
            "horizontal_flip": True,
            "vocabulary_threshold": 1,
        },
    }
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    return folder / "config.yaml"


@pytest.fixture
def command(tmp_path: Path) -> Callable[..., list[str]]:
    """``command("folder", "--workers", "2")``: the arguments of the command."""
    config = make_config(tmp_path, PHOTOS)

    def arguments(folder: str, *options: str) -> list[str]:
        output = ["-o", str(tmp_path / folder), "--batch-size", "2"]
        return ["prepare", "features", str(config), *output, *options]

    return arguments


@pytest.fixture
def prepare(command: Any, capsys: Any) -> Callable[..., tuple[int, str]]:
    """``prepare("folder", "--workers", "2")``: exit code and standard error."""

    def run(*arguments: str) -> tuple[int, str]:
        code = main(command(*arguments))
        return code, capsys.readouterr().err

    return run


RAY = ("--engine", "ray", "--workers", "2", "--part-photos", "3")  # two batches are a part


def contents_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.slow
@pytest.mark.usefixtures("shared_ray")
def test_the_folder_is_that_of_the_plain_command(prepare, command, on_ray, tmp_path) -> None:
    assert prepare("plain")[0] == FAILED  # one photo is broken

    code, _, err = on_ray(*command("ray", *RAY))

    assert code == FAILED, err
    warnings = [line for line in err.splitlines() if "skipped" in line]
    assert len(warnings) == 1
    assert "5.png: not a supported image" in warnings[0]
    assert contents_of(tmp_path / "ray") == contents_of(tmp_path / "plain")


def test_an_interrupted_job_is_continued_by_either_engine(prepare, tmp_path, workers_here) -> None:
    assert prepare("plain")[0] == FAILED
    workers_here.stop_after = 1
    for part in (1, 2):
        assert prepare("f", *RAY)[0] == INTERRUPTED
        _, *blocks = (tmp_path / "f" / JOURNAL).read_text().splitlines()
        assert sum(len(json.loads(line)) for line in blocks) == 4 * part

    assert prepare("f")[0] == FAILED

    assert contents_of(tmp_path / "f") == contents_of(tmp_path / "plain")


@pytest.mark.usefixtures("workers_here")
def test_an_encoder_that_differs_on_a_machine_stops_the_job(prepare, tmp_path, monkeypatch) -> None:
    """As with another version of timm there."""
    own = features.open_feature_encoder

    def other(*arguments: Any, **options: Any) -> Any:
        encoder = own(*arguments, **options)
        return encoder._replace(fingerprint={**encoder.fingerprint, "weights": "other"})

    monkeypatch.setattr(features, "open_feature_encoder", other)
    code, err = prepare("f", *RAY)
    assert code == FAILED
    assert "has another encoder than the machine that started the job (" in err
    assert sorted(contents_of(tmp_path / "f")) == [ROWS, JOURNAL]
