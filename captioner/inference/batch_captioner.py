"""Caption prepared photos in batches: what ``Captioner`` and the package's commands run.

    model = BatchCaptioner(*read_models("runs/mine/best"))
    photos = [model.prepare(open_image(path)) for path in paths]
    captions = model.caption_batch(photos, model.options(beam_size=1))

Like `inference`, it does not import torch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from captioner.caption import END_NAME, Alternative, Caption, CropBox, text_of
from captioner.errors import ConfigError
from captioner.hardware import Precision
from captioner.inference.confidence import Observation, no_confidence
from captioner.inference.engine import ATTENTION_METHODS, Engine, Ensemble, Prepared, as_map
from captioner.inference.loading import with_weights
from captioner.inference.onnx_engine import ExportedModel, OnnxEngine
from captioner.options import ExplanationMethod, SearchOptions
from captioner.search.arrays import Array, top_k
from captioner.search.search import Hypothesis
from captioner.search.words import encode_search_words
from captioner.text.vocabulary import END, NEVER_GENERATED

if TYPE_CHECKING:  # they import torch
    from captioner.inference.folder import StoredModel
    from captioner.model.captioner import CaptionModel

Alternatives = tuple[tuple[Alternative, ...], ...]


class BatchCaptioner:
    """A model, or an ensemble of several, that captions batches of prepared photos."""

    def __init__(
        self,
        stored: StoredModel | ExportedModel,
        *others: StoredModel | ExportedModel,
        device: str = "auto",
        precision: Precision = "auto",
    ) -> None:
        """Prepare models for inference; for arguments and errors see ``Captioner``."""
        for number, other in enumerate(others, 2):
            _check_ensemble(stored, other, number)
        self.stored = stored
        """The (first) model as stored."""
        self.ensemble = Ensemble([_engine(one, device, precision) for one in (stored, *others)])
        self.engine = self.ensemble.engines[0]
        self.device = self.engine.device
        """Where the models run."""
        self.precision = self.engine.precision
        """In use: fp32, tf32, bf16, fp16 or int8."""

    @property
    def model(self) -> CaptionModel:
        """The (first) model as a module of torch, copied for inference.

        Raises:
            ConfigError: It is exported.
        """
        with_weights(self.stored)
        return cast("CaptionModel", self.engine.model)  # type: ignore[attr-defined]

    def options(self, **changes: Any) -> SearchOptions:
        """See ``Captioner.options``."""
        return self.stored.search.changed(**changes)

    def check_method(self, method: object) -> None:
        """See ``Ensemble.check_method``."""
        self.ensemble.check_method(method)

    def no_confidence(self, options: SearchOptions) -> str | None:
        """Why captions found with these options have no confidence; None: they have one."""
        if len(self.ensemble.engines) > 1:
            return "an ensemble of models is not calibrated; use a single model"
        return no_confidence(self.stored.calibrator, options, self.stored.vocabulary.styles)

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
            alternatives: Number of most probable words to return per position.
            method: How the maps are computed; see ``models.explanations``.

        Returns:
            For each photo its captions, best first; at least one.

        Raises:
            ConfigError: A word in the options is unknown, or no caption satisfies the options.
        """
        self.check_method(method)
        check_alternatives(alternatives)
        if not photos:
            return []
        grids = self.ensemble.encode(photos)
        crop_boxes = [photo.crop_box for photo in photos]
        seeds = [photo.seed for photo in photos]
        return self._search(
            grids, crop_boxes, options, seeds, alternatives=alternatives, method=method
        )

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
        return self._search(grids, crop_boxes, options, seeds or range(len(features)))

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
            alternatives: See ``caption_batch``.
            method: See ``caption_batch``.
            style: Style of the captions; None: that of the model's search options.
        """
        captions = [self.stored.vocabulary.encode(words) for words in sentences]
        start = self.stored.vocabulary.start(self.stored.search.style if style is None else style)
        self.check_method(method)
        check_alternatives(alternatives)
        if not photos:
            return []
        grids = self.ensemble.encode(photos)
        memories = self.ensemble.memories(grids)
        scores = self.ensemble.score(memories, [[tokens] for tokens in captions], start)
        found = []
        for row, tokens in enumerate(captions):
            length = len(tokens)
            log_probs = scores.log_probs[row, 0, np.arange(length + 1), [*tokens, END]]
            hypothesis = Hypothesis(
                tokens=tokens,
                token_log_probs=log_probs[:-1],
                alphas=scores.alphas[row, 0, :length],
                gates=scores.gates[row, 0, :length],
                log_prob=float(log_probs.sum()),
                ended=True,
            )
            found.append([hypothesis])
        crop_boxes = [photo.crop_box for photo in photos]
        explained = self._captions(
            found,
            grids,
            crop_boxes,
            start=start,
            method=method,
            log_probs=scores.log_probs,
            alternatives=alternatives,
        )
        return [caption for [caption] in explained]

    def observe_batch(
        self, photos: Sequence[Prepared], options: SearchOptions
    ) -> list[Observation]:
        """What is known of the best caption of every photo, from which confidence is computed.

        Args:
            photos: From ``prepare``; at least one.
            options: Search options.
        """
        words = encode_search_words(options, self.stored.vocabulary)
        start = self.stored.vocabulary.start(options.style)
        seeds = [photo.seed for photo in photos]
        memories = self.ensemble.memories(self.ensemble.encode(photos))
        found = self.ensemble.search(memories, options, words, start, seeds, evidence=True)
        return self._observations(memories, found)

    def photo_vectors(self, photos: Sequence[Prepared]) -> NDArray[np.float32]:
        """Mean of the features of each photo's regions, as the decoder uses them: (B, D)."""
        return self.ensemble.summary(self.ensemble.memories(self.ensemble.encode(photos)))

    def _search(
        self,
        grids: Sequence[Any],
        crop_boxes: Sequence[CropBox],
        options: SearchOptions,
        seeds: Sequence[int],
        *,
        alternatives: int = 0,
        method: ExplanationMethod = "attention",
    ) -> list[list[Caption]]:
        """Search for the captions of encoded photos; see ``caption_batch``."""
        words = encode_search_words(options, self.stored.vocabulary)
        start = self.stored.vocabulary.start(options.style)
        memories = self.ensemble.memories(grids)
        calibrator = None if self.no_confidence(options) else self.stored.calibrator
        evidence = calibrator is not None
        found = self.ensemble.search(memories, options, words, start, seeds, evidence=evidence)
        confidences: list[float] = []
        if calibrator is not None:
            style = options.style or next(iter(self.stored.vocabulary.styles), "")
            observed = self._observations(memories, found)
            confidences = [calibrator.confidence(seen, style) for seen in observed]
        log_probs = None
        if alternatives:  # score the captions again, so that the search need not store every word
            tokens = [[hypothesis.tokens for hypothesis in hypotheses] for hypotheses in found]
            log_probs = self.ensemble.score(memories, tokens, start).log_probs
        return self._captions(
            found,
            grids,
            crop_boxes,
            start=start,
            method=method,
            log_probs=log_probs,
            alternatives=alternatives,
            confidences=confidences,
        )

    def _observations(
        self, memories: Sequence[Any], found: Sequence[Sequence[Hypothesis]]
    ) -> list[Observation]:
        """What is known of the best caption of every photo."""
        vocabulary, photos = self.stored.vocabulary, self.ensemble.summary(memories)
        observed = []
        for (best, *_), photo in zip(found, photos, strict=True):
            assert best.evidence is not None  # collected on request
            observed.append(
                Observation(
                    text=text_of(vocabulary.shown(best.tokens), vocabulary.pieces(best.tokens)),
                    log_probs=best.token_log_probs,
                    log_prob=best.log_prob,
                    entropies=best.evidence.entropies,
                    share=best.evidence.share,
                    overlap=best.evidence.overlap,
                    photo=photo,
                )
            )
        return observed

    def _captions(
        self,
        found: Sequence[Sequence[Hypothesis]],
        grids: Sequence[Any],
        crop_boxes: Sequence[CropBox],
        *,
        start: int,
        method: ExplanationMethod,
        log_probs: NDArray[np.float32] | None,
        alternatives: int,
        confidences: Sequence[float] = (),
    ) -> list[list[Caption]]:
        """The captions of photos with their maps; the best of each with its confidence, if any."""
        engine, vocabulary = self.engine, self.stored.vocabulary
        captions: list[list[Caption]] = [[] for _ in found]
        for row, (crop_box, hypotheses) in enumerate(zip(crop_boxes, found, strict=True)):
            for column, hypothesis in enumerate(hypotheses):
                tokens = hypothesis.tokens
                maps = self.ensemble.explain(method, grids, row, start, hypothesis)
                if method not in ATTENTION_METHODS:
                    maps = as_map(maps)
                others: Alternatives = ()
                if log_probs is not None:
                    others = self._alternatives(log_probs[row, column, : len(tokens)], alternatives)
                caption = Caption(
                    words=vocabulary.shown(tokens),
                    log_probs=hypothesis.token_log_probs,
                    alphas=maps.reshape(len(maps), *engine.grid),
                    gates=hypothesis.gates,
                    log_prob=hypothesis.log_prob,
                    crop_box=crop_box,
                    alternatives=others,
                    pieces=vocabulary.pieces(tokens),
                    geometry=engine.geometry.placed(engine.preprocessing.image_size, *crop_box),
                    method=method,
                    confidence=confidences[row] if confidences and column == 0 else None,
                )
                captions[row].append(caption)
        return captions

    def _alternatives(self, log_probs: NDArray[np.float32], count: int) -> Alternatives:
        """The ``count`` most probable words at every position of (T, V)."""
        if count == 0:
            return ()
        allowed = log_probs.copy()
        allowed[:, list(NEVER_GENERATED)] = -math.inf
        best = top_k(allowed, min(count, allowed.shape[-1] - len(NEVER_GENERATED)))
        shown = self.stored.vocabulary.shown
        return tuple(
            tuple(
                Alternative(END_NAME if token == END else shown([token])[0], value)
                for token, value in zip(tokens, values, strict=True)
            )
            for tokens, values in zip(best[1].tolist(), best[0].tolist(), strict=True)
        )


def _check_ensemble(
    first: StoredModel | ExportedModel, other: StoredModel | ExportedModel, number: int
) -> None:
    """Raise ConfigError unless model ``number`` can be averaged with the first."""
    exported = [isinstance(model, ExportedModel) for model in (first, other)]
    if exported[0] != exported[1]:
        kinds = ["is exported" if one else "is not" for one in exported]
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


def check_alternatives(count: object) -> None:
    """Raise ConfigError unless ``count`` is a number of alternatives."""
    if type(count) is not int or count < 0:
        raise ConfigError(f"alternatives is {count!r}; give a whole number, 0 (none) or more")


def _engine(stored: StoredModel | ExportedModel, device: str, precision: Precision) -> Engine:
    if isinstance(stored, ExportedModel):
        return OnnxEngine(stored, device, precision)
    from captioner.inference.torch_engine import TorchEngine

    return TorchEngine(stored.model, device, precision)
