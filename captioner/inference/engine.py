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
    """The part of the photo that the first model sees, as fractions of its width and height."""

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
    """Context gates, (B, R, T): how much each word uses the photo, from 0 (not at all) to 1."""

    def hypothesis(self, row: int, tokens: list[int]) -> Hypothesis:
        """Return the scores of a photo's first caption in the form of a search result.

        Args:
            row: Index of the photo in the batch.
            tokens: Token ids of the caption, without start and end tokens.
        """
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
        """Encode the pixels of photos, (B, H, W, 3), and return the features of their regions.

        The features are called grids. Only the engine itself can use this object.
        """

    def memory(self, grids: Any) -> Any:
        """Compute the decoder's inputs for photos from their features (grids, from ``encode``).

        The inputs are called the memory. Only the engine itself can use this object.
        """

    def read(self, grids: Any) -> Reading | None:
        """Return the log-odds that the photos show each word, for whole photos and for each region.

        This result is called the model's reading of the photos. It is computed from the features
        before any caption is written. The log-odds are float32, (B, S) and (B, L, S), for S word
        stems such as "dog" (for dog and dogs).

        Args:
            grids: Features of the photos, from ``encode``.

        Returns:
            The reading, or None if the model was trained without the part that computes it.
        """

    def summary(self, memory: Any) -> NDArray[np.float32]:
        """Return the mean of each photo's region features, as the decoder uses them, (B, D).

        ``memory`` contains the decoder's inputs for the photos, from the method ``memory``.
        """

    def stepper(self, memory: Any, start: int) -> Any:
        """Return a new ``Stepper``, which runs the decoder one word at a time during a search.

        Args:
            memory: The decoder's inputs for the photos, from ``memory``.
            start: Id of the token that begins every caption.
        """

    def score(self, memory: Any, tokens: NDArray[np.int64]) -> CaptionScores:
        """Return the decoder's results at every word of given captions of the photos.

        Args:
            memory: The decoder's inputs for B photos, from ``memory``.
            tokens: R captions per photo, as the ids of the start token, words and padding,
                (B, R, T).
        """


def _average(
    parts: Sequence[CaptionScores | Advance], *, one_grid: bool
) -> tuple[Array, Array, Array]:
    """Average the results of several models, and return log-probabilities, attention and gates.

    The probabilities of words are always averaged, and the logarithm of their mean is returned.

    Args:
        parts: The results of each model for the same photos and words.
        one_grid: True if all models divide a photo into the same regions. Attention weights and
            context gates are then averaged too. Otherwise, those of the first model are returned.
    """
    log_probs, *maps = zip(*parts, strict=True)
    alphas, gates = (mean(each if one_grid else each[:1]) for each in maps)
    return mean_probability(log_probs), alphas, gates


class EnsembleStepper:
    """A stepper that runs the decoders of several models together, one word at a time.

    The probabilities that the models assign to the next word are averaged.

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
        """The number of photos that are not finished yet."""
        return self.members[0].batch_size

    def advance(self, tokens: Array) -> Advance:
        """Pass the last word of each beam, (B, K), to all decoders, and score the next word."""
        advances = [member.advance(tokens) for member in self.members]
        return Advance(*_average(advances, one_grid=self.one_grid))

    def reorder(self, parents: Array) -> None:
        """Let beam k of photo b continue beam ``parents[b, k]`` of the last step in every model."""
        for member in self.members:
            member.reorder(parents)

    def keep(self, rows: Array) -> None:
        """Drop all photos except those with these indices in the batch."""
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
        """Resize an RGB image for every model.

        Models that need the same image size, resizing and channel order share the pixels.
        """
        kinds = {
            pixel_format(engine.preprocessing): engine.preprocessing for engine in self.engines
        }
        made = {kind: one.pixels(image) for kind, one in kinds.items()}
        pixels = tuple(made[pixel_format(engine.preprocessing)] for engine in self.engines)
        return Prepared(pixels, self.engines[0].preprocessing.crop_box(*image.size))

    def encode(self, photos: Sequence[Prepared]) -> list[Any]:
        """Encode photos, and return the features of their regions (grids) for each model."""
        with self.engines[0].running():
            return [
                engine.encode(np.stack([photo.pixels[number] for photo in photos]))
                for number, engine in enumerate(self.engines)
            ]

    def memories(self, grids: Sequence[Any]) -> list[Any]:
        """Compute the inputs of each model's decoder from the photos' features (``encode``).

        The result has one entry, called memory, for each model.
        """
        with self.engines[0].running():
            return [engine.memory(grid) for engine, grid in zip(self.engines, grids, strict=True)]

    def read(self, grids: Sequence[Any]) -> Reading | None:
        """Return the first model's reading of photos: log-odds that they show each word.

        Args:
            grids: Features of the photos for each model, from ``encode``.

        Returns:
            The log-odds for whole photos, (B, S), and for each region, (B, L, S), or None if the
            first model was trained without a reading.
        """
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
        """Search for the best captions of each photo, and return them best first.

        Args:
            memories: The decoder's inputs for the photos, one entry per model, from ``memories``.
            options: The search options.
            vocabulary: The vocabulary that all models share.
            seeds: Seed of each photo for random sampling.
            worth: Probabilities that words are true of the photos, which the search rewards. None:
                no rewards.

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
        """Continue one caption of each photo with the most probable words.

        With the option ``certainty``, a search may end captions early. The continuation shows the
        words that it left out.

        Args:
            memories: The decoder's inputs for the photos, one entry per model, from ``memories``.
            captions: Token ids of one caption per photo, without start and end tokens.
            options: The search options. Their rules also apply to the continuation.
            vocabulary: The vocabulary that all models share.

        Returns:
            For each photo the words after the caption, or None if the decoder would add no word.
        """
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
        """Return the results of the decoder for given captions of each photo, as NumPy arrays.

        Args:
            memories: The decoder's inputs for the photos, one entry per model, from ``memories``.
            captions: Captions of each photo, as token ids without start and end tokens.
            start: Id of the token that begins every caption.
        """
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
