"""What is only fast; the model reads without it.

Each kernel has the plain formula beside it, which runs within `plain_formulas` or with the
environment variable ``CAPTIONER_KERNELS=0``. Tests compare both, forward and backward. A kernel
stays if it gains 5% of a training step or of captioning a photo.
"""

from captioner.model.kernels.additive import compile_scores
from captioner.model.kernels.deferred import (
    StepLinear,
    additive_scores,
    deferred_gradients,
    weighted_sum,
)
from captioner.model.kernels.depthwise import depthwise_convolution
from captioner.model.kernels.fused import can_fuse, fused_convolution
from captioner.model.kernels.packing import unroll
from captioner.model.kernels.switch import enabled, plain_formulas
from captioner.model.kernels.word_gates import WordGates

__all__ = [
    "StepLinear",
    "WordGates",
    "additive_scores",
    "can_fuse",
    "compile_scores",
    "deferred_gradients",
    "depthwise_convolution",
    "enabled",
    "fused_convolution",
    "plain_formulas",
    "unroll",
    "weighted_sum",
]
