"""Preparation of a run: its data, and a new model or the model of ``init_from``.

A model that is loaded determines some settings, such as the encoder's name. `prepare` returns a
copy of the config with these settings filled in (the resolved config), the data and the model.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from captioner.data.example import Example
from captioner.data.features import FeatureCache, FeatureEncoder, feature_fingerprint
from captioner.errors import ConfigError
from captioner.evaluation.references import count_frequencies
from captioner.hardware import autocast, pick_device, pick_precision
from captioner.inference.folder import load_model
from captioner.inference.reading import ReadingWords
from captioner.inference.stored_model import StoredModel
from captioner.inference.weights import to_float16
from captioner.memory import memory_errors
from captioner.model import kernels
from captioner.model.build import check_attention, start_at_frequencies
from captioner.model.caption_model import CaptionModel
from captioner.model.efficientnet_lite import recompute_blocks
from captioner.model.encoder import Encoder, build_encoder
from captioner.model.preprocessing import Preprocessing
from captioner.model.reading import DROPOUT
from captioner.options import DecoderConfig, EncoderConfig, TrainConfig
from captioner.search.words import encode_search_words
from captioner.text.vocabulary import UNKNOWN, Vocabulary
from captioner.training.data import (
    check_images,
    check_spaces,
    encode_captions,
    first_of_styles,
    new_vocabulary,
    open_features,
    read_data,
    repeat_photos,
    tokenized,
)
from captioner.training.reading import add_reading

DEFAULT_ENCODER = "timm/tf_efficientnet_lite2"
DEFAULT_IMAGE_SIZE = 224


SMALLER = (
    "lower training.micro_batch or set encoder.recompute true, which --resume accepts after the "
    "first save; or train with a smaller training.batch_size or encoder.image_size"
)
"""Advice at the end of error messages about exhausted memory."""


@dataclass
class Setup:
    """Everything a run needs before its first step."""

    config: TrainConfig
    """The config of the run, with the settings of the model's encoder and decoder filled in."""
    train: list[Example]
    """Training photos with encoded captions, repeated as ``data.repeats`` sets."""
    val: list[Example]
    """All validation photos. Only ``validated`` are captioned."""
    stored: StoredModel
    """The model before the first step, with its vocabulary."""
    cache: FeatureCache | None = None
    """Features of all photos from ``data.features``, or None if photos are encoded in training."""

    @property
    def validated(self) -> list[Example]:
        """The validation photos that are captioned: ``training.limit_val``, or all for 0."""
        return first_of_styles(self.val, self.config.training.limit_val)

    @cached_property
    def frequencies(self) -> bytes:
        """Document frequencies of the training captions, as the content of a ``.json.gz`` file.

        They are stored with the model, so that a later CIDEr-D can use them.
        """
        captions = {photo.image_id: photo.captions for photo in self.train}
        return count_frequencies(captions).to_bytes()


@memory_errors(SMALLER)
def prepare(config: TrainConfig) -> Setup:
    """Read the data, and build or load the model, for a run with this config.

    Settings and data are checked here, so that a run with a mistake stops before its first step.

    Raises:
        CaptionerError: Settings, data or weights cannot be used.
    """
    check_attention(config.decoder)  # fail on a misspelled setting before the data are read
    # Stored features are found by the photos' ids, so the ids may change only without features.
    train, val = read_data(config.data, renumber=not config.data.features)
    torch.manual_seed(config.training.seed)
    if config.init_from is None:
        vocabulary, words = new_vocabulary(train, config.data)
        stored = _model(*_new_encoder(config.encoder), config.decoder, vocabulary)
        config = _resolved(config, stored)
    else:
        stored = _load_initial_model(config)
        if stored.vocabulary.subwords is None:
            check_spaces([caption for photo in train for caption in photo.captions])
        words = tokenized(train, stored.vocabulary)
        config = _resolved(config, stored)  # checked again with the model's decoder
        counts = Counter(word for captions in words for caption in captions for word in caption)
        stored = _reconfigured(stored, config, counts)
        if (factor := config.training.sharpen_attention) != 1:
            energy = stored.model.decoder.get_parameter("attention.scorer.energy.weight")
            energy.data.mul_(factor)
    stored.search = config.search
    encode_search_words(config.search, stored.vocabulary)  # fail on unknown words now
    model, settings = stored.model, config.encoder
    if config.training.reading and model.reading is None:
        add_reading(stored, train)
    if model.reading is not None:
        model.reading.requires_grad_(config.training.reading > 0)
        model.reading.dropout.p = min(DROPOUT, config.decoder.dropout)
    size, frozen = model.preprocessing.image_size, settings.freeze_depthwise
    model.encoder.finetune_from(settings.finetune_from, size, freeze_depthwise=frozen)
    if settings.recompute:
        recompute_blocks(model.encoder)
    model.encoder.to(memory_format=torch.channels_last)
    kernels.accelerate(model)
    encoded = encode_captions(train, words, stored.vocabulary, config.data.max_words)
    if config.init_from is None:
        tokens = [token for photo in encoded for caption in photo.tokens for token in caption]
        counted = torch.bincount(torch.tensor(tokens), minlength=len(stored.vocabulary))
        start_at_frequencies(model.decoder, counted.float())
    setup = Setup(config, repeat_photos(encoded, config.data), val, stored)
    if config.data.features:
        setup.cache, setup.train = open_features(config, model, setup.train, val)
        model.features_stage = setup.cache.stage
    check_images(setup.validated, setup.cache)
    return setup


