"""``captioner train`` as a user runs it: how runs end, and what resuming refuses."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from PIL import Image

from captioner.cli.main import FAILED, OK, main

COLOURS = ("red", "lime", "blue", "yellow")

Train = Callable[..., int]


@pytest.fixture
def train(tmp_path: Path) -> Train:
    """``train("--training.lr", "0")``: train a tiny model to name the colour of four photos.

    Each colour is less frequent than the end token, so an untrained model gives empty captions.
    """
    images, annotations = [], []
    (tmp_path / "photos").mkdir()
    for number, colour in enumerate(COLOURS, 1):
        Image.new("RGB", (48, 48), colour).save(tmp_path / "photos" / f"{colour}.png")
        images.append({"id": number, "file_name": f"{colour}.png"})
        annotations.append({"id": number, "image_id": number, "caption": colour})
    captions = tmp_path / "captions.json"
    captions.write_text(json.dumps({"images": images, "annotations": annotations}))
    settings: dict[str, Any] = {
        "run_folder": str(tmp_path / "run"),
        "data": {
            "train_annotations": [str(captions)], "val_annotations": [str(captions)],
            "images": [str(tmp_path / "photos")], "vocabulary_threshold": 1, "workers": 0,
        },
        "encoder": {"name": "timm/test_resnet", "weights": "none", "image_size": 48},
        "decoder": {"embed_dim": 16, "hidden_dim": 16, "attention_dim": 16, "dropout": 0.0},
        "training": {
            "epochs": 2, "batch_size": 2, "lr": 0.05, "warmup_steps": 0, "precision": "fp32",
            "sample_images": 0, "trackers": [],
        },
        "search": {"beam_size": 1, "max_length": 4},
    }  # fmt: skip
    config = tmp_path / "config.yaml"
    config.write_text(yaml.safe_dump(settings))
    return lambda *options: main(["train", str(config), *options])


def test_a_run_whose_best_model_gives_empty_captions_fails(
    train: Train, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    untrained = ("--training.lr", "0", "--training.epochs", "1", "--force")
    assert train(*untrained) == FAILED
    out, err = capsys.readouterr()
    assert out == f"best CIDEr 0.0 in epoch 1: {tmp_path / 'run' / 'best'}\n"
    assert err.splitlines()[-1] == (
        "captioner: the best model is of no use: all captions of the 4 validation photos are "
        "empty; raise training.epochs or training.lr, or give init_from"
    )
    assert train(*untrained, "--training.select", "loss") == FAILED
    assert "are empty" in capsys.readouterr().err
    assert train(*untrained, "--training.limit_val", "1") == FAILED
    last = capsys.readouterr().err.splitlines()[-1]
    assert "no model could be selected: the CIDEr of a single validation photo is always 0" in last


def test_resuming_a_finished_run_repeats_its_result(
    train: Train, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    longer = ("--training.epochs", "15", "--training.patience", "0")
    assert train(*longer) == OK
    found = capsys.readouterr().out
    assert train(*longer, "--resume") == OK
    out, err = capsys.readouterr()
    assert out == found  # names the best model again
    assert err.splitlines()[-1] == (
        "already complete: 15 of 15 epochs; to continue, give a larger --training.epochs"
    )
    assert train(*longer, "--training.epochs", "16", "--resume") == OK
    assert "already complete" not in capsys.readouterr().err
    for rows in ("metrics.jsonl", "steps.jsonl"):  # epochs of two steps have a point each
        assert len((tmp_path / "run" / rows).read_text().splitlines()) == 16
