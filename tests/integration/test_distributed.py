"""Two processes (gloo) against one: same gradients, scores and files."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file

from captioner.cli.main import OK, main

pytestmark = pytest.mark.slow

# Train through the command line, in the default precision.
TRAIN = """
import json
import sys
from captioner.cli.main import main

for arguments in json.loads(sys.argv[1]):
    code = main(["train", *arguments])
    assert code == 0, arguments
"""

# In double precision, where a different order of summation is negligible.
DOUBLE = """
import json
import sys
import zlib
from pathlib import Path
from safetensors.torch import save_file
from captioner.cli.train import read
from captioner.training.run import RunFolder
from captioner.training.setup import prepare
from captioner.training.loop import Trainer

def double(arguments):
    config = read(arguments)[0]
    setup = prepare(config)
    setup.stored.model.double()
    return Trainer(setup, RunFolder(config.run_folder, config))

def save_gradients(trainer, target):
    gradients = {}

    def keep(parameters, norm):
        for name, parameter in trainer.model.named_parameters():
            if parameter.requires_grad:
                gradients[name] = parameter.grad.contiguous().clone()

    trainer.accelerator.clip_grad_norm_ = keep
    trainer.model.train()
    trainer.step(next(iter(trainer.source.batches(0, 0))))
    if trainer.accelerator.is_main_process:
        save_file(gradients, target)

def save_batches(trainer, target):
    steps = []
    batches = trainer.source.batches

    def keep(*arguments):
        for batch in batches(*arguments):
            steps.append([
                [image_id, zlib.crc32(pixels.numpy()), [token for token in caption if token]]
                for image_id, pixels, captions in zip(
                    batch.image_ids, batch.images, batch.tokens.tolist()
                )
                for caption in captions
                if any(caption)
            ])
            yield batch

    trainer.source.batches = keep
    trainer.run()
    Path(f"{target}.{trainer.accelerator.process_index}.json").write_text(json.dumps(steps))

for target, (job, arguments) in json.loads(sys.argv[1]).items():
    globals()[job](double(arguments), target)
