"""Packed teacher forcing: which captions each step runs on, so that most padding is skipped.

Notation: B photos, R captions per photo, T steps, P positions over all steps together.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from captioner.hardware import upload
from captioner.text.vocabulary import PAD


class PackedLayout(NamedTuple):
    """The photos and captions that each step of teacher forcing runs on.

    It is computed from tokens on the CPU, so that nothing waits for a device. The P packed
    positions are ordered by step: first all those of step 0, then those of step 1, ...
    """

    photos: int
    """B."""
    captions: int
    """R."""
    extents: tuple[tuple[int, int], ...]
    """For each of T steps the number of leading photos and captions it runs on, at least (1, 1)."""

    @classmethod
    def of(cls, tokens: Tensor) -> PackedLayout:
        """The layout of tokens (B, R, T) on the CPU."""
        real = tokens != PAD
        needed = real.flip(2).cummax(dim=2).values.flip(2)  # a later word needs the earlier steps

        def last(used: Tensor) -> list[int]:  # (n, T) to T numbers
            counts = torch.arange(1, len(used) + 1).unsqueeze(1)
            return (counts * used).amax(dim=0).clamp(min=1).tolist()

        extents = zip(last(needed.any(dim=1)), last(needed.any(dim=0)), strict=True)
        return cls(tokens.shape[0], tokens.shape[1], tuple(extents))

    @property
    def sizes(self) -> list[int]:
        """Positions of each step: T numbers whose sum is P."""
        return [photos * captions for photos, captions in self.extents]

    def indices(self, device: torch.device | None = None) -> Tensor:
        """Index of each packed position in a flattened (B, R, T) tensor, (P,)."""
        steps = len(self.extents)
        every = torch.arange(self.photos * self.captions * steps).view(
            self.photos, self.captions, steps
        )
        parts = [every[:b, :r, t].flatten() for t, (b, r) in enumerate(self.extents)]
        return upload(torch.cat(parts), device)

    def unpack(self, packed: Tensor) -> Tensor:
        """(P, ...) to (B, R, T, ...), with zeros at positions that were skipped."""
        whole = packed.new_zeros(
            self.photos * self.captions * len(self.extents), *packed.shape[1:]
        ).index_copy(0, self.indices(packed.device), packed)
        return whole.view(self.photos, self.captions, len(self.extents), *packed.shape[1:])
