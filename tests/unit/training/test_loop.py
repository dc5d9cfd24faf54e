"""Test the training loop: it learns, and an interrupted run resumes exactly."""

from __future__ import annotations

import json
import math
import os
import shutil
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from captioner.cli.main import SOME_FAILED, main
from captioner.data.coco import read_captions
from captioner.errors import CheckpointError, ImageError
from captioner.evaluation.references import DocumentFrequencies, count_frequencies
from captioner.inference.names import FREQUENCIES, WEIGHTS
from captioner.inference.stored_model import StoredModel
from captioner.options import TrainConfig
from captioner.training.loop import Trainer, start
from captioner.training.names import METRICS, STEPS
from captioner.training.run_folder import RunFolder, read_rows
from captioner.training.setup import prepare

Rows = list[dict[str, float]]


def train(config: TrainConfig, folder: Path, *, resume: bool = False) -> Trainer:
    trainer = Trainer(prepare(config), RunFolder(folder, config))
    if resume:
        with torch.no_grad():  # the checkpoint must restore everything
            for tensor in trainer.model.state_dict().values():
                tensor.zero_()
        trainer.state.load(trainer.folder.state)
    trainer.run()
    return trainer


def rows(folder: Path) -> Rows:
    return [{k: v for k, v in row.items() if k != "seconds"} for row in read_rows(folder / METRICS)]


def progress_of(folder: Path) -> dict[str, Any]:
    raw = (folder / "state.safetensors").read_bytes()
    header = json.loads(raw[8 : 8 + int.from_bytes(raw[:8], "little")])
    progress: dict[str, Any] = json.loads(header["__metadata__"]["progress"])
    progress["scaler"] = json.loads(header["__metadata__"]["scaler"])
    del progress["seconds"]
    return progress


def assert_same_run(one: Path, two: Path) -> None:
    assert rows(one) == rows(two)
    assert progress_of(one) == progress_of(two)
    for file in ("state.safetensors", "best/model.safetensors"):
        ones, twos = load_file(one / file), load_file(two / file)
        assert ones.keys() == twos.keys()
        assert not [name for name in ones if not torch.equal(ones[name], twos[name])]


@contextmanager
def signal_in_step(number: int, kind: int = signal.SIGINT, times: int = 1) -> Iterator[None]:
    """Send a signal before the step with this number, counted from 1."""
    whole, done = Trainer.step, 0

    def step(self: Trainer, *given: Any) -> None:
        nonlocal done
        done += 1
        if done == number:
            for _ in range(times):
                os.kill(os.getpid(), kind)
        whole(self, *given)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Trainer, "step", step)
        yield


# --- Resuming ---

AVERAGED = {
    "training": {"ema_decay": 0.5, "label_smoothing": 0.1},
    "data": {"horizontal_flip": True},
}
SELF_CRITICAL = {
    "training": {"objective": "self_critical", "sharpen_attention": 2.0, "initial_share": 0.5},
    "self_critical": {"max_length": 6},
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changes", "stops"),
    [
        pytest.param(AVERAGED, [2, 4], id="averaged and flipped; twice"),
        pytest.param(
            {"data": {"min_crop": 0.5, "color_jitter": 0.3, "workers": 1}},
            [3],
            id="augmented by a worker process; after the last step of the first epoch",
        ),
        pytest.param(
            {
                "training": {"encoder_lr": 1e-3, "reading": 0.1, "ema_decay": 0.5},
                "encoder": {"finetune_from": "layer4"},
            },
            [5],
            id="fine-tuned with its reading; in the middle of the second epoch",
        ),
        pytest.param(
            {
                "training": {"micro_batch": 2, "save_every": 2},
                "decoder": {"selection": "hard", "layer_norm": True},
            },
            [1, 1, 1],
            id="hard attention in micro-batches; three times",
        ),
        pytest.param(SELF_CRITICAL, [2, 4], id="self-critical"),
        pytest.param({"training": {"precision": "fp16"}}, [4], id="fp16"),
    ],
)
def test_a_resumed_run_equals_an_uninterrupted_one(
    configure: Any, first_stage: str, tmp_path: Path, changes: dict[str, Any], stops: list[int]
):
    if changes is SELF_CRITICAL:
        changes = {**changes, "init_from": first_stage}
    config = configure(**changes)
    straight, stopped = tmp_path / "straight", tmp_path / "stopped"
    train(config, straight)
    assert [row["epoch"] for row in rows(straight)] == [1, 2, 3]
    for number, steps in enumerate(stops):
        with signal_in_step(steps), pytest.raises(KeyboardInterrupt, match="saved in"):
            train(config, stopped, resume=number > 0)
        assert progress_of(stopped)["step"] == sum(stops[: number + 1])
    train(config, stopped, resume=True)
    assert_same_run(straight, stopped)


