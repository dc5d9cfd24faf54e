"""Where the regions of an encoder lie in its input: centre, pitch and extent, per axis.

Every convolution and pooling maps positions to positions (Araujo et al. 2019, Computing Receptive
Fields of Convolutional Neural Networks, sections 2 and 3). With kernel k, stride s, padding p in
front and dilation d, output i is centred on input

    s * i - p + d * (k - 1) / 2

A forward pass records these layers as they are executed, so any encoder can be followed whose grid
comes from convolutions, poolings and paddings: also TensorFlow's "same" padding, which depends on
the size of the input, and transformers with a patch embedding. Where branches of different position
meet (the average poolings of ResNet-D), or where the grid is made in another way (Swin's patch
merging), the gradient of the features with respect to the input is measured instead.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakTensorKeyDictionary

from captioner.geometry import Axis, Geometry

_MAX_SPREAD = 0.05  # of the pitch: positions of branches that differ by more are not averaged


class _Line(NamedTuple):
    """Positions along one axis of a feature map, in pixel indices of the input."""

    first: float
    pitch: float
    size: int
    """Number of positions."""
    low: float
    """First pixel that any position sees."""
    high: float
    """Last one."""
    reach: float
    """Pixels that a position sees on either side of its centre."""
    spread: float = 0.0
    """Largest difference between branches that were averaged."""

    def layer(self, size: int, kernel: int, stride: int, padding: int, dilation: int) -> _Line:
        """The positions of the output of a convolution or pooling."""
        half = dilation * (kernel - 1) / 2
        first = self.first + self.pitch * (half - padding)
        reach = self.reach + self.pitch * half
        last = first + self.pitch * stride * (size - 1)
        low, high = max(self.low, first - reach), min(self.high, last + reach)
        return _Line(first, self.pitch * stride, size, low, high, reach, self.spread)

    def padded(self, before: int, after: int) -> _Line:
        size = self.size + before + after
        return self._replace(first=self.first - before * self.pitch, size=size)

    def merged(self, other: _Line) -> _Line:
        """The positions of the sum of two maps; of maps of different size, the finer one's."""
        if self.size != other.size or self.pitch != other.pitch:
            return self if self.size >= other.size else other
        return _Line(
            (self.first + other.first) / 2,
            self.pitch,
            self.size,
            min(self.low, other.low),
            max(self.high, other.high),
            max(self.reach, other.reach),
            max(self.spread, other.spread) + abs(self.first - other.first) / 2,
        )


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch types it partly
    """Follows the positions of feature maps through a forward pass."""

    def __init__(self, images: Tensor) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.lines: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
        self.lines[images] = tuple(
            _Line(0.0, 1.0, size, 0.0, size - 1.0, 0.0) for size in images.shape[-2:]
        )

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        del types
        results = func(*args, **(kwargs or {}))
        lines = self._follow(func.overloadpacket.__name__, args, results)
        if lines is not None:
            for result in _tensors([results]):
                self.lines[result] = lines
        return results

    def _follow(self, name: str, args: Sequence[Any], results: Any) -> tuple[_Line, ...] | None:
        known: list[tuple[_Line, ...]] = [self.lines[t] for t in _tensors(args) if t in self.lines]
        if not known:
            return None
        merged = known[0]
        for lines in known[1:]:
            merged = tuple(a.merged(b) for a, b in zip(merged, lines, strict=True))
        layers = _layers(name, args)
        if layers is None:
            return merged
        out = next(iter(_tensors([results])))
        if args[0].shape[-2:] != tuple(line.size for line in merged):
            return None  # resampled before, such as by an upsampling: no longer known
        if name == "constant_pad_nd":
            return tuple(line.padded(*layer) for line, layer in zip(merged, layers, strict=True))
        return tuple(
            line.layer(size, *layer)
            for line, layer, size in zip(merged, layers, out.shape[-2:], strict=True)
        )


def _layers(name: str, args: Sequence[Any]) -> list[tuple[int, ...]] | None:
    """Kernel, stride, padding and dilation of both axes; of a padding, before and after.

    None: an operation that keeps positions.
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


def _tensors(values: Iterable[Any]) -> list[Tensor]:
    """The tensors among arguments, also in lists such as torch.cat's."""
    found = []
    for value in values:
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, list | tuple):
            found += [one for one in value if isinstance(one, Tensor)]
    return found


@torch.inference_mode(False)  # whose tensors have no gradients, even for a caller who is in it
def locate_regions(encoder: nn.Module, image_size: int) -> Geometry:
    """Where the regions of an encoder lie in its input of ``image_size`` x ``image_size`` pixels.

    In pixels from the upper left corner: the first pixel is 0 to 1.
    """
    images = _like_parameters(encoder, torch.zeros(1, 3, image_size, image_size))
    with torch.no_grad(), _Recorder(images) as recorder:
        features, grid = encoder(images)
    lines = recorder.lines.get(features)
    if lines is None or tuple(line.size for line in lines) != grid:
        even = Geometry.even(grid, right=image_size, bottom=image_size)
        return centred_by_gradients(encoder, image_size, even)
    # The centre of pixel 0 is 0.5; the part that is seen ends behind its last pixel.
    axes = [Axis(line.first + 0.5, line.pitch, line.low, line.high + 1.0) for line in lines]
    found = Geometry(*axes)
    if any(line.spread > _MAX_SPREAD * line.pitch for line in lines):
        return centred_by_gradients(encoder, image_size, found)
    return found


