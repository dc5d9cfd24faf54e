"""From a config to what a run needs: photos, vocabulary, model, optimizer."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields, replace
from pathlib import Path

import torch
from torch import nn

from captioner.config import DataConfig, DecoderConfig, EncoderConfig, TrainConfig, TrainingConfig
from captioner.data.batches import EncodedImage, warn_of
from captioner.data.coco import CaptionedImage, karpathy_ids, read_captions, read_dataset
from captioner.data.features import FeatureCache, feature_key, read_contents, threads
from captioner.data.images import image_size
from captioner.data.preprocessing import Preprocessing
from captioner.decoding.rules import number_words
from captioner.errors import ConfigError, ImageError
from captioner.model_folder import StoredModel, halved, load_model
from captioner.models.attention import check_attention
from captioner.models.captioner import CaptionModel
from captioner.models.encoder import Encoder, build_encoder
from captioner.tokenizer import tokenize
from captioner.vocabulary import END, Vocabulary


@dataclass
class Setup:
    """A run's photos and its model, before the first step."""

    train: list[EncodedImage]
    val: list[CaptionedImage]
    stored: StoredModel
    cache: FeatureCache | None = None
    """Features of all photos, where the config names them; they fit the encoder."""


def read_data(config: DataConfig) -> tuple[list[CaptionedImage], list[CaptionedImage]]:
    """Training and validation photos.

    Raises:
        DataError: They cannot be read.
        ConfigError: Files and split contradict each other.
    """
    folders = None if config.shards else config.images  # of training photos

    def read(
        files: Sequence[str], folders: Sequence[str] | None, styles: Sequence[str]
    ) -> list[CaptionedImage]:
        photos = read_dataset(files, folders)
        if not styles:
            return photos
        style_of = {
            image_id: style
            for file, style in reversed(list(zip(files, styles, strict=True)))
            for image_id in read_captions([file])[0]
        }
        return [replace(photo, style=style_of[photo.image_id]) for photo in photos]

    if config.karpathy_split is None:
        if not config.val_annotations:
            raise ConfigError(
                "data.val_annotations is empty; give a COCO captions file to validate on, or "
                "data.karpathy_split"
            )
        return (
            read(config.train_annotations, folders, config.styles),
            read(config.val_annotations, config.images, config.val_styles),
        )
    ids = karpathy_ids(config.karpathy_split)
    files = [*config.train_annotations, *config.val_annotations]
    return (
        read_dataset(files, folders, ids=ids["train"]),
        read_dataset(files, config.images, ids=ids["val"]),
    )


def prepare(config: TrainConfig) -> Setup:
    """Read the data, count the vocabulary, build the model.

    The vocabulary is counted over the training captions alone.

    Raises:
        CaptionerError: Data, settings or weights cannot be used.
    """
    check_attention(config.decoder)  # a misspelt word is told before the data are read
    train, val = read_data(config.data)
    train = [photo for photo in train if len(photo.captions) >= config.data.min_captions]
    if not train:
        raise ConfigError(
            f"no training photo has {config.data.min_captions} captions; lower data.min_captions"
        )
    words = [[tokenize(caption) for caption in image.captions] for image in train]
    torch.manual_seed(config.training.seed)
    if config.init_from is None:
        vocabulary = Vocabulary.count(
            (caption for captions in words for caption in captions),
            config.data.vocabulary_threshold,
            tuple(dict.fromkeys(config.data.styles)),
        )
        if not vocabulary.words:
            raise ConfigError(
                f"no word stands {config.data.vocabulary_threshold} times in the training "
                "captions; lower data.vocabulary_threshold"
            )
        stored = _new_model(config, vocabulary)
    else:
        stored = _first_stage(config)
    # A second stage's decoder is its model's: the run folder says so, and what does not go together
    # with it is refused.
    config.decoder = replace(config, decoder=stored.decoder).decoder
    stored.search = config.search
    number_words(config.search, stored.vocabulary)  # unknown words are told before an epoch is lost
    model = stored.model
    model.encoder.finetune_from(
        config.encoder.finetune_from,
        model.preprocessing.image_size,
        freeze_depthwise=config.encoder.freeze_depthwise,
    )
    model.encoder.to(memory_format=torch.channels_last)
    for style in config.data.styles:
        stored.vocabulary.start(style)  # one that a first stage has not learned is refused
    encoded = _encode(train, words, stored.vocabulary, config.data.max_words)
    if config.init_from is None:
        model.decoder.expect_words(_target_counts(encoded, stored.vocabulary))
    if config.data.repeats:
        encoded = _repeated(encoded, config.data)
    setup = Setup(encoded, val, stored)
    if config.data.features:
        setup.cache = _open_features(config, setup)
    _refuse_unreadable(val[: config.training.limit_val or None], setup.cache)
    return setup


