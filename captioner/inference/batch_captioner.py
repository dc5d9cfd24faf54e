"""A loaded model that captions batches of photos in memory.

`inference.captioner.Captioner` extends this class: it also reads photos, saves models and pushes
them to the hub. Programs that read and batch photos themselves, such as the server and the
evaluation, call the methods of this module.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from captioner.caption_types import (
    END_NAME,
    Alternative,
    Caption,
    CropBox,
    Keyword,
    LeftOut,
    text_of,
)
from captioner.errors import ConfigError
from captioner.hardware import Precision
from captioner.hints import hinted
from captioner.inference.confidence import Observation, no_confidence
from captioner.inference.copies import Portable
from captioner.inference.engine import ATTENTION_METHODS, CaptionScores, Prepared
from captioner.inference.open_models import open_models
from captioner.inference.reading import NO_KEYWORDS, Reading, has_keywords
from captioner.inference.stored_model import StoredModel
from captioner.inference.truth import WordTruth
from captioner.options import ExplanationMethod, SearchOptions, check_method
from captioner.search.arrays import Array, top_k
from captioner.search.search import Hypothesis
from captioner.search.words import WIDE_WORDS
from captioner.search.worth import FUNCTION_WORD, Worth, wide_words
from captioner.text.vocabulary import END, NEVER_GENERATED

if TYPE_CHECKING:  # the engine and the model import torch
    from typing_extensions import Self

    from captioner.inference.torch_engine import TorchEngine
    from captioner.model.caption_model import CaptionModel


class _Encoded(NamedTuple):
    """A batch of photos after the encoder, with all inputs of a search."""

    memories: Sequence[Any]
    crop_boxes: Sequence[CropBox]
    seeds: Sequence[int]
    reading: Reading | None
    """The first model's reading of the photos, which is the log-odds that they show each word. None
    if the model was trained without a reading."""
    grids: Sequence[Any] = ()
    """Features of the photos, for explanation methods that need the weights."""


@hinted
class BatchCaptioner(Portable):
    """A loaded model, or an ensemble of several models (see `Captioner`)."""

    def __init__(
        self,
        *models: StoredModel,
        device: str = "auto",
        precision: Precision = "auto",
    ) -> None:
        """Prepare models from ``load_model`` for inference (see ``load``)."""
        if not models:
            raise ConfigError("Captioner() was called without a model; use captioner.load()")
        for model in models:
            if not isinstance(model, StoredModel):
                raise ConfigError(f"{model!r:.60} is not a model; use captioner.load(folder)")
        self.stored = models[0]
        """The first model's stored contents: float32 network, vocabulary and search options."""
        self._opened = models, device, precision
        self.ensemble = open_models(*self._opened)
        self.engine = self.ensemble.engines[0]
        self.device = self.engine.device
        """The device that the models run on."""
        self.precision = self.engine.precision
        """The precision in use: fp32, tf32, bf16, fp16 or int8."""
        self._torch: Self | None = None

    @property
    def model(self) -> CaptionModel:
        """The network of the first model, as torch runs it.

        Raises:
            ConfigError: The model has no weights, or torch is not installed.
        """
        own: CaptionModel | None = getattr(self.engine, "model", None)
        return self.stored.model if own is None else own

    def in_torch(self) -> Self:
        """Return this captioner, run by torch in float32, for features that need the weights.

        If torch already runs the model, the captioner is returned unchanged.

        Raises:
            ConfigError: The model has no weights, torch is not installed, or the captioner is an
                ensemble.
        """
        if hasattr(self.engine, "model"):
            return self
        if len(self.ensemble.engines) > 1:
            raise ConfigError(
                "an ensemble cannot be converted to a single torch model; load one model instead"
            )
        if self._torch is None:
            self.stored.require_weights()
            self._torch = type(self)(self.stored, device=str(self.device), precision="fp32")
        return self._torch

    def options(self, **changes: Any) -> SearchOptions:
        """Return the model's default search options with some of them changed.

        Raises:
            ConfigError: An option is unknown or invalid.
        """
        return self.stored.search.changed(**changes)

    def known_words(self, text: str) -> list[str]:
        """Return the words of a sentence, spelled as in the vocabulary.

        Raises:
            ConfigError: The text is empty or has words outside the vocabulary.
        """
        return self.stored.vocabulary.known_words(text)

    def check_method(self, method: object) -> None:
        """Check that the model supports an explanation method.

        Raises:
            ConfigError: The method is unknown, or the model does not support it.
        """
        check_method(method)
        if method not in ATTENTION_METHODS:
            if len(self.ensemble.engines) > 1:
                raise ConfigError(
                    f"the method {method!r} does not support ensembles; use 'attention' or "
                    "'attention_gate', or a single model"
                )
            self.stored.require_weights(f"the method {method!r}")

    def no_confidence(self, options: SearchOptions) -> str | None:
        """Return the reason why a search computes no confidence, or None if it computes one."""
        if len(self.ensemble.engines) > 1:
            return "an ensemble of models is not calibrated; use a single model"
        return no_confidence(self.stored.calibrator, options, self.stored.vocabulary.styles)

    def prepare(self, image: Image.Image) -> Prepared:
        """Prepare an upright RGB image, such as an image from ``open_image``, for the encoders."""
        return self.ensemble.prepare(image)

    def caption_batch(
        self,
        photos: Sequence[Prepared],
        options: SearchOptions,
        *,
        alternatives: int = 0,
        method: ExplanationMethod = "attention",
        check: Callable[[], None] = lambda: None,
    ) -> list[list[Caption]]:
        """Return at least one caption of each photo, best first.

        Args:
            photos: Photos from ``prepare``.
            options: Search options from ``options``.
            alternatives: Number of most probable words to add at each position of a caption.
            method: Method that computes the maps, such as ``attention`` or ``occlusion``.
            check: Function that is called before the maps of each caption are computed. It can
                raise an error to stop the work.

        Raises:
            ConfigError: A word in the options is unknown, or no caption satisfies the options.
        """
        self._check(method, alternatives, options)
        if not photos:
            return []
        return self._search(self._encode(photos, method), options, alternatives, method, check)

    def caption_features(
        self,
        features: Array,
        crop_boxes: Sequence[CropBox],
        options: SearchOptions,
        seeds: Sequence[int] | None = None,
    ) -> list[list[Caption]]:
        """Caption photos from their cached features instead of their pixels.

        Args:
            features: Features from a ``FeatureCache``, (B, L, D).
            crop_boxes: The part of each photo that the encoder saw.
            options: The search options.
            seeds: Seed of each photo for random sampling (default: its index).

        Raises:
            ConfigError: The captioner is an ensemble.
        """
        if len(self.ensemble.engines) > 1:
            raise ConfigError(
                "an ensemble cannot use cached features, which belong to one encoder; use a single "
                "model"
            )
        model = self.in_torch()
        with model.engine.running():
            grid = cast("TorchEngine", model.engine).encode_features(features)
        memories, reading = model.ensemble.memories([grid]), model.ensemble.read([grid])
        seeds = seeds or range(len(features))
        return model._search(_Encoded(memories, crop_boxes, seeds, reading), options)

    def explain_batch(
        self,
        photos: Sequence[Prepared],
        sentences: Sequence[Sequence[str]],
        *,
        alternatives: int = 0,
        method: ExplanationMethod = "attention",
        style: str | None = None,
    ) -> list[Caption]:
        """Add attention maps and log-probabilities to one given caption per photo.

        Args:
            photos: Photos from ``prepare``.
            sentences: The words of each photo's caption. The model reads words outside its
                vocabulary as its unknown word, as in training.
            alternatives: Number of most probable words to add at each position.
            method: Method that computes the maps.
            style: Style in which the model scores the captions (default: the model's own default).
        """
        self._check(method, alternatives)
        vocabulary = self.stored.vocabulary
        captions = [vocabulary.encode(words) for words in sentences]
        start = vocabulary.start(self.stored.search.style if style is None else style)
        if not photos:
            return []
        encoded = self._encode(photos, method)
        scores = self.ensemble.score(encoded.memories, [[one] for one in captions], start)
        found = [[scores.hypothesis(row, tokens)] for row, tokens in enumerate(captions)]
        explained = self._captions(found, encoded, start, method)
        if alternatives:
            self._add_alternatives(explained, scores, alternatives)
        if vocabulary.subwords is not None:
            return [caption for [caption] in explained]
        # The vocabulary would show unknown words as <unk>.
        return [
            replace(caption, words=tuple(words))
            for [caption], words in zip(explained, sentences, strict=True)
        ]

    def observe_batch(
        self, photos: Sequence[Prepared], options: SearchOptions
    ) -> list[Observation]:
        """Search for captions, and return the inputs of the confidence model for each best caption.

        The confidence model estimates the probability that nothing in a caption is false.
        """
        encoded = self._encode(photos)
        return self._observations(encoded, self._find(encoded, options))

    def photo_vectors(self, photos: Sequence[Prepared]) -> NDArray[np.float32]:
        """Return the mean of each photo's features over its regions, as in the decoder, (B, D)."""
        return self.engine.summary(self._encode(photos).memories[0])

    def _check(
        self, method: object, alternatives: object, options: SearchOptions | None = None
    ) -> None:
        self.check_method(method)
        if options is not None and options.keywords and not has_keywords(self.stored.reading):
            raise ConfigError(f"keywords is {options.keywords}, but the model {NO_KEYWORDS}")
        # Without a grammar, captions that end early would break off after words such as "the".
        can_check = self._truth is not None and self.stored.grammar is not None
        if options is not None and options.certainty and not can_check:
            raise ConfigError(
                f"certainty is {options.certainty}, but the model cannot judge whether its words "
                "are true; set certainty to 0, or run scripts/fit_reading.py and captioner "
                "calibrate"
            )
        if type(alternatives) is not int or alternatives < 0:
            raise ConfigError(f"alternatives is {alternatives!r}; use an integer of at least 0")

    def _encode(
        self, photos: Sequence[Prepared], method: ExplanationMethod = "attention"
    ) -> _Encoded:
        grids = self.ensemble.encode(photos)
        memories, reading = self.ensemble.memories(grids), self.ensemble.read(grids)
        if method not in ATTENTION_METHODS and self.in_torch() is not self:
            grids = self.in_torch().ensemble.encode(photos)
        crop_boxes, seeds = [one.crop_box for one in photos], [one.seed for one in photos]
        return _Encoded(memories, crop_boxes, seeds, reading, grids)

    def _search(
        self,
        encoded: _Encoded,
        options: SearchOptions,
        alternatives: int = 0,
        method: ExplanationMethod = "attention",
        check: Callable[[], None] = lambda: None,
    ) -> list[list[Caption]]:
        vocabulary = self.stored.vocabulary
        start = vocabulary.start(options.style)
        calibrator = None if self.no_confidence(options) else self.stored.calibrator
        found = self._find(encoded, options)
        captions = self._captions(found, encoded, start, method, check)
        if alternatives:  # score the captions again, so that the search need not store every word
            tokens = [[hypothesis.tokens for hypothesis in hypotheses] for hypotheses in found]
            scores = self.ensemble.score(encoded.memories, tokens, start)
            self._add_alternatives(captions, scores, alternatives)
        if options.certainty:
            self._add_left_out(captions, found, encoded, options, method)
        if calibrator is not None:
            style = options.style or next(iter(vocabulary.styles), "")
            for group, seen in zip(captions, self._observations(encoded, found), strict=True):
                group[0] = replace(group[0], confidence=calibrator.confidence(seen, style))
        if options.keywords:
            for group, words in zip(captions, self._keywords(encoded, options), strict=True):
                group[0] = replace(group[0], keywords=words)
        return captions

    def _add_left_out(
        self,
        captions: list[list[Caption]],
        found: Sequence[Sequence[Hypothesis]],
        encoded: _Encoded,
        options: SearchOptions,
        method: ExplanationMethod,
    ) -> None:
        """Add to each photo's best caption the words that the decoder would have written next.

        The search left these words out because they are probably not true of the photo.
        """
        best = [hypotheses[0].tokens for hypotheses in found]
        rest = self.ensemble.continuations(encoded.memories, best, options, self.stored.vocabulary)
        rows = [row for row, one in enumerate(rest) if one is not None]
        whole = [[_joined(found[row][0], cast("Hypothesis", rest[row]))] for row in rows]
        some = encoded._replace(
            crop_boxes=[encoded.crop_boxes[row] for row in rows],
            grids=[grid[rows] for grid in encoded.grids] if method not in ATTENTION_METHODS else (),
            reading=encoded.reading and Reading(*(part[rows] for part in encoded.reading)),
        )
        start = self.stored.vocabulary.start(options.style)
        for row, (caption,) in zip(rows, self._captions(whole, some, start, method), strict=True):
            part = slice(len(best[row]), None)
            captions[row][0] = replace(
                captions[row][0],
                left_out=LeftOut(
                    caption.words[part],
                    caption.log_probs[part],
                    caption.alphas[part],
                    caption.gates[part],
                    np.zeros(0, np.float32) if caption.truth is None else caption.truth[part],
                    caption.pieces[part],
                ),
            )

    def _add_alternatives(
        self, captions: list[list[Caption]], scores: CaptionScores, count: int
    ) -> None:
        """Add the ``count`` most probable words at each position of the scored captions."""
        vocabulary = self.stored.vocabulary

        def alternative(log_prob: float, token: int) -> Alternative:
            word = END_NAME if token == END else vocabulary.shown([token])[0]
            return Alternative(word, log_prob)

        for group, of_photo in zip(captions, scores.log_probs, strict=True):
            log_probs = of_photo.copy()  # (R, T, V); a copy of the whole batch would take gigabytes
            log_probs[..., list(NEVER_GENERATED)] = -np.inf
            best = top_k(log_probs, min(count, log_probs.shape[-1] - len(NEVER_GENERATED)))
            for column, one in enumerate(group):
                values, tokens = (part[column, : len(one.words)].tolist() for part in best)
                found = (tuple(map(alternative, *of)) for of in zip(values, tokens, strict=True))
                group[column] = replace(one, alternatives=tuple(found))

    def _keywords(self, encoded: _Encoded, options: SearchOptions) -> Iterator[tuple[Keyword, ...]]:
        """Yield the keywords that the first model finds in each photo."""
        read, reading, calibrator = self.stored.reading, encoded.reading, self.stored.calibrator
        assert read is not None  # checked
        assert reading is not None
        photos = self.engine.summary(encoded.memories[0])
        for words, regions, photo in zip(*reading, photos, strict=True):
            yield read.read_keywords(
                words,
                regions.reshape(*self.engine.grid, -1),
                options.keywords,
                neutral=options.neutral,
                familiarity=calibrator.familiarity(photo) if calibrator else 1.0,
            )

    def _find(self, encoded: _Encoded, options: SearchOptions) -> list[list[Hypothesis]]:
        return self.ensemble.search(
            encoded.memories,
            options,
            self.stored.vocabulary,
            encoded.seeds,
            worth=self._worth(encoded),
        )

    def _worth(self, encoded: _Encoded) -> Worth | None:
        """Return the probability that each word is true of each photo.

        The search rewards words by it. None if the model cannot estimate it.
        """
        if (truth := self._truth) is None or encoded.reading is None:
            return None
        truths = np.stack([truth.search_truths(z) for z in encoded.reading.words])
        return Worth(truths[:, :-1], self._rows, self.stored.grammar, self._wide_words)

    @property
    def _truth(self) -> WordTruth | None:
        calibrator = self.stored.calibrator
        return None if calibrator is None else calibrator.truth

    @cached_property
    def _rows(self) -> NDArray[np.int64]:
        """The index of each token's word stem, such as dog for dogs, (V,).

        Tokens without a stem have ``UNKNOWN_WORD`` (-2, content words) or ``FUNCTION_WORD`` (-1).
        """
        vocabulary, reading = self.stored.vocabulary, self.stored.reading
        if reading is None:
            return np.full(len(vocabulary), FUNCTION_WORD)
        return reading.token_rows(vocabulary)

    @cached_property
    def _wide_words(self) -> list[tuple[int, ...]]:
        return wide_words(self.stored.vocabulary, WIDE_WORDS)

    def _observations(
        self, encoded: _Encoded, found: Sequence[Sequence[Hypothesis]]
    ) -> list[Observation]:
        """Return the inputs of the confidence model for each photo's best caption."""
        vocabulary = self.stored.vocabulary
        photos = self.engine.summary(encoded.memories[0])
        z = np.zeros((len(photos), 0)) if encoded.reading is None else encoded.reading.words
        return [
            Observation(
                text_of(words, vocabulary.pieces(best.tokens)), words, best, photo,
                self._rows[best.tokens], of_photo,
            )
            for (best, *_), photo, of_photo in zip(found, photos, z, strict=True)
            for words in [vocabulary.shown(best.tokens)]
        ]  # fmt: skip

    def _captions(
        self,
        found: Sequence[Sequence[Hypothesis]],
        encoded: _Encoded,
        start: int,
        method: ExplanationMethod,
        check: Callable[[], None] = lambda: None,
    ) -> list[list[Caption]]:
        """Turn the results of a search into captions with maps."""
        engine, vocabulary = self.engine, self.stored.vocabulary
        exact: Any = None if method in ATTENTION_METHODS else self.in_torch().engine

        def maps_of(row: int, found: Hypothesis) -> NDArray[np.float32]:
            if method == "attention":
                return found.alphas
            if exact is None:
                return np.asarray(found.alphas * found.gates[:, None])
            relevance = exact.relevance(method, encoded.grids[0][row], start, found.tokens)
            supporting = relevance.clip(min=0)  # drop regions that count against the word
            total = supporting.sum(axis=-1, keepdims=True)
            return np.asarray(supporting / np.where(total > 0, total, np.float32(1)))

        def truth_of(row: int, found: Hypothesis) -> NDArray[np.float32] | None:
            if self._truth is None or encoded.reading is None:
                return None
            rows, z = self._rows[found.tokens], encoded.reading.words[row]
            return self._truth.truths(rows, found.token_log_probs, z)

        def caption(row: int, hypothesis: Hypothesis) -> Caption:
            check()
            maps, crop_box = maps_of(row, hypothesis), encoded.crop_boxes[row]
            return Caption(
                words=vocabulary.shown(hypothesis.tokens),
                log_probs=hypothesis.token_log_probs,
                alphas=maps.reshape(len(maps), *engine.grid),
                gates=hypothesis.gates,
                log_prob=hypothesis.log_prob,
                crop_box=crop_box,
                pieces=vocabulary.pieces(hypothesis.tokens),
                geometry=engine.geometry.placed(engine.preprocessing.image_size, *crop_box),
                method=method,
                truth=truth_of(row, hypothesis),
            )

        return [[caption(row, one) for one in group] for row, group in enumerate(found)]


def _joined(caption: Hypothesis, rest: Hypothesis) -> Hypothesis:
    """Join a caption with its continuation, which contains the words that were left out."""
    log_probs, alphas, gates = (
        np.concatenate([getattr(one, name) for one in (caption, rest)])
        for name in ("token_log_probs", "alphas", "gates")
    )
    tokens, total = [*caption.tokens, *rest.tokens], caption.log_prob + rest.log_prob
    return Hypothesis(tokens, log_probs, alphas, gates, total, rest.ended)
