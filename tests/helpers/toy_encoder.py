"""A minimal encoder for tests of the decoder and the losses, and norms that change something."""

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


def randomize_norms(network: nn.Module) -> None:
    """Give every batch norm random statistics and weights, so that one left out is noticed."""
    for module in network.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.uniform_(module.weight, 0.5, 1.5)
            nn.init.normal_(module.bias, std=0.1)
            nn.init.normal_(module.running_mean, std=0.1)
            nn.init.uniform_(module.running_var, 0.5, 2)
