"""Inference with one model or an ensemble, from batches of photos to search results.

An ``Engine`` runs one model: ``TorchEngine`` with torch, ``OnnxEngine`` with ONNX Runtime. This
module depends on neither of them and does not import torch.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from captioner.caption_types import CropBox
from captioner.errors import ConfigError
from captioner.geometry import Geometry
from captioner.inference.reading import Reading
from captioner.model.preprocessing import Preprocessing
from captioner.options import SearchOptions
from captioner.search.arrays import Array, mean, mean_probability, to_numpy
from captioner.search.left_out import continuations
from captioner.search.search import Advance, Hypothesis, Stepper, search
from captioner.search.words import encode_search_words
from captioner.search.worth import Worth
from captioner.text.vocabulary import END, PAD, Vocabulary

ATTENTION_METHODS = ("attention", "attention_gate")
"""Explanation methods that need only the decoder's output for each word."""


class Prepared(NamedTuple):
    """A photo that is ready for the encoders."""

    pixels: tuple[NDArray[np.uint8], ...]
    """The pixels for each model, (H, W, 3)."""
    crop_box: CropBox
    """The part of the photo that the first model sees."""

    @property
    def seed(self) -> int:
        """The seed for random sampling, derived from the pixels.

        A photo therefore gets the same captions in every batch.
        """
        return zlib.crc32(self.pixels[0].tobytes())


class CaptionScores(NamedTuple):
    """The decoder's results for given captions (teacher forcing): T steps, V words, L regions."""

    log_probs: Array
    """Log-probability of every word at each step, (B, R, T, V)."""
    alphas: Array
    """Attention weights, (B, R, T, L)."""
    gates: Array
    """Context gates, (B, R, T)."""

    def hypothesis(self, row: int, tokens: list[int]) -> Hypothesis:
        """Return the scores of a photo's first caption in the form of a search result."""
        length = len(tokens)
        log_probs = self.log_probs[row, 0, np.arange(length + 1), [*tokens, END]]
        return Hypothesis(
            tokens=tokens,
            token_log_probs=log_probs[:-1],
            alphas=self.alphas[row, 0, :length],
            gates=self.gates[row, 0, :length],
            log_prob=float(log_probs.sum()),
            ended=True,
        )


class Engine(Protocol):
    """An engine that runs one model, with the arrays of its own library and device."""

    name: str
    """Name of the encoder."""
    preprocessing: Preprocessing
    grid: tuple[int, int]
    geometry: Geometry
    device: Any
    precision: str
    """Precision in use: ``fp32``, ``tf32``, ``bf16``, ``fp16`` or ``int8``."""

    def running(self) -> AbstractContextManager[object]:
        """Return the context manager in which the search and all other methods must run."""

    def encode(self, pixels: NDArray[np.uint8]) -> Any:
        """Encode photos, (B, H, W, 3), and return their features as an opaque object, the grids."""

    def memory(self, grids: Any) -> Any:
        """Compute the decoder's inputs for the photos as an opaque object, the memory."""

    def read(self, grids: Any) -> Reading | None:
        """Return the model's reading of the photos, or None if the model has no reading."""

    def summary(self, memory: Any) -> NDArray[np.float32]:
        """Return the mean of each photo's region features, as the decoder uses them, (B, D)."""

    def stepper(self, memory: Any, start: int) -> Any:
        """Return a new ``Stepper`` for a search that begins with the start token (its token id)."""

    def score(self, memory: Any, tokens: NDArray[np.int64]) -> CaptionScores:
        """Score captions, given as token ids of the start token, words and padding, (B, R, T)."""


def _average(
    parts: Sequence[CaptionScores | Advance], *, one_grid: bool
) -> tuple[Array, Array, Array]:
    """Return the mean of the probabilities, and of attention and gates if the grids agree.

    If the grids differ, attention and gates come from the first member (see `Ensemble`).
    """
    log_probs, *maps = zip(*parts, strict=True)
    alphas, gates = (mean(each if one_grid else each[:1]) for each in maps)
    return mean_probability(log_probs), alphas, gates


class EnsembleStepper:
    """A stepper that advances the steppers of several models together (see `Ensemble`).

    The steppers must be new, and must have the same vocabulary and photos. If ``one_grid`` is true,
    region l is the same part of the photo for every model.
    """

    def __init__(self, members: Sequence[Stepper], *, one_grid: bool) -> None:
        self.members, self.one_grid = members, one_grid
        first = members[0]
        self.xp, self.device = first.xp, first.device
        self.start_token, self.end_token = first.start_token, first.end_token

    @property
    def batch_size(self) -> int:
        """See ``Stepper.batch_size``."""
        return self.members[0].batch_size

    def advance(self, tokens: Array) -> Advance:
        """See ``Stepper.advance``."""
        advances = [member.advance(tokens) for member in self.members]
        return Advance(*_average(advances, one_grid=self.one_grid))

    def reorder(self, parents: Array) -> None:
        """See ``Stepper.reorder``."""
        for member in self.members:
            member.reorder(parents)

    def keep(self, rows: Array) -> None:
        """See ``Stepper.keep``."""
        for member in self.members:
            member.keep(rows)


