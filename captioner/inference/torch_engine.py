"""An engine that runs a model with torch, and the stepper of its decoder for the search."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from typing import Any

import array_api_compat.torch
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from captioner.hardware import (
    Precision,
    autocast,
    pick_device,
    pick_precision,
    product_type,
    upload,
)
from captioner.inference.engine import CaptionScores
from captioner.inference.reading import Reading
from captioner.model import kernels
from captioner.model.attention import Memory, widen
from captioner.model.caption_model import CaptionModel
from captioner.model.decoder import Decoder
from captioner.model.efficientnet_lite import fold_norms
from captioner.model.explanations import WordScorer, relevance
from captioner.options import ExplanationMethod
from captioner.search.search import Advance
from captioner.text.vocabulary import END, NEVER_GENERATED, START

ENCODED_TOGETHER = 8
"""Number of photos that a CPU encodes at a time. Larger batches are split, to save memory."""


class TorchEngine:
    """An engine that runs a model with torch.

    Its methods pass features of photos as tensors, (B, L, D), which the arguments call grids.
    """

    def __init__(self, model: CaptionModel, device: str, precision: Precision) -> None:
        """Prepare a copy of a model for inference on a device.

        Raises:
            ConfigError: The device or the precision is not available.
        """
        self.device = pick_device(device)
        self.precision: str = pick_precision(precision, self.device)
        self.geometry = model.geometry  # needs gradients, which the copy does not have
        self.model = _inference_copy(model, self.device, self.precision)
        kernels.accelerate(self.model, fixed=True)
        self.name, self.grid = model.encoder.name, model.grid
        self.preprocessing = model.preprocessing

    @contextmanager
    def running(self) -> Iterator[None]:
        """Turn off gradients and set the precision during the block, for all other methods."""
        with torch.inference_mode(), autocast(self.precision, self.device):
            yield

    def encode(self, pixels: NDArray[np.uint8]) -> Tensor:
        """Encode the pixels of photos, (B, H, W, 3), and return their features, (B, L, D)."""
        photos = torch.from_numpy(pixels)
        if self.device.type != "cpu":
            return self.model.encode(upload(photos, self.device))
        parts = torch.split(photos, ENCODED_TOGETHER)
        return torch.cat([self.model.encode(part) for part in parts])

    def encode_features(self, features: Tensor) -> Tensor:
        """Turn cached features of the encoder into the features of the regions, (B, L, D)."""
        return self.model.to_features(upload(features, self.device))

    def memory(self, grids: Tensor) -> Memory:
        """Compute the decoder's inputs for photos (memory) from their features, (B, L, D)."""
        return self.model.decoder.memory(grids)

    def read(self, grids: Tensor) -> Reading | None:
        """Return log-odds that photos show each word (the reading), or None without a reading.

        ``grids`` contains the features of the photos, (B, L, D). The reading has log-odds for whole
        photos, (B, S), and for each region, (B, L, S). Not every model is trained to compute it.
        """
        if self.model.reading is None:
            return None
        return Reading(*(part.float().cpu().numpy() for part in self.model.reading(grids)))

    def summary(self, memory: Memory) -> NDArray[np.float32]:
        """Return the mean of each photo's region features, as the decoder uses them, (B, D)."""
        vectors: NDArray[np.float32] = memory.summary.squeeze(1).float().cpu().numpy()
        return vectors

    def stepper(self, memory: Memory, start: int) -> DecoderStepper:
        """Return a stepper, which runs the decoder word by word from the token id ``start``."""
        return DecoderStepper(self.model.decoder, memory, start)

    def score(self, memory: Memory, tokens: NDArray[np.int64]) -> CaptionScores:
        """Return the decoder's results at every word of given captions.

        ``tokens`` contains the ids of the start token, words and padding, (B, R, T).
        """
        decoder = self.model.decoder
        unrolled = decoder(memory, upload(torch.from_numpy(tokens), self.device))
        logits = decoder.readout(unrolled.embedded, *unrolled.outputs)
        return CaptionScores(widen(logits).log_softmax(dim=-1), unrolled.alphas, unrolled.betas)

    def relevance(
        self, method: ExplanationMethod, grid: Tensor, start: int, tokens: list[int]
    ) -> NDArray[np.float32]:
        """Return how relevant each region is for each word of a caption, in nats, (T, L).

        ``grid`` contains the features of the photo, (L, D). For the methods see
        ``model.explanations``. The methods ``attention`` and ``attention_gate`` are not supported,
        because they only need the decoder's output.
        """
        # The caller may be in inference mode, in which tensors have no gradients.
        with torch.inference_mode(False), torch.autocast(self.device.type, enabled=False):
            scorer = WordScorer(self.exact_decoder, start, tokens)
            found = relevance(method, scorer, grid.float().clone())
            return np.asarray(found.detach().cpu())

    @cached_property
    def exact_decoder(self) -> Decoder:
        """The decoder in float32. Lower precision would round away the effect of a region."""
        decoder = self.model.decoder
        weight = decoder.word_output.weight
        if weight.dtype == torch.float32 and not weight.is_inference():
            return decoder
        with torch.inference_mode(False):
            return copy.deepcopy(decoder).float()


