"""The data that a run trains and validates on: photos, captions as token ids, cached features."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

from captioner.data.batches import warn_skipped
from captioner.data.coco import read_dataset
from captioner.data.example import Example
from captioner.data.features import FeatureCache, feature_fingerprint, read_header
from captioner.data.images import image_size, open_image
from captioner.data.importers import import_captions
from captioner.data.reading import read_batches, reader_threads
from captioner.errors import ConfigError, DataError, ImageError
from captioner.messages import first_of
from captioner.model.caption_model import CaptionModel
from captioner.options import DataConfig, TrainConfig
from captioner.text.tokenizer import lacks_spaces
from captioner.text.vocabulary import END, Subwords, Vocabulary

Words = list[list[list[str]]]
"""Words (or sub-word pieces), indexed by photo, caption and position."""


def read_data(config: DataConfig, *, renumber: bool = False) -> tuple[list[Example], list[Example]]:
    """Read the captions of the training and validation photos, and find the photos' files.

    Training photos with fewer than ``data.min_captions`` captions are left out.

    Args:
        config: The settings of the data.
        renumber: Choose new ids for images whose id belongs to a different image in an earlier
            file. Use this only if nothing else, such as features, refers to the ids.

    Returns:
        The training photos.
        The validation photos.

    Raises:
        ConfigError: There are no training photos or no validation captions.
        DataError: Captions or photos are missing.
    """
    for file in (*config.train_annotations, *config.val_annotations):
        if not Path(file).exists():
            raise DataError(
                f"{file} does not exist; create it with captioner prepare dataset (see "
                "docs/training.md), or correct data.train_annotations and data.val_annotations"
            )

    def read(files: list[str], styles: list[str]) -> list[Example]:
        """Read captions files and set each photo's style, one style per file."""
        photos = read_dataset(files, config.images, renumber=renumber)
        return [replace(p, style=styles[p.source]) for p in photos] if styles else photos

    if config.karpathy_split is not None:
        ids: dict[str, set[Any]] = {"train": set(), "val": set()}
        for photo in import_captions(config.karpathy_split, "karpathy"):
            ids.setdefault(photo.split, set()).add(photo.image_id)
        files = [*config.train_annotations, *config.val_annotations]
        train = read_dataset(files, config.images, ids=ids["train"])
        val = read_dataset(files, config.images, ids=ids["val"])
    elif not config.val_annotations:
        raise ConfigError(
            "data.val_annotations is empty; use captions of your own (captioner train --data "
            "captions.csv --images photos/), a COCO captions file or data.karpathy_split"
        )
    else:
        train = read(config.train_annotations, config.styles)
        val = read(config.val_annotations, config.val_styles)
    train = [photo for photo in train if len(photo.captions) >= config.min_captions]
    if not train:
        raise ConfigError(
            f"no training photo has at least {config.min_captions} captions; lower "
            "data.min_captions"
        )
    return train, val


def first_of_styles(photos: Sequence[Example], count: int) -> list[Example]:
    """Return ``count`` of the photos, or all photos for 0, in their order.

    The first photos of each style are chosen. Each style gets the same number of photos, unless it
    has too few.
    """
    numbers = Counter[str]()  # photos of each style so far
    ranks = []
    for index, photo in enumerate(photos):
        ranks.append((numbers[photo.style], index))
        numbers[photo.style] += 1
    chosen = sorted(index for _, index in sorted(ranks)[: count or None])
    return [photos[index] for index in chosen]


def tokenized(photos: Sequence[Example], vocabulary: Vocabulary) -> Words:
    """Split the captions of all photos into words, or into the sub-word pieces of a vocabulary."""
    return [[vocabulary.tokenize(caption) for caption in photo.captions] for photo in photos]


def new_vocabulary(photos: Sequence[Example], config: DataConfig) -> tuple[Vocabulary, Words]:
    """Build a vocabulary from the training captions, and split these captions.

    Returns:
        The vocabulary of words, or of sub-word pieces if ``data.tokenizer`` is bpe.
        The words or pieces of the captions.

    Raises:
        ConfigError: No word is frequent enough, or the captions have no spaces between words.
    """
    styles = tuple(dict.fromkeys(config.styles))
    captions = [caption for photo in photos for caption in photo.captions]
    if config.tokenizer == "bpe":
        trained = Subwords.train(captions, config.vocabulary_size, config.vocabulary_threshold)
        vocabulary = Vocabulary(trained.pieces, styles, trained)
        return vocabulary, tokenized(photos, vocabulary)
    check_spaces(captions)
    words = tokenized(photos, Vocabulary(()))
    vocabulary = Vocabulary.count(chain.from_iterable(words), config.vocabulary_threshold, styles)
    if not vocabulary.words:
        raise ConfigError(
            f"no word occurs at least {config.vocabulary_threshold} times in the training "
            "captions; lower data.vocabulary_threshold"
        )
    return vocabulary, words


