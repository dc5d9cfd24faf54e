"""The additive score and its gradient, computed in blocks of photos.

    e_i = v^T tanh(k_i + q)        for B photos, R queries and L regions each, over A sizes

A direct implementation creates a tensor of B R L A values at every step, moves it to memory and
back several times, and stores it for the backward pass. Here it is computed in blocks that fit the
processor's cache and recomputed in the backward pass, so nothing is stored.

Exponentials are computed once per region and once per query instead of once per pair:

    tanh(k + q) = 2 / (1 + exp(-2 k) exp(-2 q)) - 1

which leaves a product, a sum and a reciprocal per pair.

Notation: B photos, R queries (captions, beams), L regions, A attention size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from captioner.model.kernels.deferred import Deferring

LARGEST = 40.0
"""Keys and queries are clamped to +-40, as float32 holds exp(80). It changes the tanh of their sum
only if one exceeds the limit and the other, of opposite sign, is nearly as large."""

CPU_BLOCK = 4 << 20
"""Block size on a CPU in bytes: about a core's cache. Smaller blocks cost more calls."""

GPU_BLOCK = 512 << 20
"""Block size on other devices in bytes: enough to keep the device busy."""


def exponentials(x: Tensor) -> Tensor:
    """exp(-2 x) of keys or queries of any shape."""
    return torch.exp(-2 * x.clamp(-LARGEST, LARGEST))


class AdditiveScores(nn.Module, Deferring):
    """v^T tanh(k_i + q). Within `deferred_gradients` all steps share keys and v."""

    def __init__(self) -> None:
        super().__init__()
        self.compiled = False
        """Whether to use `compiled_kernels`."""
        self._within = False
        self._sums: _KeySums | None = None

    def begin_steps(self) -> None:
        """See `Deferring`."""
        self._within = True

    def end_steps(self) -> None:
        """See `Deferring`."""
        if self._sums is not None:
            self._sums.keys = None
        self._within, self._sums = False, None

    def forward(self, query: Tensor, keys: Tensor, energy: Tensor) -> Tensor:
        """Score every region against every query.

        Args:
            query: ``exponentials`` of q, (B, R, A), float32 or float64.
            keys: ``exponentials`` of k, (B, L, A).
            energy: v, (A,).

        Returns:
            (B, R, L).
        """
        if torch.compiler.is_compiling():  # exported to ONNX, which cannot express blocks
            scores: Tensor = (1 / (1 + query.unsqueeze(2) * keys.unsqueeze(1))) @ energy
            return 2 * scores - energy.sum()
        sums = None
        if self._within and keys.requires_grad:
            sums = self._sums = self._sums or _KeySums(keys, energy)
            assert sums.keys is not None  # within the context
            keys = sums.keys
        kernels = BLOCKS
        # torch.compile makes another graph for a size of 1 and for inference, and gives up after
        # eight.
        if self.compiled and torch.is_grad_enabled() and 1 not in (*query.shape, keys.shape[1]):
            kernels = compiled_kernels()
        scores = _AdditiveScores.apply(query, keys, energy, kernels, sums)
        return 2 * scores - energy.sum()


class Kernels(NamedTuple):
    """Sums over s = 1 / (1 + exp(-2 k) exp(-2 q)), and over its slope d = s - s^2."""

    forward: Callable[[Tensor, Tensor, Tensor], Tensor]
    """query (B, R, A), keys (B, L, A), energy (A,) to sum_a v_a s, (B, R, L)."""
    backward: Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
    """query, keys, gradient g (B, R, L) and a buffer (B, L, A), to which it adds sum_r g d; returns
    sum_i g d and sum_i g s, (B, R, A) each."""


def _forward(query: Tensor, keys: Tensor, energy: Tensor) -> Tensor:
    return (energy / (1 + query.unsqueeze(2) * keys.unsqueeze(1))).sum(dim=-1)


def _backward(
    query: Tensor, keys: Tensor, gradient: Tensor, for_keys: Tensor
) -> tuple[Tensor, Tensor]:
    share = 1 / (1 + query.unsqueeze(2) * keys.unsqueeze(1))
    weighted = gradient.unsqueeze(3) * share
    # Not the difference of two sums: where s is 1, the slope must be 0.
    slope = weighted * (1 - share)
    for_keys.add_(slope.sum(dim=1))
    return slope.sum(dim=2), weighted.sum(dim=2)


@cache
def compiled_kernels() -> Kernels:
    """Fused kernels made by torch.compile; needs a C++ compiler on a CPU."""
    return Kernels(torch.compile(_forward, dynamic=True), torch.compile(_backward, dynamic=True))


@torch.no_grad()
def warm_up_compiled_kernels(weight: Tensor) -> None:
    """Compile forward and backward pass for tensors of any size on a weight's device.

    All tensors and all their sizes differ, also those of the tensors that keys and sums are the
    first photos of: a size or a tensor that occurs twice would be compiled as always equal, and 1
    as always 1.

    Args:
        weight: Any float tensor, for device and dtype.
    """
    query, gradient, energy = (weight.new_ones(shape) for shape in ((2, 3, 5), (2, 3, 7), (5,)))
    keys, for_keys = (weight.new_ones(photos, 7, 5)[:2] for photos in (4, 6))
    kernels = compiled_kernels()
    kernels.forward(query, keys, energy)
    kernels.backward(query, keys, gradient, for_keys)


