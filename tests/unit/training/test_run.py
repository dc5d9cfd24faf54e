"""The run folder and the training state: exact, atomic and without pickle."""

from __future__ import annotations

import errno
import json
import os
import pickle
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import yaml
from PIL import Image
from safetensors.numpy import load_file, save_file
from torch.optim import AdamW
from torch.optim.swa_utils import AveragedModel

from captioner.caption import Caption
from captioner.data.coco import CaptionedImage
from captioner.errors import CheckpointError
from captioner.model.captioner import CaptionModel
from captioner.model.encoder import Encoder
from captioner.model.preprocessing import Preprocessing
from captioner.options import DecoderConfig, TrainingConfig
from captioner.training.optim import make_average, make_optimizer
from captioner.training.run import (
    FORMAT_VERSION,
    Progress,
    RunFolder,
    load_state,
    read_steps,
    save_state,
)
from captioner.training.validation import Sentence

PROGRESS = Progress(3, 2, 17, 0.1 + 0.2, 1, 1 / 3, 71, 12.5)


class Run(NamedTuple):
    model: CaptionModel
    average: AveragedModel | None
    optimizer: AdamW

    def train(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        for _ in range(2):
            pixels = torch.randint(256, (2, 48, 48, 3), generator=generator).byte()
            tokens = torch.tensor([[[1, 4, 5, 2]], [[1, 5, 2, 0]]])
            self.model(pixels, tokens).cross_entropy.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            if self.average is not None:
                self.average.update_parameters(self.model)


def build(
    *, hidden_dim: int = 8, finetune_from: str | None = "layer4", ema_decay: float = 0.9
) -> Run:
    config = DecoderConfig(embed_dim=8, hidden_dim=hidden_dim, attention_dim=8, dropout=0.0)
    model = CaptionModel(Encoder("timm/test_resnet"), config, Preprocessing(48), 7)
    model.encoder.finetune_from(finetune_from, 48)
    model.encoder.to(memory_format=torch.channels_last)  # as in a run
    optimizer = make_optimizer(model, TrainingConfig())
    return Run(model, make_average(model, ema_decay), optimizer)


@pytest.fixture
def run() -> Run:
    torch.manual_seed(1)
    run = build()
    run.train(1)
    return run


@pytest.fixture
def state(run: Run, tmp_path: Path) -> Path:
    path = tmp_path / "state.safetensors"
    save_state(path, PROGRESS, *run)
    return path


def everything(run: Run) -> dict[str, torch.Tensor]:
    tensors = {f"model {k}": v for k, v in run.model.state_dict().items()}
    if run.average is not None:
        tensors |= {f"average {k}": v for k, v in run.average.state_dict().items()}
    for number, moments in run.optimizer.state_dict()["state"].items():
        tensors |= {f"optimizer {number} {k}": v for k, v in moments.items()}
    return tensors


def assert_same(one: Run, two: Run) -> None:
    ones, twos = everything(one), everything(two)
    assert ones.keys() == twos.keys()
    differing = [name for name in ones if not torch.equal(ones[name], twos[name])]
    assert not differing
    assert all(ones[name].dtype == twos[name].dtype for name in ones)


def one_line(caught: pytest.ExceptionInfo[CheckpointError]) -> str:
    message = str(caught.value)
    assert "\n" not in message
    return message


# --- Round trip ---


def test_a_state_is_restored_exactly(run: Run, state: Path):
    torch.manual_seed(2)
    fresh = build()
    assert load_state(state, *fresh) == PROGRESS
    assert any(name.startswith("optimizer") for name in everything(run))
    assert_same(run, fresh)
    run.train(3)
    fresh.train(3)  # training continues identically
    assert_same(run, fresh)


def test_moments_have_the_memory_layout_of_their_weights(state: Path):
    """AdamW's fused step pairs elements by memory offset, so strides must match."""
    fresh = build()
    load_state(state, *fresh)
    for parameter, moments in fresh.optimizer.state.items():
        for key in ("exp_avg", "exp_avg_sq"):
            assert moments[key].stride() == parameter.stride()


def test_without_an_average(tmp_path: Path):
    run, fresh = build(ema_decay=0), build(ema_decay=0)
    run.train(1)
    save_state(tmp_path / "s", PROGRESS, *run)
    load_state(tmp_path / "s", *fresh)
    assert_same(run, fresh)


def test_before_the_first_step(tmp_path: Path):
    run, fresh = build(), build()
    save_state(tmp_path / "s", Progress(), *run)
    assert load_state(tmp_path / "s", *fresh) == Progress()
    assert_same(run, fresh)


def test_learning_rates_come_from_the_config(run: Run, state: Path):
    fresh = build()
    for group in fresh.optimizer.param_groups:
        group["peak_lr"] = 0.125
    load_state(state, *fresh)
    assert {group["peak_lr"] for group in fresh.optimizer.param_groups} == {0.125}


def test_nothing_is_pickled(state: Path, monkeypatch: pytest.MonkeyPatch):
    arrays = load_file(state)  # NumPy's reader: no torch, no pickle
    assert {name.split(".")[0] for name in arrays} == {"model", "average", "optimizer"}
    raw = state.read_bytes()
    end = 8 + int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8:end])  # the file is a JSON header and raw tensors
    sizes = [entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"]
    assert len(raw) == end + max(sizes)

    def refuse(*args: object, **kwargs: object) -> None:
        raise AssertionError("unpickled")

    monkeypatch.setattr(pickle, "Unpickler", refuse)
    monkeypatch.setattr(torch, "load", refuse)
    load_state(state, *build())


# --- Invalid files ---


@pytest.mark.parametrize("kept", [0.0, 0.001, 0.5, 0.999])
def test_a_truncated_file(state: Path, kept: float):
    raw = state.read_bytes()
    state.write_bytes(raw[: int(len(raw) * kept)])
    with pytest.raises(CheckpointError, match="cannot read") as caught:
        load_state(state, *build())
    assert str(state) in one_line(caught)


def test_a_missing_file_and_a_folder(tmp_path: Path):
    for path in (tmp_path / "none", tmp_path):
        with pytest.raises(CheckpointError, match="cannot read") as caught:
            load_state(path, *build())
        one_line(caught)


@pytest.mark.parametrize(
    "metadata",
    [
        None,
        {"format": "pt"},
        {"format_version": "1", "progress": "{}"},
        {"format_version": "1.0"},
        {"format_version": "one"},
    ],
)
def test_a_file_of_another_program(tmp_path: Path, metadata: dict[str, str] | None):
    save_file({"weight": np.zeros(3, np.float32)}, tmp_path / "s", metadata)
    with pytest.raises(CheckpointError, match=r"not a checkpoint .* --force") as caught:
        load_state(tmp_path / "s", *build())
    one_line(caught)


@pytest.mark.parametrize("progress", [None, "no JSON", "[]", '{"epoch": 1, "unheard_of": 2}'])
def test_invalid_progress(state: Path, progress: str | None):
    metadata = {"format_version": str(FORMAT_VERSION)} | (
        {} if progress is None else {"progress": progress}
    )
    save_file(load_file(state), state, metadata)
    with pytest.raises(CheckpointError, match=r"not a checkpoint .* --force") as caught:
        load_state(state, *build())
    one_line(caught)


@pytest.mark.parametrize(
    "other",
    [
        pytest.param({"hidden_dim": 4}, id="sizes"),
        pytest.param({"finetune_from": None}, id="fewer trainable stages"),
        pytest.param({"finetune_from": "layer3"}, id="more trainable stages"),
    ],
)
def test_a_state_with_other_settings(state: Path, other: dict[str, int | str | None]):
    with pytest.raises(CheckpointError, match="with other settings") as caught:
        load_state(state, *build(**other))  # type: ignore[arg-type]
    one_line(caught)


def test_a_state_without_the_average(tmp_path: Path):
    save_state(tmp_path / "s", PROGRESS, *build(ema_decay=0))
    with pytest.raises(CheckpointError, match="with other settings"):
        load_state(tmp_path / "s", *build())


# --- Writing ---


@pytest.mark.parametrize("where", ["fsync", "write", "replace"])
def test_a_full_disk_keeps_the_old_state(
    run: Run, state: Path, monkeypatch: pytest.MonkeyPatch, where: str
):
    def full(*args: object, **kwargs: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    before = state.read_bytes()
    run.train(4)
    owner = {"fsync": (os, "fsync"), "write": (Path, "open"), "replace": (Path, "replace")}[where]
    with monkeypatch.context() as patch:
        patch.setattr(*owner, full)
        with pytest.raises(CheckpointError, match=r"No space left .* unchanged; .*") as caught:
            save_state(state, Progress(), *run)
    assert str(state) in one_line(caught)
    assert state.read_bytes() == before
    assert [file.name for file in state.parent.iterdir()] == [state.name]
    assert load_state(state, *build()) == PROGRESS


# --- The run folder ---


@pytest.fixture
def folder(configure: Any, tmp_path: Path) -> RunFolder:
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
    return Sentence(CaptionedImage(1, path, ("a photo",)), caption)


def test_all_resolved_settings_are_saved(folder: RunFolder, configure: Any):
    folder.open(0)
    resolved = json.loads(json.dumps(asdict(configure())))  # tuples become lists, as in YAML
    assert yaml.safe_load(folder.config.read_text()) == resolved


def test_metrics_are_json_lines(folder: RunFolder):
    assert folder.rows() == []
    for epoch in (1, 2):
        folder.add_metrics(row(epoch))
    assert folder.rows() == [row(1), row(2)]
    assert [json.loads(line) for line in folder.metrics.read_text().splitlines()] == folder.rows()


def test_an_incomplete_last_line_is_ignored(folder: RunFolder):
    folder.path.mkdir()
    for step in (20, 40, 60):
        folder.add_steps({"epoch": 1, "step": step, "loss": 0.5})
    with folder.steps.open("a") as file:
        file.write('{"epoch": 1, "st')
    assert [point["step"] for point in read_steps(folder.path)] == [20, 40, 60]
    folder.open(0, 40)
    assert [point["step"] for point in read_steps(folder.path)] == [20, 40]
    folder.open(0, fresh=True)
    assert read_steps(folder.path) == []


def test_metrics_and_samples_after_the_checkpoint_are_deleted(folder: RunFolder):
    for epoch in (1, 2, 3):
        folder.add_metrics(row(epoch))
        folder.add_samples(epoch, [])
    folder.best.mkdir()
    folder.open(2)
    assert folder.rows() == [row(1), row(2)]
    samples = folder.path / "samples"
    assert sorted(path.name for path in samples.iterdir()) == ["epoch_001", "epoch_002"]
    assert folder.best.is_dir()
    folder.open(0, fresh=True)
    assert folder.rows() == []
    assert not list(samples.iterdir())
    assert not folder.best.exists()


def test_samples_are_saved_and_listed(folder: RunFolder, tmp_path: Path):
    red, blue = (sentence(tmp_path / "photos" / f"{c}.png", c) for c in ("red", "blue"))
    figures = folder.add_samples(7, [red, blue])
    samples = folder.path / "samples" / "epoch_007"
    assert {file.name for file in samples.iterdir()} == {"red.png", "blue.png", "captions.txt"}
    assert (samples / "captions.txt").read_text() == "red.png\ta red\nblue.png\ta blue\n"
    assert figures == {colour: samples / f"{colour}.png" for colour in ("red", "blue")}
    with Image.open(samples / "red.png") as picture:
        assert picture.width > 100


@pytest.mark.parametrize("other", ["b/1.png", "a/1.bmp"])
def test_samples_with_the_same_name_do_not_overwrite_each_other(
    folder: RunFolder, tmp_path: Path, other: str
):
    folder.add_samples(
        1, [sentence(tmp_path / "a/1.png", "red"), sentence(tmp_path / other, "blue")]
    )
    figures = list((folder.path / "samples" / "epoch_001").glob("*.png"))
    assert len(figures) == 2