def check_spaces(captions: Sequence[str]) -> None:
    """Check that captions can be split into words at spaces.

    Raises:
        ConfigError: The captions are written without spaces.
    """
    if lacks_spaces(captions):
        raise ConfigError(
            f"the training captions have no spaces between words ({captions[0]!r:.60} would be one "
            "word); train a new model with data.tokenizer=bpe"
        )


def encode_captions(
    photos: Sequence[Example], words: Words, vocabulary: Vocabulary, max_words: int
) -> list[Example]:
    """Convert the tokenized captions of every photo to token ids.

    A caption longer than ``max_words`` words (or pieces) is truncated. A truncated caption has no
    end token, so that the model does not learn to end captions there.

    Returns:
        The photos with ``tokens`` and ``start`` set.
    """

    def encode(caption: Sequence[str]) -> list[int]:
        """Return the token ids of a caption, with the end token unless the caption is truncated."""
        end = [END] if len(caption) <= max_words else []
        return [*vocabulary.encode(caption[:max_words]), *end]

    return [
        replace(photo, tokens=tuple(map(encode, captions)), start=vocabulary.start(photo.style))
        for photo, captions in zip(photos, words, strict=True)
    ]


def repeat_photos(photos: Sequence[Example], config: DataConfig) -> list[Example]:
    """Return the photos of one epoch, with each photo repeated as often as ``data.repeats`` states.

    The setting has one number per captions file. Each repetition has its own random choice of
    captions, flip and augmentation.
    """
    if not config.repeats:
        return list(photos)
    return [
        replace(photo, repeat=repeat)
        for photo in photos
        for repeat in range(config.repeats[photo.source])
    ]


def open_features(
    config: TrainConfig,
    model: CaptionModel,
    train: Sequence[Example],
    val: Sequence[Example],
) -> tuple[FeatureCache, list[Example]]:
    """Open the cache of encoder features in ``data.features``, and check that it fits the run.

    Returns:
        The cache.
        The training photos with features in the cache. A warning names each photo without features.

    Raises:
        ConfigError: The run trains encoder layers that computed the features.
        DataError: The features are from a different encoder, preprocessing or set of photos.
    """
    assert config.data.features is not None
    encoder, finetune_from = model.encoder, config.encoder.finetune_from
    stage = read_header(config.data.features).get("key", {}).get("stage")
    order = encoder.stages()
    if finetune_from is not None and (
        stage is None or order.index(stage) > order.index(finetune_from)
    ):
        stored = "the output of the encoder" if stage is None else f"the input of {stage}"
        raise ConfigError(
            f"data.features contains {stored}, but encoder.finetune_from {finetune_from!r} trains "
            "layers before it; leave out data.features, or compute the features again with this "
            "setting (EfficientNet-Lite only)"
        )
    key = feature_fingerprint(encoder, model.preprocessing, stage)
    cache = FeatureCache(config.data.features, key)
    cache.check(train, flipped=config.data.horizontal_flip)
    cache.check(val)
    for photo in train:
        if not cache.has(photo.image_id):
            warn_skipped(ImageError(f"{photo.path} was unreadable when its features were computed"))
    return cache, [photo for photo in train if cache.has(photo.image_id)]


def check_images(images: Sequence[Example], cache: FeatureCache | None) -> None:
    """Check before training that all validation photos can be read.

    Otherwise an unreadable photo would stop the run only at its first validation.

    Raises:
        ImageError: A photo cannot be read.
    """

    def check(image: Example) -> None:
        """Raise an error if a photo, or its entry in the cache, cannot be used."""
        if cache is None:
            open_image(image.path, min_side=1)  # fast: JPEGs are decoded at an eighth of their size
        elif cache.has(image.image_id):
            image_size(image.path)
        else:
            raise ImageError(
                f"{image.path} was unreadable when its features were computed; repair the photo or "
                "remove it from the validation captions, then compute the features again"
            )

    with closing(read_batches(check, images, 32, threads=reader_threads())) as batches:
        results = [result for batch in batches for _, result in batch]
    if errors := [error for error in results if error is not None]:
        raise ImageError(first_of(errors))
