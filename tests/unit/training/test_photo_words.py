"""Words of photos: which they are, and that a run learns them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from test_objectives import WORDS, batch_of, model_of, photos_of

from captioner.data.batches import EncodedImage
from captioner.errors import DataError
from captioner.inference.folder import StoredModel
from captioner.options import DecoderConfig, TrainConfig, TrainingConfig
from captioner.training.objectives import WordsOfPhotos, build_objective

CONTENT = ["dog", "runs", "grass", "man", "hat"]  # of WORDS; the others are function words


def labelled(*labels: int | str, number: int = 0) -> EncodedImage:
    """Photo 10 + ``number`` of ``photos_of`` with object classes."""
    photo = photos_of(WORDS)[number]
    return replace(photo, image=replace(photo.image, labels=labels))


def words_of(photos: list[EncodedImage], filling: tuple[int, ...] = ()) -> list[set[str]]:
    """The words of each photo."""
    batch = batch_of(photos, filling)
    words = WordsOfPhotos(photos, WORDS).of_batch(batch.image_ids, batch.tokens)
    assert [WORDS.words[token - 4] for token in words.tokens.tolist()] == CONTENT
    found = {
        image_id: {CONTENT[column] for column in row.nonzero().squeeze(1).tolist()}
        for image_id, row in zip(batch.image_ids, words.present, strict=True)
    }
    return [found[photo.image.image_id] for photo in photos]


def test_words_of_a_photo_are_the_content_words_of_all_its_captions() -> None:
    first, second, third = photos_of(WORDS)[:3]

    # Captions 1; 1 and 2; 1, 2 and 3 of test_objectives, and the first words of the vocabulary.
    assert words_of([first, second, third]) == [
        {"dog", "runs"},
        {"dog", "runs", "man", "grass"},
        {"dog", "runs", "man", "grass"},
    ]


def test_names_of_object_classes_are_words_too() -> None:
    # A number is COCO's: 18 is a dog; 41 a skateboard, which the vocabulary lacks.
    assert words_of([labelled("hat", 18, 41, "the hot dog")]) == [{"dog", "runs", "hat"}]


@pytest.mark.parametrize("label", [0, 12, 91, -1])  # 12 was left out of COCO
def test_an_unknown_class_is_refused(label: int) -> None:
    with pytest.raises(DataError, match=f"x: label {label} is not the number of a COCO category"):
        WordsOfPhotos([labelled(label)], WORDS)


def test_the_objective_trains_it_beside_the_captions() -> None:
    photos, model = photos_of(WORDS), model_of(WORDS)
    stored = StoredModel(model, DecoderConfig(), WORDS)
    config = TrainConfig(training=TrainingConfig(photo_words=1.0))
    batch = batch_of(photos)
    objective = build_objective(config, photos, stored, steps=1)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)

    def losses() -> Any:
        (task,) = objective.tasks(model, batch, batch.images, 0)
        return task.losses(model, 0.0)

    before = losses()
    for _ in range(120):
        optimizer.zero_grad()
        losses().total(config.training).backward()
        optimizer.step()

    after = losses()
    # No model knows better than that all words of a photo have the same share.
    batch_words = WordsOfPhotos(photos, WORDS).of_batch(batch.image_ids, batch.tokens)
    counts = batch_words.present.sum(dim=1)
    least = (counts * counts.log()).sum()
    assert least < after.photo_words < 1.2 * least < before.photo_words
    assert after.cross_entropy < before.cross_entropy
