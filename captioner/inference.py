"""Models at work: prepared photos or features in, captions with their evidence out, by the batch.

What people call for one photo, or for a stream of them, is ``captioner.api``.
"""

from __future__ import annotations

import copy
import math
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor, nn

from captioner.caption import END_NAME, Alternative, Caption, CropBox
from captioner.config import SearchOptions
from captioner.data.images import open_image
from captioner.data.preprocessing import Preprocessing
from captioner.decoding.rules import number_words
from captioner.decoding.search import Hypothesis, search
from captioner.decoding.stepper import DecoderStepper, EnsembleStepper, mean_probability
from captioner.errors import ConfigError, OptionError
from captioner.hardware import Precision, autocast, pick_device, pick_precision
from captioner.model_folder import StoredModel
from captioner.models.attention import Memory, widen
from captioner.models.captioner import CaptionModel
from captioner.models.decoder import Unrolled
from captioner.vocabulary import END, PAD, UNSPOKEN

Photo = str | Path | Image.Image | BinaryIO


class Prepared(NamedTuple):
    """A photo ready for the encoders."""

    pixels: tuple[NDArray[np.uint8], ...]
    """(H, W, 3) for every model."""
    crop_box: CropBox
    """The part of the photo that the first model sees."""


class _Told(NamedTuple):
    """What models say of given sentences."""

    log_probs: Tensor
    """(B, R, T, V)."""
    alphas: Tensor
    """(B, R, T, L)."""
    gates: Tensor
    """(B, R, T)."""


