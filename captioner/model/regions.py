"""Positions of an encoder's regions in its input image, along each axis.

The regions are not always equal cells of the image, because padding shifts them (see ``geometry``).
Their positions follow from the layers of the network. With kernel k, stride s, dilation d and
padding p before the first value, output i of a convolution or pooling is centred on input

    s * i - p + d * (k - 1) / 2

`locate_regions` runs the encoder once and applies this formula to each layer as it runs. This works
for every grid that is made by convolutions, poolings and paddings. Examples are TensorFlow's "same"
padding, which depends on the input size, and the patch embedding of a transformer. If branches with
different positions are added (as in ResNet-D, with its average poolings), the mean position is
used. If a grid is made in a different way (as in Swin, which merges patches), its regions are
assumed to be equal cells.

Source: Araujo et al. 2019, Computing Receptive Fields of Convolutional Neural Networks, sections 2
and 3. Deviation: none.
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
    """Positions along one axis of a feature map, in pixel indices of the encoder's input."""

    first: float
    """Centre of the first position. Padding can move it outside of the input."""
    pitch: float
    """Distance between the centres of neighbouring positions."""
    size: int
    """Number of positions."""
    low: float
    """First pixel of the input that any position sees."""
    high: float
    """Last pixel of the input that any position sees."""
    reach: float
    """Number of pixels that a position sees on each side of its centre."""

    def layer(self, size: int, kernel: int, stride: int, padding: int, dilation: int) -> _Line:
        """Return the positions after a convolution or pooling with ``size`` outputs."""
        half = dilation * (kernel - 1) / 2
        first = self.first + self.pitch * (half - padding)
        reach = self.reach + self.pitch * half
        last = first + self.pitch * stride * (size - 1)
        low, high = max(self.low, first - reach), min(self.high, last + reach)
        return _Line(first, self.pitch * stride, size, low, high, reach)

    def padded(self, before: int, after: int) -> _Line:
        """Return the positions after this many values are added at both ends."""
        size = self.size + before + after
        return self._replace(first=self.first - before * self.pitch, size=size)

    def merged(self, other: _Line) -> _Line:
        """Return the positions of the result of an operation on two maps, such as their sum.

        Maps of the same size and pitch count equally, so the result has the mean of their
        positions. Otherwise, the map with more positions sets them. An example is a map that is
        multiplied by one number per channel.
        """
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
    """Context in which torch's operations record the positions of the feature maps they return."""

    def __init__(self, images: Tensor) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.lines: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
        """Vertical and horizontal positions (two lines) of each feature map."""
        self.lines[images] = [
            _Line(0.0, 1.0, size, 0.0, size - 1.0, 0.0) for size in images.shape[-2:]
        ]

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        """Run an operation, and derive the positions of its outputs from its inputs."""
        del types
        results = func(*args, **(kwargs or {}))
        outputs = _tensors(results)
        if known := [self.lines[tensor] for tensor in _tensors(args) if tensor in self.lines]:
            lines = [reduce(_Line.merged, axis) for axis in zip(*known, strict=True)]
            if (layers := _layers(func.overloadpacket.__name__, args)) is not None:
                if args[0].shape[-2:] != tuple(line.size for line in lines):
                    return results  # the map was resampled before, so its positions are unknown
                lines = [
                    line.padded(*layer) if len(layer) == 2 else line.layer(size, *layer)
                    for line, layer, size in zip(lines, layers, outputs[0].shape[-2:], strict=True)
                ]
            for output in outputs:
                self.lines[output] = lines
        return results


def _layers(name: str, args: Sequence[Any]) -> list[tuple[int, ...]] | None:
    """Return the numbers that describe how an operation changes positions, or None if it does not.

    Args:
        name: Name of the operation in torch, such as ``convolution``.
        args: Arguments of the operation.

    Returns:
        One tuple for the vertical and one for the horizontal axis. For a convolution or pooling, it
        contains kernel, stride, padding and dilation. For a padding operation, it contains the
        number of values added before and after.
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
    """Return the values for both axes. torch accepts one number if they are equal."""
    values = list(value) if isinstance(value, Sequence) else [value]
    return (values * 2)[0], (values * 2)[1]


def _tensors(values: Any) -> list[Tensor]:
    """Return all tensors among values, including tensors in lists (as torch.cat takes them)."""
    return [value for value in tree_leaves(values) if isinstance(value, Tensor)]


@torch.no_grad()
def locate_regions(encoder: nn.Module, image_size: int) -> Geometry:
    """Locate the regions of an encoder in its input of ``image_size`` x ``image_size`` pixels.

    Returns:
        The positions of the regions, in pixels from the upper left corner. The first pixel extends
        from 0 to 1. If the positions cannot be derived, the regions are equal cells.
    """
    images = torch.zeros(1, 3, image_size, image_size)
    parameter = next(encoder.parameters(), images)
    images = images.to(parameter.device, parameter.dtype)
    with _Recorder(images) as recorder:
        features, grid = encoder(images)
    lines = recorder.lines.get(features)
    if lines is None or tuple(line.size for line in lines) != grid:
        return Geometry.even(grid, right=image_size, bottom=image_size)
    # Pixel indices become coordinates: the centre of pixel 0 is at 0.5, and pixel n ends at n + 1.
    axes = (Axis(line.first + 0.5, line.pitch, line.low, line.high + 1.0) for line in lines)
    return Geometry(*axes)
