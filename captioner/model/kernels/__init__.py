"""What is only fast; the model reads without it.

Each kernel has the plain formula beside it, which runs within `plain_formulas` or with the
environment variable ``CAPTIONER_KERNELS=0``. Tests compare both, forward and backward. A kernel
stays if it gains 5% of a training step or of captioning a photo.
"""

from captioner.model.kernels.convolutions import can_fuse as can_fuse
from captioner.model.kernels.convolutions import depthwise_convolution as depthwise_convolution
from captioner.model.kernels.convolutions import fused_convolution as fused_convolution
from captioner.model.kernels.deferred import StepLinear as StepLinear
from captioner.model.kernels.deferred import additive_scores as additive_scores
from captioner.model.kernels.packing import unroll as unroll
from captioner.model.kernels.switch import enabled as enabled
from captioner.model.kernels.switch import for_inference as for_inference
from captioner.model.kernels.switch import plain_formulas as plain_formulas
from captioner.model.kernels.word_gates import WordGates as WordGates
