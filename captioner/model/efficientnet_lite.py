"""EfficientNet-Lite, the encoder of the shipped model, without its pooling.

The networks and their parameter names are the same as in timm. They are implemented here because
importing timm and torchvision takes longer than captioning a photo.

Source: Tan and Le 2019 (arXiv:1905.11946), table 1, with the changes of the authors' Lite code
(tensorflow/tpu, models/official/efficientnet/lite). Squeeze-and-excitation is left out, and ReLU6
replaces swish. Stem, head and the depth of the first and last stages are not scaled.

Shapes: (B, 3, H, W) to (B, 1280, H / 32, W / 32), both rounded up.
"""

from __future__ import annotations

import math
import re
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from captioner.errors import ConfigError

STAGES = (
    # blocks, kernel, stride (of the first block), channels
    (1, 3, 1, 16),
    (2, 3, 2, 24),
    (2, 5, 2, 40),
    (3, 3, 2, 80),
    (3, 5, 1, 112),
    (4, 5, 2, 192),
    (1, 3, 1, 320),
)
EXPANSION = 6
STEM, HEAD = 32, 1280
SCALES = {0: (1.0, 1.0), 1: (1.0, 1.1), 2: (1.1, 1.2), 3: (1.2, 1.4), 4: (1.4, 1.8)}
"""Width and depth factors of sizes 0 to 4."""

EPS = 1e-3  # as in TensorFlow

# Normalization of timm's weights, for pixels in 0..1.
TIMM_MEAN = TIMM_STD = (0.5,) * 3


def lite_size(name: str) -> int | None:
    """Return the EfficientNet-Lite size in an encoder's name, or None for a different network."""
    match = re.fullmatch(r"timm/tf_efficientnet_lite([0-4])", name)
    return int(match[1]) if match else None


class EfficientNetLite(nn.Module):
    """The convolutional part of an EfficientNet-Lite of one size, 0 to 4."""

    def __init__(self, size: int) -> None:
        super().__init__()
        wider, deeper = SCALES[size]
        self.conv_stem = Convolution(3, STEM, 3, stride=2)
        self.bn1 = _norm(STEM)
        stages, width = [], STEM
        for number, (count, kernel, first_stride, channels) in enumerate(STAGES):
            out = _round_to_eight(wider * channels)
            ends = number in (0, len(STAGES) - 1)  # the depth of these stages is not scaled
            blocks = []
            for block in range(count if ends else math.ceil(deeper * count)):
                expansion = EXPANSION if number else 1
                stride = 1 if block else first_stride
                blocks.append(Block(width, out, kernel, stride=stride, expansion=expansion))
                width = out
            stages.append(nn.Sequential(*blocks))
        self.blocks = nn.Sequential(*stages)
        self.conv_head = Convolution(width, HEAD, 1)
        self.bn2 = _norm(HEAD)

    def output_size(self, image_size: int) -> tuple[int, tuple[int, int]]:
        """Return the feature size and the grid for square photos of a size (pixels)."""
        side = math.ceil(image_size / 32)
        return HEAD, (side, side)

    def forward(self, images: Tensor) -> Tensor:
        """Encode normalized photos, (B, 3, H, W) to (B, 1280, Gh, Gw)."""
        return self.run_from(self.run_until(images, 0), 0)

    def run_until(self, images: Tensor, stage: int) -> Tensor:
        """Run normalized photos (B, 3, H, W) up to the input of ``blocks.stage``."""
        features = self.conv_stem.layer(self.bn1, images, relu6=True)
        for blocks in self.blocks[:stage]:
            features = blocks(features)
        return features

    def run_from(self, features: Tensor, stage: int) -> Tensor:
        """Run the input of ``blocks.stage`` to the output (B, 1280, Gh, Gw)."""
        for blocks in self.blocks[stage:]:
            features = blocks(features)
        return self.conv_head.layer(self.bn2, features, relu6=True)


@torch.no_grad()
def fold_norms(network: nn.Module) -> None:
    """Fold the norms of an EfficientNet-Lite into its convolutions, for inference only.

    Afterwards, the weights can no longer be saved, cached or trained. Other networks do not change.
    """
    for module in list(network.modules()):
        names = [name for name, _ in module.named_children()]
        for before, name in pairwise(names):
            convolution, norm = getattr(module, before), getattr(module, name)
            if isinstance(convolution, Convolution) and isinstance(norm, nn.BatchNorm2d):
                weight, bias = _folded(convolution, norm)
                convolution.weight = nn.Parameter(weight, convolution.weight.requires_grad)
                convolution.bias = nn.Parameter(bias, norm.bias.requires_grad)
                setattr(module, name, nn.Identity())


def recompute_blocks(network: nn.Module) -> None:
    """Recompute the activations inside blocks during the backward pass, to save memory.

    Activations inside a block have up to six times as many channels as the block's input. Only the
    input is kept. Call this function after you have chosen the trainable parameters. Blocks before
    the first trainable parameter are not recomputed, because they keep no activations.

    Raises:
        ConfigError: The network is not an EfficientNet-Lite.
    """
    blocks, learning = [part for part in network.modules() if isinstance(part, Block)], False
    for block in blocks:
        learning = learning or any(p.requires_grad for p in block.parameters())
        block.recomputed = learning
    if not blocks:
        raise ConfigError(
            "encoder.recompute needs an EfficientNet-Lite; set training.micro_batch instead, which "
            "saves memory with any encoder"
        )