class Ensemble:
    """One or several models with the same vocabulary, ready for inference.

    Word probabilities are averaged. Attention is averaged if all models divide a photo into the
    same regions. Otherwise, the attention of the first model is used.
    """

    def __init__(self, engines: Sequence[Engine]) -> None:
        self.engines = list(engines)
        self.one_grid = all(_same_view(self.engines[0], other) for other in self.engines[1:])

    @property
    def image_size(self) -> int:
        """Height and width of the largest encoder input, in pixels."""
        return max(engine.preprocessing.image_size for engine in self.engines)

    def prepare(self, image: Image.Image) -> Prepared:
        """Resize an RGB image for every model. Models with equal `pixel_format` share pixels."""
        kinds = {
            pixel_format(engine.preprocessing): engine.preprocessing for engine in self.engines
        }
        made = {kind: one.pixels(image) for kind, one in kinds.items()}
        pixels = tuple(made[pixel_format(engine.preprocessing)] for engine in self.engines)
        return Prepared(pixels, self.engines[0].preprocessing.crop_box(*image.size))

    def encode(self, photos: Sequence[Prepared]) -> list[Any]:
        """Encode photos, and return their encoded form (grids) for each model."""
        with self.engines[0].running():
            return [
                engine.encode(np.stack([photo.pixels[number] for photo in photos]))
                for number, engine in enumerate(self.engines)
            ]

    def memories(self, grids: Sequence[Any]) -> list[Any]:
        """Compute the decoder's inputs for the photos, and return one memory per model."""
        with self.engines[0].running():
            return [engine.memory(grid) for engine, grid in zip(self.engines, grids, strict=True)]

    def read(self, grids: Sequence[Any]) -> Reading | None:
        """Return the first model's reading of the encoded photos (see ``Engine.read``)."""
        with self.engines[0].running():
            return self.engines[0].read(grids[0])

    def search(
        self,
        memories: Sequence[Any],
        options: SearchOptions,
        vocabulary: Vocabulary,
        seeds: Sequence[int],
        worth: Worth | None = None,
    ) -> list[list[Hypothesis]]:
        """Search for captions (see ``search.search``).

        Raises:
            ConfigError: A word in the options is unknown, or no caption satisfies the options.
        """
        words, start = encode_search_words(options, vocabulary), vocabulary.start(options.style)
        with self.engines[0].running():
            found = search(self._stepper(memories, start), options, words, seeds, worth=worth)
        if not all(found):
            raise ConfigError(
                "no caption satisfies the search options; lower min_length or block_ngrams, or "
                "use fewer forced_words or banned_words"
            )
        return found

    def continuations(
        self,
        memories: Sequence[Any],
        captions: Sequence[Sequence[int]],
        options: SearchOptions,
        vocabulary: Vocabulary,
    ) -> list[Hypothesis | None]:
        """Continue one caption of each photo (see ``left_out.continuations``)."""
        words, start = encode_search_words(options, vocabulary), vocabulary.start(options.style)
        with self.engines[0].running():
            return continuations(self._stepper(memories, start), captions, options, words)

    def _stepper(self, memories: Sequence[Any], start: int) -> Stepper:
        steppers = [
            engine.stepper(memory, start)
            for engine, memory in zip(self.engines, memories, strict=True)
        ]
        return EnsembleStepper(steppers, one_grid=self.one_grid) if steppers[1:] else steppers[0]

    def score(
        self, memories: Sequence[Any], captions: Sequence[Sequence[list[int]]], start: int
    ) -> CaptionScores:
        """Score given captions of each photo, as lists of token ids, and return NumPy arrays."""
        count = max(len(group) for group in captions)
        longest = max(len(tokens) for group in captions for tokens in group)
        inputs = np.full((len(captions), count, longest + 1), PAD, dtype=np.int64)
        for row, group in enumerate(captions):
            for column, tokens in enumerate(group):
                inputs[row, column, : len(tokens) + 1] = [start, *tokens]
        with self.engines[0].running():
            scores = [
                engine.score(memory, inputs)
                for engine, memory in zip(self.engines, memories, strict=True)
            ]
            return CaptionScores(*map(to_numpy, _average(scores, one_grid=self.one_grid)))


def pixel_format(preprocessing: Preprocessing) -> tuple[object, ...]:
    """Return the settings that determine the pixel values of a model's input."""
    return preprocessing.image_size, preprocessing.resize, preprocessing.channel_order


def _same_view(one: Engine, other: Engine) -> bool:
    """Return whether two models divide every photo into the same regions.

    Region l must be the same part of the photo for both models, within 0.1 of a region.
    """
    if (one.grid, one.preprocessing.resize) != (other.grid, other.preprocessing.resize):
        return False
    mine, theirs = (  # (2, 2): first and pitch of each axis, as fractions of the input's side
        np.array(each.geometry)[:, :2] / each.preprocessing.image_size for each in (one, other)
    )
    return bool((np.abs(mine - theirs) <= 0.1 * mine[:, 1:]).all())
