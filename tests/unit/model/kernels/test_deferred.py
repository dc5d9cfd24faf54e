"""Test gradients collected over all steps: several or partial backward passes, and memory."""

from __future__ import annotations

import gc
import weakref

import torch
from torch import Tensor, nn

from captioner.model.attention import AdditiveScorer, Sizes
from captioner.model.kernels.additive import BlockwiseScorer
from captioner.model.kernels.deferred import DeferredLinear, Steps

EXTENTS = ((3, 4), (3, 2), (1, 2))
L, D, N, A = 5, 4, 6, 7


class Recurrence(nn.Module):
    """Attend and run a layer at every step, on fewer and fewer photos and captions."""

    def __init__(self) -> None:
        super().__init__()
        sizes = Sizes(features=D, query=N, attention=A, regions=L)
        self.plain, self.scorer = AdditiveScorer(sizes), BlockwiseScorer(sizes)
        self.query = self.scorer.query = DeferredLinear(N, A, bias=False)
        self.recurrent = DeferredLinear(D, N, bias=False)
        self.plain.query, self.plain.energy = self.query, self.scorer.energy
        self.double()

    def forward(
        self, state: Tensor, keys: Tensor, values: Tensor, plain: bool = False
    ) -> list[Tensor]:
        found, steps = [], Steps(EXTENTS)
        kernels = () if plain else (self.query, self.recurrent, self.scorer)
        for kernel in kernels:
            kernel.begin(steps)
        for photos, captions in steps:
            scorer = self.plain if plain else self.scorer
            alphas = scorer(state[:photos, :captions], keys[:photos]).softmax(-1)
            state = torch.tanh(self.recurrent(alphas @ values[:photos]))
            found.append(state.sum())
        for kernel in kernels:
            kernel.end()
        return found

    def learned(self) -> list[Tensor]:
        return [self.query.weight, self.recurrent.weight, self.scorer.energy.weight]


def inputs() -> list[Tensor]:
    shapes = ((3, 4, N), (3, L, A), (3, L, D))
    return [torch.randn(shape).double().requires_grad_() for shape in shapes]


def test_gradients_are_exact() -> None:
    model = Recurrence()
    assert torch.autograd.gradcheck(lambda *given: sum(model(*given)), inputs())


def test_any_part_of_the_graph_gives_the_gradients_of_plain_layers() -> None:
    """A pass over a different part of the model must not leave anything in a sum."""
    model, given = Recurrence(), inputs()
    steps = model(*given)
    plain_steps = model(*given, plain=True)
    everything = [*given, *model.learned()]
    only_energy = [model.scorer.energy.weight]

    for last, wanted in ((3, only_energy), (1, everything), (3, everything), (3, everything)):
        found, expected = (
            torch.autograd.grad(sum(part[:last]), wanted, retain_graph=True)
            for part in (steps, plain_steps)
        )
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12)


def test_the_graph_is_freed_without_a_backward_pass() -> None:
    model, given = Recurrence(), inputs()
    gc.disable()
    try:
        steps = model(*given)
        leaf = weakref.ref(given[0])
        del given
        assert leaf() is not None  # the graph holds it
        del steps
        assert leaf() is None
    finally:
        gc.enable()