def open_encoder(config: TrainConfig) -> tuple[Encoder, Preprocessing]:
    """Return the encoder and the preprocessing with which a run with this config starts.

    They are new, or come from the model of ``init_from``.
    """
    if config.init_from is None:
        return _new_encoder(config.encoder)
    stored = _load_initial_model(config)
    return _inherited(stored, _resolved(config, stored).encoder)


# --- A new model ---------------------------------------------------------------------------------


def _new_encoder(config: EncoderConfig) -> tuple[Encoder, Preprocessing]:
    size = config.image_size or DEFAULT_IMAGE_SIZE
    encoder = _rounded(build_encoder(config.name or DEFAULT_ENCODER, config.weights, size))
    mean, std = tuple(encoder.mean), tuple(encoder.std)
    return encoder, Preprocessing(size, config.resize or "crop", mean, std)  # type: ignore[arg-type]


def _rounded(encoder: Encoder) -> Encoder:
    """Round the encoder's weights to fp16, the precision of a model folder, and return the encoder.

    Then frozen weights and cached features are the same in this run, in its saved model and in runs
    that start from this model.
    """
    encoder.load_state_dict(
        {name: to_float16(v).to(v.dtype) for name, v in encoder.state_dict().items()}
    )
    return encoder


def _model(
    encoder: Encoder, preprocessing: Preprocessing, config: DecoderConfig, vocabulary: Vocabulary
) -> StoredModel:
    model = CaptionModel(encoder, config, preprocessing, len(vocabulary), len(vocabulary.styles))
    return StoredModel(model, config, vocabulary)


def _resolved(config: TrainConfig, stored: StoredModel) -> TrainConfig:
    """Return a copy of the config with the settings that the model determines filled in.

    An example is the name of the encoder.
    """
    model = stored.model
    encoder = replace(
        config.encoder,
        name=model.encoder.name,
        image_size=config.encoder.image_size or model.preprocessing.image_size,
        resize=config.encoder.resize or model.preprocessing.resize,
    )
    decoder = replace(stored.decoder, dropout=config.decoder.dropout)
    data = replace(config.data, tokenizer=stored.vocabulary.tokenizer)
    return replace(config, data=data, encoder=encoder, decoder=decoder)


# --- The model of init_from ----------------------------------------------------------------------


def _load_initial_model(config: TrainConfig) -> StoredModel:
    """Load the model of ``init_from``.

    Raises:
        ConfigError: The config contradicts the model. It may change only the image size, the
            resizing, the dropout, and the words and styles that are added.
    """
    assert config.init_from is not None
    stored = load_model(config.init_from)
    fixed: dict[str, Any] = {
        "encoder.name": stored.model.encoder.name,
        "data.tokenizer": stored.vocabulary.tokenizer,
    }
    fixed |= {f"decoder.{n}": v for n, v in asdict(stored.decoder).items() if n != "dropout"}
    given = asdict(config)
    for name, held in fixed.items():
        section, key = name.split(".")
        if given[section][key] not in (held, None):
            raise ConfigError(
                f"{name} is {given[section][key]!r}, but the model {config.init_from} was trained "
                f"with {held!r}; leave out {name}, or train without init_from"
            )
    return stored


def _inherited(stored: StoredModel, config: EncoderConfig) -> tuple[Encoder, Preprocessing]:
    """Return a model's encoder and preprocessing with the image size and resizing of a config."""
    size, old = config.image_size, stored.model
    assert size is not None
    assert config.resize is not None
    encoder = old.encoder.at_size(size)
    if encoder is not old.encoder:
        encoder = _rounded(encoder)
    return encoder, replace(old.preprocessing, image_size=size, resize=config.resize)


