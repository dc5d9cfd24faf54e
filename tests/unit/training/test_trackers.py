"""Curves and images in TensorBoard; unknown trackers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from captioner.errors import ConfigError
from captioner.training import trackers
from captioner.training.run import METRICS, STEPS, RunFolder
from captioner.training.trackers import Trackers


@pytest.fixture
def folder(configure: Any, tmp_path: Path) -> RunFolder:
    (tmp_path / "run").mkdir()
    return RunFolder(tmp_path / "run", configure())


def row(epoch: int) -> dict[str, Any]:
    return {"epoch": epoch, "step": 10 * epoch, "CIDEr": 0.1 * epoch, "signature": "words"}


def events_of(folder: RunFolder) -> EventAccumulator:
    return EventAccumulator(str(folder.path / "tensorboard")).Reload()


def test_training_curves_have_separate_tags(folder: RunFolder):
    folder.append(METRICS, row(1))
    folder.append(STEPS, {"epoch": 1, "step": 5, "loss": 3.0})
    with Trackers(["tensorboard"], folder) as trackers:
        trackers.log({"epoch": 2, "step": 15, "loss": 2.0}, "train/")
    events = events_of(folder)
    assert events.Tags()["scalars"] == ["CIDEr", "train/loss"]
    points = [(event.step, event.value) for event in events.Scalars("train/loss")]
    assert points == [(5, 3.0), (15, 2.0)]


def test_images_keep_their_size(folder: RunFolder, tmp_path: Path):
    Image.new("RGB", (30, 20), "red").save(tmp_path / "dog.png")
    with Trackers(["tensorboard"], folder) as trackers:
        trackers.log_images({"dog": tmp_path / "dog.png"}, step=7)
    (image,) = events_of(folder).Images("samples/dog")
    assert (image.step, image.width, image.height) == (7, 30, 20)


@pytest.mark.parametrize(
    ("name", "expected"),
    [("wandb", "'wandb' is not installed"), ("all", "'all' is unknown"),
     ("curves", "'curves' is unknown; use any of aim, ")],
)  # fmt: skip
def test_unavailable_trackers(folder: RunFolder, name: str, expected: str):
    with pytest.raises(ConfigError, match=expected) as caught:
        Trackers([name], folder)
    assert "\n" not in str(caught.value)


def test_a_tracker_that_cannot_be_started(folder: RunFolder, monkeypatch: pytest.MonkeyPatch):
    class Tracker:
        requires_logging_directory = False

        def __init__(self, project: str) -> None:
            raise KeyError("No API key configured")

    monkeypatch.setitem(trackers.LOGGER_TYPE_TO_CLASS, "tensorboard", Tracker)
    with pytest.raises(ConfigError, match=r"tensorboard cannot be started .*No API key"):
        Trackers(["tensorboard"], folder).__enter__()
