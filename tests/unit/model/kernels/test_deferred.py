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
from captioner.model.attention import AdditiveScorer, Sizes, SoftAttention
from captioner.model.kernels.deferred import DeferredLinear, deferred_gradients

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


# --- Attention ---

PARTS = ("features", "key", "query", "energy")


class Glances(nn.Module):
    """Attends to photos at every step; later steps have fewer photos and captions."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = SoftAttention(AdditiveScorer(Sizes(6, 4, 5, 7)))
        self.next = nn.Linear(6, 4)

    def forward(self, features: Tensor, *, deferred: bool) -> Tensor:
        state = features.new_ones(3, 4, 4)
        memory = self.attention.memory(features, features.mean(dim=1, keepdim=True))
        total = features.new_zeros(())
        with deferred_gradients(self) if deferred else nullcontext():
            for photos, captions in ((3, 4), (3, 2), (2, 2), (1, 1)):
                memory, state = memory.select(slice(photos)), state[:photos, :captions]
                attended = self.attention(state, memory)
                state = torch.tanh(self.next(attended.context))
                total = total + state.square().sum() + attended.alphas.square().sum()
        return total


@pytest.fixture
def glances() -> tuple[Glances, list[Tensor]]:
    """The module and what it learns: features, keys, queries and energy."""
    torch.manual_seed(0)
    module = Glances().double()
    scorer = module.attention.scorer
    assert isinstance(scorer, AdditiveScorer)
    features = torch.randn(3, 7, 6, dtype=torch.float64).requires_grad_()
    return module, [features, scorer.key.weight, scorer.query.weight, scorer.energy.weight]


def test_keys_and_values_get_torchs_gradients(glances) -> None:
    module, learned = glances
    plain, deferred = (
        torch.autograd.grad(module(learned[0], deferred=how), learned) for how in (False, True)
    )
    torch.testing.assert_close(deferred, plain)


def test_an_unfinished_backward_pass_leaves_nothing_behind(glances) -> None:
    module, learned = glances
    expected = torch.autograd.grad(module(learned[0], deferred=False), learned)
    loss = module(learned[0], deferred=True)
    torch.autograd.grad(loss, learned[3:], retain_graph=True)  # the sums of the keys are not used
    for last in (False, True):
        found = torch.autograd.grad(loss, learned, retain_graph=not last)
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("frozen", range(4), ids=PARTS)
def test_frozen_parts_of_attention_get_none(glances, frozen: int) -> None:
    module, learned = glances
    expected = torch.autograd.grad(module(learned[0], deferred=False), learned)
    learned[frozen].requires_grad_(False)
    module(learned[0], deferred=True).backward()
    for number, (part, gradient) in enumerate(zip(learned, expected, strict=True)):
        if number == frozen:
            assert part.grad is None
        else:
            torch.testing.assert_close(part.grad, gradient)


def test_attention_keeps_nothing_after_a_step(glances) -> None:
    module, (features, *_) = glances
    attention = module.attention
    gc.disable()
    try:
        memory = attention.memory(features, features.mean(dim=1, keepdim=True))
        with deferred_gradients(module):
            context = attention(features.new_ones(3, 4, 4), memory).context
            kept = [
                weakref.ref(attention.weighted_sum._steps),
                weakref.ref(attention.scorer.additive_scores._sums),
            ]
        context.sum().backward()
        del context, memory
        assert [reference() for reference in kept] == [None, None]
    finally:
        gc.enable()
