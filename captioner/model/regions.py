"""Positions of an encoder's regions in its input: centre, pitch and extent along each axis.

Every convolution and pooling maps positions to positions (Araujo et al. 2019, Computing Receptive
Fields of Convolutional Neural Networks, sections 2 and 3). With kernel k, stride s, dilation d and
padding p before the first value, output i is centred on input

    s * i - p + d * (k - 1) / 2

A forward pass records these layers as they run. This works for every encoder that makes its grid
with convolutions, poolings and paddings. These include TensorFlow's "same" padding, which depends
on the input size, and transformers with a patch embedding. Where branches with different positions
meet (the average poolings of ResNet-D), the mean position is used. If a grid is made differently
(Swin's patch merging), its regions are assumed to be equal cells.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakTensorKeyDictionary

from captioner.geometry import Axis, Geometry


class _Line(NamedTuple):
    """Positions along one axis of a feature map, in pixel indices of the input."""

    first: float
    pitch: float
    size: int
    """Number of positions."""
    low: float
    """First pixel that any position sees."""
    high: float
    """Last pixel that any position sees."""
    reach: float
    """Number of pixels that a position sees on each side of its centre."""

    def layer(self, size: int, kernel: int, stride: int, padding: int, dilation: int) -> _Line:
        """Return the output positions of a convolution or pooling."""
        half = dilation * (kernel - 1) / 2
        first = self.first + self.pitch * (half - padding)
        reach = self.reach + self.pitch * half
        last = first + self.pitch * stride * (size - 1)
        low, high = max(self.low, first - reach), min(self.high, last + reach)
        return _Line(first, self.pitch * stride, size, low, high, reach)

    def padded(self, before: int, after: int) -> _Line:
        size = self.size + before + after
        return self._replace(first=self.first - before * self.pitch, size=size)

    def merged(self, other: _Line) -> _Line:
        """Return the positions of the sum of two maps, or the finer positions if sizes differ."""
        if self.size != other.size or self.pitch != other.pitch:
            return self if self.size >= other.size else other
        return _Line(
            (self.first + other.first) / 2,
            self.pitch,
            self.size,
            min(self.low, other.low),
            max(self.high, other.high),
            max(self.reach, other.reach),
        )


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch types it partly
    """Recorder that follows the positions of feature maps through a forward pass."""

    def __init__(self, images: Tensor) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.lines: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
        self.lines[images] = [
            _Line(0.0, 1.0, size, 0.0, size - 1.0, 0.0) for size in images.shape[-2:]
        ]

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        del types
        results = func(*args, **(kwargs or {}))
        outputs = _tensors(results)
        if known := [self.lines[tensor] for tensor in _tensors(args) if tensor in self.lines]:
            lines = [reduce(_Line.merged, axis) for axis in zip(*known, strict=True)]
            if (layers := _layers(func.overloadpacket.__name__, args)) is not None:
                if args[0].shape[-2:] != tuple(line.size for line in lines):
                    return results  # resampled earlier (upsampling), so positions are unknown
                lines = [
                    line.padded(*layer) if len(layer) == 2 else line.layer(size, *layer)
                    for line, layer, size in zip(lines, layers, outputs[0].shape[-2:], strict=True)
                ]
            for output in outputs:
                self.lines[output] = lines
        return results


def _layers(name: str, args: Sequence[Any]) -> list[tuple[int, ...]] | None:
    """Return kernel, stride, padding and dilation for both axes of an operation.

    For a padding operation, return the padding before and after. For operations that keep
    positions, return None.
    """
    given = list(args)
    if name == "convolution" and not given[6] and given[0].ndim == 4:
        kernel, (stride, padding, dilation) = given[1].shape[-2:], given[3:6]
    elif name == "max_pool2d_with_indices":
        given += [[], 0, 1][len(given) - 2 :]
        kernel, stride, padding, dilation = given[1:5]
    elif name == "avg_pool2d":
        given += [[], 0][len(given) - 2 :]
        kernel, stride, padding = given[1:4]
        dilation = 1
    elif name == "constant_pad_nd" and given[0].ndim == 4:
        sides = [*given[1], 0, 0]
        return [tuple(sides[2:4]), tuple(sides[:2])]
    else:
        return None
    columns = (_pair(value) for value in (kernel, stride or kernel, padding, dilation))
    return list(zip(*columns, strict=True))


def _pair(value: Any) -> tuple[int, int]:
    values = list(value) if isinstance(value, Sequence) else [value]
    return (values * 2)[0], (values * 2)[1]


def _tensors(values: Any) -> list[Tensor]:
    """Return the tensors among arguments, also from lists such as the argument of torch.cat."""
    return [value for value in tree_leaves(values) if isinstance(value, Tensor)]


@torch.no_grad()
def locate_regions(encoder: nn.Module, image_size: int) -> Geometry:
    """Locate the regions of an encoder in its input of ``image_size`` x ``image_size`` pixels.

    Coordinates are pixels from the upper left corner. The first pixel extends from 0 to 1.
    """
    images = torch.zeros(1, 3, image_size, image_size)
    parameter = next(encoder.parameters(), images)
    images = images.to(parameter.device, parameter.dtype)
    with _Recorder(images) as recorder:
        features, grid = encoder(images)
    lines = recorder.lines.get(features)
    if lines is None or tuple(line.size for line in lines) != grid:
        return Geometry.even(grid, right=image_size, bottom=image_size)
    # The centre of pixel 0 is at 0.5, and the visible part ends after its last pixel.
    axes = (Axis(line.first + 0.5, line.pitch, line.low, line.high + 1.0) for line in lines)
    return Geometry(*axes)
