"""A minimal encoder for tests of the decoder and the losses."""

from __future__ import annotations

from torch import Tensor, nn


class PatchEncoder(nn.Module):
    """One region per 16 x 16 patch, by a single convolution."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, dim, 16, 16)

    def forward(self, images: Tensor) -> tuple[Tensor, tuple[int, int]]:
        grid = self.conv(images)
        return grid.flatten(2).transpose(1, 2), (grid.shape[2], grid.shape[3])

    def measure(self, image_size: int) -> tuple[int, tuple[int, int]]:
        return self.conv.out_channels, (image_size // 16, image_size // 16)
