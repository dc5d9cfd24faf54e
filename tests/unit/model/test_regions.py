"""Positions of an encoder's regions: padding arithmetic against gradients."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from captioner.model.encoder import Encoder
from captioner.model.regions import centred_by_gradients, locate_regions


class Layers(nn.Module):
    """An encoder made of the given layers."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.Sequential(*layers)

    def forward(self, images: Tensor) -> tuple[Tensor, tuple[int, int]]:
        maps = self.layers(images)
        return maps.flatten(2).transpose(1, 2), (maps.shape[2], maps.shape[3])


# --- known answers -------------------------------------------------------------------------------


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
        ("timm/tf_efficientnet_lite0", 224, 31.5, 32, 224),
        ("timm/tf_efficientnet_lite0", 256, 31.5, 32, 256),
        ("timm/tf_efficientnet_lite0", 260, 3.5, 32, 260),  # "same" padding depends on the size
        ("timm/test_vit", 160, 8, 16, 160),
        ("timm/test_convnext", 230, 16, 32, 228),
    ],
)
def test_encoders_of_known_geometry(name, size, first, pitch, stop) -> None:
    y, x = locate_regions(Encoder(name), size)

    assert y == x == pytest.approx((first, pitch, 0, stop))


def test_branches_at_different_positions_are_measured() -> None:
    """Half of the features come from 4 pixels, the other half from a pixel beside them."""

    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.other = nn.Conv2d(3, 4, 4, stride=4), nn.Conv2d(3, 4, 1, stride=4)

        def forward(self, images: Tensor) -> tuple[Tensor, tuple[int, int]]:
            maps = self.one(images) + self.other(images)
            return maps.flatten(2).transpose(1, 2), (maps.shape[2], maps.shape[3])

    with torch.no_grad():
        encoder = Two()
        encoder.other.weight.zero_()  # this branch has no effect
        y, x = locate_regions(encoder, 32)

    for axis in (y, x):
        assert axis.first == pytest.approx(2, abs=0.3)
        assert axis.pitch == 4


def test_grids_made_by_reshaping_are_measured() -> None:
    """Patches without a convolution, by pixel unshuffling."""

    class Patches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(48, 5)

        def forward(self, images: Tensor) -> tuple[Tensor, tuple[int, int]]:
            maps = nn.functional.pixel_unshuffle(images, 4)
            return self.linear(maps.flatten(2).transpose(1, 2)), (maps.shape[2], maps.shape[3])

    y, x = locate_regions(Patches(), 32)

    assert (y.pitch, x.pitch) == (4, 4)
    assert (y.first, x.first) == pytest.approx((2, 2), abs=0.6)


# --- against gradients ---------------------------------------------------------------------------

FAMILIES = [
    *[("resnet18", size) for size in (160, 224)],
    ("resnet50", 224),
    ("timm/resnet18", 224),
    ("efficientnet_b0", 224),
    ("regnet_y_400mf", 224),
    ("mobilenet_v3_large", 224),
    ("mobilenet_v3_small", 192),
    *[("timm/tf_efficientnet_lite0", size) for size in (224, 256)],
    *[("timm/tf_efficientnet_lite2", size) for size in (260, 288)],
    *[("vgg11", size) for size in (100, 128)],
    *[("timm/convnext_atto", size) for size in (224, 230)],
    ("timm/vit_tiny_patch16_224", 224),
]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "size"), FAMILIES)
def test_centres_agree_with_gradients(name: str, size: int) -> None:
    encoder = Encoder(name)
    regions = locate_regions(encoder, size)

    measured = centred_by_gradients(encoder, size, regions)

    for own, other in zip(measured, regions, strict=True):
        assert own.first == pytest.approx(other.first, abs=0.01 * other.pitch)
