"""Test the training state: it is exact, atomic and not pickled, and settings must match."""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import pickle
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.numpy import load_file, save_file
from torch import nn

from captioner.errors import CheckpointError, ConfigError
from captioner.files import check_same
from captioner.model.caption_model import CaptionModel
from captioner.model.encoder import Encoder
from captioner.model.preprocessing import Preprocessing
from captioner.options import DecoderConfig, TrainingConfig
from captioner.training.optim import RunningAverage, make_optimizer
from captioner.training.setup import prepare
from captioner.training.state import Progress, TrainingState, resume_settings

PROGRESS = Progress(
    3, 2, 17, 0.1 + 0.2, 1, start=0.5, sums={"loss": 1 / 3}, settings={"seed": 0}, seconds=12.0
)


def build(hidden_dim: int = 8, ema_decay: float = 0.9) -> TrainingState:
    config = DecoderConfig(embed_dim=8, hidden_dim=hidden_dim, attention_dim=8, dropout=0.0)
    model = CaptionModel(Encoder("timm/test_resnet"), config, Preprocessing(48), 7)
    model.encoder.finetune_from("layer4", 48)
    model.encoder.to(memory_format=torch.channels_last)  # as in a run
    average = RunningAverage(model, ema_decay) if ema_decay else None
    optimizer, scaler = make_optimizer(model, TrainingConfig()), torch.amp.GradScaler("cpu")
    return TrainingState(model, average, optimizer, scaler, Progress(settings={"seed": 0}))


def train(state: TrainingState, seed: int) -> TrainingState:
    generator = torch.Generator().manual_seed(seed)
    for _ in range(2):
        pixels = torch.randint(256, (2, 48, 48, 3), generator=generator).byte()
        features = state.model.to_features(pixels)
        state.model.decoder.memory(features).summary.square().sum().backward()
        for parameter in state.model.decoder.parameters():
            if parameter.grad is None:
                parameter.grad = torch.ones_like(parameter)
        state.optimizer.step()
        state.optimizer.zero_grad()
        if state.average is not None:
            state.average.update_parameters(state.model)
    return state


@pytest.fixture
def saved(tmp_path: Path) -> tuple[TrainingState, Path]:
    torch.manual_seed(1)
    state = train(build(), 1)
    state.progress = dataclasses.replace(PROGRESS)
    state.save(tmp_path / "state.safetensors")
    return state, tmp_path / "state.safetensors"


def everything(state: TrainingState) -> dict[str, torch.Tensor]:
    tensors = {f"model {k}": v for k, v in state.model.state_dict().items()}
    if state.average is not None:
        tensors |= {f"average {k}": v for k, v in state.average.state_dict().items()}
    for number, moments in state.optimizer.state_dict()["state"].items():
        tensors |= {f"optimizer {number} {k}": v for k, v in moments.items()}
    return tensors


def assert_same(one: TrainingState, two: TrainingState) -> None:
    ones, twos = everything(one), everything(two)
    assert ones.keys() == twos.keys()
    assert not [name for name in ones if not torch.equal(ones[name], twos[name])]
    assert all(ones[name].dtype == twos[name].dtype for name in ones)
    assert one.progress == two.progress


def test_a_state_is_restored_exactly(saved: tuple[TrainingState, Path]):
    state, path = saved
    torch.manual_seed(2)
    fresh = build()
    fresh.load(path)
    assert any(name.startswith("optimizer") for name in everything(state))
    assert_same(state, fresh)
    assert_same(train(state, 3), train(fresh, 3))  # training continues identically
    for parameter, moments in fresh.optimizer.state.items():
        for key in ("exp_avg", "exp_avg_sq"):  # AdamW's fused step pairs them by memory offset
            assert moments[key].stride() == parameter.stride()


def test_learning_rates_come_from_the_config(saved: tuple[TrainingState, Path]):
    fresh = build()
    for group in fresh.optimizer.param_groups:
        group["peak_lr"] = 0.125
    fresh.load(saved[1])
    assert {group["peak_lr"] for group in fresh.optimizer.param_groups} == {0.125}


def test_nothing_is_pickled(saved: tuple[TrainingState, Path], monkeypatch: pytest.MonkeyPatch):
    arrays = load_file(saved[1])  # NumPy's reader: no torch, no pickle
    assert {name.split(".")[0] for name in arrays} == {"model", "average", "optimizer"}

    def refuse(*args: object, **kwargs: object) -> None:
        raise AssertionError("unpickled")

    monkeypatch.setattr(pickle, "Unpickler", refuse)
    monkeypatch.setattr(torch, "load", refuse)
    build().load(saved[1])


@pytest.mark.parametrize("kept", [0.0, 0.5, None])
def test_a_damaged_or_foreign_file_is_refused(
    saved: tuple[TrainingState, Path], kept: float | None
):
    path = saved[1]
    if kept is None:
        save_file(load_file(path), path, {"format": "pt"})
    else:
        raw = path.read_bytes()
        path.write_bytes(raw[: int(len(raw) * kept)])
    with pytest.raises(CheckpointError, match="cannot read the checkpoint") as caught:
        build().load(path)
    assert "\n" not in str(caught.value)


