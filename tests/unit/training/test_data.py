"""From the config to data sets: splits, vocabulary, token ids."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from captioner.data.coco import CaptionedImage
from captioner.errors import ImageError
from captioner.text.vocabulary import END
from captioner.training.data import check_images, read_data
from captioner.training.setup import prepare


def test_vocabulary_is_built_from_training_captions_only(
    configure: Any, two_files: tuple[str, str]
):
    train, val = two_files
    setup = prepare(configure(data={"train_annotations": [train], "val_annotations": [val]}))
    assert set(setup.stored.vocabulary.words) == {"a", "square", "red", "lime", "blue", "yellow"}
    assert [image.path.stem for image in setup.val] == ["cyan", "magenta", "white", "gray"]
    decoder = setup.stored.model.decoder
    assert decoder.word_output.out_features == len(setup.stored.vocabulary) == 10


def test_the_karpathy_split_overrides_the_files(
    configure: Any, two_files: tuple[str, str], tmp_path: Path
):
    splits = ["val", "train", "restval", "test", "train", "val", "test", "restval"]
    images = [
        {"cocoid": number, "split": split, "filename": "a.png", "sentences": []}
        for number, split in enumerate(splits, start=1)
    ]
    split_file = tmp_path / "dataset_coco.json"
    split_file.write_text(json.dumps({"images": images}))
    data = {
        "train_annotations": [two_files[0]],
        "val_annotations": [two_files[1]],
        "karpathy_split": str(split_file),
    }
    setup = prepare(configure(data=data))
    assert [item.image.image_id for item in setup.train] == [2, 3, 5, 8]
    assert [image.image_id for image in setup.val] == [1, 6]
    assert "red" not in setup.stored.vocabulary  # photo 1 is for validation


def test_captions_are_encoded_and_truncated(configure: Any):
    setup = prepare(configure(data={"max_words": 2}))  # captions have three words
    words = [setup.stored.vocabulary.decode(item.tokens[0]) for item in setup.train]
    assert words == [["a", item.image.path.stem] for item in setup.train]
    bias = setup.stored.model.decoder.word_output.bias
    assert bias[END] == bias.min()  # truncation is not learned as an ending
    setup = prepare(configure(data={"max_words": 3}))
    words = [setup.stored.vocabulary.decode(item.tokens[0]) for item in setup.train]
    assert words == [["a", item.image.path.stem, "square", "<end>"] for item in setup.train]


def test_a_truncated_validation_photo_is_found_before_the_first_step(tmp_path: Path):
    photo = tmp_path / "a.jpg"
    noise = np.random.default_rng(0).integers(256, size=(64, 64, 3), dtype=np.uint8)
    Image.fromarray(noise).save(photo)
    check_images([CaptionedImage(1, photo, ("a dog",))], None)
    photo.write_bytes(photo.read_bytes()[:-1000])
    both = [CaptionedImage(n, photo, ("a dog",)) for n in (1, 2)]
    with pytest.raises(ImageError, match=r"a\.jpg: the image is truncated .* \(and 1 more\)"):
        check_images(both, None)


def test_training_captions_alone_can_be_read(configure: Any):
    config = configure(data={"val_annotations": []}).data
    train, val = read_data(config, validation=False)
    assert (len(train), val) == (8, [])