class Block(nn.Module):
    """Inverted residual block: expansion (if above 1), depthwise convolution, projection.

    Source: Sandler et al. 2018 (arXiv:1801.04381), section 3.3.
    """

    def __init__(self, width: int, out: int, kernel: int, *, stride: int, expansion: int) -> None:
        super().__init__()
        self.bn1: nn.Module
        inner = expansion * width
        depthwise = Convolution(inner, inner, kernel, stride=stride, groups=inner)
        if expansion > 1:
            self.conv_pw, self.bn1 = Convolution(width, inner, 1), _norm(inner)
            self.conv_dw, self.bn2 = depthwise, _norm(inner)
            self.conv_pwl, self.bn3 = Convolution(inner, out, 1), _norm(out)
        else:
            self.conv_dw, self.bn1 = depthwise, _norm(inner)
            self.conv_pw, self.bn2 = Convolution(inner, out, 1), _norm(out)
        self.recomputed = False
        """True after `recompute_blocks`."""
        self.expands = expansion > 1
        self.skips = stride == 1 and width == out

    def forward(self, features: Tensor) -> Tensor:
        """Run the block: (B, width, H, W) to (B, out, H / stride, W / stride)."""
        if not (self.recomputed and torch.is_grad_enabled()):
            return self.run(features)
        recorded: Tensor = checkpoint(
            self.run, features, use_reentrant=False, preserve_rng_state=False
        )
        return recorded

    def run(self, features: Tensor) -> Tensor:
        """Run the block without recomputation."""
        added = features if self.skips else None
        if not self.expands:
            inner = self.conv_dw.layer(self.bn1, features, relu6=True)
            return self.conv_pw.layer(self.bn2, inner, added=added)
        inner = self.conv_pw.layer(self.bn1, features, relu6=True)
        inner = self.conv_dw.layer(self.bn2, inner, relu6=True)
        return self.conv_pwl.layer(self.bn3, inner, added=added)


class Convolution(nn.Conv2d):
    """Convolution with an odd kernel and with TensorFlow's ``SAME`` padding and initialization."""

    def __init__(
        self, width: int, out: int, kernel: int, *, stride: int = 1, groups: int = 1
    ) -> None:
        padding = kernel // 2 if stride == 1 else 0
        super().__init__(width, out, kernel, stride, padding, groups=groups, bias=False)
        fan_out = kernel * kernel * out // groups
        nn.init.normal_(self.weight, std=math.sqrt(2 / fan_out))

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - torch's name
        """Run the convolution: (B, C, H, W) to (B, C', H / stride, W / stride), rounded up."""
        return self.convolve(input, self.weight, self.bias)

    def convolve(self, features: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Convolve features with the weights that are passed, not with the module's own weights."""
        padded, stride, padding = self.pad(features), self.stride[0], int(self.padding[0])
        return nn.functional.conv2d(padded, weight, bias, stride, padding, groups=self.groups)

    def pad(self, features: Tensor) -> Tensor:
        """Add TensorFlow's padding if ``padding`` cannot express it: more at the end."""
        (kernel, _), (stride, _) = self.kernel_size, self.stride
        if stride == 1:
            return features
        sides = []
        for size in (features.shape[-1], features.shape[-2]):  # F.pad begins with the last
            padding = max((math.ceil(size / stride) - 1) * stride + kernel - size, 0)
            sides += [padding // 2, padding - padding // 2]
        return nn.functional.pad(features, sides)

    def layer(
        self,
        norm: nn.Module,
        features: Tensor,
        *,
        relu6: bool = False,
        added: Tensor | None = None,
    ) -> Tensor:
        """Run the convolution and its batch norm, then add ``added`` or apply relu6.

        The norm is in eval mode, where it is a linear map. Folding it into the weights saves a pass
        over the features, and results and gradients change by rounding only.
        """
        weight, bias = self.weight, self.bias
        if isinstance(norm, nn.BatchNorm2d):  # else `fold_norms` has folded it
            weight, bias = _folded(self, norm)
        result = self.convolve(features, weight, bias)
        if relu6:
            return nn.functional.relu6(result, inplace=True)
        return result if added is None else result + added


def _norm(channels: int) -> nn.BatchNorm2d:
    return nn.BatchNorm2d(channels, eps=EPS)


def _folded(convolution: Convolution, norm: nn.BatchNorm2d) -> tuple[Tensor, Tensor]:
    """Return weight and bias of a convolution combined with its norm.

    torch's ``fuse_conv_bn_weights`` returns new parameters, and they would cut off the gradients.
    """
    assert norm.running_mean is not None
    assert norm.running_var is not None
    scale = norm.weight * torch.rsqrt(norm.running_var + norm.eps)
    weight = convolution.weight * scale[:, None, None, None]
    return weight, norm.bias - norm.running_mean * scale


def _round_to_eight(channels: float) -> int:
    """Return the nearest multiple of 8 that is at least 90% of ``channels``."""
    rounded = max(8, int(channels + 4) // 8 * 8)
    return rounded if rounded >= 0.9 * channels else rounded + 8
