"""``captioner train`` as a user runs it: how runs end, and what resuming refuses."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from PIL import Image
from tiny_data import run_settings, write_captions

from captioner.cli.main import INTERRUPTED, OK, SOME_FAILED
from captioner.training.loop import Trainer

Train = Callable[..., tuple[int, str, str]]


@pytest.fixture
def train(tmp_path: Path, run: Callable[..., tuple[int, str, str]]) -> Train:
    """``train("training.lr=0")``: train a tiny model to name the colour of four photos.

    Each colour is less frequent than the end token, so an untrained model gives empty captions.
    """
    colours = ("red", "lime", "blue", "yellow")
    (tmp_path / "photos").mkdir()
    for colour in colours:
        Image.new("RGB", (48, 48), colour).save(tmp_path / "photos" / f"{colour}.png")
    captions = write_captions(tmp_path / "captions.json", {f"{one}.png": [one] for one in colours})
    settings = run_settings(
        captions, tmp_path / "photos",
        decoder={"embed_dim": 16, "hidden_dim": 16, "attention_dim": 16, "dropout": 0.0},
        training={
            "epochs": 2, "batch_size": 2, "lr": 0.05, "warmup_steps": 0, "precision": "fp32",
            "sample_images": 0, "trackers": [],
        },
        search={"beam_size": 1, "max_length": 4},
    )  # fmt: skip
    config = tmp_path / "config.yaml"
    config.write_text(yaml.safe_dump({"run_folder": str(tmp_path / "run"), **settings}))
    return lambda *options: run("train", config, *options)


def test_a_run_whose_best_model_gives_empty_captions_fails(
    train: Train, run: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    untrained = ("training.lr=1e-12", "training.epochs=1", "--force")
    code, out, err = train(*untrained)
    assert code == SOME_FAILED
    assert out == f"the best model (CIDEr 0.0, epoch 1) is in {tmp_path / 'run' / 'best'}\n"
    assert err.splitlines()[-1] == (
        "captioner: the best model is useless: all captions of the 4 validation photos are "
        "empty; raise training.epochs or training.lr, or set init_from"
    )
    code, out, err = run("caption", tmp_path / "photos" / "red.png", "--model", tmp_path / "run")
    assert (code, out) == (SOME_FAILED, "")
    assert "red.png: the model wrote an empty caption; add --min-length 1" in err
    code, _, err = train(*untrained, "training.select=loss")
    assert (code, "are empty" in err) == (SOME_FAILED, True)
    with monkeypatch.context() as patch:  # it prints a traceback if a process fails
        patch.setenv("TORCHELASTIC_RUN_ID", "1")
        code, _, err = train(*untrained, "training.select=loss")
        assert (code, "are empty" in err) == (OK, True)
    code, _, err = train(*untrained, "training.limit_val=1")
    assert code == SOME_FAILED
    assert "no model could be selected: the CIDEr of a single validation photo is always 0" in err


def test_resuming_a_finished_run_repeats_its_result(train: Train, run: Train, tmp_path: Path):
    longer, patient = "training.epochs=15", "training.patience=0"
    code, found, _ = train(longer, patient)
    assert code == OK
    code, out, err = train(longer, patient, "--resume")
    assert (code, out) == (OK, found)  # names the best model again
    assert err.splitlines()[-1] == (
        "already complete: 15 of 15 epochs; to continue, set a larger training.epochs"
    )
    code, _, err = train("training.epochs=16", patient, "--resume")
    assert (code, "already complete" in err) == (OK, False)
    code, _, err = run("train", "--run-folder", tmp_path / "run", "--resume")
    assert (code, "already complete: 16 of 16" in err) == (OK, True)  # with the saved settings
    for rows in ("metrics.jsonl", "steps.jsonl"):  # epochs of two steps have a point each
        assert len((tmp_path / "run" / rows).read_text().splitlines()) == 16


def test_ctrl_c_prints_how_to_continue(train: Train, tmp_path: Path, monkeypatch):
    monkeypatch.setattr(Trainer, "step", lambda *_: os.kill(os.getpid(), signal.SIGINT))
    code, _, err = train()
    saved = (
        f"captioner: the training state is saved in {tmp_path / 'run'}; to continue, run the same"
    )
    assert code == INTERRUPTED
    assert err.endswith(f"{saved} command with --resume\ncaptioner: interrupted\n")
