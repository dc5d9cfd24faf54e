"""From the config to the model that a run trains: a new one, or the model of ``init_from``.

Nothing here changes the caller's config: ``prepare`` returns the resolved one with data and model.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

import torch

from captioner.config import DecoderConfig, EncoderConfig, TrainConfig
from captioner.data.batches import EncodedImage
from captioner.data.coco import CaptionedImage
from captioner.data.features import FeatureCache
from captioner.data.preprocessing import Preprocessing
from captioner.decoding.words import encode_search_words
from captioner.errors import ConfigError
from captioner.model_folder import StoredModel, load_model, to_float16
from captioner.models.attention import check_attention
from captioner.models.captioner import CaptionModel
from captioner.models.encoder import Encoder, build_encoder
from captioner.tokenizer import tokenize
from captioner.training.data import (
    check_images,
    count_targets,
    count_vocabulary,
    encode_captions,
    open_features,
    read_data,
    repeat_photos,
)
from captioner.vocabulary import Vocabulary


@dataclass
class Setup:
    """Everything a run needs before its first step."""

    config: TrainConfig
    """Resolved: a model from ``init_from`` keeps its own decoder."""
    train: list[EncodedImage]
    val: list[CaptionedImage]
    stored: StoredModel
    cache: FeatureCache | None = None
    """Features of all photos, from the config's ``data.features``."""


def prepare(config: TrainConfig) -> Setup:
    """Read the data and build the model.

    The vocabulary of a new model is counted over the training captions alone.

    Raises:
        CaptionerError: Data, settings or weights cannot be used.
    """
    check_attention(config.decoder)  # fail on a misspelled setting before the data are read
    train, val = read_data(config.data)
    train = [photo for photo in train if len(photo.captions) >= config.data.min_captions]
    if not train:
        raise ConfigError(
            f"no training photo has {config.data.min_captions} captions; lower data.min_captions"
        )
    words = [[tokenize(caption) for caption in photo.captions] for photo in train]
    torch.manual_seed(config.training.seed)
    if config.init_from is None:
        stored = _new_model(config, count_vocabulary(words, config.data))
    else:
        stored = _load_first_stage(config)
    config = replace(config, decoder=stored.decoder)  # checked again with the model's decoder
    stored.search = config.search
    encode_search_words(config.search, stored.vocabulary)  # fail on unknown words now
    stored.vocabulary.start(config.search.style)  # and on an unknown style
    model = stored.model
    model.encoder.finetune_from(
        config.encoder.finetune_from,
        model.preprocessing.image_size,
        freeze_depthwise=config.encoder.freeze_depthwise,
    )
    model.encoder.to(memory_format=torch.channels_last)
    encoded = encode_captions(train, words, stored.vocabulary, config.data.max_words)
    if config.init_from is None:
        model.decoder.init_output_bias(count_targets(encoded, stored.vocabulary))
    setup = Setup(config, repeat_photos(encoded, config.data), val, stored)
    if config.data.features:
        setup.cache, setup.train = open_features(config, model, setup.train, val)
        model.features_stage = setup.cache.stage
    check_images(val[: config.training.limit_val or None], setup.cache)
    return setup


def open_encoder(config: TrainConfig) -> tuple[Encoder, Preprocessing]:
    """The encoder and preprocessing that a run of this config starts with.

    Raises:
        CaptionerError: Settings or weights cannot be used.
    """
    if config.init_from is None:
        encoder = _new_encoder(config.encoder)
        return encoder, _preprocessing(config.encoder, encoder)
    model = _load_first_stage(config).model
    return model.encoder, model.preprocessing


def _new_encoder(config: EncoderConfig) -> Encoder:
    """Build the encoder, with weights rounded to the precision of a model folder.

    So frozen weights and cached features are the same in this run, its model and the next stage.
    """
    encoder = build_encoder(config.name, config.weights)
    encoder.load_state_dict(
        {name: to_float16(v).to(v.dtype) for name, v in encoder.state_dict().items()}
    )
    return encoder


def _preprocessing(config: EncoderConfig, encoder: Encoder) -> Preprocessing:
    mean = tuple(config.mean) if config.mean else encoder.mean
    std = tuple(config.std) if config.std else encoder.std
    return Preprocessing(config.image_size, config.resize, mean, std)  # type: ignore[arg-type]


def _new_model(config: TrainConfig, vocabulary: Vocabulary) -> StoredModel:
    encoder = _new_encoder(config.encoder)
    preprocessing = _preprocessing(config.encoder, encoder)
    model = CaptionModel(
        encoder, config.decoder, preprocessing, len(vocabulary), len(vocabulary.styles)
    )
    return StoredModel(model, config.decoder, vocabulary)


def _load_first_stage(config: TrainConfig) -> StoredModel:
    """Load the model of ``init_from``; the config may only change image size and dropout."""
    assert config.init_from is not None
    stored = load_model(config.init_from)
    if stored.model.encoder.name != config.encoder.name:
        raise ConfigError(
            f"encoder.name is {config.encoder.name}, but {config.init_from} has "
            f"{stored.model.encoder.name}; use the same encoder"
        )
    for name in ("mean", "std"):
        given, held = getattr(config.encoder, name), getattr(stored.model.preprocessing, name)
        if given is not None and tuple(given) != held:
            raise ConfigError(
                f"encoder.{name} is {given}, but {config.init_from} has {list(held)}; leave it "
                "out, or train without init_from"
            )
    default = DecoderConfig()
    for field in fields(DecoderConfig):
        given, held = getattr(config.decoder, field.name), getattr(stored.decoder, field.name)
        if field.name != "dropout" and given not in (held, getattr(default, field.name)):
            raise ConfigError(
                f"decoder.{field.name} is {given!r}, but {config.init_from} has {held!r}; leave it "
                "out, or train without init_from"
            )
    return _reconfigured(stored, config)


def _reconfigured(stored: StoredModel, config: TrainConfig) -> StoredModel:
    """The same weights at the config's image size, resizing and dropout, with its new styles.

    A new style starts as a copy of the default style.
    """
    old, styles = stored.model, stored.vocabulary.styles
    vocabulary = Vocabulary(
        stored.vocabulary.words, tuple(dict.fromkeys([*styles, *config.data.styles]))
    )
    decoder = replace(stored.decoder, dropout=config.decoder.dropout)
    preprocessing = replace(
        old.preprocessing, image_size=config.encoder.image_size, resize=config.encoder.resize
    )
    model = CaptionModel(
        old.encoder, decoder, preprocessing, len(vocabulary), len(vocabulary.styles)
    )
    if decoder.attention == "location" and model.grid != old.grid:
        raise ConfigError(
            f"encoder.image_size {preprocessing.image_size} gives {model.grid[0]} x "
            f"{model.grid[1]} regions, but attention 'location' of {config.init_from} was trained "
            f"on {old.grid[0]} x {old.grid[1]}; use image_size {old.preprocessing.image_size}"
        )
    state = old.state_dict()
    embedding = state["decoder.embedding.weight"]
    added = embedding[stored.vocabulary.start()].expand(len(vocabulary.styles) - len(styles), -1)
    state["decoder.embedding.weight"] = torch.cat([embedding, added])
    model.load_state_dict(state)
    return StoredModel(model, decoder, vocabulary, stored.search, stored.info)