def open_encoder(config: TrainConfig) -> tuple[Encoder, Preprocessing]:
    """The encoder as a run of this config has it before its first step, and what it is fed.

    Raises:
        CaptionerError: Settings or weights cannot be used.
    """
    if config.init_from is None:
        encoder = _new_encoder(config.encoder)
        return encoder, _preprocessing(config.encoder, encoder)
    model = _first_stage(config).model
    return model.encoder, model.preprocessing


def make_optimizer(model: CaptionModel, config: TrainingConfig) -> torch.optim.AdamW:
    """AdamW; matrices decay and vectors do not, the encoder has its own learning rate."""
    groups = []
    for module, lr in ((model.encoder, config.encoder_lr), (model.decoder, config.lr)):
        learning = [p for p in module.parameters() if p.requires_grad]
        for decay, members in (
            (config.weight_decay, [p for p in learning if p.ndim > 1]),
            (0.0, [p for p in learning if p.ndim < 2]),
        ):
            if members:
                groups.append(
                    {"params": members, "lr": lr, "highest_lr": lr, "weight_decay": decay}
                )
    return torch.optim.AdamW(groups, fused=True)


def make_average(model: nn.Module, decay: float) -> torch.optim.swa_utils.AveragedModel | None:
    """A running average of the weights, or None where the decay is 0.

        average <- d average + (1 - d) weights,   d = min(decay, (1 + n) / (10 + n))

    after n updates: the cap lets the average forget the random start.
    """
    if decay == 0:
        return None

    def update(
        averages: Sequence[torch.Tensor], weights: Sequence[torch.Tensor], n: object
    ) -> None:
        count = float(n)  # type: ignore[arg-type]
        capped = min(decay, (1 + count) / (10 + count))
        torch._foreach_lerp_(list(averages), list(weights), 1 - capped)

    return torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=update)


def average_models(folders: Sequence[Path]) -> StoredModel:
    """One model whose weights are the mean of several of one run.

    Source: Izmailov et al. 2018 (arXiv:1803.05407). Deviation: the best of a run with a falling
    learning rate are averaged, as Vaswani et al. 2017 do, not the last under a constant one.
    """
    models = [load_model(folder) for folder in folders]
    states = [stored.model.state_dict() for stored in models]
    mean = {
        name: torch.stack([state[name].double() for state in states]).mean(dim=0).to(value.dtype)
        if value.is_floating_point()
        else value
        for name, value in states[0].items()
    }
    models[0].model.load_state_dict(mean)
    return models[0]


def _open_features(config: TrainConfig, setup: Setup) -> FeatureCache:
    """The cache that the config names, if it is what this run's encoder gives its photos."""
    assert config.data.features is not None
    model, learns_from = setup.stored.model, config.encoder.finetune_from
    stage = (read_contents(Path(config.data.features)) or {}).get("key", {}).get("stage")
    order = model.encoder.stages()
    if learns_from is not None and (stage is None or order.index(stage) > order.index(learns_from)):
        raise ConfigError(
            f"data.features holds {f'the input of {stage}' if stage else 'the output'} of the "
            f"encoder, and encoder.finetune_from {learns_from} changes it; run captioner prepare "
            f"features with encoder.finetune_from {learns_from}"
        )
    # Of any dtype and precision: the key tells other encoders, weights and preprocessing.
    encoder = model.encoder
    state = encoder.state_dict() if stage is None else encoder.state_until(stage)
    key = feature_key(encoder.name, state, model.preprocessing, stage=stage)
    cache = FeatureCache.open(config.data.features, key)
    model.features_stage = cache.stage
    images = [photo.image for photo in setup.train]
    cache.check(images, mirrored=config.data.horizontal_flip)
    cache.check(setup.val)
    for image in images:
        if not cache.has(image.image_id):
            warn_of(ImageError(f"{image.path}: it could not be read when its features were made"))
    setup.train = [photo for photo in setup.train if cache.has(photo.image.image_id)]
    return cache


def _refuse_unreadable(images: Sequence[CaptionedImage], cache: FeatureCache | None) -> None:
    """Tell now of a validation photo that is not there or no picture, not after an epoch.

    Headers are read; one that breaks off behind its header is told when it is captioned.
    """
    for image in images:
        if cache is not None and not cache.has(image.image_id):
            raise ImageError(
                f"{image.path}: this photo could not be read when its features were made; mend "
                "it or take it out of the validation captions, and make the features again"
            )
    with ThreadPoolExecutor(threads()) as readers:
        for _ in readers.map(image_size, (image.path for image in images)):
            pass  # its error is raised here


