"""Two processes (gloo) against one: same gradients, scores and files."""

from __future__ import annotations

import copy
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import training_jobs
import yaml
from safetensors.torch import load_file

pytestmark = pytest.mark.slow

SELF_CRITICAL = ["training.objective=self_critical", "self_critical.max_length=6"]
CHANGES: dict[str, list[str]] = {
    "true captions": [],
    "in parts": ["training.micro_batch=1"],
    "encoder learns": ["encoder.finetune_from=layer4"],
    "self-critical": [*SELF_CRITICAL, "--init_from", "first/best"],
    "reading": ["training.reading=0.5"],
}
EPOCHS = 4


def launch(jobs: training_jobs.Jobs) -> None:
    """Run jobs in two processes, all in one launch, since launching is slow."""
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [sys.executable, *command, training_jobs.__file__, json.dumps(jobs)],
        capture_output=True,
        text=True,
        timeout=1800,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.fixture(scope="module")
def runs(
    training_settings: dict[str, Any],
    tmp_path_factory: pytest.TempPathFactory,
) -> Path:
    """A folder with the results of all jobs.

    Four photos with two or three captions; batches of three are split unevenly.
    """
    folder = tmp_path_factory.mktemp("distributed")
    settings = copy.deepcopy(training_settings)
    settings["decoder"]["dropout"] = 0.0
    settings["training"] = {
        "batch_size": 3, "epochs": 2, "lr": 1e-2, "warmup_steps": 1, "precision": "fp32",
        "ema_decay": 0.5, "select": "loss",
    }  # fmt: skip
    settings["search"]["min_length"] = 1  # runs with only empty captions fail
    (folder / "config.yaml").write_text(yaml.safe_dump(settings))

    def compared(processes: int) -> training_jobs.Jobs:
        longer = [
            *(f"training.epochs={EPOCHS}", "training.patience=0"),
            *("--init_from", "first/best", "training.initial_share=0.5"),
            *("training.sharpen_attention=2", "training.reading=0.1"),
        ]
        return [
            *(("gradients", f"{name} {processes}", ["config.yaml", *changes])
              for name, changes in CHANGES.items()),
            ("train_double", f"run {processes}", ["config.yaml", *longer]),
        ]  # fmt: skip

    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        short = ["config.yaml", "training.epochs=1"]
        training_jobs.run([("train", "first", short), *compared(1)])
        launch(
            [
                *compared(2),
                ("train", "straight", ["config.yaml"]),
                ("interrupt", "stopped", ["config.yaml"]),
                ("train", "stopped", ["config.yaml", "--resume"]),
            ]
        )
    return folder


@pytest.mark.parametrize("name", CHANGES)
def test_two_processes_give_the_gradients_of_one(runs: Path, name: str) -> None:
    one, two = (load_file(runs / f"{name} {processes}.safetensors") for processes in (1, 2))
    assert one.keys() == two.keys()
    learns = any(parameter.startswith("encoder") for parameter in one)
    assert learns == (name == "encoder learns")
    largest = max(float(gradient.norm()) for gradient in one.values())
    for parameter, gradient in one.items():
        assert gradient.dtype == torch.float64
        difference = float((two[parameter] - gradient).norm())
        allowed = 1e-9 * max(float(gradient.norm()), 1e-3 * largest)
        assert difference <= allowed, parameter
    assert largest > 0


def test_two_processes_train_and_validate_like_one(runs: Path) -> None:
    """Equal losses, validation scores and final weights over all epochs, so equal batches."""
    rows, states = [], []
    for processes in (1, 2):
        folder = runs / f"run {processes}"
        lines = (folder / "metrics.jsonl").read_text().splitlines()
        rows.append([json.loads(line) for line in lines])
        states.append(load_file(folder / "state.safetensors"))
        assert sorted(path.name for path in folder.iterdir()) == [
            "best", "config.yaml", "metrics.jsonl", "samples", "state.safetensors", "steps.jsonl",
            "tensorboard",
        ]  # fmt: skip
        assert len(list((folder / "tensorboard" / "captioner").glob("events.out.*"))) == 1
    assert len(rows[0]) == EPOCHS
    assert rows[0][-1]["Bleu_1"] > 0  # the captions are not empty
    for one, two in zip(*rows, strict=True):
        for name in ("loss", "val_loss", "perplexity"):
            assert two.pop(name) == pytest.approx(one.pop(name), rel=1e-9)
        del one["seconds"], two["seconds"]
        assert one == two
    one, two = states
    assert one.keys() == two.keys()
    assert one["model.decoder.attention.scorer.key.bias"].dtype == torch.float64
    for name, tensor in one.items():
        torch.testing.assert_close(two[name], tensor, rtol=1e-9, atol=1e-11, msg=name)


def test_two_processes_continue_a_run_exactly(runs: Path) -> None:
    straight, stopped = (
        load_file(runs / name / "state.safetensors") for name in ("straight", "stopped")
    )
    assert straight.keys() == stopped.keys()
    assert not [name for name in straight if not torch.equal(straight[name], stopped[name])]
