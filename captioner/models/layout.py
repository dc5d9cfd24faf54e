"""Which words a step of teacher forcing runs on, and where they stand.

Notation: B photos, R captions a photo, T steps, P photos and captions of all steps together.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from captioner.vocabulary import PAD


class Layout(NamedTuple):
    """On which photos and captions each step of teacher forcing runs.

    It is read from the tokens where they are, on the CPU, so that nothing waits for a device.
    P counts what the steps run on, one after the other: first all that the first step runs on.
    """

    photos: int
    """B."""
    captions: int
    """R."""
    extents: tuple[tuple[int, int], ...]
    """For each of T steps: up to which photo and which caption there are words, at least (1, 1)."""

    @classmethod
    def of(cls, tokens: Tensor) -> Layout:
        """Of tokens (B, R, T), on the CPU."""
        real = tokens != PAD
        needed = real.flip(2).cummax(dim=2).values.flip(2)  # a word later needs the steps before

        def last(there: Tensor) -> list[int]:  # (n, T) to T numbers
            places = torch.arange(1, len(there) + 1).unsqueeze(1)
            return (places * there).amax(dim=0).clamp(min=1).tolist()

        extents = zip(last(needed.any(dim=1)), last(needed.any(dim=0)), strict=True)
        return cls(tokens.shape[0], tokens.shape[1], tuple(extents))

    @property
    def sizes(self) -> list[int]:
        """What each step runs on, T numbers whose sum is P."""
        return [photos * captions for photos, captions in self.extents]

    def places(self, device: torch.device | None = None) -> Tensor:
        """Where each of P stands in a flattened (B, R, T)."""
        steps = len(self.extents)
        every = torch.arange(self.photos * self.captions * steps).view(
            self.photos, self.captions, steps
        )
        parts = [every[:b, :r, t].flatten() for t, (b, r) in enumerate(self.extents)]
        return upload(torch.cat(parts), device)

    def unpack(self, packed: Tensor) -> Tensor:
        """(P, ...) to (B, R, T, ...), with zeros where no step ran."""
        whole = packed.new_zeros(
            self.photos * self.captions * len(self.extents), *packed.shape[1:]
        ).index_copy(0, self.places(packed.device), packed)
        return whole.view(self.photos, self.captions, len(self.extents), *packed.shape[1:])


def upload(tensor: Tensor, device: torch.device | None) -> Tensor:
    """A tensor of the CPU on a device, without waiting for what the device is doing."""
    if device is None or device.type != "cuda":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)
