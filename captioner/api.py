"""The Python API: load a model, caption photos.

model = captioner.load()
caption = model.caption("photo.jpg")
captioner.overlay("photo.jpg", caption).save("attention.png")
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import torch
from PIL import Image
from torch import Tensor

from captioner.caption import END_NAME, Alternative, Caption, CropBox
from captioner.config import SearchOptions
from captioner.data.images import open_image
from captioner.data.prefetch import read_ahead
from captioner.decoding.rules import encode_search_words
from captioner.decoding.search import Hypothesis
from captioner.errors import ConfigError, ImageError
from captioner.hardware import Precision
from captioner.inference import Ensemble, Prepared
from captioner.model_folder import StoredModel, load_model, save_model
from captioner.models.attention import Memory
from captioner.tokenizer import tokenize
from captioner.visualization.notebook import PhotoCaption
from captioner.vocabulary import END, NEVER_GENERATED

SHIPPED_MODEL = Path(__file__).parent / "pretrained"
"""Folder of the model that is included in the package."""

Photo = str | Path | Image.Image | BinaryIO

Alternatives = tuple[tuple[Alternative, ...], ...]


class Result(NamedTuple):
    """Result for one photo: captions or an error."""

    photo: Photo
    captions: list[Caption]
    """Best first; empty if the photo cannot be read."""
    error: ImageError | None


def load(*folders: str | Path, device: str = "auto", precision: Precision = "auto") -> Captioner:
    """Load a model, or several models as an ensemble.

    Args:
        *folders: Model folders; none: the model included in the package.
        device: ``auto``, ``cpu``, ``cuda``, ``cuda:1``, ...
        precision: ``auto`` (bf16 if the hardware supports it natively), ``fp32``, ``bf16``.

    Raises:
        ModelError: A folder cannot be loaded.
        ConfigError: The device is not available, or the models have different vocabularies.
    """
    for folder in folders:
        if not isinstance(folder, str | Path):
            raise ConfigError(f"a model is {folder!r:.60}; give each folder by its own path")
    stored = [load_model(folder) for folder in folders or (SHIPPED_MODEL,)]
    return Captioner(*stored, device=device, precision=precision)


class Captioner:
    """A loaded model, or an ensemble of several.

    The models of an ensemble share one vocabulary; their word probabilities are averaged. Search
    options, info and grid are the first model's; see also ``Ensemble``.
    """

    def __init__(
        self,
        stored: StoredModel,
        *others: StoredModel,
        device: str = "auto",
        precision: Precision = "auto",
    ) -> None:
        """Prepare models for inference.

        Args:
            stored: A model in memory, e.g. from ``load_model``.
            *others: More models with the same vocabulary, for an ensemble.
            device: See ``load``.
            precision: See ``load``.

        Raises:
            ConfigError: The device or precision is not available, or the vocabularies differ.
        """
        for number, other in enumerate(others, 2):
            if other.vocabulary != stored.vocabulary:
                raise ConfigError(
                    f"the vocabularies of model 1 and model {number} differ "
                    f"({len(stored.vocabulary)} and {len(other.vocabulary)} words); an ensemble "
                    "needs models trained with the same vocabulary"
                )
        self.stored = stored
        self.ensemble = Ensemble([one.model for one in (stored, *others)], device, precision)
        self.model = self.ensemble.models[0]
        self.device = self.ensemble.device
        self.precision = precision

    @property
    def info(self) -> dict[str, Any]:
        """The model's training data and scores."""
        return self.stored.info

    def save(self, folder: str | Path) -> None:
        """Write the (first) model as a model folder."""
        save_model(folder, self.stored)

    def options(self, **changes: Any) -> SearchOptions:
        """The model's default search options with some of them changed.

        Raises:
            ConfigError: An option is unknown or out of range.
        """
        return self.stored.search.changed(**changes)

    def caption(self, photo: Photo, *, alternatives: int = 0, **search: Any) -> PhotoCaption:
        """Caption one photo.

        Args:
            photo: A path, a PIL image or a binary file.
            alternatives: Number of most probable words to return per position.
            **search: Fields of ``SearchOptions`` to change, e.g. ``beam_size=1``.

        Returns:
            The best caption; notebooks display it with its photo.

        Raises:
            ImageError: The photo cannot be read.
        """
        return self.captions(photo, alternatives=alternatives, **search)[0]

    def captions(self, photo: Photo, *, alternatives: int = 0, **search: Any) -> list[PhotoCaption]:
        """The best ``num_captions`` captions of one photo, best first; see ``caption``."""
        options = self.options(**search)
        image = open_image(photo)
        found = self.caption_batch([self.prepare(image)], options, alternatives=alternatives)[0]
        return PhotoCaption.of(found, image, photo)

    def explain(
        self, photo: Photo, text: str, *, alternatives: int = 0, style: str | None = None
    ) -> PhotoCaption:
        """Attention and word probabilities for a given caption.

        Args:
            photo: A path, a PIL image or a binary file.
            text: The caption; tokenized as captions are.
            alternatives: See ``caption``.
            style: Style that the caption is read in; None: the model's default.

        Returns:
            The caption with its attention, log-probabilities and gates.

        Raises:
            ImageError: The photo cannot be read.
            ConfigError: The text is empty or has words outside the vocabulary.
        """
        words = self.known_words(text)
        image = open_image(photo)
        explained = self.explain_batch(
            [self.prepare(image)], [words], alternatives=alternatives, style=style
        )
        return PhotoCaption.of(explained, image, photo)[0]

    def known_words(self, text: str) -> list[str]:
        """The words of a text, spelled as in the vocabulary.

        Raises:
            ConfigError: The text is empty or has words outside the vocabulary.
        """
        if not isinstance(text, str):
            raise ConfigError(f"the caption to explain is {text!r:.40}; give a string")
        words = tokenize(text)
        unknown = [word for word in words if word not in self.stored.vocabulary]
        if unknown or not words:
            problem = f"the model does not know {', '.join(unknown)}" if unknown else "no words"
            raise ConfigError(f"{text!r}: {problem}; use words from the model's vocabulary")
        return words

    def stream(
        self,
        photos: Iterable[Photo] | str | Path,
        options: SearchOptions | None = None,
        *,
        batch_size: int = 32,
        alternatives: int = 0,
    ) -> Iterator[Result]:
        """Caption any number of photos in batches, in order and in constant memory.

        Threads read the next photos while the model runs. A photo that cannot be read yields a
        result with its error.

        Args:
            photos: Paths, PIL images or binary files, consumed lazily; or one path.
            options: Search options; None: the model's defaults.
            batch_size: Photos per batch.
            alternatives: See ``caption``.
        """
        if batch_size < 1:
            raise ConfigError(f"batch-size is {batch_size}; give 1 or more")
        options = options or self.stored.search
        photos = [photos] if isinstance(photos, str | Path) else photos
        # While one batch is captioned, the next one is read.
        read = read_ahead(self._try_prepare, photos, ahead=batch_size + 1, threads=2)
        with closing(read):
            while batch := list(islice(read, batch_size)):
                good = [prepared for _, prepared in batch if isinstance(prepared, Prepared)]
                captions = iter(self.caption_batch(good, options, alternatives=alternatives))
                for photo, prepared in batch:
                    if isinstance(prepared, ImageError):
                        yield Result(photo, [], prepared)
                    else:
                        yield Result(photo, next(captions), None)

    def prepare(self, image: Image.Image) -> Prepared:
        """Resize an image for the encoders.

        Args:
            image: From ``data.images.open_image``: RGB and upright.
        """
        return self.ensemble.prepare(image)

    @torch.inference_mode()
    def caption_batch(
        self, photos: Sequence[Prepared], options: SearchOptions, *, alternatives: int = 0
    ) -> list[list[Caption]]:
        """Caption prepared photos together.

        Args:
            photos: From ``prepare``.
            options: Search options.
            alternatives: See ``caption``.

        Returns:
            For each photo its captions, best first; at least one.

        Raises:
            ConfigError: A word in the options is unknown, or no caption satisfies the options.
        """
        if not photos:
            return []
        seeds = [zlib.crc32(photo.pixels[0].tobytes()) for photo in photos]
        crop_boxes = [photo.crop_box for photo in photos]
        return self._search(self.ensemble.encode(photos), crop_boxes, options, seeds, alternatives)

    @torch.inference_mode()
    def caption_features(
        self,
        features: Tensor,
        crop_boxes: Sequence[CropBox],
        options: SearchOptions,
        seeds: Sequence[int] | None = None,
    ) -> list[list[Caption]]:
        """Caption photos from cached features; one model only.

        Args:
            features: From a ``FeatureCache``, (B, L, D), on any device.
            crop_boxes: The part of each photo that the model sees.
            options: Search options.
            seeds: A random seed per photo, for sampling; None: its index.

        Returns:
            See ``caption_batch``.

        Raises:
            ConfigError: There are several models.
        """
        memories = self.ensemble.encode_features(features)
        return self._search(memories, crop_boxes, options, seeds or range(len(features)))

    @torch.inference_mode()
    def explain_batch(
        self,
        photos: Sequence[Prepared],
        sentences: Sequence[Sequence[str]],
        *,
        alternatives: int = 0,
        style: str | None = None,
    ) -> list[Caption]:
        """Attention and word probabilities for given captions, one per photo.

        Args:
            photos: From ``prepare``.
            sentences: The words of each caption, all in the vocabulary.
            alternatives: See ``caption``.
            style: Style of the captions; None: that of the model's search options.
        """
        captions = [self.stored.vocabulary.encode(words) for words in sentences]
        start = self.stored.vocabulary.start(self.stored.search.style if style is None else style)
        memories = self.ensemble.encode(photos)
        scores = self.ensemble.score(memories, [[tokens] for tokens in captions], start)
        explained = []
        for row, (photo, tokens) in enumerate(zip(photos, captions, strict=True)):
            length = len(tokens)
            log_probs = scores.log_probs[row, 0, torch.arange(length + 1), [*tokens, END]].cpu()
            hypothesis = Hypothesis(
                tokens=tokens,
                token_log_probs=log_probs[:-1],
                alphas=scores.alphas[row, 0, :length].cpu(),
                gates=scores.gates[row, 0, :length].cpu(),
                log_prob=float(log_probs.sum()),
                ended=True,
            )
            others = self._alternatives(scores.log_probs[row, 0, :length], alternatives)
            explained.append(self._caption(hypothesis, photo.crop_box, others))
        return explained

    def _search(
        self,
        memories: Sequence[Memory],
        crop_boxes: Sequence[CropBox],
        options: SearchOptions,
        seeds: Sequence[int],
        alternatives: int = 0,
    ) -> list[list[Caption]]:
        words = encode_search_words(options, self.stored.vocabulary)
        start = self.stored.vocabulary.start(options.style)
        found = self.ensemble.search(memories, options, words, start, seeds)
        log_probs = None
        if alternatives:  # score the captions again, so that the search need not store every word
            tokens = [[hypothesis.tokens for hypothesis in hypotheses] for hypotheses in found]
            log_probs = self.ensemble.score(memories, tokens, start).log_probs
        return [
            [
                self._caption(
                    hypothesis,
                    crop_box,
                    ()
                    if log_probs is None
                    else self._alternatives(log_probs[row, column], alternatives),
                )
                for column, hypothesis in enumerate(hypotheses)
            ]
            for row, (crop_box, hypotheses) in enumerate(zip(crop_boxes, found, strict=True))
        ]

    def _alternatives(self, log_probs: Tensor, count: int) -> Alternatives:
        """The ``count`` most probable words at every position of (T, V)."""
        if type(count) is not int or count < 0:
            raise ConfigError(f"alternatives is {count!r}; give a whole number, 0 (none) or more")
        if count == 0:
            return ()
        allowed = log_probs.clone()
        allowed[:, list(NEVER_GENERATED)] = -math.inf
        best = allowed.topk(min(count, allowed.shape[-1] - len(NEVER_GENERATED)), dim=-1)
        decode = self.stored.vocabulary.decode
        return tuple(
            tuple(
                Alternative(END_NAME if token == END else decode([token])[0], value)
                for token, value in zip(tokens, values, strict=True)
            )
            for tokens, values in zip(best.indices.tolist(), best.values.tolist(), strict=True)
        )

    def _caption(
        self, hypothesis: Hypothesis, crop_box: CropBox, alternatives: Alternatives
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
            geometry=self.model.geometry.placed(self.model.preprocessing.image_size, *crop_box),
        )

    def _try_prepare(self, photo: Photo) -> tuple[Photo, Prepared | ImageError]:
        try:
            return photo, self.prepare(open_image(photo))
        except ImageError as error:
            return photo, error
