"""Fixtures: eight photos of coloured squares, and the config of a tiny model."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from PIL import Image, ImageDraw
from tiny_data import run_settings, write_captions

from captioner.options import TrainConfig
from captioner.schema import build_options
from captioner.training.loop import start
from captioner.training.setup import prepare

COLOURS = ("red", "lime", "blue", "yellow", "cyan", "magenta", "white", "gray")


@pytest.fixture(scope="session")
def squares(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with photos/ and captions.json, one caption per photo: "a red square" ..."""
    folder = tmp_path_factory.mktemp("squares")
    (folder / "photos").mkdir()
    for colour in COLOURS:
        photo = Image.new("RGB", (64, 48), "black")
        ImageDraw.Draw(photo).rectangle((12, 4, 52, 44), fill=colour)
        photo.save(folder / "photos" / f"{colour}.png")
    captions = {f"{colour}.png": [f"A {colour} square."] for colour in COLOURS}
    write_captions(folder / "captions.json", captions)
    return folder


@pytest.fixture
def two_files(squares: Path, tmp_path: Path) -> tuple[str, str]:
    """Captions for four training photos and for four validation photos."""
    whole = json.loads((squares / "captions.json").read_text())
    files = []
    for name, half in (("train", slice(0, 4)), ("val", slice(4, 8))):
        part = {key: value[half] for key, value in whole.items()}
        file = tmp_path / f"{name}.json"
        file.write_text(json.dumps(part))
        files.append(str(file))
    return files[0], files[1]


@pytest.fixture(autouse=True)
def _few_photos(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a reading learn words that occur in any photo."""
    monkeypatch.setattr("captioner.training.reading.MIN_PHOTOS", 1)


Configure = Callable[..., TrainConfig]


def _configure(squares: Path, run_folder: Path, **changes: Any) -> TrainConfig:
    settings = run_settings(
        squares / "captions.json", squares / "photos",
        decoder={"embed_dim": 16, "hidden_dim": 16, "dropout": 0.2},
        training={
            "epochs": 3, "batch_size": 3, "lr": 1e-2, "warmup_steps": 2, "precision": "fp32",
            "sample_images": 0, "save_every": 1000,
        },
    )  # fmt: skip
    return build_options(TrainConfig, settings, {"run_folder": str(run_folder)}, changes)


@pytest.fixture
def configure(squares: Path, tmp_path: Path) -> Configure:
    """A config for the squares: ``configure(training={"epochs": 3}, init_from=...)``."""
    return partial(_configure, squares, tmp_path / "run")


@pytest.fixture(scope="session")
def first_stage(squares: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The folder of a model that was trained for one epoch."""
    folder = tmp_path_factory.mktemp("first_stage")
    start(prepare(_configure(squares, folder, training={"epochs": 1})), folder, resume=False)
    return str(folder / "best")
