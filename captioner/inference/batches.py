"""Captions of photos that the caller reads and batches: what ``Captioner`` does with a batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from captioner.caption import Caption, CropBox
from captioner.errors import ConfigError
from captioner.hardware import Precision
from captioner.inference.captions import (
    Alternatives,
    given_hypothesis,
    make_caption,
    most_probable,
    observe,
)
from captioner.inference.confidence import Observation, no_confidence
from captioner.inference.engine import Engine, Ensemble, Prepared
from captioner.inference.folder import Graphs, StoredModel
from captioner.options import ExplanationMethod, SearchOptions
from captioner.search.arrays import Array
from captioner.search.search import Hypothesis
from captioner.search.words import encode_search_words

if TYPE_CHECKING:  # it imports torch
    from captioner.model.captioner import CaptionModel


class _Encoded(NamedTuple):
    """Photos that were encoded."""

    grids: Sequence[Any]
    crop_boxes: Sequence[CropBox]
    seeds: Sequence[int]


class BatchMethods:
    """The part of ``Captioner`` that knows no files: photos are prepared arrays or features."""

    def __init__(
        self,
        stored: StoredModel,
        *others: StoredModel,
        device: str = "auto",
        precision: Precision = "auto",
    ) -> None:
        """Prepare models for inference.

        Args:
            stored: A model in memory, from ``load_model``.
            *others: More models with the same vocabulary, for an ensemble.
            device: See ``load``.
            precision: See ``load``.

        Raises:
            ConfigError: The device or precision is not available, or the models cannot be averaged.
        """
        for number, other in enumerate(others, 2):
            _check_ensemble(stored, other, number)
        self.stored = stored
        """The (first) model as stored: network in float32, vocabulary, search options."""
        self.ensemble = Ensemble(
            [_engine(one.network, device, precision) for one in (stored, *others)]
        )
        self.engine = self.ensemble.engines[0]
        self.device = self.engine.device
        """Where the models run."""
        self.precision = self.engine.precision
        """In use: fp32, tf32, bf16, fp16 or int8."""

    @property
    def model(self) -> CaptionModel:
        """The (first) network, copied for inference.

        Raises:
            ConfigError: It is exported.
        """
        network: CaptionModel = getattr(self.engine, "model", None) or self.stored.model
        return network

    def options(self, **changes: Any) -> SearchOptions:
        """The model's default search options with some of them changed.

        Raises:
            ConfigError: An option is unknown or out of range.
        """
        return self.stored.search.changed(**changes)

    def prepare(self, image: Image.Image) -> Prepared:
        """Resize an image from ``data.images.open_image``, RGB and upright, for the encoders."""
        return self.ensemble.prepare(image)

    def caption_batch(
        self,
        photos: Sequence[Prepared],
        options: SearchOptions,
        *,
        alternatives: int = 0,
        method: ExplanationMethod = "attention",
    ) -> list[list[Caption]]:
        """Caption prepared photos together.

        Args:
            photos: From ``prepare``.
            options: Search options.
            alternatives: See ``stream``.
            method: See ``stream``.

        Returns:
            For each photo its captions, best first; at least one.

        Raises:
            ConfigError: A word in the options is unknown, or no caption satisfies the options.
        """
        self._check(method, alternatives)
        if not photos:
            return []
        encoded = self._encode(photos)
        return self._search(encoded, options, alternatives=alternatives, method=method)

    def caption_features(
        self,
        features: Array,
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
        grids = self.ensemble.encode_features(features)
        return self._search(_Encoded(grids, crop_boxes, seeds or range(len(features))), options)

    def explain_batch(
        self,
        photos: Sequence[Prepared],
        sentences: Sequence[Sequence[str]],
        *,
        alternatives: int = 0,
        method: ExplanationMethod = "attention",
        style: str | None = None,
    ) -> list[Caption]:
        """Attention and word probabilities for given captions, one per photo.

        Args:
            photos: From ``prepare``.
            sentences: The words of each caption, all in the vocabulary.
            alternatives: See ``stream``.
            method: See ``stream``.
            style: Style of the captions; None: that of the model's search options.
        """
        vocabulary = self.stored.vocabulary
        captions = [vocabulary.encode(words) for words in sentences]
        start = vocabulary.start(self.stored.search.style if style is None else style)
        self._check(method, alternatives)
        if not photos:
            return []
        encoded = self._encode(photos)
        tokens = [[caption] for caption in captions]
        scores = self.ensemble.score(self.ensemble.memories(encoded.grids), tokens, start)
        found = [[given_hypothesis(scores, row, caption)] for row, caption in enumerate(captions)]
        others = most_probable(scores, tokens, alternatives, vocabulary) if alternatives else []
        explained = self._captions(found, encoded, start, method, others=others)
        return [caption for [caption] in explained]

    def observe_batch(
        self, photos: Sequence[Prepared], options: SearchOptions
    ) -> list[Observation]:
        """What is known of the best caption of every photo, from which confidence is computed.

        Args:
            photos: From ``prepare``; at least one.
            options: Search options.
        """
        encoded = self._encode(photos)
        memories = self.ensemble.memories(encoded.grids)
        return self._observations(
            memories, self._find(memories, encoded.seeds, options, evidence=True)
        )

    def photo_vectors(self, photos: Sequence[Prepared]) -> NDArray[np.float32]:
        """Mean of the features of each photo's regions, as the decoder uses them: (B, D)."""
        return self.ensemble.summary(self.ensemble.memories(self._encode(photos).grids))

    def check_method(self, method: object) -> None:
        """See ``Ensemble.check_method``."""
        self.ensemble.check_method(method)

    def no_confidence(self, options: SearchOptions) -> str | None:
        """Why captions found with these options have no confidence; None: they have one."""
        if len(self.ensemble.engines) > 1:
            return "an ensemble of models is not calibrated; use a single model"
        return no_confidence(self.stored.calibrator, options, self.stored.vocabulary.styles)

    def _check(self, method: object, alternatives: object) -> None:
        self.ensemble.check_method(method)
        if type(alternatives) is not int or alternatives < 0:
            raise ConfigError(
                f"alternatives is {alternatives!r}; give a whole number, 0 (none) or more"
            )

    def _encode(self, photos: Sequence[Prepared]) -> _Encoded:
        return _Encoded(
            self.ensemble.encode(photos),
            [photo.crop_box for photo in photos],
            [photo.seed for photo in photos],
        )

    def _search(
        self,
        encoded: _Encoded,
        options: SearchOptions,
        *,
        alternatives: int = 0,
        method: ExplanationMethod = "attention",
    ) -> list[list[Caption]]:
        """Search for the captions of photos; see ``caption_batch``."""
        memories = self.ensemble.memories(encoded.grids)
        calibrator = None if self.no_confidence(options) else self.stored.calibrator
        found = self._find(memories, encoded.seeds, options, evidence=calibrator is not None)
        confidences: list[float] = []
        if calibrator is not None:
            style = options.style or next(iter(self.stored.vocabulary.styles), "")
            observed = self._observations(memories, found)
            confidences = [calibrator.confidence(seen, style) for seen in observed]
        start = self.stored.vocabulary.start(options.style)
        others: list[list[Alternatives]] = []
        if alternatives:  # score the captions again, so that the search need not store every word
            tokens = [[hypothesis.tokens for hypothesis in hypotheses] for hypotheses in found]
            scores = self.ensemble.score(memories, tokens, start)
            others = most_probable(scores, tokens, alternatives, self.stored.vocabulary)
        return self._captions(found, encoded, start, method, others=others, confidences=confidences)

    def _find(
        self,
        memories: Sequence[Any],
        seeds: Sequence[int],
        options: SearchOptions,
        *,
        evidence: bool,
    ) -> list[list[Hypothesis]]:
        words = encode_search_words(options, self.stored.vocabulary)
        start = self.stored.vocabulary.start(options.style)
        return self.ensemble.search(memories, options, words, start, seeds, evidence=evidence)

    def _observations(
        self, memories: Sequence[Any], found: Sequence[Sequence[Hypothesis]]
    ) -> list[Observation]:
        pairs = zip(found, self.ensemble.summary(memories), strict=True)
        return [observe(best, photo, self.stored.vocabulary) for (best, *_), photo in pairs]

    def _captions(
        self,
        found: Sequence[Sequence[Hypothesis]],
        encoded: _Encoded,
        start: int,
        method: ExplanationMethod,
        *,
        others: Sequence[Sequence[Alternatives]],
        confidences: Sequence[float] = (),
    ) -> list[list[Caption]]:
        """The captions of photos with their maps; the best of each with its confidence, if any."""
        return [
            [
                make_caption(
                    hypothesis,
                    self.ensemble.explain(method, encoded.grids, row, start, hypothesis),
                    encoded.crop_boxes[row],
                    self.engine,
                    self.stored.vocabulary,
                    method=method,
                    alternatives=others[row][column] if others else (),
                    confidence=confidences[row] if confidences and column == 0 else None,
                )
                for column, hypothesis in enumerate(hypotheses)
            ]
            for row, hypotheses in enumerate(found)
        ]


