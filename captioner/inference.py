"""Inference with one model or an ensemble: from photos to hypotheses, in batches, on a device."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor, nn

from captioner.caption import CropBox
from captioner.config import ExplanationMethod, SearchOptions, check_method
from captioner.data.preprocessing import Preprocessing
from captioner.decoding.search import Hypothesis, search
from captioner.decoding.stepper import DecoderStepper, EnsembleStepper, mean_probability
from captioner.decoding.words import SearchTokens
from captioner.errors import ConfigError, OptionError
from captioner.hardware import Precision, autocast, pick_device, pick_precision, upload
from captioner.models.attention import Memory, widen
from captioner.models.captioner import CaptionModel
from captioner.models.decoder import Decoder, Unrolled
from captioner.models.explanations import WordScorer, relevance
from captioner.vocabulary import PAD

ENCODED_TOGETHER = 8
"""Photos that a CPU encodes at a time, whatever the batch: the activations of 32 take half a
gigabyte, and of 8 they are nearer to the cache."""


class Prepared(NamedTuple):
    """A photo ready for the encoders."""

    pixels: tuple[NDArray[np.uint8], ...]
    """(H, W, 3) for every model."""
    crop_box: CropBox
    """The part of the photo that the first model sees."""


class CaptionScores(NamedTuple):
    """Teacher-forced results of given captions: T steps, V words, L regions."""

    log_probs: Tensor
    """(B, R, T, V)."""
    alphas: Tensor
    """(B, R, T, L)."""
    gates: Tensor
    """(B, R, T)."""


class Ensemble:
    """One model or several of the same vocabulary, ready for inference on a device.

    Word probabilities are averaged. Attention is averaged if all models see a photo through the
    same grid; otherwise it is the first model's.
    """

    def __init__(self, models: Sequence[CaptionModel], device: str, precision: Precision) -> None:
        """Copy the models to a device.

        Raises:
            ConfigError: The device or the precision is not available.
        """
        self.device = pick_device(device)
        self.precision: Precision = precision
        for model in models:
            _ = model.geometry  # computed before the copies, which cannot be differentiated
        self.models = [_inference_copy(model, self.device, precision) for model in models]
        self.one_grid = all(_same_view(self.models[0], model) for model in self.models[1:])

    @property
    def image_size(self) -> int:
        """Height and width of the largest encoder input (pixels)."""
        return max(model.preprocessing.image_size for model in self.models)

    def prepare(self, image: Image.Image) -> Prepared:
        """Resize an RGB image for every model; models with the same input share the pixels."""
        by_kind: dict[tuple[object, ...], NDArray[np.uint8]] = {}
        pixels = []
        for model in self.models:
            kind = _pixel_format(model.preprocessing)
            if kind not in by_kind:
                by_kind[kind] = model.preprocessing.pixels(image)
            pixels.append(by_kind[kind])
        return Prepared(tuple(pixels), self.models[0].preprocessing.crop_box(*image.size))

    def encode(self, photos: Sequence[Prepared]) -> list[Tensor]:
        """Encode photos: one grid of features (B, L, D) per model."""
        grids = []
        with autocast(self.precision, self.device):
            for number, model in enumerate(self.models):
                pixels = torch.from_numpy(np.stack([photo.pixels[number] for photo in photos]))
                grids.append(self._encode(model, pixels))
        return grids

    def _encode(self, model: CaptionModel, pixels: Tensor) -> Tensor:
        """Features (B, L, D) of pixels (B, H, W, 3)."""
        if self.device.type != "cpu":
            return model.encode(upload(pixels, self.device))
        return torch.cat([model.encode(part) for part in torch.split(pixels, ENCODED_TOGETHER)])

    def encode_features(self, features: Tensor) -> list[Tensor]:
        """Continue from cached features, (B, L, D); one model only.

        Raises:
            ConfigError: There are several models.
        """
        if len(self.models) > 1:
            raise ConfigError("cached features belong to one encoder; use a single model")
        model = self.models[0]
        with autocast(self.precision, self.device):
            return [model.to_features(upload(features, self.device))]

    def memories(self, grids: Sequence[Tensor]) -> list[Memory]:
        """What the decoders need of encoded photos: one memory per model."""
        with autocast(self.precision, self.device):
            return [
                model.decoder.memory(grid) for model, grid in zip(self.models, grids, strict=True)
            ]

    def search(
        self,
        memories: Sequence[Memory],
        options: SearchOptions,
        words: SearchTokens,
        start: int,
        seeds: Sequence[int],
        *,
        evidence: bool = False,
    ) -> list[list[Hypothesis]]:
        """Search for captions; see ``decoding.search.search``.

        Raises:
            ConfigError: No caption satisfies the options.
        """
        with autocast(self.precision, self.device):
            steppers = [
                DecoderStepper(model.decoder, memory, start)
                for model, memory in zip(self.models, memories, strict=True)
            ]
            ensemble = EnsembleStepper(steppers, one_grid=self.one_grid)
            stepper = ensemble if len(steppers) > 1 else steppers[0]
            found = search(stepper, options, words, seeds, evidence=evidence)
        if not all(found):
            raise OptionError(
                "no caption satisfies the search options; lower {min_length} or {block_ngrams}, or "
                "give fewer {forced_words} or {banned_words}"
            )
        return found

    def score(
        self, memories: Sequence[Memory], captions: Sequence[Sequence[list[int]]], start: int
    ) -> CaptionScores:
        """Score given captions.

        Args:
            memories: The photos, from ``memories``.
            captions: Token ids of each photo's captions.
            start: Start token.
        """
        count = max(len(group) for group in captions)
        longest = max(len(tokens) for group in captions for tokens in group)
        inputs = torch.full((len(captions), count, longest + 1), PAD)
        for row, group in enumerate(captions):
            for column, tokens in enumerate(group):
                inputs[row, column, : len(tokens) + 1] = torch.tensor([start, *tokens])
        log_probs: list[Tensor] = []
        unrolls: list[Unrolled] = []
        with autocast(self.precision, self.device):
            for model, memory in zip(self.models, memories, strict=True):
                unrolled = model.decoder(memory, inputs)
                logits = model.decoder.readout(unrolled.embedded, *unrolled.outputs)
                log_probs.append(widen(logits).log_softmax(dim=-1))
                if self.one_grid or not unrolls:
                    unrolls.append(unrolled)
        return CaptionScores(
            mean_probability(log_probs),
            torch.stack([unrolled.alphas for unrolled in unrolls]).mean(dim=0),
            torch.stack([unrolled.gates for unrolled in unrolls]).mean(dim=0),
        )

    def check_method(self, method: object) -> None:
        """Check that these models support a method of explanation.

        Raises:
            ConfigError: They do not.
        """
        check_method(method)
        if len(self.models) > 1 and method not in ("attention", "attention_gate"):
            raise OptionError(
                "{method} {given} needs a single model, not an ensemble; give attention or "
                "attention_gate, or one model",
                given=method,
            )

    @cached_property
    def exact_decoder(self) -> Decoder:
        """The first model's decoder in float32: bf16 would round away the effect of a region."""
        decoder = self.models[0].decoder
        weight = decoder.word_output.weight
        if weight.dtype == torch.float32 and not weight.is_inference():
            return decoder
        with torch.inference_mode(False):
            return copy.deepcopy(decoder).float()

    def explain(
        self,
        method: ExplanationMethod,
        grids: Sequence[Tensor],
        row: int,
        start: int,
        hypothesis: Hypothesis,
    ) -> Tensor:
        """Relevance of the regions of a photo for the words of a caption.

        Args:
            method: One that ``check_method`` accepts.
            grids: The photos, from ``encode``.
            row: Index of the photo.
            start: Start token.
            hypothesis: The caption.

        Returns:
            (T, L), see ``models.explanations.relevance``; on the CPU.
        """
        # The caller is in inference mode, whose tensors have no gradients.
        with torch.inference_mode(False), torch.autocast(self.device.type, enabled=False):
            grid = grids[0][row].float().clone()
            scorer = WordScorer(self.exact_decoder, start, hypothesis.tokens)
            found = relevance(method, scorer, grid, hypothesis.alphas, hypothesis.gates)
            return found.detach().cpu()


