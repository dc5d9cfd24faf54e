"""Linear layers of a recurrence, whose weight gradient is one product over all steps.

torch computes the gradient of a weight at every step and adds it to the sum, which for a matrix of
four million numbers takes longer than to multiply 160 rows with it. Here each step's backward pass
only keeps the gradient of its output. When the last one is done, a single product over the rows of
all steps gives the gradient of the weight.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable


class DeferredLinear(nn.Linear):
    """A linear layer without bias that is applied at every step; see `deferred_gradients`."""

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__(in_features, out_features, bias=False)
        self._steps: _Steps | None = None

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - torch's name
        """(..., in_features) to (..., out_features)."""
        if self._steps is None:
            return super().forward(input)
        return self._steps.apply(input)


@contextmanager
def deferred_gradients(module: nn.Module) -> Iterator[None]:
    """Within this context, the layers of a module are applied to the steps of one sequence."""
    layers = [layer for layer in module.modules() if isinstance(layer, DeferredLinear)]
    learning = torch.is_grad_enabled() and module.training
    for layer in layers:
        if learning and layer.weight.requires_grad:
            layer._steps = _Steps(layer.weight)
    try:
        yield
    finally:
        for layer in layers:
            if layer._steps is not None:
                layer._steps.weight = None  # a cycle through the graph would never be freed
            layer._steps = None


class _Steps:
    """The inputs of a layer and the gradients of its outputs, by step."""

    def __init__(self, weight: Tensor) -> None:
        self.inputs: list[Tensor] = []
        self.gradients: dict[int, Tensor] = {}
        """By step rather than a list, so that a second backward pass replaces them."""
        kind = weight.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else weight.dtype
        self.weight: Tensor | None = _Collect.apply(weight, self, dtype)

    def apply(self, rows: Tensor) -> Tensor:
        """One step's output."""
        assert self.weight is not None  # within the context
        self.inputs.append(rows.detach().to(self.weight.dtype))
        output: Tensor = _Apply.apply(rows, self.weight, self, len(self.inputs) - 1)
        return output


class _Collect(torch.autograd.Function):
    """The weight as it is; its gradient from all steps."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, steps: _Steps, dtype: torch.dtype) -> Tensor:
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
    def forward(ctx: Any, rows: Tensor, weight: Tensor, steps: _Steps, step: int) -> Tensor:
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