def test_a_full_disk_keeps_the_old_state(
    saved: tuple[TrainingState, Path], monkeypatch: pytest.MonkeyPatch
):
    def full(*args: object, **kwargs: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    state, path = saved
    before = path.read_bytes()
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(CheckpointError, match=r"No space left .* unchanged; .*"):
            train(state, 4).save(path)
    assert path.read_bytes() == before
    assert [file.name for file in path.parent.iterdir()] == [path.name]


def test_shared_tensors_and_weights_without_gradients_are_restored(tmp_path: Path):
    state, fresh = build(ema_decay=0.0), build(ema_decay=0.0)
    for one in (state, fresh):  # a module that is used twice, and one that is not used
        one.model.twice, one.model.unused = one.model.decoder.embedding, nn.Linear(2, 2)
        one.optimizer.add_param_group({"params": [*one.model.unused.parameters()]})
    train(state, 1).save(tmp_path / "state.safetensors")
    fresh.load(tmp_path / "state.safetensors")
    assert_same(train(state, 3), train(fresh, 3))


# --- What must match ---


def test_settings_must_match_unless_they_are_marked(configure: Any):
    settings = resume_settings(prepare(configure()))
    assert settings.keys() >= {
        "init_from", "data.max_words", "encoder.name", "decoder.hidden_dim", "training.seed",
        "self_critical.samples", "search.beam_size",
    }  # fmt: skip
    assert not settings.keys() & {
        "run_folder", "data.images", "data.workers", "encoder.recompute", "training.lr",
        "training.epochs", "training.micro_batch",
    }  # fmt: skip


@pytest.mark.parametrize("part", ["progress", "settings"])
def test_a_run_of_an_earlier_version_continues_if_it_can(
    saved: tuple[TrainingState, Path], part: str
):
    """Earlier versions had more settings and more fields in ``Progress``."""

    def rewrite(lr_scale: float, guidance: str) -> None:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata()
        progress = json.loads(metadata["progress"])
        progress |= {"lr_scale": lr_scale, "plateau": 2, "kept": {"1": 0.5}}
        progress["settings"] |= {"distillation.guidance": guidance, "self_critical.count_end": True}
        save_file(load_file(path), path, metadata | {"progress": json.dumps(progress)})

    path = saved[1]
    rewrite(1.0, "[]")
    build().load(path)

    changed = {"progress": (0.5, "[]"), "settings": (1.0, "[0.3]")}[part]
    rewrite(*changed)
    named = {"progress": "lr_scale 0.5", "settings": r"distillation.guidance \[0.3\]"}[part]
    with pytest.raises(CheckpointError, match=f"is from a run with {named}, which this version"):
        build().load(path)


def test_all_differences_are_named_in_one_line(configure: Any):
    setup = prepare(configure())
    held = json.loads(json.dumps(resume_settings(setup)))  # as in a checkpoint
    check_same("state", held, resume_settings(setup))
    setup.config.decoder.attention, setup.config.encoder.image_size = "scaled_dot", 256
    with pytest.raises(ConfigError) as caught:
        check_same("state", held, resume_settings(setup))
    assert str(caught.value) == (
        "cannot resume state: encoder.image_size was 48 and is now 256; decoder.attention was "
        "additive and is now scaled_dot; use the same options and inputs, or start over with "
        "--force, which replaces the earlier results"
    )


def test_other_captions_are_refused(configure: Any):
    setup = prepare(configure())
    held = resume_settings(setup)
    for part in ("train", "val"):
        other = dataclasses.replace(setup, **{part: getattr(setup, part)[:-1]})
        with pytest.raises(ConfigError, match=r"captions was \w+ and is now \w+; use"):
            check_same("state", held, resume_settings(other))


def test_another_model_to_read_again_is_refused(configure: Any, first_stage: str, tmp_path: Path):
    folder = str(shutil.copytree(first_stage, tmp_path / "first"))
    setup = prepare(configure(init_from=folder, training={"initial_share": 0.5}))
    held = resume_settings(setup)
    weights = tmp_path / "first" / "model.safetensors"
    save_file({"other": np.zeros(2)}, weights)
    with pytest.raises(ConfigError, match=r"models was \w+ and is now \w+; use"):
        check_same("state", held, resume_settings(setup))


# --- Which model is the best ---


@pytest.mark.parametrize(
    ("settings", "scores", "best_epoch", "ending"),
    [
        ({}, [0.3, 0.7, 0.5], 1, "3 of 3 epochs"),
        # Patience starts at the first score; until then the newest model is the best one.
        ({"epochs": 9, "patience": 2}, [0, 0, 0, 0.3, 0.2, 0.3], 3, "stopped early after"),
        ({"epochs": 9, "patience": 2, "select": "loss"}, [-3, -2, -2.5], 1, ""),
        ({"epochs": 9, "patience": 0}, [0.3, 0.1, 0.1], 0, ""),
        ({"epochs": 4, "patience": 1}, [0, 0, 0, 0], 3, "4 of 4 epochs"),
    ],
)
def test_best_model_and_ending(
    settings: dict[str, Any],
    scores: list[float],
    best_epoch: int,
    ending: str,
):
    config, progress = TrainingConfig(**{"epochs": 3, **settings}), Progress()
    for score in scores:
        assert progress.ending(config) == ""
        progress.add_score(score, config)
        progress.epoch += 1
    assert progress.best_epoch == best_epoch
    assert progress.ending(config).startswith(ending)
    assert bool(progress.ending(config)) == bool(ending)
