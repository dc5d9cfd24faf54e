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
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

Scores: TypeAlias = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Signature of ``additive_scores``."""

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


def additive_scores(query: Tensor, keys: Tensor, energy: Tensor) -> Tensor:
    """v^T tanh(k_i + q).

    Args:
        query: ``exponentials`` of q, (B, R, A), float32 or float64.
        keys: ``exponentials`` of k, (B, L, A).
        energy: v, (A,).

    Returns:
        (B, R, L).
    """
    if torch.compiler.is_compiling():  # exported to ONNX, which cannot express blocks
        scores: Tensor = (1 / (1 + query.unsqueeze(2) * keys.unsqueeze(1))) @ energy
    else:
        scores = _AdditiveScores.apply(query, keys, energy)
    return 2 * scores - energy.sum()


@cache
def compiled_scores() -> Scores:
    """``additive_scores`` as fused kernels made by torch.compile; needs a C++ compiler on a CPU."""

    def scores(query: Tensor, keys: Tensor, energy: Tensor) -> Tensor:
        shares = 1 / (1 + query.unsqueeze(2) * keys.unsqueeze(1))
        return 2 * (energy * shares).sum(dim=-1) - energy.sum()

    return torch.compile(scores, dynamic=True)


def training_scores(query: Tensor, keys: Tensor, energy: Tensor) -> Tensor:
    """``compiled_scores`` where its graph for training fits, else ``additive_scores``.

    torch.compile makes another graph for a size of 1 and for a pass without gradient, and gives up
    after eight.
    """
    sizes = (*query.shape, keys.shape[1])
    if not torch.is_grad_enabled() or 1 in sizes:
        return additive_scores(query, keys, energy)
    return compiled_scores()(query.contiguous(), keys.contiguous(), energy)


def warm_up_compiled_scores(weight: Tensor) -> None:
    """Compile forward and backward pass for tensors of any size on a weight's device.

    All three tensors and all their sizes differ: a size or a tensor that occurs twice would be
    compiled as always equal, and 1 as always 1.

    Args:
        weight: Any float tensor, for device and dtype.
    """
    query, keys, energy = (
        weight.new_ones(shape).requires_grad_() for shape in ((2, 3, 5), (2, 7, 5), (5,))
    )
    scores = compiled_scores()(query, keys, energy)
    torch.autograd.grad(scores.sum(), (query, keys, energy))


class _AdditiveScores(torch.autograd.Function):
    """sum_a v_a s_a with s = 1 / (1 + exp(-2 k) exp(-2 q)); the score is 2 times it minus sum v.

    With d = s - s^2, the derivative with respect to the exponential x of a query or key is
    - v d / x.
    """

    @staticmethod
    def forward(ctx: Any, query: Tensor, keys: Tensor, energy: Tensor) -> Tensor:
        ctx.save_for_backward(query, keys, energy)
        scores = query.new_empty(*query.shape[:2], keys.shape[1])
        for photos, queries, share in _blocks(query, keys):
            part = torch.mv(share.flatten(0, 2), energy)
            scores[photos, queries] = part.view(share.shape[:3])
        return scores

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        query, keys, energy = ctx.saved_tensors
        for_query, for_keys = torch.empty_like(query), torch.zeros_like(keys)
        for_energy = torch.zeros_like(energy)
        gradient = gradient.contiguous()
        for photos, queries, share in _blocks(query, keys):
            part = gradient[photos, queries]  # (b, r, L)
            for_energy.addmv_(share.flatten(0, 2).t(), part.flatten())
            slope = share.addcmul_(share, share, value=-1)  # d, (b, r, L, A)
            for_query[photos, queries] = torch.matmul(part.unsqueeze(2), slope).squeeze(2)
            keys_part, part = for_keys[photos], part.unsqueeze(3)  # (b, r, L, 1)
            for number in range(slope.shape[1]):
                keys_part.addcmul_(slope[:, number], part[:, number])
        return for_query.mul_(-energy).div_(query), for_keys.mul_(-energy).div_(keys), for_energy


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
