"""Test the trackers of a run: they receive its settings, numbers and figures."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from accelerate.tracking import LOGGER_TYPE_TO_CLASS
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from captioner.errors import ConfigError
from captioner.training.processes import Processes


def points_of(folder: Path, name: str) -> list[tuple[int, float]]:
    events = EventAccumulator(str(folder / "tensorboard" / "captioner")).Reload()
    return [(event.step, event.value) for event in events.Scalars(name)]


def test_tensorboard_has_curves_with_separate_tags_and_whole_images(tmp_path: Path):
    Image.new("RGB", (30, 20), "red").save(tmp_path / "dog.png")
    processes = Processes(tmp_path, ["tensorboard"])
    with processes.tracking({"training.lr": 0.1, "decoder.style": None}, step=0):
        processes.log({"epoch": 1, "step": 10, "CIDEr": 0.1, "signature": "words"})
        processes.log({"epoch": 2, "step": 15, "loss": 2.0}, "train/")
        processes.log_images({"dog": tmp_path / "dog.png"}, step=7)
    events = EventAccumulator(str(tmp_path / "tensorboard" / "captioner")).Reload()
    assert events.Tags()["scalars"] == ["CIDEr", "train/loss"]
    assert points_of(tmp_path, "train/loss") == [(15, 2.0)]
    (image,) = events.Images("samples/dog")
    assert (image.step, image.width, image.height) == (7, 30, 20)


def test_a_resumed_run_replaces_the_points_after_the_checkpoint(tmp_path: Path):
    for start, steps, loss in ((0, (5, 10, 15), 3.0), (10, (15, 20), 2.0)):
        processes = Processes(tmp_path, ["tensorboard"])
        with processes.tracking({}, step=start):
            for step in steps:
                processes.log({"epoch": 1, "step": step, "loss": loss})
        # TensorBoard reads the event files by name, and only the second in the name tells the
        # runs apart: the number after it sorts 10 before 9.
        time.sleep(1)
    assert points_of(tmp_path, "loss") == [(5, 3.0), (10, 3.0), (15, 2.0), (20, 2.0)]


def test_without_trackers_nothing_is_written(tmp_path: Path):
    processes = Processes(tmp_path)
    with processes.tracking({"training.lr": 0.1}, step=0):
        processes.log({"epoch": 1, "step": 10, "CIDEr": 0.1})
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("name", "expected"),
    [("wandb", "'wandb' is not installed"), ("all", "'all' is unknown"),
     ("curves", "'curves' is unknown; use any of aim, ")],
)  # fmt: skip
def test_unavailable_trackers(tmp_path: Path, name: str, expected: str):
    with pytest.raises(ConfigError, match=expected) as caught:
        Processes(tmp_path, [name])
    assert "\n" not in str(caught.value)


def test_a_tracker_that_cannot_be_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    class Tracker:
        requires_logging_directory = False

        def __init__(self, project: str, **given: object) -> None:
            raise KeyError("No API key configured")

    monkeypatch.setitem(LOGGER_TYPE_TO_CLASS, "tensorboard", Tracker)
    processes = Processes(tmp_path, ["tensorboard"])
    with (
        pytest.raises(ConfigError, match=r"tensorboard cannot be started .*No API key"),
        processes.tracking({}, step=0),
    ):
        pass
