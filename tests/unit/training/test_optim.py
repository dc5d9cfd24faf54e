"""Test parameter groups, the learning rate schedule and the average of the weights."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from captioner.training.optim import RunningAverage, lr_factor, make_optimizer
from captioner.training.setup import prepare


def test_only_matrices_have_weight_decay(configure: Any):
    config = configure(
        encoder={"finetune_from": "layer4"},
        training={"lr": 0.5, "encoder_lr": 0.25, "weight_decay": 0.125},
    )
    model = prepare(config).stored.model
    groups = make_optimizer(model, config.training).param_groups
    found = {id(p): group for group in groups for p in group["params"]}
    assert len(found) == sum(len(group["params"]) for group in groups)  # no duplicates
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            assert id(parameter) not in found, name
            continue
        group = found[id(parameter)]
        assert group["weight_decay"] == (0.125 if parameter.ndim > 1 else 0), name
        expected = 0.25 if name.startswith("encoder.") else 0.5
        assert group["lr"] == group["peak_lr"] == expected, name


@pytest.mark.parametrize(
    ("step", "expected"),
    [
        (0, 1 / 11),  # not 0, so that the first step has an effect
        (4, 5 / 11),
        (9, 10 / 11),
        (10, 1.0),  # end of the warm-up
        (35, 0.5 * (1 + math.cos(math.pi / 4))),
        (60, 0.5),  # halfway down
        (110, 0.0),
        (500, 0.0),  # a run longer than planned
    ],
)
def test_schedule_known_answers(step: int, expected: float):
    assert lr_factor(step, warmup_steps=10, total_steps=110) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("decay", [0.15, 0.5, 0.999])
def test_the_average_follows_the_equation(decay: float):
    model = nn.Linear(2, 3)
    average = RunningAverage(model, decay)
    expected = np.zeros((3, 2))
    for n in range(30):
        with torch.no_grad():
            model.weight.copy_(torch.randn(3, 2))
        average.update_parameters(model)
        weight = model.weight.detach().double().numpy()
        d = min(decay, (1 + n) / (10 + n)) if n > 0 else 0  # the first update copies
        expected = d * expected + (1 - d) * weight
        found = average.module.weight.detach().numpy()
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)
