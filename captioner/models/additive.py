"""The additive score and its gradient, a few photos at a time.

    e_i = v^T tanh(k_i + q)        for B photos, R queries and L regions each, over A sizes

Written plainly, the tanh of every photo, query, region and size is a tensor of B R L A numbers at
every word; it goes out to memory and back several times, and training keeps it for every word.
Here a block of it lives at a time, small enough for the processor's cache; nothing of it is kept,
and the backward pass computes it again.

The logarithmic half of the work is done once, too:

    tanh(k + q) = 2 / (1 + exp(-2 k) exp(-2 q)) - 1

so that regions and queries are raised to a power each by themselves, (B L + B R) A times in all,
and what is left for every pair is a product, a sum and a reciprocal.

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
"""Scores of ``exponentials`` of queries and keys, and v; see ``additive_scores``."""

LARGEST = 40.0
"""Keys and queries beyond it, on either side, count as this: exp(80) is what float32 holds. The
tanh of their sum is another only where one is beyond it and the other, of opposite sign, nearly as
large."""

CPU_BLOCK = 4 << 20
"""Bytes of a block on a CPU: about what a core's cache holds. Less costs more calls."""

GPU_BLOCK = 512 << 20
"""Bytes of a block elsewhere: enough to keep the device busy."""


def exponentials(x: Tensor) -> Tensor:
    """exp(-2 x), from keys or queries of any shape."""
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
    scores: Tensor = _AdditiveScores.apply(query, keys, energy)
    return 2 * scores - energy.sum()


@cache
def compiled_scores() -> Scores:
    """``additive_scores`` as one kernel that torch.compile makes, another for the way back.

    On a CPU a C++ compiler makes it, when it is first used; the blocks above need none.
    """

    def scores(query: Tensor, keys: Tensor, energy: Tensor) -> Tensor:
        shares = 1 / (1 + query.unsqueeze(2) * keys.unsqueeze(1))
        return 2 * (energy * shares).sum(dim=-1) - energy.sum()

    return torch.compile(scores, dynamic=True)


class _AdditiveScores(torch.autograd.Function):
    """sum_a v_a s_a with s = 1 / (1 + exp(-2 k) exp(-2 q)); twice this, less sum v, is the score.

    With d = s - s^2 the derivative by a query's exponential x is - v d / x, by a key's the same.
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
            told = gradient[photos, queries]  # (b, r, L)
            for_energy.addmv_(share.flatten(0, 2).t(), told.flatten())
            slope = share.addcmul_(share, share, value=-1)  # d, (b, r, L, A)
            for_query[photos, queries] = torch.matmul(told.unsqueeze(2), slope).squeeze(2)
            keyed, told = for_keys[photos], told.unsqueeze(3)  # (b, r, L, 1)
            for number in range(slope.shape[1]):
                keyed.addcmul_(slope[:, number], told[:, number])
        return for_query.mul_(-energy).div_(query), for_keys.mul_(-energy).div_(keys), for_energy


def _blocks(query: Tensor, keys: Tensor) -> Iterator[tuple[slice, slice, Tensor]]:
    """Photos, queries and their s, (b, r, L, A); the memory of s serves the next block too."""
    photos, queries, size = query.shape
    regions_bytes = keys.shape[1] * size * keys.element_size()
    largest = CPU_BLOCK if query.device.type == "cpu" else GPU_BLOCK
    pairs = max(1, largest // max(1, regions_bytes))
    rows = max(1, pairs // max(1, queries))  # photos of a block
    columns = min(queries, pairs)  # queries of a block
    one = query.new_ones(size)
    room = query.new_empty(min(rows, photos), columns, *keys.shape[1:])
    for first in range(0, photos, rows):
        of_photos = slice(first, first + rows)
        regions = keys[of_photos].unsqueeze(1)
        for begin in range(0, queries, columns):
            of_queries = slice(begin, begin + columns)
            asked = query[of_photos, of_queries].unsqueeze(2)
            share = room[: asked.shape[0], : asked.shape[1]]
            if not share.is_contiguous():
                share = torch.empty_like(share, memory_format=torch.contiguous_format)
            torch.addcmul(one, regions, asked, out=share)
            yield of_photos, of_queries, share.reciprocal_()