"""


def run(processes: int, *arguments: object) -> str:
    """Run Python, or torchrun with several processes; return what it printed."""
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    command = [sys.executable, *(launch if processes > 1 else []), *map(str, arguments)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=1800, env=environment, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.fixture
def config(training_settings: dict[str, Any], tmp_path: Path) -> Path:
    """Four photos with two or three captions; batches of three are split unevenly."""
    settings = training_settings
    settings["decoder"]["dropout"] = 0.0
    settings["training"] = {
        "batch_size": 3, "epochs": 2, "lr": 1e-2, "warmup_steps": 1, "precision": "fp32",
        "ema_decay": 0.5, "select": "loss",
    }  # fmt: skip
    settings["search"]["min_length"] = 1  # runs with only empty captions fail
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(settings))
    return path


def test_two_processes_give_the_gradients_of_one(
    config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    first = ("--run-folder", str(tmp_path / "first"), "--training.epochs", "1")
    assert main(["train", str(config), *first]) == OK
    changes = {
        "true captions": [],
        "in parts": ["--training.micro_batch", "1"],
        "encoder learns": ["--encoder.finetune_from", "layer4"],
        "self-critical": [
            *("--training.objective", "self_critical", "--self_critical.max_length", "6"),
            *("--init_from", str(tmp_path / "first" / "best")),
        ],
        "distilled": [
            *("--distillation.guidance", "[0.5]", "--distillation.rare_words", "[0.2]"),
            *("--init_from", str(tmp_path / "first" / "best")),
        ],
    }
    script = tmp_path / "double.py"
    script.write_text(DOUBLE)
    for processes in (1, 2):  # one launch for all jobs, since launching is slow
        jobs = {
            str(tmp_path / f"{name} {processes}"): (
                "save_gradients",
                [str(config), *options, "--run-folder", str(tmp_path / "run")],
            )
            for name, options in changes.items()
        }
        run(processes, script, json.dumps(jobs))
    for name in changes:
        one, two = (load_file(tmp_path / f"{name} {processes}") for processes in (1, 2))
        assert one.keys() == two.keys(), name
        learns = any(parameter.startswith("encoder") for parameter in one)
        assert learns == (name == "encoder learns")
        largest = max(float(gradient.norm()) for gradient in one.values())
        for parameter, gradient in one.items():
            assert gradient.dtype == torch.float64
            difference = float((two[parameter] - gradient).norm())
            allowed = 1e-9 * max(float(gradient.norm()), 1e-3 * largest)
            assert difference <= allowed, f"{name}: {parameter}"
        assert largest > 0, name


def test_two_processes_train_and_validate_like_one(config: Path, tmp_path: Path) -> None:
    """Equal batches, losses, validation scores and final weights over eight epochs.

    In float32 the weights need not agree: the key bias has a gradient near zero, whose sign depends
    on rounding, and Adam takes a full step in either direction. In float64 rounding is far below
    Adam's epsilon.
    """
    script = tmp_path / "double.py"
    script.write_text(DOUBLE)
    rows, steps, states = [], [], []
    for processes in (1, 2):
        folder = tmp_path / f"run_{processes}"
        longer = ["--run-folder", str(folder), "--training.epochs", "8", "--training.patience", "0"]
        target = str(tmp_path / f"batches_{processes}")
        run(processes, script, json.dumps({target: ("save_batches", [str(config), *longer])}))
        lines = (folder / "metrics.jsonl").read_text().splitlines()
        rows.append([json.loads(line) for line in lines])
        shares = [
            json.loads(Path(f"{target}.{rank}.json").read_text()) for rank in range(processes)
        ]
        steps.append([sorted(chain(*parts)) for parts in zip(*shares, strict=True)])
        states.append(load_file(folder / "state.safetensors"))
        assert sorted(path.name for path in folder.iterdir()) == [
            "best", "config.yaml", "metrics.jsonl", "samples", "state.safetensors", "tensorboard",
        ]  # fmt: skip
        assert len(list((folder / "tensorboard").glob("events.out.*"))) == 1
    assert steps[0] == steps[1]
    assert len(steps[0]) == 16
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


def test_two_processes_can_be_stopped_and_resumed(config: Path, tmp_path: Path) -> None:
    straight, stopped = tmp_path / "straight", tmp_path / "stopped"
    # A learning rate that does not depend on the length of the run.
    train = [str(config), "--training.schedule", "plateau", "--run-folder"]
    both = [[*train, str(straight)], [*train, str(stopped), "--training.epochs", "1"]]
    script = tmp_path / "train.py"
    script.write_text(TRAIN)
    run(2, script, json.dumps(both))  # one launch, since launching is slow
    run(2, "-m", "captioner", "train", *train, stopped, "--resume")
    ones, twos = (load_file(folder / "state.safetensors") for folder in (straight, stopped))
    assert ones.keys() == twos.keys()
    assert not [name for name in ones if not torch.equal(ones[name], twos[name])]


def test_shards_in_object_storage_train_the_same_weights(
    config: Path, tmp_path: Path, bucket: str
) -> None:
    """Two processes with two readers each, from S3 and from a disk; and one that is resumed."""
    fsspec = pytest.importorskip("fsspec")
    local, remote = tmp_path / "shards", f"{bucket}/shards"
    prepare_shards = ["prepare", "shards", str(config), "-o", str(local)]
    assert main([*prepare_shards, "--photos-per-shard", "1"]) == OK
    for path in local.iterdir():
        with fsspec.open(f"{remote}/{path.name}", "wb") as file:
            file.write(path.read_bytes())
    script = tmp_path / "train.py"
    script.write_text(TRAIN)

    def arguments(name: str, *changes: str) -> list[str]:
        shards = ["--data.shards", remote if name == "remote" else str(local)]
        workers = ["--data.workers", "2"]
        return [str(config), *shards, *workers, "--run-folder", str(tmp_path / name), *changes]

    for changes in (("--training.epochs", "1"), ("--resume",)):
        run(2, script, json.dumps([arguments(name, *changes) for name in ("remote", "local")]))

    found, expected = (
        load_file(tmp_path / name / "best" / "model.safetensors") for name in ("remote", "local")
    )
    assert all(torch.equal(found[name], value) for name, value in expected.items())
