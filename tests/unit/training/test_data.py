"""From the config to data sets: splits, vocabulary, token ids."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from captioner.text.vocabulary import END
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
    images = [{"cocoid": number, "split": split} for number, split in enumerate(splits, start=1)]
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
