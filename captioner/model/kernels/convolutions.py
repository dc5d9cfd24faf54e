"""Fast convolutions of EfficientNet-Lite on CPUs, for inference and for training.

Inference, on x86 processors: torch runs a convolution, a sum and a relu6 as three operations. Each
operation reads and writes all features, and in bf16 relu6 alone takes half of an encoder's time.
oneDNN, torch's library for CPUs, can apply the sum or the relu6 while the result of the convolution
is still in a register. Its functions for this belong to torch.compile and may change. So they are
tried once, and encoders use the plain operations if the trial fails. Captioning takes 23% less time
in float32 and 45% less in bf16.

Training: oneDNN's backward pass of a depthwise convolution is many times slower than its forward
pass, for the shapes in this network. Here, the gradient of the input is computed by a forward
convolution: the gradient of the output is convolved with the flipped kernel. For stride 2, zeros
are inserted into the gradient of the output first. The gradient of the weight is computed in
float32 even in half precision, because this is faster. Fine-tuning the last four stages of the
shipped model's encoder takes 45% less time in bf16 and 1% less in float32.

Notation: B photos, H x W positions, C channels of the input and C' channels of the output. A kernel
has k x k weights per channel.
"""

from __future__ import annotations

import platform
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from captioner.model.efficientnet_lite import Block, Convolution

INNER_BYTES = 20_000_000
"""Largest size of a block's inner features in inference on a CPU (bytes).

The inner features have up to six times as many channels as the input of the block. In the first
blocks, they would take most of the memory of captioning.
"""


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
        """Run the convolution, and add or clamp in the same operation where oneDNN can do so.

        The arguments are the same as in ``Convolution.layer``. The norm must have been folded into
        the weights (see ``fold_norms``). Otherwise, the plain operations are used.
        """
        if isinstance(norm, nn.BatchNorm2d) or not can_fuse(features):
            return super().layer(norm, features, relu6=relu6, added=added)
        (stride, _), groups = self.stride, self.groups
        return fused_convolution(
            features, self.weight, self.bias, stride, groups, relu6=relu6, added=added
        )

    def convolve(self, features: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Convolve with a faster depthwise backward pass on CPUs (see ``Convolution.convolve``)."""
        learning = torch.is_grad_enabled() and features.device.type == "cpu"
        if self.groups == 1 or not learning:
            return super().convolve(features, weight, bias)
        return depthwise_convolution(
            self.pad(features), weight, bias, self.stride[0], int(self.padding[0])
        )


class FastBlock(Block):
    """Block that encodes a few photos at a time on a CPU, to limit the memory of inference."""

    def forward(self, features: Tensor) -> Tensor:
        """Run the block (see ``Block.forward``), in parts of a few photos if they are large."""
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
    """Run a convolution with TensorFlow's ``SAME`` padding and a sum or a relu6, in one operation.

    Gradients are not recorded.

    Args:
        features: Input, (B, C, H, W), on a CPU.
        weight: Weights, (C', C / groups, k, k), with odd k.
        bias: Bias of each output channel, (C',), or None.
        stride: 1 or 2.
        groups: Number of groups of channels.
        relu6: Whether to clamp the result to 0..6.
        added: Features to add to the result, with its shape. Not together with ``relu6``.

    Returns:
        The result, (B, C', H / stride, W / stride), with sizes rounded up.
    """
    around = weight.shape[-1] // 2
    if stride > 1:
        # For an even size, TensorFlow adds one zero less at the start than at the end. oneDNN pads
        # both sides equally. A row of zeros at the start of the kernel has the same effect, and
        # costs less than a padded copy of the features.
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
    """Return whether to use `fused_convolution` for these features.

    It is used for inference on a CPU if ``works`` confirms that it works for their type.
    """
    return for_inference(features) and works(features.dtype)


@cache
def works(dtype: torch.dtype) -> bool:
    """Return whether `fused_convolution` works for a type and agrees with torch's operations.

    A small convolution is tried once per type and process.
    """
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
        except Exception:  # a version of torch with other functions, or an unsupported type
            return False
        plain = nn.functional.conv2d(features, weight, bias, padding=1)
        return all(
            torch.allclose(found.float(), wanted.float(), rtol=0.05, atol=0.05)
            for found, wanted in ((clamped, plain.clamp(0, 6)), (summed, plain + features))
        )


def depthwise_convolution(
    features: Tensor, weight: Tensor, bias: Tensor | None, stride: int, padding: int
) -> Tensor:
    """Convolve each channel with its own kernel on a CPU, with a fast backward pass.

    The result is the same as with ``torch.nn.functional.conv2d`` and ``groups=C``.

    Args:
        features: Input, (B, C, H, W).
        weight: Weights, (C, 1, k, k).
        bias: Bias of each channel, (C,), or None.
        stride: Stride along both axes.
        padding: Number of zeros to add on each side.
    """
    if torch.is_autocast_enabled("cpu"):  # autocast does not apply inside of _Depthwise
        dtype = torch.get_autocast_dtype("cpu")
        features, weight = features.to(dtype), weight.to(dtype)
        bias = None if bias is None else bias.to(dtype)
    result: Tensor = _Depthwise.apply(features, weight, bias, stride, padding)
    return result


class _Depthwise(torch.autograd.Function):
    """Depthwise convolution with the backward pass that the docstring of the module describes."""

    @staticmethod
    def forward(ctx: Any, *given: Any) -> Tensor:
        """Return the convolution. The arguments are the same as in `depthwise_convolution`."""
        features, weight, bias, stride, padding = given
        ctx.save_for_backward(features, weight)
        ctx.stride, ctx.padding = stride, padding
        return nn.functional.conv2d(features, weight, bias, stride, padding, groups=len(weight))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of features, weight and bias, each None if it is not needed."""
        features, weight = ctx.saved_tensors
        gradient = gradients[0].contiguous(memory_format=torch.channels_last)
        stride, padding, channels, kernel = ctx.stride, ctx.padding, len(weight), weight.shape[-1]
        of_features = of_weight = of_bias = None
        if ctx.needs_input_grad[0]:
            dilated = gradient
            if stride > 1:  # insert zeros between the values
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
        if ctx.needs_input_grad[2]:  # a matrix product, because sum((0, 2, 3)) is far slower
            flat = gradient.permute(0, 2, 3, 1).reshape(-1, channels)
            (of_bias,) = flat.new_ones(1, len(flat)).mm(flat)
        return of_features, of_weight, of_bias, None, None
