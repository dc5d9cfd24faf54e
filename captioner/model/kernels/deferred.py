"""Parts of a recurrence that compute a gradient once for all steps.

torch computes the gradient of what all steps share (a weight, the photos' features) at every step
and adds it to the sum, which for a matrix of four million numbers takes longer than to multiply 160
rows with it. Here each step's backward pass only keeps what the gradient is made of. When the last
one is done, a single product over all steps gives the gradient.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable


class Deferring(ABC):
    """A module that is applied at every step; see `deferred_gradients`."""

    @abstractmethod
    def begin_steps(self) -> None:
        """The next calls are the steps of one sequence."""

    @abstractmethod
    def end_steps(self) -> None:
        """The sequence is complete. Drops what refers to the graph: a cycle is never freed."""


@contextmanager
def deferred_gradients(module: nn.Module) -> Iterator[None]:
    """Within this context, the parts of a module are applied to the steps of one sequence.

    What all steps share must be the same in all of them; later steps may use fewer photos, the
    first ones.
    """
    learning = torch.is_grad_enabled() and module.training
    parts = [part for part in module.modules() if isinstance(part, Deferring)] if learning else []
    for part in parts:
        part.begin_steps()
    try:
        yield
    finally:
        for part in parts:
            part.end_steps()


def product_dtype(tensor: Tensor) -> torch.dtype:
    """The type in which autocast multiplies a tensor."""
    kind = tensor.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else tensor.dtype


class DeferredLinear(nn.Linear, Deferring):
    """A linear layer without bias whose weight is shared by all steps."""

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__(in_features, out_features, bias=False)
        self._steps: _LinearSteps | None = None

    def begin_steps(self) -> None:
        """See `Deferring`."""
        if self.weight.requires_grad:
            self._steps = _LinearSteps(self.weight)

    def end_steps(self) -> None:
        """See `Deferring`."""
        if self._steps is not None:
            self._steps.weight = None
        self._steps = None

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - torch's name
        """(..., in_features) to (..., out_features)."""
        if self._steps is None:
            return super().forward(input)
        return self._steps.apply(input)


class _LinearSteps:
    """The inputs of a layer and the gradients of its outputs, by step."""

    def __init__(self, weight: Tensor) -> None:
        self.inputs: list[Tensor] = []
        self.gradients: dict[int, Tensor] = {}
        """By step rather than a list, so that a second backward pass replaces them."""
        self.weight: Tensor | None = _CollectWeight.apply(weight, self, product_dtype(weight))

    def apply(self, rows: Tensor) -> Tensor:
        """One step's output."""
        assert self.weight is not None  # within the context
        self.inputs.append(rows.detach().to(self.weight.dtype))
        output: Tensor = _Apply.apply(rows, self.weight, self, len(self.inputs) - 1)
        return output


class _CollectWeight(torch.autograd.Function):
    """The weight as it is; its gradient from all steps."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, steps: _LinearSteps, dtype: torch.dtype) -> Tensor:
        ctx.steps, ctx.dtype = steps, weight.dtype
        ctx.set_materialize_grads(False)
        return weight.to(dtype) if weight.dtype != dtype else weight.view_as(weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *nothing: None) -> tuple[Tensor | None, None, None]:
        del nothing
        steps = ctx.steps
        if not steps.gradients:
            return None, None, None
        rows = [steps.inputs[step].flatten(0, -2) for step in steps.gradients]
        gradients = [gradient.flatten(0, -2) for gradient in steps.gradients.values()]
        steps.gradients.clear()
        product = torch.cat(gradients).t().mm(torch.cat(rows))
        return product.to(ctx.dtype), None, None


class _Apply(torch.autograd.Function):
    """One step: a product whose backward pass leaves out the weight."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor, steps: _LinearSteps, step: int) -> Tensor:
        ctx.save_for_backward(weight)
        ctx.steps, ctx.step, ctx.dtype = steps, step, rows.dtype
        return rows.to(weight.dtype) @ weight.t()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, None, None, None]:
        (weight,), (gradient,) = ctx.saved_tensors, gradients
        gradient = gradient.to(weight.dtype)
        ctx.steps.gradients[ctx.step] = gradient
        if not ctx.needs_input_grad[0]:
            return None, None, None, None
        return (gradient @ weight).to(ctx.dtype), None, None, None


