"""Test the run folder: results that a resumed run will write again are deleted."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from PIL import Image

from captioner.caption_types import Caption
from captioner.data.example import Example
from captioner.errors import CheckpointError, DataError
from captioner.training.names import METRICS, STEPS
from captioner.training.run_folder import RunFolder, read_rows
from captioner.training.validation import Sentence


@pytest.fixture
def folder(configure: Any, tmp_path: Path) -> RunFolder:
    (tmp_path / "run").mkdir()
    return RunFolder(tmp_path / "run", configure())


def row(epoch: int) -> dict[str, float]:
    return {"epoch": epoch, "step": 10 * epoch, "loss": 1 / epoch, "CIDEr": 0.1 * epoch}


def sentence(path: Path, colour: str) -> Sentence:
    path.parent.mkdir(exist_ok=True)
    Image.new("RGB", (20, 10), colour).save(path)
    caption = Caption(
        words=("a", colour),
        log_probs=np.full(2, -1, np.float32),
        alphas=np.full((2, 2, 2), 0.25, np.float32),
        gates=np.ones(2, np.float32),
        log_prob=-2.5,
    )
    return Sentence(Example(1, path, ("a photo",)), caption)


def test_all_resolved_settings_are_saved(folder: RunFolder, configure: Any):
    folder.open(0)
    resolved = json.loads(json.dumps(asdict(configure())))  # tuples become lists, as in YAML
    assert yaml.safe_load((folder.path / "config.yaml").read_text()) == resolved


def test_an_incomplete_last_line_is_ignored(folder: RunFolder):
    for step in (20, 40, 60):
        folder.append(STEPS, {"epoch": 1, "step": step, "loss": 0.5})
    with (folder.path / "steps.jsonl").open("a") as file:
        file.write('{"epoch": 1, "st')
    assert [point["step"] for point in read_rows(folder.path / STEPS)] == [20, 40, 60]
    folder.open(0, 40)
    assert [point["step"] for point in read_rows(folder.path / STEPS)] == [20, 40]
    folder.open(0, fresh=True)
    assert read_rows(folder.path / STEPS) == []


def test_undefined_values_are_null_in_json(folder: RunFolder):
    folder.append(METRICS, row(1) | {"agreement": float("nan")})
    text = (folder.path / METRICS).read_text()
    assert json.loads(text, parse_constant=pytest.fail)["agreement"] is None
    earlier = text.replace("null", "NaN")  # as older versions wrote it
    (folder.path / METRICS).write_text(earlier)
    assert read_rows(folder.path / METRICS) == [row(1) | {"agreement": None}]


def test_metrics_and_samples_after_the_checkpoint_are_deleted(folder: RunFolder):
    for epoch in (1, 2, 3):
        folder.append(METRICS, row(epoch))
        folder.add_samples(epoch, [])
    folder.best.mkdir()
    folder.open(2)
    assert read_rows(folder.path / METRICS) == [row(1), row(2)]
    samples = folder.path / "samples"
    assert sorted(path.name for path in samples.iterdir()) == ["epoch_001", "epoch_002"]
    assert folder.best.is_dir()
    folder.open(0, fresh=True)
    assert read_rows(folder.path / METRICS) == []
    assert not list(samples.iterdir())
    assert not folder.best.exists()


def test_samples_are_saved_and_listed(folder: RunFolder, tmp_path: Path):
    red, blue = (sentence(tmp_path / "photos" / f"{c}.png", c) for c in ("red", "blue"))
    figures = folder.add_samples(7, [red, blue])
    samples = folder.path / "samples" / "epoch_007"
    assert {file.name for file in samples.iterdir()} == {"red.png", "blue.png", "captions.txt"}
    text = (samples / "captions.txt").read_text()
    assert text == "red.png\ta red\ta photo\nblue.png\ta blue\ta photo\n"
    assert figures == {colour: samples / f"{colour}.png" for colour in ("red", "blue")}
    with Image.open(samples / "red.png") as picture:
        assert picture.width > 100


def test_samples_with_the_same_name_do_not_overwrite_each_other(folder: RunFolder, tmp_path: Path):
    names = ("a/1.png", "b/1.png", "a/1.bmp")
    folder.add_samples(1, [sentence(tmp_path / name, "red") for name in names])
    assert len(list((folder.path / "samples" / "epoch_001").glob("*.png"))) == 3


def test_a_second_run_in_the_same_folder_is_refused(folder: RunFolder, tmp_path: Path):
    with folder.locked(), pytest.raises(DataError, match="another process is writing to"):
        folder.locked().__enter__()
    (tmp_path / "file").touch()
    folder.path = tmp_path / "file" / "run"
    with pytest.raises(CheckpointError, match="Not a directory"):
        folder.locked().__enter__()


def test_damaged_metrics_are_one_line(folder: RunFolder):
    folder.append(METRICS, row(1))
    (folder.path / METRICS).write_text("{broken\n")
    with pytest.raises(CheckpointError, match=r"metrics\.jsonl is damaged"):
        read_rows(folder.path / METRICS)
