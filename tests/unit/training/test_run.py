"""Training state on disk: exact, whole or not at all, never pickled."""

from __future__ import annotations

import errno
import json
import os
import pickle
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file
from torch.optim import AdamW
from torch.optim.swa_utils import AveragedModel

from captioner.config import DecoderConfig, TrainingConfig
from captioner.data.preprocessing import Preprocessing
from captioner.errors import CheckpointError
from captioner.models.captioner import CaptionModel
from captioner.models.encoder import Encoder
from captioner.training.setup import make_average, make_optimizer
from captioner.training.state import FORMAT_VERSION, Progress, load_state, save_state

PROGRESS = Progress(3, 2, 17, 0.1 + 0.2, 1, 1 / 3, 71, 12.5)


class Run(NamedTuple):
    model: CaptionModel
    average: AveragedModel | None
    optimizer: AdamW

    def learn(self, seed: int) -> None:
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
    run.learn(1)
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


def test_everything_comes_back_exactly(run: Run, state: Path):
    torch.manual_seed(2)
    fresh = build()
    assert load_state(state, *fresh) == PROGRESS
    assert any(name.startswith("optimizer") for name in everything(run))
    assert_same(run, fresh)
    run.learn(3)
    fresh.learn(3)  # and goes on as the other does
    assert_same(run, fresh)


def test_moments_lie_in_memory_as_their_weights_do(state: Path):
    """AdamW's fused step walks both by address: other strides would mix the weights up."""
    fresh = build()
    load_state(state, *fresh)
    for parameter, moments in fresh.optimizer.state.items():
        for key in ("exp_avg", "exp_avg_sq"):
            assert moments[key].stride() == parameter.stride()


def test_without_an_average(tmp_path: Path):
    run, fresh = build(ema_decay=0), build(ema_decay=0)
    run.learn(1)
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
        group["highest_lr"] = 0.125
    load_state(state, *fresh)
    assert {group["highest_lr"] for group in fresh.optimizer.param_groups} == {0.125}


def test_nothing_is_pickled(state: Path, monkeypatch: pytest.MonkeyPatch):
    arrays = load_file(state)  # NumPy's reader: no torch, no pickle
    assert {name.split(".")[0] for name in arrays} == {"model", "average", "optimizer"}
    raw = state.read_bytes()
    end = 8 + int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8:end])  # the file is a JSON header and numbers
    sizes = [entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"]
    assert len(raw) == end + max(sizes)

    def refuse(*args: object, **kwargs: object) -> None:
        raise AssertionError("unpickled")

    monkeypatch.setattr(pickle, "Unpickler", refuse)
    monkeypatch.setattr(torch, "load", refuse)
    load_state(state, *build())


# --- Files that cannot be used ---


@pytest.mark.parametrize("kept", [0.0, 0.001, 0.5, 0.999])
def test_a_cut_file(state: Path, kept: float):
    raw = state.read_bytes()
    state.write_bytes(raw[: int(len(raw) * kept)])
    with pytest.raises(CheckpointError, match="cannot be read") as caught:
        load_state(state, *build())
    assert str(state) in one_line(caught)


def test_a_missing_file_and_a_folder(tmp_path: Path):
    for path in (tmp_path / "none", tmp_path):
        with pytest.raises(CheckpointError, match="cannot be read") as caught:
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
def test_a_foreign_file(tmp_path: Path, metadata: dict[str, str] | None):
    save_file({"weight": np.zeros(3, np.float32)}, tmp_path / "s", metadata)
    with pytest.raises(CheckpointError, match=r"not a checkpoint .* --force") as caught:
        load_state(tmp_path / "s", *build())
    one_line(caught)


@pytest.mark.parametrize("progress", [None, "no JSON", "[]", '{"epoch": 1, "unheard_of": 2}'])
def test_progress_that_is_not_ours(state: Path, progress: str | None):
    metadata = {"format_version": str(FORMAT_VERSION)} | (
        {} if progress is None else {"progress": progress}
    )
    save_file(load_file(state), state, metadata)
    with pytest.raises(CheckpointError, match="belongs to other settings") as caught:
        load_state(state, *build())
    one_line(caught)


@pytest.mark.parametrize(
    "other",
    [
        pytest.param({"hidden_dim": 4}, id="sizes"),
        pytest.param({"finetune_from": None}, id="fewer stages learn"),
        pytest.param({"finetune_from": "layer3"}, id="more stages learn"),
    ],
)
def test_the_state_of_other_settings(state: Path, other: dict[str, int | str | None]):
    with pytest.raises(CheckpointError, match="belongs to other settings") as caught:
        load_state(state, *build(**other))  # type: ignore[arg-type]
    one_line(caught)


def test_a_state_without_the_average_that_is_asked_for(tmp_path: Path):
    save_state(tmp_path / "s", PROGRESS, *build(ema_decay=0))
    with pytest.raises(CheckpointError, match="belongs to other settings"):
        load_state(tmp_path / "s", *build())


# --- Writing ---


@pytest.mark.parametrize("where", ["fsync", "write", "replace"])
def test_a_full_disk_keeps_the_old_state(
    run: Run, state: Path, monkeypatch: pytest.MonkeyPatch, where: str
):
    def full(*args: object, **kwargs: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    before = state.read_bytes()
    run.learn(4)
    owner = {"fsync": (os, "fsync"), "write": (Path, "open"), "replace": (Path, "replace")}[where]
    with monkeypatch.context() as patch:
        patch.setattr(*owner, full)
        with pytest.raises(CheckpointError, match=r"No space left .* unchanged; .*") as caught:
            save_state(state, Progress(), *run)
    assert str(state) in one_line(caught)
    assert state.read_bytes() == before
    assert [file.name for file in state.parent.iterdir()] == [state.name]
    assert load_state(state, *build()) == PROGRESS