class BatchCaptioner:
    """A model, or several as an ensemble, on their device; photos come in batches.

    The models of an ensemble have one vocabulary; at every word their probabilities are averaged.
    Search options and grid are the first one's; attention is averaged where all of them see a photo
    through one grid, and otherwise the first one's.
    """

    def __init__(
        self,
        stored: StoredModel,
        *others: StoredModel,
        device: str = "auto",
        precision: Precision = "auto",
    ) -> None:
        """Put a model to use.

        Args:
            stored: A model in memory, e.g. from ``load_model``.
            *others: More models of the same vocabulary, for an ensemble.
            device: Where they run; see ``captioner.load``.
            precision: See there.

        Raises:
            ConfigError: The device or the precision is not to be had, or the vocabularies differ.
        """
        for number, other in enumerate(others, 2):
            if other.vocabulary != stored.vocabulary:
                raise ConfigError(
                    f"model {number} says other words than model 1 ({len(other.vocabulary)} and "
                    f"{len(stored.vocabulary)} in their vocabularies); an ensemble takes models "
                    "that were trained with one vocabulary"
                )
        self.stored = stored
        self.device = pick_device(device)
        self.precision: Precision = precision
        self.models = [
            _working_copy(one.model, self.device, precision) for one in (stored, *others)
        ]
        self.model = self.models[0]
        views = {(model.grid, model.preprocessing.resize) for model in self.models}
        self._one_grid = len(views) == 1

    def prepare(self, photo: Photo) -> Prepared:
        """Read and resize one photo.

        Raises:
            ImageError: The photo cannot be read.
        """
        image = open_image(photo)
        made: dict[tuple[object, ...], NDArray[np.uint8]] = {}
        for model in self.models:
            kind = _kind_of_pixels(model.preprocessing)
            if kind not in made:
                made[kind] = model.preprocessing.pixels(image)
        pixels = tuple(made[_kind_of_pixels(model.preprocessing)] for model in self.models)
        return Prepared(pixels, self.model.preprocessing.crop_box(*image.size))

    @torch.inference_mode()
    def caption_batch(
        self, photos: Sequence[Prepared], options: SearchOptions, *, alternatives: int = 0
    ) -> list[list[Caption]]:
        """Caption prepared photos together.

        Args:
            photos: From ``prepare``.
            options: How to search.
            alternatives: So many of the most probable words are told at every place.

        Returns:
            For each photo its captions, best first; at least one.

        Raises:
            ConfigError: A word of the options cannot be used, or no sentence is left to say.
        """
        if not photos:
            return []
        keys = [zlib.crc32(photo.pixels[0].tobytes()) for photo in photos]
        with autocast(self.precision, self.device):
            memories = self._memories(photos)
        regions = [photo.crop_box for photo in photos]
        return self._say(memories, regions, options, keys, alternatives)

    @torch.inference_mode()
    def caption_features(
        self,
        features: Tensor,
        regions: Sequence[CropBox],
        options: SearchOptions,
        keys: Sequence[int] | None = None,
    ) -> list[list[Caption]]:
        """Caption photos of which the encoder's features are at hand; one model, no ensemble.

        Args:
            features: As a `FeatureCache` has them, (B, L, D), on any device.
            regions: The part of each photo that the model sees.
            options: How to search.
            keys: A number for each photo, from which its random draws are made; None: its place.

        Returns:
            See ``caption_batch``.

        Raises:
            ConfigError: There are several models.
        """
        if len(self.models) > 1:
            raise ConfigError("features belong to one encoder; caption them with one model")
        bf16 = pick_precision(self.precision, self.device) == "bf16"
        features = features.to(self.device, torch.bfloat16 if bf16 else torch.float32)
        with autocast(self.precision, self.device):
            memories = [self.model.decoder.memory(self.model.finish(features))]
        return self._say(memories, regions, options, keys or range(len(features)))

    @torch.inference_mode()
    def explain_batch(
        self,
        photos: Sequence[Prepared],
        sentences: Sequence[Sequence[str]],
        *,
        alternatives: int = 0,
        style: str | None = None,
    ) -> list[Caption]:
        """Where the model looks when it says given sentences, one for each photo.

        Args:
            photos: Prepared photos.
            sentences: For each its words, all of them in the vocabulary.
            alternatives: So many of the most probable words are told at every place.
            style: Style that the sentences are read in; None: the search options' own.
        """
        numbers = [self.stored.vocabulary.encode(words) for words in sentences]
        with autocast(self.precision, self.device):
            memories = self._memories(photos)
        start = self.stored.vocabulary.start(self.stored.search.style if style is None else style)
        told = self._tell(memories, [[sentence] for sentence in numbers], start)
        captions = []
        for row, (photo, sentence) in enumerate(zip(photos, numbers, strict=True)):
            length = len(sentence)
            said = told.log_probs[row, 0, torch.arange(length + 1), [*sentence, END]].cpu()
            hypothesis = Hypothesis(
                tokens=sentence,
                token_log_probs=said[:-1],
                alphas=told.alphas[row, 0, :length].cpu(),
                gates=told.gates[row, 0, :length].cpu(),
                log_prob=float(said.sum()),
                ended=True,
            )
            others = self._alternatives(told.log_probs[row, 0, :length], alternatives)
            captions.append(self._caption(hypothesis, photo.crop_box, others))
        return captions

    def _say(
        self,
        memories: Sequence[Memory],
        regions: Sequence[CropBox],
        options: SearchOptions,
        keys: Sequence[int],
        alternatives: int = 0,
    ) -> list[list[Caption]]:
        """Search; see ``caption_batch``."""
        words = number_words(options, self.stored.vocabulary)
        start = self.stored.vocabulary.start(options.style)
        with autocast(self.precision, self.device):
            steppers = [
                DecoderStepper(model.decoder, memory, start)
                for model, memory in zip(self.models, memories, strict=True)
            ]
            ensemble = EnsembleStepper(steppers, one_grid=self._one_grid)
            stepper = ensemble if len(steppers) > 1 else steppers[0]
            found = search(stepper, options, words, keys)
        if not all(found):
            raise OptionError(
                "no caption satisfies the search options; lower {min_length} or {block_ngrams}, or "
                "give fewer {forced_words} or {banned_words}"
            )
        told = None
        if alternatives:  # the sentences are said again: the search need not keep what it rejects
            told = self._tell(
                memories, [[h.tokens for h in hypotheses] for hypotheses in found], start
            )
        return [
            [
                self._caption(
                    hypothesis,
                    region,
                    self._alternatives(told.log_probs[row, place], alternatives) if told else (),
                )
                for place, hypothesis in enumerate(hypotheses)
            ]
            for row, (region, hypotheses) in enumerate(zip(regions, found, strict=True))
        ]

    def _tell(
        self, memories: Sequence[Memory], sentences: Sequence[list[list[int]]], start: int
    ) -> _Told:
        """Say given sentences, a list for each photo, after a start token."""
        most = max(len(group) for group in sentences)
        longest = max(len(sentence) for group in sentences for sentence in group)
        tokens = torch.full((len(sentences), most, longest + 1), PAD)
        for row, group in enumerate(sentences):
            for place, sentence in enumerate(group):
                tokens[row, place, : len(sentence) + 1] = torch.tensor([start, *sentence])
        told: list[Tensor] = []
        mapped: list[Unrolled] = []
        with autocast(self.precision, self.device):
            for model, memory in zip(self.models, memories, strict=True):
                unrolled = model.decoder(memory, tokens.to(self.device))
                logits = model.decoder.readout(unrolled.embedded, *unrolled.outputs)
                told.append(widen(logits).log_softmax(dim=-1))
                if self._one_grid or not mapped:
                    mapped.append(unrolled)
        return _Told(
            mean_probability(told),
            torch.stack([unrolled.alphas for unrolled in mapped]).mean(dim=0),
            torch.stack([unrolled.gates for unrolled in mapped]).mean(dim=0),
        )

    def _alternatives(self, log_probs: Tensor, count: int) -> tuple[tuple[Alternative, ...], ...]:
        """The ``count`` most probable words at every place of (T, V)."""
        if type(count) is not int or count < 0:
            raise ConfigError(f"alternatives is {count!r}; give a whole number from 0 (none) on")
        if count == 0:
            return ()
        speakable = log_probs.clone()
        speakable[:, list(UNSPOKEN)] = -math.inf
        best = speakable.topk(min(count, speakable.shape[-1] - len(UNSPOKEN)), dim=-1)
        names = self.stored.vocabulary.decode
        return tuple(
            tuple(
                Alternative(END_NAME if number == END else names([number])[0], value)
                for number, value in zip(numbers, values, strict=True)
            )
            for numbers, values in zip(best.indices.tolist(), best.values.tolist(), strict=True)
        )

    def _memories(self, photos: Sequence[Prepared]) -> list[Memory]:
        """Encode photos for every model's decoder."""
        memories = []
        for number, model in enumerate(self.models):
            pixels = torch.from_numpy(np.stack([photo.pixels[number] for photo in photos]))
            memories.append(model.decoder.memory(model.encode(pixels.to(self.device))))
        return memories

    def _caption(
        self,
        hypothesis: Hypothesis,
        crop_box: CropBox,
        alternatives: tuple[tuple[Alternative, ...], ...] = (),
    ) -> Caption:
        alphas = hypothesis.alphas.float().numpy()
        return Caption(
            words=tuple(self.stored.vocabulary.decode(hypothesis.tokens)),
            log_probs=hypothesis.token_log_probs.float().numpy(),
            alphas=alphas.reshape(len(alphas), *self.model.grid),
            gates=hypothesis.gates.float().numpy(),
            log_prob=hypothesis.log_prob,
            crop_box=crop_box,
            alternatives=alternatives[: len(alphas)],
        )


def _kind_of_pixels(preprocessing: Preprocessing) -> tuple[object, ...]:
    """Models that agree on this share a photo's pixels."""
    return preprocessing.image_size, preprocessing.resize, preprocessing.channel_order


def _working_copy(model: CaptionModel, device: torch.device, precision: Precision) -> CaptionModel:
    """A copy laid out for use; the original keeps its float32 weights, e.g. to go on training.

    In bf16 the weights of products are cast here, once: without gradients, autocast would cast
    them anew at every word, which took a third of the search.
    """
    copied = copy.deepcopy(model).to(device).eval().requires_grad_(False)
    copied.encoder.fold_norms()
    copied.encoder.to(memory_format=torch.channels_last)
    if pick_precision(precision, device) == "bf16":
        for module in copied.modules():
            if isinstance(module, nn.Conv2d | nn.Linear):
                module.to(torch.bfloat16)
    with autocast(precision, device):
        copied.decoder.tabulate_words()
    return copied
