"""Runs a model with torch."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from captioner.decoding.stepper import DecoderStepper
from captioner.hardware import Precision, autocast, pick_device, pick_precision
from captioner.inference import CaptionScores
from captioner.models.attention import Memory, widen
from captioner.models.captioner import CaptionModel


class TorchEngine:
    """See ``inference.Engine``."""

    def __init__(self, model: CaptionModel, device: str, precision: Precision) -> None:
        """Copy a model to a device.

        Raises:
            ConfigError: The device or the precision is not available.
        """
        self.device = pick_device(device)
        self.precision: str = pick_precision(precision, self.device)
        self.geometry = model.geometry  # computed before the copy, which cannot be differentiated
        self.model = _inference_copy(model, self.device, self.precision)
        self.name, self.grid = model.encoder.name, model.grid
        self.preprocessing = model.preprocessing

    @contextmanager
    def running(self) -> Iterator[None]:
        """See ``Engine.running``."""
        with torch.inference_mode(), autocast(self.precision, self.device):
            yield

    def encode(self, pixels: NDArray[np.uint8]) -> Memory:
        """See ``Engine.encode``."""
        features = self.model.encode(torch.from_numpy(pixels).to(self.device))
        return self.model.decoder.memory(features)

    def encode_features(self, features: Tensor) -> Memory:
        """See ``Engine.encode_features``."""
        return self.model.decoder.memory(self.model.to_features(features.to(self.device)))

    def stepper(self, memory: Memory, start: int) -> DecoderStepper:
        """See ``Engine.stepper``."""
        return DecoderStepper(self.model.decoder, memory, start)

    def score(self, memory: Memory, tokens: NDArray[np.int64]) -> CaptionScores:
        """See ``Engine.score``."""
        decoder = self.model.decoder
        unrolled = decoder(memory, torch.from_numpy(tokens).to(self.device))
        logits = decoder.readout(unrolled.embedded, *unrolled.outputs)
        return CaptionScores(widen(logits).log_softmax(dim=-1), unrolled.alphas, unrolled.gates)


def _inference_copy(model: CaptionModel, device: torch.device, precision: str) -> CaptionModel:
    """A copy optimised for inference; the original keeps its float32 weights.

    For bf16 the weights of products are converted once: without gradients, autocast would convert
    them again at every word.
    """
    copied = copy.deepcopy(model).to(device).eval().requires_grad_(False)
    copied.encoder.fold_norms()
    copied.encoder.to(memory_format=torch.channels_last)
    if precision == "bf16":
        for module in copied.modules():
            if isinstance(module, nn.Conv2d | nn.Linear):
                module.to(torch.bfloat16)
    with autocast(precision, device):
        copied.decoder.cache_word_gates()
    return copied