def _encode(
    images: list[CaptionedImage], words: list[list[list[str]]], vocabulary: Vocabulary, most: int
) -> list[EncodedImage]:
    def encode(caption: list[str]) -> list[int]:
        return [*vocabulary.encode(caption[:most]), *([END] if len(caption) <= most else [])]

    return [
        EncodedImage(image, tuple(map(encode, captions)), vocabulary.start(image.style))
        for image, captions in zip(images, words, strict=True)
    ]


def _repeated(photos: list[EncodedImage], config: DataConfig) -> list[EncodedImage]:
    """Every photo as often as an epoch is to take it."""
    repeats = {
        image_id: count
        for file, count in zip(config.train_annotations, config.repeats, strict=True)
        for image_id in read_captions([file])[0]
    }
    return [photo for photo in photos for _ in range(repeats[photo.image.image_id])]


def _target_counts(photos: list[EncodedImage], vocabulary: Vocabulary) -> torch.Tensor:
    """How often each token is to be said, (V,)."""
    numbers = [number for photo in photos for caption in photo.tokens for number in caption]
    return torch.bincount(torch.tensor(numbers), minlength=len(vocabulary)).float()


def _preprocessing(config: EncoderConfig, encoder: Encoder) -> Preprocessing:
    mean = tuple(config.mean) if config.mean else encoder.mean
    std = tuple(config.std) if config.std else encoder.std
    return Preprocessing(config.image_size, config.resize, mean, std)  # type: ignore[arg-type]


def _new_encoder(config: EncoderConfig) -> Encoder:
    """The encoder that a config names, its weights rounded as a model folder will hold them.

    What stays frozen is then the same in this run, in the model folder and in the next stage, and
    so are features that were cached.
    """
    encoder = build_encoder(config.name, config.weights)
    encoder.load_state_dict(
        {name: halved(v).to(v.dtype) for name, v in encoder.state_dict().items()}
    )
    return encoder


def _new_model(config: TrainConfig, vocabulary: Vocabulary) -> StoredModel:
    encoder = _new_encoder(config.encoder)
    preprocessing = _preprocessing(config.encoder, encoder)
    model = CaptionModel(
        encoder, config.decoder, preprocessing, len(vocabulary), len(vocabulary.styles)
    )
    return StoredModel(model, config.decoder, vocabulary)


def _first_stage(config: TrainConfig) -> StoredModel:
    """The model that a second stage starts from, as the config wants to see photos."""
    assert config.init_from is not None
    stored = load_model(config.init_from)
    if stored.model.encoder.name != config.encoder.name:
        raise ConfigError(
            f"encoder.name is {config.encoder.name}, but {config.init_from} holds "
            f"{stored.model.encoder.name}; give the same"
        )
    for name in ("mean", "std"):
        given, held = getattr(config.encoder, name), getattr(stored.model.preprocessing, name)
        if given is not None and tuple(given) != held:
            raise ConfigError(
                f"encoder.{name} is {given}, but {config.init_from} sees photos with "
                f"{list(held)}; leave it out, or train without init_from"
            )
    _refuse_another_decoder(config, stored.decoder)
    return _resized(stored, config)


def _refuse_another_decoder(config: TrainConfig, stored: DecoderConfig) -> None:
    """A second stage keeps its model's decoder; what asks for another one is not passed over."""
    default = DecoderConfig()
    for field in fields(DecoderConfig):
        asked, held = getattr(config.decoder, field.name), getattr(stored, field.name)
        if field.name != "dropout" and asked not in (held, getattr(default, field.name)):
            raise ConfigError(
                f"decoder.{field.name} is {asked!r}, but {config.init_from} holds {held!r}; leave "
                "it out, or train without init_from"
            )


def _resized(stored: StoredModel, config: TrainConfig) -> StoredModel:
    """A second stage: the weights go on, at the config's photo size, dropout and resizing."""
    old = stored.model
    decoder = replace(stored.decoder, dropout=config.decoder.dropout)
    preprocessing = replace(
        old.preprocessing, image_size=config.encoder.image_size, resize=config.encoder.resize
    )
    model = CaptionModel(
        old.encoder,
        decoder,
        preprocessing,
        len(stored.vocabulary),
        len(stored.vocabulary.styles),
    )
    if decoder.attention == "location" and model.grid != old.grid:
        raise ConfigError(
            f"encoder.image_size {preprocessing.image_size} gives {model.grid[0]} x "
            f"{model.grid[1]} regions, but attention 'location' of {config.init_from} has learned "
            f"{old.grid[0]} x {old.grid[1]}; give image_size {old.preprocessing.image_size}"
        )
    model.load_state_dict(old.state_dict())
    return StoredModel(model, decoder, stored.vocabulary, stored.search, stored.info)