def _inference_copy(model: CaptionModel, device: torch.device, precision: str) -> CaptionModel:
    """Return a copy of a model that is optimized for inference. The original keeps its weights.

    The copy shares all weights that are not converted. For bf16 and fp16, the weights of matrix
    products and convolutions are converted once. Without this step, autocast would convert them for
    every word.
    """
    shared: dict[int, Any] = {
        id(part): nn.Parameter(part.detach(), requires_grad=False) for part in model.parameters()
    }
    copied = copy.deepcopy(model, shared).to(device).eval()
    fold_norms(copied.encoder)
    copied.encoder.to(memory_format=torch.channels_last)
    dtype = product_type(precision)
    if dtype is not None:
        for module in copied.modules():
            if isinstance(module, nn.Conv2d | nn.Linear):
                module.to(dtype)
    return copied


class DecoderStepper:
    """A stepper that runs a decoder over the beams of a batch of photos.

    The features and keys are stored once per photo, not once per beam. Gradients are not recorded.
    """

    xp: Any = array_api_compat.torch
    end_token = END

    def __init__(self, decoder: Decoder, memory: Memory, start_token: int | Tensor = START) -> None:
        """Start with one beam per photo.

        ``start_token`` is the token id for all photos, or one id for each photo, (B,).
        """
        self.start_token = start_token
        self.decoder, self.memory = decoder, memory
        with torch.no_grad():
            self.state = decoder.start(memory)
        self.device = memory.summary.device

    @property
    def batch_size(self) -> int:
        """The number of photos that are not finished yet."""
        return self.memory.summary.shape[0]

    @torch.no_grad()
    def advance(self, tokens: Tensor) -> Advance:
        """Pass the last word of every beam, (B, K), to the decoder, and score the next word.

        Tokens that a decoder never generates, such as padding, get -inf.
        """
        embedded, word_inputs = self.decoder.words(tokens)  # (B, K, E), (B, K, 4N)
        step = self.decoder.step(word_inputs, self.state, self.memory)
        self.state = step.state
        logits = self.decoder.readout(embedded, *step.outputs)
        log_probs = widen(logits).log_softmax(dim=-1)
        for token in NEVER_GENERATED:
            log_probs[..., token].fill_(-torch.inf)
        return Advance(log_probs, step.alphas, step.beta.squeeze(-1))

    def reorder(self, parents: Tensor) -> None:
        """Let beam k of photo b continue beam ``parents[b, k]`` of the last step."""
        photos = torch.arange(len(parents), device=parents.device).unsqueeze(1)
        self.state = self.state.select((photos, parents))

    def keep(self, rows: Tensor) -> None:
        """Drop all photos except those with these indices in the batch."""
        self.memory = self.memory.select(rows)
        self.state = self.state.select(rows)