def _pixel_format(preprocessing: Preprocessing) -> tuple[object, ...]:
    return preprocessing.image_size, preprocessing.resize, preprocessing.channel_order


def _same_view(one: CaptionModel, other: CaptionModel) -> bool:
    """Whether region l is the same part of every photo for both models, within 0.1 of a region."""
    if (one.grid, one.preprocessing.resize) != (other.grid, other.preprocessing.resize):
        return False
    for mine, theirs in zip(one.geometry, other.geometry, strict=True):
        a = mine.mapped(1 / one.preprocessing.image_size)
        b = theirs.mapped(1 / other.preprocessing.image_size)
        if max(abs(a.first - b.first), abs(a.pitch - b.pitch)) > 0.1 * a.pitch:
            return False
    return True


def _inference_copy(
    model: CaptionModel, device: torch.device, precision: Precision
) -> CaptionModel:
    """A copy optimised for inference; the original keeps its float32 weights.

    For bf16 the weights of products are converted once: without gradients, autocast would convert
    them again at every word.
    """
    copied = copy.deepcopy(model).to(device).eval().requires_grad_(False)
    copied.encoder.fold_norms()
    copied.encoder.to(memory_format=torch.channels_last)
    if pick_precision(precision, device) == "bf16":
        for module in copied.modules():
            if isinstance(module, nn.Conv2d | nn.Linear):
                module.to(torch.bfloat16)
    with autocast(precision, device):
        copied.decoder.cache_word_gates()
    return copied
