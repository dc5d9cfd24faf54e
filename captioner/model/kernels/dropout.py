"""Dropout whose random numbers are drawn quickly on a CPU."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Dropout(nn.Dropout):
    """As ``torch.nn.Dropout``; on a CPU the share is rounded to a multiple of 1/65,536.

    Source: Srivastava et al. 2014 (JMLR 15, 1929-1958). torch draws a number of 32 bits for each
    value; here 64 bits are drawn for four values.
    """

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - torch's name
        """Zero a share ``p`` of the values, of any shape, and divide the others by 1 - p."""
        if not self.training or self.p in {0, 1} or input.device.type != "cpu":
            return super().forward(input)
        drawn = torch.empty(-(-input.numel() // 4), dtype=torch.int64).random_(-(2**63), None)
        values = drawn.view(torch.int16)[: input.numel()].view(input.shape)
        kept = values >= round(self.p * 2**16) - 2**15
        return input * kept.to(input.dtype).div_(1 - self.p)
