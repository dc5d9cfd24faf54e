"""Test the positions of an encoder's regions."""

from __future__ import annotations

import pytest
from torch import Tensor, nn

from captioner.model.encoder import Encoder
from captioner.model.regions import locate_regions


class Layers(nn.Module):
    """An encoder that consists of the given layers."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.Sequential(*layers)

    def forward(self, images: Tensor) -> tuple[Tensor, tuple[int, int]]:
        maps = self.layers(images)
        return maps.flatten(2).transpose(1, 2), (maps.shape[2], maps.shape[3])


@pytest.mark.parametrize(
    ("layers", "expected"),
    [
        # One convolution: the first output is centred on pixel (k - 1) / 2 - p.
        ([nn.Conv2d(3, 4, 3, stride=2, padding=1)], (0.5, 2, 0, 16)),
        ([nn.Conv2d(3, 4, 3, stride=2)], (1.5, 2, 0, 15)),
        ([nn.Conv2d(3, 4, 4, stride=4)], (2, 4, 0, 16)),
        ([nn.Conv2d(3, 4, 3, padding=2, dilation=2)], (0.5, 1, 0, 16)),
        ([nn.Conv2d(3, 4, 3, padding="same")], (0.5, 1, 0, 16)),
        # Padding and pooling, with and without optional arguments.
        ([nn.ZeroPad2d((0, 1, 0, 1)), nn.Conv2d(3, 4, 3, stride=2)], (1.5, 2, 0, 16)),
        ([nn.Conv2d(3, 4, 1), nn.MaxPool2d(2)], (1, 2, 0, 16)),
        ([nn.Conv2d(3, 4, 1), nn.MaxPool2d(3, 2, ceil_mode=True)], (1.5, 2, 0, 16)),
        ([nn.Conv2d(3, 4, 1), nn.AvgPool2d(3, 2, padding=1)], (0.5, 2, 0, 16)),
        # Layers compose; 16 is not divisible by 5, so the last pixel is never seen.
        ([nn.Conv2d(3, 4, 5, stride=5), nn.ReLU(), nn.Conv2d(4, 4, 1)], (2.5, 5, 0, 15)),
        ([nn.Conv2d(3, 4, 2, stride=2), nn.BatchNorm2d(4), nn.MaxPool2d(2)], (2, 4, 0, 16)),
    ],
)
def test_padding_arithmetic(layers, expected) -> None:
    y, x = locate_regions(Layers(*layers).eval(), 16)

    assert y == x == pytest.approx(expected)


@pytest.mark.parametrize(
    ("name", "size", "first", "pitch", "stop"),
    [
        ("resnet18", 160, 0.5, 32, 160),
        ("timm/resnet18", 224, 0.5, 32, 224),
        ("efficientnet_b0", 224, 0.5, 32, 224),
        ("regnet_y_400mf", 224, 0.5, 32, 224),
        ("mobilenet_v3_small", 192, 0.5, 32, 192),
        ("vgg11", 100, 8, 16, 100),
        ("timm/tf_efficientnet_lite0", 224, 31.5, 32, 224),
        ("timm/tf_efficientnet_lite0", 256, 31.5, 32, 256),
        ("timm/tf_efficientnet_lite0", 260, 3.5, 32, 260),  # "same" padding depends on the size
        ("timm/test_vit", 160, 8, 16, 160),
        ("timm/test_convnext", 230, 16, 32, 228),
        # The mean of the branches: 3 x 3 convolutions (0.5) and 2 x 2 poolings (14.5).
        ("timm/resnet18d", 128, 7.5, 32, 128),
        ("swin_t", 128, 16, 32, 128),  # patches merged by reshaping: equal cells
    ],
)
def test_encoders_of_known_geometry(name, size, first, pitch, stop) -> None:
    """The first eight rows also agree with measurements by gradients of the features."""
    y, x = locate_regions(Encoder(name, image_size=size), size)

    assert y == x == pytest.approx((first, pitch, 0, stop))
