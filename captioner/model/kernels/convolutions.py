"""Fast convolutions for CPUs: fused with a sum or a clamp by oneDNN, and depthwise.

Inference on x86 processors: torch runs a convolution, a sum and a relu6 as three operations. Each
operation reads and writes all features, and in bf16 relu6 alone takes half of an encoder's time.
oneDNN can apply the sum and the relu6 while the result is still in a register. Its functions for
this belong to torch.compile and may change. So they are tried once, and encoders use the plain
operations if the trial fails. Captioning takes 23% less time in float32 and 45% less in bf16.

Training: for these shapes, oneDNN's backward pass of a depthwise convolution is many times slower
than its forward pass. Here the input gradient is a forward convolution of the output gradient with
the flipped kernel (for stride 2, zeros are inserted first). In half precision, the weight gradient
is computed in float32, because this is faster. Fine-tuning the last four stages of the shipped
model's encoder takes 45% less time in bf16 and 1% less in float32.
"""

from __future__ import annotations

import platform
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from captioner.model.efficientnet_lite import Block, Convolution

INNER_BYTES = 20_000_000
"""Limit of a block's inner features for inference on a CPU (bytes). Inner features are six times as
wide as the block's input. In the first blocks, they would take most of the memory of captioning."""


class FastConvolution(Convolution):
    """Convolution that uses `fused_convolution` and `depthwise_convolution` where they work."""

    def layer(
        self,
        norm: nn.Module,
        features: Tensor,
        *,
        relu6: bool = False,
        added: Tensor | None = None,
    ) -> Tensor:
        """See ``Convolution.layer``."""
        if isinstance(norm, nn.BatchNorm2d) or not can_fuse(features):
            return super().layer(norm, features, relu6=relu6, added=added)
        (stride, _), groups = self.stride, self.groups
        return fused_convolution(
            features, self.weight, self.bias, stride, groups, relu6=relu6, added=added
        )

    def convolve(self, features: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """See ``Convolution.convolve``."""
        learning = torch.is_grad_enabled() and features.device.type == "cpu"
        if self.groups == 1 or not learning:
            return super().convolve(features, weight, bias)
        return depthwise_convolution(
            self.pad(features), weight, bias, self.stride[0], int(self.padding[0])
        )


class FastBlock(Block):
    """Block that encodes a few photos at a time on a CPU, to limit the memory of inference."""

    def forward(self, features: Tensor) -> Tensor:
        """See ``Block.forward``."""
        if isinstance(self.bn1, nn.BatchNorm2d) or not for_inference(features):
            return super().forward(features)
        inner = self.conv_dw.weight.shape[0] * features[0, 0].numel() * features.element_size()
        parts = torch.split(features, max(1, INNER_BYTES // inner))
        return self.run(features) if len(parts) == 1 else torch.cat(list(map(self.run, parts)))


def for_inference(features: Tensor) -> bool:
    """Return whether the features are on the CPU and torch does not record gradients."""
    return features.device.type == "cpu" and not torch.is_grad_enabled()


def fused_convolution(
    features: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: int,
    groups: int,
    *,
    relu6: bool = False,
    added: Tensor | None = None,
) -> Tensor:
    """Run a convolution with TensorFlow's ``SAME`` padding, then a sum or a relu6.

    It does not record gradients.

    Args:
        features: (B, C, H, W).
        weight: (C', C / groups, k, k) with odd k.
        bias: (C',), or None.
        stride: 1 or 2.
        groups: Number of groups.
        relu6: Clamp the result to 0..6.
        added: Features (B, C', H', W') to add to the result, instead of relu6.
    """
    around = weight.shape[-1] // 2
    if stride > 1:
        # An even size needs one zero less at its start. A row of zeros in the kernel has the same
        # effect as a padded copy of the features, and costs less.
        height, width = (1 - size % 2 for size in features.shape[2:])
        weight = nn.functional.pad(weight, (width, 0, height, 0))
    layout = [around, around], [stride, stride], [1, 1], groups
    run = torch.ops.mkldnn._convolution_pointwise
    if added is not None:
        summed: Tensor = run.binary(
            features, added, weight, bias, *layout, "add", 1, None, [], None
        )
        return summed
    kind, limits = ("hardtanh", [0.0, 6.0]) if relu6 else ("none", [])
    result: Tensor = run.default(features, weight, bias, *layout, kind, limits, "")
    return result


def can_fuse(features: Tensor) -> bool:
    """Return whether `fused_convolution` should run on these features."""
    return for_inference(features) and works(features.dtype)


@cache
def works(dtype: torch.dtype) -> bool:
    """Return whether `fused_convolution` works and agrees with torch's operations."""
    if platform.machine().lower() not in ("x86_64", "amd64"):
        return False  # other processors have their own convolutions, which may be faster
    with torch.inference_mode():
        features = torch.linspace(-4, 4, 2 * 16 * 8 * 8).view(2, 16, 8, 8).sin()
        weight = torch.linspace(-9, 9, 16 * 16 * 9).view(16, 16, 3, 3).cos()
        layout = torch.channels_last
        features, weight = (part.to(dtype, memory_format=layout) for part in (features, weight))
        bias = torch.ones(16, dtype=dtype)
        try:
            clamped = fused_convolution(features, weight, bias, 1, 1, relu6=True)
            summed = fused_convolution(features, weight, bias, 1, 1, added=features)
        except Exception:  # another version, or a processor without this type
            return False
        plain = nn.functional.conv2d(features, weight, bias, padding=1)
        return all(
            torch.allclose(found.float(), wanted.float(), rtol=0.05, atol=0.05)
            for found, wanted in ((clamped, plain.clamp(0, 6)), (summed, plain + features))
        )


def depthwise_convolution(
    features: Tensor, weight: Tensor, bias: Tensor | None, stride: int, padding: int
) -> Tensor:
    """Return ``torch.nn.functional.conv2d`` with one channel per group, on a CPU."""
    if torch.is_autocast_enabled("cpu"):  # it does not apply inside the function
        dtype = torch.get_autocast_dtype("cpu")
        features, weight = features.to(dtype), weight.to(dtype)
        bias = None if bias is None else bias.to(dtype)
    result: Tensor = _Depthwise.apply(features, weight, bias, stride, padding)
    return result


class _Depthwise(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *given: Any) -> Tensor:
        features, weight, bias, stride, padding = given
        ctx.save_for_backward(features, weight)
        ctx.stride, ctx.padding = stride, padding
        return nn.functional.conv2d(features, weight, bias, stride, padding, groups=len(weight))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        features, weight = ctx.saved_tensors
        gradient = gradients[0].contiguous(memory_format=torch.channels_last)
        stride, padding, channels, kernel = ctx.stride, ctx.padding, len(weight), weight.shape[-1]
        of_features = of_weight = of_bias = None
        if ctx.needs_input_grad[0]:
            dilated = gradient
            if stride > 1:
                less = 2 * padding - kernel + 1
                size = (side + less for side in features.shape[2:])
                dilated = gradient.new_zeros(len(gradient), channels, *size)
                dilated = dilated.to(memory_format=torch.channels_last)
                dilated[:, :, ::stride, ::stride] = gradient
            flipped, around = weight.flip(2, 3), kernel - 1 - padding
            of_features = nn.functional.conv2d(dilated, flipped, padding=around, groups=channels)
        if ctx.needs_input_grad[1]:
            exact = torch.promote_types(weight.dtype, torch.float32)
            _, found, _ = torch.ops.aten.convolution_backward(
                gradient.to(exact), features.to(exact), weight.to(exact), None,
                [stride, stride], [padding, padding], [1, 1], False, [0, 0], channels,
                [False, True, False],
            )  # fmt: skip
            of_weight = found.to(weight.dtype)
        if ctx.needs_input_grad[2]:  # a product, as a sum over (0, 2, 3) is far slower
            flat = gradient.permute(0, 2, 3, 1).reshape(-1, channels)
            (of_bias,) = flat.new_ones(1, len(flat)).mm(flat)
        return of_features, of_weight, of_bias, None, None
