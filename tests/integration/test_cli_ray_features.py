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

from captioner.cli.main import FAILED, INTERRUPTED, USAGE, main
from captioner.data.features import CONTENTS, JOURNAL, ROWS

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


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--workers", "2"), "--workers is for --engine ray; add it, or leave this option out"),
        (("--engine", "ray", "--worker-cpus", "0"), "--worker-cpus is 0; give 1 or more"),
    ],
)
def test_options_that_contradict_each_other(arguments, message, prepare, tmp_path) -> None:
    code, err = prepare("f", *arguments)
    assert code == USAGE
    assert message in err
    assert not (tmp_path / "f").exists()


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


@pytest.mark.usefixtures("workers_here")
def test_each_engine_continues_what_the_other_began(prepare, tmp_path) -> None:
    assert prepare("f")[0] == FAILED
    expected = contents_of(tmp_path / "f")
    for arguments in (RAY, ()):
        interrupt(tmp_path / "f", blocks=2)
        assert contents_of(tmp_path / "f") != expected
        code, err = prepare("f", *arguments)
        assert code == FAILED, err
        assert contents_of(tmp_path / "f") == expected


def test_what_an_interrupted_job_leaves_is_continued(prepare, tmp_path, workers_here) -> None:
    assert prepare("plain")[0] == FAILED
    workers_here.stop_after = 1
    assert prepare("f", *RAY)[0] == INTERRUPTED
    assert JOURNAL in contents_of(tmp_path / "f")

    assert prepare("f")[0] == FAILED

    assert contents_of(tmp_path / "f") == contents_of(tmp_path / "plain")


def interrupt(folder: Path, blocks: int) -> None:
    """Leave what an interruption after some blocks of two photos leaves."""
    contents = json.loads((folder / CONTENTS).read_text())
    records = contents.pop("records")
    lines = [contents, *(records[n : n + 2] for n in range(0, 2 * blocks, 2))]
    (folder / JOURNAL).write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / CONTENTS).unlink()
    rows = bytearray((folder / ROWS).read_bytes())
    size = len(rows) // contents["shape"][0]
    for number in range(2 * blocks, contents["shape"][0]):
        if not PHOTOS <= number < PHOTOS + 2 * blocks:
            rows[number * size : (number + 1) * size] = bytes(size)
    (folder / ROWS).write_bytes(rows)


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
