"""Weight gradients of a recurrence in one product: those of torch's own layers."""

from __future__ import annotations

import copy
import gc
import weakref
from contextlib import nullcontext

import pytest
import torch
from torch import Tensor, nn

from captioner.hardware import autocast
from captioner.models.deferred import DeferredLinear, deferred_gradients

CPU = torch.device("cpu")


class Recurrence(nn.Module):
    """Two layers that share their input; later steps have fewer rows."""

    def __init__(self) -> None:
        super().__init__()
        self.recurrent, self.other = DeferredLinear(4, 4), DeferredLinear(4, 3)

    def forward(self, state: Tensor, *, deferred: bool) -> Tensor:
        total = state.new_zeros(())
        with deferred_gradients(self) if deferred else nullcontext():
            for rows in (5, 5, 3, 1):
                state = torch.tanh(self.recurrent(state[:, :rows]).to(state.dtype))
                total = total + self.other(state).to(state.dtype).square().sum()
        return total


@pytest.fixture
def model() -> Recurrence:
    torch.manual_seed(0)
    return Recurrence().double()


@pytest.fixture
def state() -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(2, 5, 4, dtype=torch.float64, generator=generator)


def gradients(model: Recurrence, state: Tensor, **how: bool) -> list[Tensor]:
    given = state.clone().requires_grad_()
    return list(torch.autograd.grad(model(given, **how), [given, *model.parameters()]))


def test_gradients_are_torchs(model, state) -> None:
    torch.testing.assert_close(
        gradients(model, state, deferred=True), gradients(model, state, deferred=False)
    )


def test_every_backward_pass_gives_them_again(model, state) -> None:
    expected = gradients(model, state, deferred=False)[1:]
    loss = model(state, deferred=True)
    weights = list(model.parameters())
    torch.autograd.grad(loss, weights[:1], retain_graph=True)  # of one layer only
    for last in (False, True):
        found = torch.autograd.grad(loss, weights, retain_graph=not last)
        torch.testing.assert_close(list(found), expected)


def test_frozen_layers_get_none_and_pass_gradients_on(model, state) -> None:
    expected = gradients(model, state, deferred=False)
    model.recurrent.requires_grad_(False)
    given = state.clone().requires_grad_()
    model(given, deferred=True).backward()
    assert model.recurrent.weight.grad is None
    torch.testing.assert_close([given.grad, model.other.weight.grad], [expected[0], expected[2]])


def test_a_layer_that_was_not_used_gets_none(model) -> None:
    with deferred_gradients(model):
        loss = model.other(torch.ones(1, 4, dtype=torch.float64)).sum()
    loss.backward()
    assert model.recurrent.weight.grad is None
    assert model.other.weight.grad is not None


def test_in_bf16_they_are_as_near_to_the_exact_ones_as_torchs(model, state) -> None:
    exact = gradients(model, state, deferred=False)[1:]
    errors = []
    for deferred in (False, True):
        rounded = copy.deepcopy(model).float()
        with autocast("bf16", CPU):
            loss = rounded(state.float(), deferred=deferred)
        loss.backward()
        found = [weight.grad for weight in rounded.parameters()]
        assert all(gradient.dtype == torch.float32 for gradient in found)  # type: ignore[union-attr]
        errors.append(
            sum(float((f - e).norm()) for f, e in zip(found, exact, strict=True))  # type: ignore[operator]
        )
    assert errors[1] < 1.2 * errors[0]
    assert errors[1] < 0.05 * sum(float(gradient.norm()) for gradient in exact)


def test_nothing_is_kept_after_a_step(model, state) -> None:
    gc.disable()  # what only the collector finds would pile up
    try:
        given = state.clone()
        with deferred_gradients(model):
            steps = weakref.ref(model.recurrent._steps)
            loss = model.recurrent(given).sum()
        loss.backward()
        del loss
        assert steps() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("why", ["evaluation", "no gradients"])
def test_without_training_they_are_plain_layers(why, model) -> None:
    model.train(why != "evaluation")
    with torch.set_grad_enabled(why == "evaluation"), deferred_gradients(model):
        assert model.recurrent._steps is None