def centred_by_gradients(encoder: nn.Module, image_size: int, guess: Geometry) -> Geometry:
    """Correct the centres of a geometry by the gradients of an encoder; the pitch is kept.

    The position among the regions whose centroid is the middle of the input is interpolated. The
    middle, since the edges of the input cut the receptive field of all other regions more on one
    side, which moves their centroids towards the middle.

    Positions are those of the kernels, whatever their weights. The measurement is therefore of a
    copy with symmetric kernels and without activations: its gradients are symmetric about the
    centre of a region, without the noise of weights and of the image.
    """
    middle = image_size / 2
    with _NoActivations():
        measured = _gradient_centroids(_symmetric(encoder), image_size)
    axes = []
    for axis, (indices, centroids) in zip(guess, measured, strict=True):
        index = float(np.interp(middle, centroids, indices))
        # Rounded, so that it is the same after saving and loading.
        axes.append(axis._replace(first=round(middle - axis.pitch * index, 3)))
    return Geometry(*axes)


class _NoActivations(TorchFunctionMode):
    """Leaves out activations and layer norms; max pooling becomes average pooling."""

    _LEFT_OUT = frozenset(
        {
            "relu", "relu_", "relu6", "hardtanh", "hardtanh_", "gelu", "silu", "silu_",
            "hardswish", "hardswish_", "layer_norm",
        }
    )  # fmt: skip

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given = kwargs or {}
        name = getattr(func, "__name__", "")
        if name in self._LEFT_OUT and args:
            return args[0]
        if name == "max_pool2d" and given.get("dilation", 1) == 1:
            same = ("kernel_size", "stride", "padding", "ceil_mode")
            known = {key: value for key, value in given.items() if key in same}
            return nn.functional.avg_pool2d(*args, **known)
        return func(*args, **given)


@torch.no_grad()
def _symmetric(encoder: nn.Module) -> nn.Module:
    """A copy with symmetric kernels; those of odd size have most of their energy at the centre.

    So the edges of the maps cut less of the receptive fields.
    """
    # eval: a copy of torchvision's feature extractor is in training mode, where norms mix positions
    copied = copy.deepcopy(encoder).eval().requires_grad_(False)
    for module in copied.modules():
        if isinstance(module, nn.AdaptiveAvgPool2d):  # squeeze-and-excitation: the whole map
            module.register_forward_hook(lambda *call: call[-1].detach())
        if isinstance(module, nn.Conv2d):
            weight, (height, width) = module.weight, module.kernel_size
            rows = weight + weight.flip(2)
            narrow = rows + rows.flip(3)
            if height % 2 and width % 2:
                scale = torch.full_like(weight[0, 0], 0.1)
                scale[height // 2, width // 2] = 1.0
                narrow *= scale
            weight.copy_(narrow * (weight.norm() / narrow.norm().clamp(min=1e-12)))
    return copied


def _gradient_centroids(encoder: nn.Module, image_size: int) -> list[tuple[list[int], list[float]]]:
    """Centroids of the input gradient's energy for the regions in the middle of the grid.

    The input is noise, and the score a random projection of the features. Returns rows with their
    y, and columns with their x, in pixels from the upper left corner.
    """
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(1, 3, image_size, image_size, generator=generator)
    images = _like_parameters(encoder, images)
    points = torch.arange(image_size, dtype=torch.float64) + 0.5
    centroids: tuple[list[float], list[float]] = [], []
    with torch.enable_grad():
        features, (rows, columns) = encoder(images.requires_grad_(True))
        weights = torch.randn(features.shape[-1], generator=generator).to(features)
        for y, x in zip(_middle_four(rows), _middle_four(columns), strict=True):
            score = features[0, y * columns + x] @ weights
            (gradient,) = torch.autograd.grad(score, images, retain_graph=True)
            energy = gradient[0].double().cpu().square().sum(dim=0)
            energy = energy / energy.sum()
            for axis in (0, 1):
                centroids[axis].append(float(energy.sum(dim=1 - axis) @ points))
    return [(_middle_four(rows), centroids[0]), (_middle_four(columns), centroids[1])]


def _like_parameters(encoder: nn.Module, images: Tensor) -> Tensor:
    """Images on the device, in the dtype and in the layout that the encoder is trained with."""
    parameter = next(encoder.parameters(), images)
    images = images.to(parameter.device, parameter.dtype)
    # As from Preprocessing.normalize. With contiguous images, batch norm's backward pass in eval
    # mode mixes positions when the gradient comes channels last (torch 2.15, CPU).
    return images.contiguous(memory_format=torch.channels_last)


def _middle_four(count: int) -> list[int]:
    """Four regions around the middle of an axis, with repetitions if it has fewer."""
    return [min(max(count // 2 + step, 0), count - 1) for step in (-2, -1, 0, 1)]