def test_a_killed_run_resumes_from_its_last_checkpoint(
    configure: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """The run is killed after it writes the second validation and before it saves the state."""
    config = configure()
    train(config, tmp_path / "straight")
    trainer = Trainer(prepare(config), RunFolder(tmp_path / "died", config))
    whole = trainer.save

    def save() -> None:
        if trainer.progress.epoch == 2:
            raise SystemError("no power")
        whole()

    monkeypatch.setattr(trainer, "save", save)
    with pytest.raises(SystemError, match="no power"):
        trainer.run()
    assert len(rows(tmp_path / "died")) == 2
    train(config, tmp_path / "died", resume=True)
    assert_same_run(tmp_path / "straight", tmp_path / "died")


def test_a_finished_run_is_not_changed(configure: Any, tmp_path: Path):
    config = configure()
    train(config, tmp_path)
    before = {file: file.read_bytes() for file in tmp_path.rglob("*") if file.is_file()}
    assert start(prepare(config), tmp_path, resume=True).epoch == 3
    assert {f: f.read_bytes() for f in tmp_path.rglob("*") if f.is_file()} == before


# --- Signals ---


def test_a_signal_stops_between_two_steps(configure: Any, tmp_path: Path):
    handlers = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    with signal_in_step(2, signal.SIGTERM), pytest.raises(KeyboardInterrupt):
        train(configure(), tmp_path)
    assert progress_of(tmp_path)["step"] == 2  # the running step is completed and saved
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == handlers


def test_a_signal_during_validation_stops_after_it(
    configure: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    whole = Trainer._score

    def validate(self: Trainer, stored: StoredModel) -> Any:
        os.kill(os.getpid(), signal.SIGTERM)
        return whole(self, stored)

    monkeypatch.setattr(Trainer, "_score", validate)
    with pytest.raises(KeyboardInterrupt):
        train(configure(), tmp_path)
    assert (progress_of(tmp_path)["epoch"], progress_of(tmp_path)["step"]) == (1, 3)
    assert len(rows(tmp_path)) == 1


def test_a_second_signal_stops_immediately(configure: Any, tmp_path: Path):
    handler = signal.getsignal(signal.SIGINT)
    with signal_in_step(2, times=2), pytest.raises(KeyboardInterrupt):
        train(configure(), tmp_path)
    assert progress_of(tmp_path)["step"] == 0  # the initial state
    assert signal.getsignal(signal.SIGINT) == handler


# --- Validation ---


def test_the_running_average_is_validated_and_saved(configure: Any, tmp_path: Path):
    trainer = train(configure(training={"epochs": 1, "ema_decay": 0.9}), tmp_path)
    assert trainer.state.average is not None
    kept = load_file(tmp_path / "best" / "model.safetensors")
    for name, tensor in trainer.state.average.module.state_dict().items():
        expected = tensor.half() if tensor.is_floating_point() else tensor
        assert torch.equal(kept[name], expected)
    raw = trainer.model.state_dict()["decoder.embedding.weight"].half()
    assert not torch.equal(kept["decoder.embedding.weight"], raw)


def test_a_share_of_the_initial_weights_is_validated_and_saved(
    configure: Any, first_stage: str, tmp_path: Path
):
    training = {"epochs": 1, "initial_share": 0.25, "reading": 0.1}
    learned = train(configure(init_from=first_stage, training=training), tmp_path)
    learned = learned.model.state_dict()
    initial = load_file(Path(first_stage) / "model.safetensors")
    for name, kept in load_file(tmp_path / "best" / "model.safetensors").items():
        if kept.is_floating_point():  # the reading is new
            own = initial.get(name, learned[name]).float()
            expected = 0.75 * learned[name] + 0.25 * own
            torch.testing.assert_close(kept, expected.half(), rtol=2e-3, atol=1e-6)


def test_a_second_stage_counts_its_own_captions(
    configure: Any, two_files: tuple[str, str], first_stage: str, tmp_path: Path
):
    """The initial model may have been trained on different photos."""
    files = [two_files[0]]
    config = configure(
        init_from=first_stage, data={"train_annotations": files}, training={"epochs": 1}
    )
    train(config, tmp_path / "second")
    expected = count_frequencies(read_captions(files))
    assert expected.documents == 4
    assert DocumentFrequencies.load(tmp_path / "second" / "best" / FREQUENCIES) == expected


def test_figures_that_cannot_be_drawn_do_not_end_a_run(
    configure: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
):
    def overlay(*given: Any, **options: Any) -> None:
        raise ValueError("Key backend: no such backend")

    monkeypatch.setattr("captioner.training.run_folder.overlay", overlay)
    train(configure(training={"epochs": 2, "sample_images": 1}), tmp_path)

    assert [row["epoch"] for row in rows(tmp_path)] == [1, 2]
    assert (tmp_path / "samples" / "epoch_002" / "captions.txt").is_file()
    assert capsys.readouterr().err.count("cannot be drawn (ValueError: Key backend") == 2


def test_samples_metrics_and_curves_are_written(configure: Any, tmp_path: Path):
    train(configure(training={"epochs": 1, "sample_images": 9, "limit_val": 2}), tmp_path)
    samples = tmp_path / "samples" / "epoch_001"
    assert {file.name for file in samples.iterdir()} == {"red.png", "lime.png", "captions.txt"}
    (row,) = rows(tmp_path)
    names = {"Bleu_1", "Bleu_2", "Bleu_3", "Bleu_4", "ROUGE_L", "CIDEr", "bad_endings"}
    names |= {"supported_words", "supported_captions", "agreement", "length"}
    names |= {"val_loss", "perplexity", "empty_captions"}
    assert row.keys() == {"epoch", "step", "loss", "lr"} | names
    assert (row["epoch"], row["step"]) == (1, 3)
    assert list((tmp_path / "tensorboard" / "captioner").glob("events.out.*"))
    assert (tmp_path / "config.yaml").is_file()


@pytest.mark.slow
def test_training_curves_have_a_point_every_few_steps(configure: Any, tmp_path: Path):
    """A point is the mean since the previous point. A resumed run continues the curve."""
    config = configure(training={"log_every": 2})
    train(config, tmp_path / "straight")
    points = read_rows(tmp_path / "straight" / STEPS)
    assert [(point["step"], point["epoch"]) for point in points] == [(2, 1), (4, 2), (6, 2), (8, 3)]
    train(configure(training={"log_every": 1}), tmp_path / "every")
    single = read_rows(tmp_path / "every" / STEPS)
    assert [point["step"] for point in single] == list(range(1, 10))
    norms = [point["gradient_norm"] for point in single]
    assert points[1]["gradient_norm"] == pytest.approx((norms[2] + norms[3]) / 2)
    assert points[1]["lr"] == single[3]["lr"]
    with signal_in_step(5), pytest.raises(KeyboardInterrupt):  # between two points
        train(config, tmp_path / "stopped")
    train(config, tmp_path / "stopped", resume=True)
    assert read_rows(tmp_path / "stopped" / STEPS) == points


def test_a_model_stays_the_best_if_training_makes_it_worse(
    configure: Any, first_stage: str, tmp_path: Path, capsys: Any
):
    """The initial model is validated once, before step 1. A resumed run remembers its score."""
    training = {"epochs": 2, "lr": 10.0, "select": "loss"}
    config = configure(init_from=first_stage, training=training)
    with signal_in_step(5), pytest.raises(KeyboardInterrupt):
        train(config, tmp_path)
    trainer = train(config, tmp_path, resume=True)

    assert trainer.progress.best_epoch == -1
    assert trainer.progress.best == trainer.progress.start
    first, kept = (load_file(Path(one) / WEIGHTS) for one in (first_stage, trainer.folder.best))
    assert all(torch.equal(kept[name], tensor) for name, tensor in first.items())
    err = capsys.readouterr().err
    assert err.count("start: validation loss") == 1
    assert err.count("; worse than at the start (validation loss ") == 2
    assert "warning: no epoch is better than the model of init_from (validation loss " in err


def test_a_model_that_gets_better_is_replaced(configure: Any, first_stage: str, tmp_path: Path):
    config = configure(init_from=first_stage, training={"epochs": 2, "select": "loss"})
    progress = train(config, tmp_path).progress
    assert progress.best_epoch >= 0
    assert progress.start is not None
    assert progress.best > progress.start


def test_the_loss_is_the_mean_over_words_in_nats(configure: Any, tmp_path: Path):
    """Uniform predictions have the loss ln V."""
    config = configure(training={"epochs": 1, "lr": 1e-30}, decoder={"dropout": 0.0})
    setup = prepare(config)
    with torch.no_grad():
        for parameter in setup.stored.model.decoder.word_output.parameters():
            parameter.zero_()
    start(setup, tmp_path, resume=False)
    expected = math.log(len(setup.stored.vocabulary))
    assert rows(tmp_path)[0]["loss"] == pytest.approx(expected, rel=1e-6)


# --- Feature caches ---


def test_a_validation_photo_without_features_fails_before_training(
    configure: Any, squares: Path, tmp_path: Path
):
    photos = tmp_path / "photos"
    shutil.copytree(squares / "photos", photos)
    (photos / "gray.png").write_bytes(b"no picture")
    config = configure(data={"images": [str(photos)]})
    path, features = tmp_path / "config.json", str(tmp_path / "features")
    path.write_text(json.dumps(asdict(config)))
    options = ["-o", features, "--dtype", "float32", "--batch-size", "1"]
    assert main(["prepare", "features", str(path), *options]) == SOME_FAILED
    config.data.features = features
    with pytest.raises(
        ImageError, match=r"gray\.png was unreadable when its features were computed"
    ):
        prepare(config)
    config.training.limit_val = 7  # without the last
    assert len(prepare(config).train) == 7


# --- Micro-batches, rewards ---


def gradients_of(trainer: Trainer) -> dict[str, torch.Tensor]:
    """Return the decoder's gradients in the first step."""
    found: dict[str, torch.Tensor] = {}

    def keep(*given: Any) -> None:
        named = trainer.model.decoder.named_parameters()
        found.update((name, parameter.grad.clone()) for name, parameter in named)

    trainer.state.optimizer.step = keep  # type: ignore[method-assign]
    trainer.model.train()
    trainer.step(next(iter(trainer.source.batches(0, 0))))
    return found


def test_micro_batches_give_the_gradients_of_the_whole_batch(configure: Any, tmp_path: Path):
    """Compare gradients, because Adam turns the rounding of a tiny gradient into a full step."""

    def gradients(micro_batch: int) -> dict[str, torch.Tensor]:
        config = configure(
            training={"batch_size": 8, "micro_batch": micro_batch, "clip_norm": 1e9},
            decoder={"dropout": 0.0},
        )
        setup = prepare(config)
        setup.stored.model.double()
        return gradients_of(Trainer(setup, RunFolder(tmp_path, config)))

    whole, parts = gradients(0), gradients(3)
    assert parts.keys() == whole.keys()
    for name, gradient in whole.items():
        torch.testing.assert_close(parts[name], gradient, rtol=1e-9, atol=1e-12, msg=name)


# --- fp16: the loss is scaled, and a step whose gradients overflow is left out ---


def fp16_trainer(configure: Any, folder: Path, **training: Any) -> Trainer:
    changed = {"save_every": 1, "epochs": 1, "log_every": 1, "precision": "fp16"} | training
    config = configure(training=changed, decoder={"dropout": 0.0})
    return Trainer(prepare(config), RunFolder(folder, config))


def overflowing(trainer: Trainer, steps: set[int]) -> None:
    """Make a gradient infinite in these steps."""

    def overflow(gradient: torch.Tensor) -> torch.Tensor:
        return torch.full_like(gradient, math.inf) if trainer.progress.step in steps else gradient

    trainer.model.decoder.word_output.bias.register_hook(overflow)


def test_fp16_has_the_gradients_of_fp32(configure: Any, tmp_path: Path):
    gradients, types = {}, {}
    for precision in ("fp32", "fp16"):
        trainer = fp16_trainer(configure, tmp_path / precision, precision=precision)

        def read(module: Any, inputs: Any, output: Any, precision=precision) -> None:
            types[precision] = output.dtype

        trainer.model.decoder.word_output.register_forward_hook(read)
        gradients[precision] = gradients_of(trainer)
    assert types == {"fp32": torch.float32, "fp16": torch.float16}
    for name, exact in gradients["fp32"].items():
        difference = (gradients["fp16"][name] - exact).norm()
        assert difference <= 0.01 * exact.norm() + 1e-6, name


def test_an_overflow_in_fp16_leaves_out_the_step_and_halves_the_scale(
    configure: Any, tmp_path: Path
):
    trainer = fp16_trainer(configure, tmp_path)
    overflowing(trainer, {1})
    weights = []
    update = trainer.state.scaler.update

    def updated() -> None:
        update()
        weights.append(trainer.model.decoder.word_output.weight.detach().clone())

    trainer.state.scaler.update = updated  # type: ignore[method-assign]
    trainer.run()
    assert [torch.equal(*pair) for pair in pairwise(weights)] == [True, False]
    assert trainer.state.scaler.get_scale() == 2.0**15
    curve = read_rows(tmp_path / STEPS)
    assert [point["gradient_norm"] > 0 for point in curve] == [True, False, True]
    resumed = fp16_trainer(configure, tmp_path, epochs=2)
    resumed.state.load(resumed.folder.state)
    assert resumed.state.scaler.get_scale() == 2.0**15
    resumed.run()
    state = progress_of(tmp_path)
    assert state["step"] == 6
    assert state["scaler"]["_growth_tracker"] == 4  # steps since the overflow


@pytest.mark.slow
def test_self_critical_training_raises_the_reward(configure: Any, first_stage: str, tmp_path: Path):
    config = configure(
        init_from=first_stage,
        training={"epochs": 2, "lr": 1e-2, "objective": "self_critical", "batch_size": 8},
        self_critical={"max_length": 6, "samples": 10},
    )
    setup = prepare(config)
    setup.train = setup.train * 30  # an epoch is 30 steps
    start(setup, tmp_path / "second", resume=False)
    found = rows(tmp_path / "second")
    assert found[-1]["reward"] > 1.2 * found[0]["reward"] > 0
    assert all(row["reward_signature"].startswith("cider-d:1|bleu-4:0|end:yes") for row in found)
    assert all(0 <= row["sampled_bad_endings"] <= 1 for row in found)


@pytest.mark.parametrize("what", ["loss", "gradient norm"])
def test_a_run_that_diverges_stops_before_anything_is_saved(
    configure: Any, tmp_path: Path, what: str
):
    config = configure(training={"save_every": 1, "epochs": 1})
    trainer = Trainer(prepare(config), RunFolder(tmp_path, config))
    whole, bias = trainer.step, trainer.model.decoder.word_output.bias

    def step(*given: Any) -> None:
        if trainer.progress.step == 1 and what == "loss":
            with torch.no_grad():
                bias.fill_(math.nan)
        whole(*given)

    trainer.step = step  # type: ignore[method-assign]
    if what == "gradient norm":
        overflowing(trainer, {1})
    with pytest.raises(
        CheckpointError, match=rf"the {what} is (inf|nan) by step 2 of 3 .*--resume"
    ):
        trainer.run()
    assert progress_of(tmp_path)["step"] == 1
    saved = load_file(tmp_path / "state.safetensors")
    assert all(tensor.isfinite().all() for tensor in saved.values())