def _engine(network: CaptionModel | Graphs, device: str, precision: Precision) -> Engine:
    if isinstance(network, Graphs):
        from captioner.inference.onnx_engine import OnnxEngine

        return OnnxEngine(network, device, precision)
    from captioner.inference.torch_engine import TorchEngine

    return TorchEngine(network, device, precision)


def _check_ensemble(first: StoredModel, other: StoredModel, number: int) -> None:
    """Raise ConfigError unless model ``number`` can be averaged with the first."""
    kinds = ["is exported" if isinstance(m.network, Graphs) else "is not" for m in (first, other)]
    if kinds[0] != kinds[1]:
        raise ConfigError(
            f"model 1 {kinds[0]} and model {number} {kinds[1]}; give models of one kind"
        )
    one, two = first.vocabulary, other.vocabulary
    if one == two:
        return
    if (one.words, one.subwords) == (two.words, two.subwords):
        styles = " and ".join(", ".join(each.styles) or "none" for each in (one, two))
        raise ConfigError(
            f"the styles of model 1 and model {number} differ ({styles}); an ensemble needs models "
            "trained with the same styles, in the same order"
        )
    raise ConfigError(
        f"the vocabularies of model 1 and model {number} differ ({len(one)} and {len(two)} words); "
        "an ensemble needs models trained with the same vocabulary"
    )
