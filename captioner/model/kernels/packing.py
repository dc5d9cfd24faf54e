"""Teacher forcing that skips most of the padding.

Photos with the longest captions come first, and so do the longest captions of each photo. Each step
then runs on the photos and captions up to the last one with a word at that step. Embeddings and
word gates need no state and are computed in one product over all steps.

It saves 1% of a training step with the batches of similar captions that ``data.bucket_batches``
makes, at 3 captions per photo, 9% at 5, and a quarter where lengths differ, as in self-critical
training; also half of the steps of the gradients of single words.

Notation: B photos, R captions per photo, T steps; b photos and r captions at a step, P packed
positions (all steps together, the first step's first).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from captioner.hardware import upload
from captioner.model.kernels.deferred import deferred_gradients

if TYPE_CHECKING:
    from captioner.model.attention import Memory
    from captioner.model.decoder import Decoder, Step, Unrolled


def pack(needed: Tensor) -> tuple[Tensor, list[tuple[int, int]], Tensor]:
    """The order of the photos (B,), the photos and captions of each step, and what they are.

    ``needed`` (B, R, T) is True where a result is read. Each step runs on at least (1, 1); the
    indices of the packed positions in the flattened (B, R, T) are (P,). All on the CPU: nothing
    waits for a device.
    """
    running = needed.flip(2).cummax(dim=2).values.flip(2)  # a later word needs earlier steps
    lengths = running.sum(dim=2)  # (B, R)
    photos = lengths.amax(dim=1).argsort(descending=True, stable=True)
    order = photos[:, None], lengths.argsort(dim=1, descending=True, stable=True)[photos]
    running = running[order]  # longest first
    counts = (running.any(dim=axis).sum(dim=0).clamp(min=1).tolist() for axis in (1, 0))
    extents = list(zip(*counts, strict=True))
    places = torch.arange(needed.numel()).view(needed.shape)[order]
    return (
        photos,
        extents,
        torch.cat([places[:b, :r, t].flatten() for t, (b, r) in enumerate(extents)]),
    )


def unroll(decoder: Decoder, memory: Memory, tokens: Tensor, needed: Tensor) -> Unrolled:
    """``Decoder.forward`` on tokens that are on the device; zeros where it skips a position."""
    from captioner.model.decoder import Unrolled

    photos, extents, places = pack(needed)
    places, sizes = upload(places, tokens.device), [b * r for b, r in extents]
    embedded = decoder.embed(tokens.flatten()[places])  # (P, E)
    if not torch.equal(photos, torch.arange(len(needed))):  # else already in this order
        memory = memory.select(upload(photos, tokens.device))
    state = decoder.start(memory, tokens.shape[1])
    steps: list[Step] = []
    all_gates = decoder.word_gates(embedded).split(sizes)
    with deferred_gradients(decoder, sizes):
        for gates, (b, r) in zip(all_gates, extents, strict=True):
            if (b, r) != state.hidden.shape[:2]:  # else a copy going back
                state, memory = state.select((slice(b), slice(r))), memory.select(slice(b))
            steps.append(decoder.step(gates.view(b, r, -1), state, memory))
            state = steps[-1].state

    def unpack(packed: Tensor) -> Tensor:  # (P, ...) to (B, R, T, ...)
        whole = packed.new_zeros(tokens.numel(), *packed.shape[1:])
        return whole.index_copy(0, places, packed).view(*tokens.shape, *packed.shape[1:])

    def join(parts: Sequence[Tensor]) -> Tensor:
        return unpack(torch.cat([part.flatten(0, 1) for part in parts]))

    return Unrolled.of(unpack(embedded), steps, join)