def _reconfigured(stored: StoredModel, config: TrainConfig, counts: Counter[str]) -> StoredModel:
    """Rebuild a model for the config's image size, resizing, dropout, new words and new styles.

    The weights stay the same. The reading network, which predicts the content words of a photo, is
    kept if it is trained further, or if its input features stay the same. Otherwise its predictions
    would be wrong, and it is removed.

    Args:
        stored: The model of ``init_from``. It must not be used afterwards.
        config: The config of the run, from `_resolved`.
        counts: Number of occurrences of each word in the training captions.
    """
    old, data = stored.model, config.data
    # A sub-word tokenizer can split all words into its pieces, so words need not be added.
    extend = data.extend_vocabulary and stored.vocabulary.subwords is None
    known = [counts.elements()] if extend else []
    words = Vocabulary.count(known, data.vocabulary_threshold).words
    vocabulary = stored.vocabulary.extended(words, data.styles)
    encoder, preprocessing = _inherited(stored, config.encoder)
    new = _model(encoder, preprocessing, config.decoder, vocabulary)
    if config.decoder.attention == "location" and new.model.grid != old.grid:
        raise ConfigError(
            f"encoder.image_size {preprocessing.image_size} makes {new.model.grid} regions, but "
            f"attention 'location' of {config.init_from} was trained on {old.grid}; use image_size "
            f"{old.preprocessing.image_size}"
        )
    trained, frozen = config.training.reading > 0, config.encoder.finetune_from is None
    same = frozen and preprocessing == old.preprocessing
    if stored.reading is not None and (trained or same):
        new.model.reading = old.reading
        # Training makes the network predict shares of captions, to which the calibration of the
        # keywords does not apply.
        keywords = {} if trained else stored.reading.keywords
        new.reading = ReadingWords.of(stored.reading.stems, vocabulary, keywords)
    else:
        old.reading = None
    state = old.state_dict() | {f"encoder.{k}": v for k, v in encoder.state_dict().items()}
    _extend(state, stored.vocabulary, vocabulary, counts)
    new.model.load_state_dict(state)
    new.search, new.info = stored.search, stored.info
    return new


def _extend(
    state: dict[str, torch.Tensor], old: Vocabulary, new: Vocabulary, counts: Counter[str]
) -> None:
    """Add rows to a model's weights for the words and styles that only ``new`` has.

    ``UNKNOWN`` is the token for all words that are not in the vocabulary, so the old model read the
    new words as ``UNKNOWN``. Each new word starts with the embedding and the output weights of
    ``UNKNOWN``. The probability of ``UNKNOWN`` is divided among the new words and ``UNKNOWN``
    itself, in proportion to their counts. So the probabilities of all other words stay the same,
    for every photo and all previous words. A new style starts as a copy of the default style.

    Args:
        state: The weights by name. They are replaced in this dictionary.
        old: The vocabulary of the model.
        new: The vocabulary with the added words and styles.
        counts: Number of occurrences of each word in the training captions.
    """
    added = new.words[len(old.words) :]
    unknown = [UNKNOWN] * len(added)
    starts = range(len(old), len(old) + len(old.styles))
    copies = [old.start()] * (len(new.styles) - len(old.styles))
    embedding = state["decoder.embedding.weight"]
    rows = [*range(len(old)), *unknown, *starts, *copies]
    state["decoder.embedding.weight"] = embedding[rows]
    if not added:
        return
    rows = [*range(len(old)), *unknown]
    bias = state["decoder.word_output.bias"][rows]
    rare = sum(count for word, count in counts.items() if word not in new)
    shares = torch.tensor([max(1, rare), *(counts[word] for word in added)]).float()
    bias[[UNKNOWN, *range(len(old), len(new))]] += (shares / shares.sum()).log()
    state["decoder.word_output.weight"] = state["decoder.word_output.weight"][rows]
    state["decoder.word_output.bias"] = bias


# --- Features, once for all epochs ---------------------------------------------------------------


def open_feature_encoder(config: TrainConfig, *, dtype: str, device: str) -> FeatureEncoder:
    """Open the encoder that computes cached features for a run with this config.

    With ``encoder.finetune_from``, it computes only the stages before this stage, because the run
    trains all later stages.

    Args:
        config: The config of the run.
        dtype: The type in which the features are stored.
        device: The device that computes the features.
    """
    chosen = pick_device(device)
    torch.manual_seed(config.training.seed)  # random weights must be the same as in the run
    encoder, preprocessing = open_encoder(config)
    stage = config.encoder.finetune_from  # training never changes the layers before it
    feature_dim, grid = encoder.measure(preprocessing.image_size, stage)
    precision = pick_precision(config.training.precision, chosen)
    key = feature_fingerprint(encoder, preprocessing, stage, dtype=dtype, precision=precision)
    encoder.to(chosen).to(memory_format=torch.channels_last)

    def encode(pixels: Tensor) -> Tensor:
        """Return the features of photos as RGB pixels, one row per photo."""
        with torch.inference_mode(), autocast(precision, chosen):
            images = preprocessing.normalize(pixels.to(chosen))
            found = encoder(images) if stage is None else encoder.run_until(images, stage)
            features: Tensor = found[0]
            return features

    return FeatureEncoder(encode, preprocessing, grid, feature_dim, key)


def plan_features(
    config: TrainConfig, *, dtype: str, device: str
) -> tuple[FeatureEncoder, list[Example], int]:
    """Plan the cached features that a run with this config reads.

    Returns:
        The encoder.
        The photos: the training photos first, then the validation photos that are not also training
        photos.
        The number of photos, from the first, that are also encoded flipped. With
        ``data.horizontal_flip``, these are the training photos. Otherwise the number is 0.
    """
    pick_device(device)  # raises an error before the captions are read
    train, val = read_data(config.data)
    encoder = open_feature_encoder(config, dtype=dtype, device=device)
    known = {(image.image_id, image.path) for image in train}
    images = [*train, *(image for image in val if (image.image_id, image.path) not in known)]
    return encoder, images, len(train) if config.data.horizontal_flip else 0
