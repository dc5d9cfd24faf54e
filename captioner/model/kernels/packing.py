"""Teacher forcing that skips most of the padding.

Photos are sorted so that photos with the longest captions come first, and captions of each photo
are sorted in the same way. Each step then runs only on the photos and captions up to the last one
that has a word at this step. Embeddings and gate inputs of words do not depend on the state, so
they are computed in one product over all steps.

Measured savings of a training step:

    batches from ``data.bucket_batches``, 3 captions per photo      1%
    batches from ``data.bucket_batches``, 5 captions per photo      9%
    captions of different lengths, as in self-critical training     a quarter

It also saves half of the steps for the gradients of single words.

Notation: B photos, R captions per photo, T steps, b photos and r captions at a step.
P packed positions of all steps, beginning with the positions of the first step.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from captioner.hardware import upload
from captioner.model.attention import Memory
from captioner.model.decoder import Decoder, Step, Unrolled
from captioner.model.kernels.additive import BlockwiseScorer
from captioner.model.kernels.deferred import DeferredLinear, Steps
from captioner.model.kernels.word_gates import WordGates
from captioner.text.vocabulary import END, PAD

ROWS = 128
"""On a CPU, readouts are padded to a multiple of this number of rows, because oneDNN caches a
kernel for every number of rows that it sees."""


class PackedDecoder(Decoder):
    """Decoder that skips padding, and looks up gate inputs of words if its weights are fixed."""

    table: WordGates | None = None
    """Table of the gate inputs, or None if the weights may change."""

    def words(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """See ``Decoder.words``."""
        if self.table is None or self.training:
            return super().words(tokens)
        return self.embed(tokens), self.table.look_up(tokens)

    def readout(self, embedded: Tensor, *outputs: Tensor) -> Tensor:
        """See ``Decoder.readout``."""
        given, rows = (embedded, *outputs), len(embedded)
        extra = -rows % ROWS
        if embedded.ndim != 2 or rows < ROWS or not extra or embedded.device.type != "cpu":
            return super().readout(*given)
        padded = (torch.nn.functional.pad(part, (0, 0, 0, extra)) for part in given)
        return super().readout(*padded)[:rows]

    def forward(self, memory: Memory, tokens: Tensor) -> Unrolled:
        """See ``Decoder.forward``. Results at skipped positions are zeros."""
        on_cpu = tokens.cpu()
        photos, extents, places = pack((on_cpu != PAD) & (on_cpu != END))
        device = memory.summary.device
        tokens, places, steps = upload(tokens, device), upload(places, device), Steps(extents)
        embedded, all_inputs = super().words(tokens.flatten()[places])  # (P, E), (P, 4N)
        if not torch.equal(photos, torch.arange(len(photos))):  # not yet in this order
            memory = memory.select(upload(photos, device))
        state, results = self.start(memory, tokens.shape[1]), list[Step]()
        with self.deferred_gradients(steps):
            for inputs, (b, r) in zip(torch.split(all_inputs, steps.sizes), steps, strict=True):
                if (b, r) != state.hidden.shape[:2]:  # otherwise a copy in the backward pass
                    state, memory = state.select((slice(b), slice(r))), memory.select(slice(b))
                results.append(self.step(inputs.view(b, r, -1), state, memory))
                state = results[-1].state

        def unpack(packed: Tensor) -> Tensor:  # (P, ...) to (B, R, T, ...)
            whole = packed.new_zeros(tokens.numel(), *packed.shape[1:])
            return whole.index_copy(0, places, packed).view(*tokens.shape, *packed.shape[1:])

        def join(parts: list[Tensor]) -> Tensor:
            return unpack(torch.cat([part.flatten(0, 1) for part in parts]))

        chosen = [step.chosen for step in results if step.chosen is not None]
        outputs = zip(*(step.outputs for step in results), strict=True)
        return Unrolled(
            unpack(embedded),
            tuple(join(list(parts)) for parts in outputs),
            join([step.alphas for step in results]),
            join([step.beta for step in results]).squeeze(-1),
            join(chosen) if chosen else None,
        )

    @contextmanager
    def deferred_gradients(self, steps: Steps) -> Iterator[None]:
        """In training mode, defer the kernels' weight gradients to the end of the pass."""
        learning = torch.is_grad_enabled() and self.training
        kernels = [
            part
            for part in self.modules()
            if learning and isinstance(part, DeferredLinear | BlockwiseScorer)
        ]
        for kernel in kernels:
            kernel.begin(steps)
        try:
            yield
        finally:
            for kernel in kernels:
                kernel.end()


def pack(needed: Tensor) -> tuple[Tensor, list[tuple[int, int]], Tensor]:
    """Order photos and captions by length.

    All tensors are on the CPU, so that nothing waits for a device.

    Args:
        needed: True where a result is needed, (B, R, T).

    Returns:
        The order of the photos, (B,).
        The numbers of photos and captions at each step, at least (1, 1).
        The indices of the packed positions in the flattened (B, R, T), (P,).
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
