"""Optional fast kernels. You can read the model code without them.

`accelerate` adds them to a finished model. Each kernel is a subclass that replaces methods of a
class in ``model``. The results are the same up to rounding, but need less time or memory:

    kernel           replaces                 how it saves time or memory
    PackedDecoder    Decoder.forward          skips the padding after short captions
                     Decoder.words            looks up gate inputs of words in a table (WordGates)
    DeferredLinear   nn.Linear.forward        computes a weight's gradient once for all steps
    BlockwiseScorer  AdditiveScorer.compare   keeps no tensor of the shape (B, R, L, A)
    FastConvolution  Convolution.layer        lets oneDNN add or clamp during the convolution
                     Convolution.convolve     has a faster depthwise backward pass on CPUs
    FastBlock        Block.forward            encodes a few photos at a time on a CPU

Tests compare every kernel with the plain method, forward and backward. A kernel is kept only if it
saves memory, as FastBlock does, or 5% of the time of a training step or of captioning a photo.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from torch import nn

from captioner.model.attention import AdditiveScorer
from captioner.model.decoder import Decoder
from captioner.model.efficientnet_lite import Block, Convolution
from captioner.model.kernels.additive import BlockwiseScorer
from captioner.model.kernels.convolutions import FastBlock, FastConvolution
from captioner.model.kernels.deferred import DeferredLinear
from captioner.model.kernels.packing import PackedDecoder
from captioner.model.kernels.word_gates import WordGates


def accelerate(model: nn.Module, *, fixed: bool = False) -> None:
    """Add the kernels to all decoders and encoders in a module, in place.

    The classes of the affected modules change. Their parameters, parameter names and hooks do not
    change. A second call has no effect. Your own decoder, scorer or layer is accelerated too if it
    inherits the method that the kernel replaces.

    Args:
        model: Caption model, decoder or encoder.
        fixed: Set this if the weights, their type and their device will no longer change. A search
            then looks up the gate inputs of words in a table.
    """
    for module in list(model.modules()):
        if isinstance(module, Convolution):
            _put_on(module, FastConvolution, Convolution.convolve)
        elif isinstance(module, Block):
            _put_on(module, FastBlock, Block.forward)
        elif isinstance(module, Decoder):
            _put_on(module, PackedDecoder, Decoder.forward)
            for part in module.modules():
                if isinstance(part, AdditiveScorer):
                    _put_on(part, BlockwiseScorer, AdditiveScorer.compare)
                elif isinstance(part, nn.Linear) and part.bias is None:
                    _put_on(part, DeferredLinear, nn.Linear.forward)  # type: ignore[unreachable]
            if fixed and isinstance(module, PackedDecoder):
                module.table = WordGates(module.embedding, module.word_gates)


def _put_on(module: nn.Module, kernel: type[Any], replaced: Any) -> None:
    """Change the class of a module to a kernel.

    Args:
        module: Module to change, in place.
        kernel: Class with the faster methods.
        replaced: Plain method that the kernel replaces. A module with its own version of this
            method does not change.
    """
    own: Any = type(module)
    if getattr(own, replaced.__name__) is replaced:
        module.__class__ = _combined(kernel, own)  # type: ignore[arg-type]


@cache
def _combined(kernel: type[Any], own: type[Any]) -> type[Any]:
    """Return a subclass of both classes, such as ``FastBahdanauDecoder``.

    If both classes define a method, the kernel's method is used.
    """
    return type(f"Fast{own.__name__}", (kernel, own), {"__module__": own.__module__})