class _AdditiveScores(torch.autograd.Function):
    """sum_a v_a s_a with s = 1 / (1 + exp(-2 k) exp(-2 q)); the score is 2 times it minus sum v.

    With d = s - s^2, the derivative with respect to the exponential x of a query or key is
    - v d / x.
    """

    @staticmethod
    def forward(  # noqa: PLR0917 - autograd knows positions only
        ctx: Any,
        query: Tensor,
        keys: Tensor,
        energy: Tensor,
        kernels: Kernels,
        sums: _KeySums | None,
    ) -> Tensor:
        # Detached: whether a tensor requires a gradient would be a condition of the compiled graph.
        query, keys, energy = query.detach().contiguous(), keys.detach(), energy.detach()
        ctx.save_for_backward(query, keys, energy)
        ctx.kernels, ctx.sums = kernels, sums
        return kernels.forward(query, keys[: len(query)], energy)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor | None, Tensor, None, None]:
        (query, keys, energy), (gradient,) = ctx.saved_tensors, gradients
        sums = ctx.sums
        total = torch.zeros_like(keys) if sums is None else sums.total(keys)
        rows = slice(len(query))
        slopes, shares = ctx.kernels.backward(query, keys[rows], gradient.contiguous(), total[rows])
        for_query, for_energy = slopes.mul_(-energy).div_(query), shares.sum(dim=(0, 1))
        if sums is not None:
            return for_query, None, for_energy, None, None
        return for_query, total.mul_(-energy).div_(keys), for_energy, None, None


class _KeySums:
    """The keys of all steps, and the sum over all steps that their gradient is made of."""

    def __init__(self, keys: Tensor, energy: Tensor) -> None:
        self._total: Tensor | None = None
        self._task: int | None = None
        self.keys: Tensor | None = _CollectKeys.apply(keys, energy.detach(), self)

    def total(self, keys: Tensor) -> Tensor:
        """The sum so far, (B, L, A); a step adds to its first photos."""
        task = torch._C._current_graph_task_id()  # an earlier pass may have left a part of a sum
        if self._total is None or self._task != task:
            self._total, self._task = torch.zeros_like(keys), task
        return self._total

    def take(self) -> Tensor | None:
        """The sum; None if no step has a gradient."""
        total, self._total = self._total, None
        return total if self._task == torch._C._current_graph_task_id() else None


class _CollectKeys(torch.autograd.Function):
    """The keys as they are; their gradient from all steps."""

    @staticmethod
    def forward(ctx: Any, keys: Tensor, energy: Tensor, sums: _KeySums) -> Tensor:
        ctx.save_for_backward(keys, energy)
        ctx.sums = sums
        ctx.set_materialize_grads(False)
        return keys.view_as(keys)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *nothing: None) -> tuple[Tensor | None, None, None]:
        del nothing
        (keys, energy), total = ctx.saved_tensors, ctx.sums.take()
        return None if total is None else total.mul_(-energy).div_(keys), None, None


def _forward_in_blocks(query: Tensor, keys: Tensor, energy: Tensor) -> Tensor:
    scores = query.new_empty(*query.shape[:2], keys.shape[1])
    for photos, queries, share in _blocks(query, keys):
        scores[photos, queries] = torch.mv(share.flatten(0, 2), energy).view(share.shape[:3])
    return scores


def _backward_in_blocks(
    query: Tensor, keys: Tensor, gradient: Tensor, for_keys: Tensor
) -> tuple[Tensor, Tensor]:
    slopes, shares = torch.empty_like(query), torch.empty_like(query)
    for photos, queries, share in _blocks(query, keys):
        part = gradient[photos, queries]  # (b, r, L)
        shares[photos, queries] = torch.matmul(part.unsqueeze(2), share).squeeze(2)
        slope = share.addcmul_(share, share, value=-1)  # d, (b, r, L, A)
        slopes[photos, queries] = torch.matmul(part.unsqueeze(2), slope).squeeze(2)
        keys_part, part = for_keys[photos], part.unsqueeze(3)  # (b, r, L, 1)
        for number in range(slope.shape[1]):
            keys_part.addcmul_(slope[:, number], part[:, number])
    return slopes, shares


BLOCKS = Kernels(_forward_in_blocks, _backward_in_blocks)
"""Kernels of torch's operations."""


def _blocks(query: Tensor, keys: Tensor) -> Iterator[tuple[slice, slice, Tensor]]:
    """Photos, queries and s (b, r, L, A) of each block; s is overwritten by the next block."""
    photos, queries, size = query.shape
    regions_bytes = keys.shape[1] * size * keys.element_size()
    largest = CPU_BLOCK if query.device.type == "cpu" else GPU_BLOCK
    pairs = max(1, largest // max(1, regions_bytes))
    rows = max(1, pairs // max(1, queries))  # photos per block
    columns = min(queries, pairs)  # queries per block
    one = query.new_ones(size)
    buffer = query.new_empty(min(rows, photos), columns, *keys.shape[1:])
    for first in range(0, photos, rows):
        of_photos = slice(first, first + rows)
        regions = keys[of_photos].unsqueeze(1)
        for begin in range(0, queries, columns):
            of_queries = slice(begin, begin + columns)
            block = query[of_photos, of_queries].unsqueeze(2)
            share = buffer[: block.shape[0], : block.shape[1]]
            if not share.is_contiguous():
                share = torch.empty_like(share, memory_format=torch.contiguous_format)
            torch.addcmul(one, regions, block, out=share)
            yield of_photos, of_queries, share.reciprocal_()
