"""Additive scores and their gradients, computed in blocks of photos that fit the cache.

    e_i = v^T tanh(k_i + q)

The plain formula creates a tensor of B R L A values at every step. It moves this tensor to memory
and back several times, and keeps it for the backward pass. Here the backward pass computes it
again, so nothing of this size is kept. Exponentials are computed for the keys, once for all steps,
and for the queries, but not for every pair:

    s = 1 / (1 + exp(-2 k) exp(-2 q)),   tanh(k + q) = 2 s - 1,   its slope = 4 (s - s^2)

Measured savings of time:

    training step, 196 regions, A = 512             9% (float32), 17% (bf16)
    training step, 81 regions, A = 256              10% (float32, one core)
    search, 100 regions, 16 photos                  10% (beam 3), 19% (beam 5)
    search, 100 regions, 128 samples                a quarter

Notation: B photos, R queries (captions), L regions, A attention size, b photos at a step.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from captioner.model.attention import AdditiveScorer, widen
from captioner.model.kernels.deferred import Steps

LARGEST = 40.0
"""Limit of the absolute values of keys and queries, because float32 can represent exp(80). Clamping
changes the tanh of their sum only if one of them exceeds the limit and the other has the opposite
sign and is nearly as large."""

CPU_BLOCK = 4 << 20
"""Block size on a CPU (bytes), about the cache of a core. Smaller blocks need more calls."""

GPU_BLOCK = 512 << 20
"""Block size on other devices (bytes), large enough to keep the device busy."""


class BlockwiseScorer(AdditiveScorer):
    """Additive scorer that compares in blocks, in teacher forcing and in search."""

    in_pass = False
    """True during a pass of teacher forcing, which has one memory for all steps."""
    shared: SharedKeys | None = None
    """The keys of the pass, set at its first step."""

    def begin(self, steps: Steps) -> None:
        """Start a pass of teacher forcing."""
        del steps
        self.in_pass = True

    def end(self) -> None:
        """End the pass of teacher forcing."""
        self.in_pass, self.shared = False, None

    def compare(self, query: Tensor, keys: Tensor) -> Tensor:
        """See ``AdditiveScorer.compare``."""
        in_pass = self.in_pass and keys.requires_grad
        if torch.is_grad_enabled() and not in_pass:
            return super().compare(query, keys)
        with torch.autocast(query.device.type, enabled=False):
            query, energy = widen(query), widen(self.energy.weight).flatten()
            if not in_pass:
                return _scores(exponentials(query), exponentials_of_keys(keys), energy)
            self.shared = self.shared or SharedKeys(keys, energy)
            return self.shared.scores(query, energy)


def exponentials_of_keys(keys: Tensor) -> Tensor:
    """Return `exponentials` of keys, stored on the tensor for the next steps of a search."""
    found: Tensor | None = getattr(keys, "exponentials", None)
    if found is None:
        found = keys.exponentials = exponentials(keys)  # type: ignore[attr-defined]
    return found


class SharedKeys:
    """The keys that all steps of a recurrence share, and the sum of their gradients."""

    def __init__(self, keys: Tensor, energy: Tensor) -> None:
        self.exponentials = exponentials(keys.detach())
        # Only its gradient matters: sum_r g (s - s^2), which each step passes back to the previous.
        self.chain = keys * (4 * energy.detach())

    def scores(self, query: Tensor, energy: Tensor) -> Tensor:
        """Return the scores (b, R, L) of the next step, for the first b photos."""
        scores: Tensor
        scores, self.chain = _Scores.apply(query, self.chain, energy, self.exponentials)
        return scores


class _Scores(torch.autograd.Function):
    """Scores of a step. The backward pass adds its gradient to the sum from all later steps."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, chain: Tensor, energy: Tensor, keys: Tensor
    ) -> tuple[Tensor, Tensor]:
        query = exponentials(query).contiguous()
        ctx.save_for_backward(query, energy, keys)
        ctx.set_materialize_grads(False)
        return _scores(query, keys[: len(query)], energy), chain.view_as(chain)

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, gradient: Tensor | None, total: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        if gradient is None:
            return None, total, None, None
        (query, energy, keys), gradient = ctx.saved_tensors, gradient.contiguous()
        total, rows = torch.zeros_like(keys) if total is None else total, slice(len(query))
        slopes, shares, for_keys = torch.empty_like(query), torch.empty_like(query), total[rows]
        for photos, share in _blocks(query, keys[rows]):
            part = gradient[photos]  # (b, R, L)
            shares[photos] = torch.matmul(part.unsqueeze(2), share).squeeze(2)
            slope = share.addcmul_(share, share, value=-1)  # s - s^2, (b, R, L, A)
            slopes[photos] = torch.matmul(part.unsqueeze(2), slope).squeeze(2)
            for number in range(slope.shape[1]):
                for_keys[photos].addcmul_(slope[:, number], part[:, number].unsqueeze(2))
        for_energy = shares.sum(dim=(0, 1)).mul_(2).sub_(gradient.sum())
        return slopes.mul_(4 * energy), total, for_energy, None


def exponentials(x: Tensor) -> Tensor:
    """Return exp(-2 x) of keys or queries of any shape."""
    return torch.exp(-2 * x.clamp(-LARGEST, LARGEST))


def _scores(query: Tensor, keys: Tensor, energy: Tensor) -> Tensor:
    """Compute scores (b, R, L) from exponentials of queries (b, R, A) and of keys (b, L, A)."""
    blocks = _blocks(query, keys)
    sums = torch.cat([torch.mv(s.flatten(0, 2), energy).view(s.shape[:3]) for _, s in blocks])
    return sums.mul_(2).sub_(energy.sum())


def _blocks(query: Tensor, keys: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """Yield the photos and s (b, R, L, A) of each block. The next block overwrites s."""
    largest = CPU_BLOCK if query.device.type == "cpu" else GPU_BLOCK
    photo = query.shape[1] * keys[0].numel() * keys.element_size()
    count = max(1, largest // max(1, photo))
    one = query.new_ones(query.shape[2])
    buffer = query.new_empty(min(count, len(query)), query.shape[1], *keys.shape[1:])
    for first in range(0, len(query), count):
        photos = slice(first, first + count)
        share = buffer[: len(query[photos])]
        torch.addcmul(one, keys[photos].unsqueeze(1), query[photos].unsqueeze(2), out=share)
        yield photos, share.reciprocal_()
