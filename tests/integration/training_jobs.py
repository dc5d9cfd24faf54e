"""Training jobs of one process or of several: ``torchrun training_jobs.py JOBS``.

In double precision: in float32, the sign of a gradient near zero (that of the key bias) depends on
rounding, and Adam takes a full step in either direction.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from typing import Any

import pytest
from safetensors.torch import save_file

from captioner.cli.main import INTERRUPTED, OK, main
from captioner.cli.train import read_changes, read_config
from captioner.cli.train import train as command
from captioner.training.loop import Trainer
from captioner.training.run_folder import RunFolder
from captioner.training.setup import prepare

Jobs = list[tuple[str, str, list[str]]]
"""Name of a function below, where it writes its result, and arguments of ``captioner train``."""


def train(target: str, arguments: list[str]) -> None:
    """Train through the command line, in the config's precision; ``target`` is the run folder."""
    assert main(["train", *arguments, "--run-folder", target]) == OK


def interrupt(target: str, arguments: list[str]) -> None:
    """Train as ``train`` does, but stop in the second step, by a signal to the last process."""
    whole = Trainer.step

    def step(trainer: Trainer, batch: Any) -> None:
        whole(trainer, batch)
        if trainer.progress.step == 1 and trainer.rank == trainer.world - 1:
            os.kill(os.getpid(), signal.SIGTERM)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Trainer, "step", step)
        assert main(["train", *arguments, "--run-folder", target]) == INTERRUPTED


def double(target: str, arguments: list[str]) -> Trainer:
    """A trainer in double precision."""
    options, given = command.parser().parse([*arguments, "--run-folder", target])
    config = read_config(options, read_changes(options, given))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("captioner.training.reading.MIN_PHOTOS", 1)
        setup = prepare(config)
    setup.stored.model.double()
    return Trainer(setup, RunFolder(target, config))


def gradients(target: str, arguments: list[str]) -> None:
    """Write the gradients of the first step."""
    trainer, found = double(target, arguments), {}

    def keep(*given: Any) -> None:
        for name, parameter in trainer.model.named_parameters():
            if parameter.requires_grad:
                found[name] = parameter.grad.contiguous().clone()

    trainer.training.clip_norm = 1e9
    trainer.state.optimizer.step = keep  # type: ignore[method-assign]
    trainer.model.train()
    trainer.step(next(iter(trainer.source.batches(0, 0))))
    if trainer.main:
        save_file(found, f"{target}.safetensors")


def train_double(target: str, arguments: list[str]) -> None:
    """Train in double precision; ``target`` is the run folder."""
    double(target, arguments).run()


def run(jobs: Jobs) -> None:
    """Run jobs in this process, or in its part of a launch."""
    for job, target, arguments in jobs:
        globals()[job](target, arguments)


if __name__ == "__main__":
    run(json.loads(sys.argv[1]))