class DeferredWeightedSum(nn.Module, Deferring):
    """Weighted sums of values that are shared by all steps."""

    def __init__(self) -> None:
        super().__init__()
        self._within = False
        self._steps: _SumSteps | None = None

    def begin_steps(self) -> None:
        """See `Deferring`."""
        self._within = True

    def end_steps(self) -> None:
        """See `Deferring`."""
        if self._steps is not None:
            self._steps.values = None
        self._within, self._steps = False, None

    def forward(self, weights: Tensor, values: Tensor) -> Tensor:
        """Weights (B, R, L) and values (B, L, D) to (B, R, D)."""
        if not (self._within and values.requires_grad):
            return weights.to(values.dtype) @ values
        if self._steps is None:
            self._steps = _SumSteps(values)
        return self._steps.apply(weights)


class _SumSteps:
    """The weights and the gradients of the sums, by step."""

    def __init__(self, values: Tensor) -> None:
        self.weights: list[Tensor] = []
        self.gradients: dict[int, Tensor] = {}
        """By step, as those of `_LinearSteps`."""
        self.values: Tensor | None = _CollectValues.apply(values, self, product_dtype(values))

    def apply(self, weights: Tensor) -> Tensor:
        """One step's sums."""
        assert self.values is not None  # within the context
        self.weights.append(weights.detach().to(self.values.dtype))
        sums: Tensor = _Weigh.apply(weights, self.values, self, len(self.weights) - 1)
        return sums


class _CollectValues(torch.autograd.Function):
    """The values as they are; their gradient from all steps."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, steps: _SumSteps, dtype: torch.dtype) -> Tensor:
        ctx.steps, ctx.dtype, ctx.photos = steps, values.dtype, len(values)
        ctx.set_materialize_grads(False)
        return values.to(dtype) if values.dtype != dtype else values.view_as(values)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *nothing: None) -> tuple[Tensor | None, None, None]:
        del nothing
        steps = ctx.steps
        if not steps.gradients:
            return None, None, None
        weights = _side_by_side([steps.weights[step] for step in steps.gradients], ctx.photos)
        gradients = _side_by_side(list(steps.gradients.values()), ctx.photos)
        steps.gradients.clear()
        return torch.bmm(weights.transpose(1, 2), gradients).to(ctx.dtype), None, None


def _side_by_side(steps: list[Tensor], photos: int) -> Tensor:
    """(b, r, n) of each step to (photos, sum of r, n), with zeros for photos a step left out."""
    rows = sum(step.shape[1] for step in steps)
    whole = steps[0].new_zeros(photos, rows, steps[0].shape[2])
    first = 0
    for step in steps:
        whole[: len(step), first : first + step.shape[1]] = step
        first += step.shape[1]
    return whole


class _Weigh(torch.autograd.Function):
    """One step: weighted sums whose backward pass leaves out the values."""

    @staticmethod
    def forward(ctx: Any, weights: Tensor, values: Tensor, steps: _SumSteps, step: int) -> Tensor:
        ctx.save_for_backward(values)
        ctx.steps, ctx.step, ctx.dtype = steps, step, weights.dtype
        return steps.weights[step] @ values[: len(weights)]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, None, None, None]:
        (values,), (gradient,) = ctx.saved_tensors, gradients
        gradient = gradient.to(values.dtype)
        ctx.steps.gradients[ctx.step] = gradient
        if not ctx.needs_input_grad[0]:
            return None, None, None, None
        for_weights = gradient @ values[: len(gradient)].transpose(1, 2)
        return for_weights.to(ctx.dtype), None, None, None
