"""EfficientNet-Lite without its pooling and classifier. Its size 2 is the shipped model's encoder.

The networks and the names of their parameters are the same as in timm. They are implemented here
because importing timm and torchvision takes longer than captioning a photo.

Source: Tan and Le 2019 (arXiv:1905.11946), table 1.
Deviation: The authors' own changes for Lite (tensorflow/tpu, models/official/efficientnet/lite).
Squeeze-and-excitation is left out, and ReLU6 replaces swish. The width of the stem and the head and
the depth of the first and last stages are not scaled.

Shapes: Photos, (B, 3, H, W), become features, (B, 1280, Gh, Gw). Gh = H / 32 and Gw = W / 32, both
rounded up. In the methods of a block or convolution, H and W are the size of the input features.
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
    # number of blocks, kernel size, stride of the first block, output channels
    (1, 3, 1, 16),
    (2, 3, 2, 24),
    (2, 5, 2, 40),
    (3, 3, 2, 80),
    (3, 5, 1, 112),
    (4, 5, 2, 192),
    (1, 3, 1, 320),
)
"""The seven stages, before their width and depth are scaled."""

EXPANSION = 6
"""Factor of the number of channels inside a block. In the first stage, it is 1."""

STEM, HEAD = 32, 1280
"""Number of output channels of the first and the last convolution."""

SCALES = {0: (1.0, 1.0), 1: (1.0, 1.1), 2: (1.1, 1.2), 3: (1.2, 1.4), 4: (1.4, 1.8)}
"""Factors for width (channels) and depth (blocks), for each size from 0 to 4."""

EPS = 1e-3  # of the batch norms, as in TensorFlow

# Normalization that timm's weights need, for pixel values from 0 to 1.
TIMM_MEAN = TIMM_STD = (0.5,) * 3


def lite_size(name: str) -> int | None:
    """Return the size of an EfficientNet-Lite, 0 to 4, from the name of an encoder.

    For example, the size of ``timm/tf_efficientnet_lite2`` is 2. For other networks, return None.
    """
    match = re.fullmatch(r"timm/tf_efficientnet_lite([0-4])", name)
    return int(match[1]) if match else None


class EfficientNetLite(nn.Module):
    """An EfficientNet-Lite without its pooling and classifier."""

    def __init__(self, size: int) -> None:
        """Build the network of a size from 0 to 4, with random weights."""
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
        """Return the feature size and the grid (Gh, Gw), without running the network.

        ``image_size`` is the height and width of the photos (pixels).
        """
        side = math.ceil(image_size / 32)
        return HEAD, (side, side)

    def forward(self, images: Tensor) -> Tensor:
        """Encode normalized photos, (B, 3, H, W) to (B, 1280, Gh, Gw)."""
        return self.run_from(self.run_until(images, 0), 0)

    def run_until(self, images: Tensor, stage: int) -> Tensor:
        """Run the layers before a stage on normalized photos, (B, 3, H, W).

        ``stage`` is its number, from 0 to 6. The result is the input of ``blocks[stage]``.
        """
        features = self.conv_stem.layer(self.bn1, images, relu6=True)
        for blocks in self.blocks[:stage]:
            features = blocks(features)
        return features

    def run_from(self, features: Tensor, stage: int) -> Tensor:
        """Run a stage and all later layers on the result of ``run_until``, to (B, 1280, Gh, Gw)."""
        for blocks in self.blocks[stage:]:
            features = blocks(features)
        return self.conv_head.layer(self.bn2, features, relu6=True)


@torch.no_grad()
def fold_norms(network: nn.Module) -> None:
    """Fold the norms of an EfficientNet-Lite into its convolutions, in place, for inference.

    In eval mode, a batch norm is a linear map, so the weights of the convolution before it can
    include it. This saves time. Afterwards, the weights can no longer be saved, cached or trained.
    Networks of other types do not change.
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
    """Let the blocks of a network recompute their activations in the backward pass, to save memory.

    Activations inside a block have up to six times as many channels as the block's input. Only the
    input is kept, and the block runs again in the backward pass. Choose the trainable parameters
    before you call this function. Blocks before the first trainable parameter are not recomputed,
    because they keep no activations.

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
    """Inverted residual block of three convolutions.

    A 1 x 1 convolution multiplies the number of channels (if the expansion is above 1). A depthwise
    convolution follows, and a 1 x 1 convolution projects to the output channels. If input and
    output have the same shape, the input is added to the output.

    Source: Sandler et al. 2018 (arXiv:1801.04381), section 3.3. Deviation: none.
    """

    def __init__(self, width: int, out: int, kernel: int, *, stride: int, expansion: int) -> None:
        """Create the layers.

        Args:
            width: Number of input channels.
            out: Number of output channels.
            kernel: Kernel size of the depthwise convolution, an odd number.
            stride: Stride of the depthwise convolution, 1 or 2.
            expansion: Factor of the number of channels inside the block.
        """
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
        """Whether to recompute the activations in the backward pass (see `recompute_blocks`)."""
        self.expands = expansion > 1
        """Whether the block begins with a convolution that adds channels."""
        self.skips = stride == 1 and width == out
        """Whether the input is added to the output."""

    def forward(self, features: Tensor) -> Tensor:
        """Run the block, from (B, width, H, W) to (B, out, H / stride, W / stride), rounded up."""
        if not (self.recomputed and torch.is_grad_enabled()):
            return self.run(features)
        recorded: Tensor = checkpoint(
            self.run, features, use_reentrant=False, preserve_rng_state=False
        )
        return recorded

    def run(self, features: Tensor) -> Tensor:
        """Run the block as in ``forward``, but keep all activations for the backward pass."""
        added = features if self.skips else None
        if not self.expands:
            inner = self.conv_dw.layer(self.bn1, features, relu6=True)
            return self.conv_pw.layer(self.bn2, inner, added=added)
        inner = self.conv_pw.layer(self.bn1, features, relu6=True)
        inner = self.conv_dw.layer(self.bn2, inner, relu6=True)
        return self.conv_pwl.layer(self.bn3, inner, added=added)


class Convolution(nn.Conv2d):
    """Convolution with TensorFlow's ``SAME`` padding and initial weights, for odd kernel sizes.

    With ``SAME`` padding, the output size is the input size divided by the stride, rounded up.
    """

    def __init__(
        self, width: int, out: int, kernel: int, *, stride: int = 1, groups: int = 1
    ) -> None:
        padding = kernel // 2 if stride == 1 else 0
        super().__init__(width, out, kernel, stride, padding, groups=groups, bias=False)
        fan_out = kernel * kernel * out // groups
        nn.init.normal_(self.weight, std=math.sqrt(2 / fan_out))

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - torch's name
        """Run the convolution, from (B, C, H, W) to (B, C', H / stride, W / stride), rounded up."""
        return self.convolve(input, self.weight, self.bias)

    def convolve(self, features: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Convolve features, (B, C, H, W), with this weight and bias.

        ``forward`` passes the module's own weight, and ``layer`` passes a weight that includes the
        norm.
        """
        padded, stride, padding = self.pad(features), self.stride[0], int(self.padding[0])
        return nn.functional.conv2d(padded, weight, bias, stride, padding, groups=self.groups)

    def pad(self, features: Tensor) -> Tensor:
        """Add TensorFlow's padding to features if the stride is above 1.

        TensorFlow may then add one more zero at the end than at the start. The argument ``padding``
        of torch's convolution cannot express this. For stride 1, return the features unchanged.
        """
        (kernel, _), (stride, _) = self.kernel_size, self.stride
        if stride == 1:
            return features
        sides = []
        for size in (features.shape[-1], features.shape[-2]):  # torch pads the last axis first
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
        """Run the convolution and its batch norm, then add features or apply relu6.

        The norm is in eval mode, where it is a linear map. Folding it into the weights saves a pass
        over the features, and results and gradients change by rounding only.

        Args:
            norm: The batch norm after the convolution. After `fold_norms`, it is an identity.
            features: Input, (B, C, H, W).
            relu6: Whether to clamp the result to 0..6.
            added: Features to add to the result, with its shape. Not together with ``relu6``.

        Returns:
            The result, (B, C', H / stride, W / stride), with sizes rounded up.
        """
        weight, bias = self.weight, self.bias
        if isinstance(norm, nn.BatchNorm2d):  # otherwise, `fold_norms` has already folded it
            weight, bias = _folded(self, norm)
        result = self.convolve(features, weight, bias)
        if relu6:
            return nn.functional.relu6(result, inplace=True)
        return result if added is None else result + added


def _norm(channels: int) -> nn.BatchNorm2d:
    """Return a new batch norm for this number of channels, as in TensorFlow."""
    return nn.BatchNorm2d(channels, eps=EPS)


def _folded(convolution: Convolution, norm: nn.BatchNorm2d) -> tuple[Tensor, Tensor]:
    """Return the weight and bias of a convolution that includes the norm after it.

    torch's ``fuse_conv_bn_weights`` is not used. It returns new parameters, so gradients would not
    reach the parameters of the convolution and the norm.
    """
    assert norm.running_mean is not None
    assert norm.running_var is not None
    scale = norm.weight * torch.rsqrt(norm.running_var + norm.eps)
    weight = convolution.weight * scale[:, None, None, None]
    return weight, norm.bias - norm.running_mean * scale


def _round_to_eight(channels: float) -> int:
    """Return the multiple of 8 nearest to ``channels``, at least 8 and at least 90% of it."""
    rounded = max(8, int(channels + 4) // 8 * 8)
    return rounded if rounded >= 0.9 * channels else rounded + 8
