"""Attention on phrases: known answers for a model that attends as told, and invalid files.

Boxes are in pixels of a photo of 12 x 8 pixels, and a region is 4 x 4 of these pixels. The copy of
the photo that the model sees is squashed.
"""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from tiny_data import noise_photos

from captioner.caption_types import Caption
from captioner.errors import CaptionerError, DataError
from captioner.evaluation.phrases import PhrasedPhoto, measure_phrases, read_phrases
from captioner.text.vocabulary import Vocabulary

GRID = (2, 3)
FIRST, LAST = np.eye(6)[[0, 5]].reshape(2, *GRID)
MAPS = {"black": FIRST, "dog": (FIRST + LAST) / 2}
UNIFORM = np.full(GRID, 1 / 6)


class Told:
    """A model with the maps in ``MAPS``. All other words have a uniform map."""

    def __init__(self) -> None:
        words = ("a", "black", "dog", "'s", "runs", "in", "the", "snow", "it")
        self.stored = SimpleNamespace(vocabulary=Vocabulary(words))
        self.styles: set[str] = set()

    def prepare(self, image: Any) -> Any:
        return image

    def explain_batch(self, photos: Any, sentences: Any, style: str) -> list[Caption]:
        self.styles.add(style)
        return [
            Caption(
                tuple(words),
                np.zeros(len(words), np.float32),
                np.array([MAPS.get(word, UNIFORM) for word in words], np.float32),
                np.ones(len(words), np.float32),
                -1.0,
            )
            for _, words in zip(photos, sentences, strict=True)
        ]


BOXES = {"animal": [[0, 0, 4, 4], [2, 0, 6, 4]], "ground": [[0, 4, 12, 8]]}  # 1.5 and 3 regions


def photo(*captions: tuple[str, list[list[Any]]], **changes: Any) -> dict[str, Any]:
    texts = [{"words": words, "phrases": phrases} for words, phrases in captions]
    return {"width": 12, "height": 8, "boxes": BOXES, "captions": texts} | changes


def measured(tmp_path: Path, *captions: tuple[str, list[list[Any]]], **how: Any) -> dict[str, Any]:
    [path] = noise_photos(tmp_path, ["a.png"], (6, 6))
    given = {path: PhrasedPhoto.from_dict(photo(*captions))}
    return measure_phrases(how.pop("model", Told()), given, **how)  # type: ignore[arg-type]


def test_phrases_by_hand(tmp_path: Path) -> None:
    model = Told()
    phrases = [[0, 3, "animal"], [5, 7, "ground"]]

    found = measured(
        tmp_path, ("A black dog runs in the snow .", phrases), model=model, style="flickr8k"
    )

    animal, ground = found["per_phrase"]
    assert model.styles == {"flickr8k"}
    assert (animal["photo"], animal["phrase"], animal["text"]) == ("a.png", "animal", "black dog")
    assert (ground["text"], ground["start"]) == ("snow", 6)
    by_hand = {
        "correctness": (0.75, 0.5),
        "uniform": (1.5 / 6, 3 / 6),
        "pointing": (1, 0.5),
        "pointing_uniform": (1 / 6, 3 / 6),  # the middle of the second region is outside the box
        "pointing_centre": (0, 1),
    }
    for key, values in by_hand.items():
        assert [animal[key], ground[key]] == pytest.approx(values), key
        assert found[key] == pytest.approx(sum(values) / 2), key
    assert ground["centre"] == pytest.approx(0.5)
    assert animal["shift"] == pytest.approx([0.25, 0.75, 0.25])
    assert found["ratio"] == pytest.approx(0.625 / 0.375)
    assert found["shift"]["phrases"] == 1  # no word follows "snow"


def test_everything_that_is_not_measured_is_counted(tmp_path: Path) -> None:
    found = measured(
        tmp_path,
        ("A zebra in the snow", [[3, 5, "ground"]]),
        ("The dog in it", [[0, 2, "elsewhere"], [3, 4, "ground"]]),
        ("In the dog's snow", [[3, 4, "ground"]]),
    )

    counts = ("photos", "captions", "captions_with_unknown_words", "phrases", "measured")
    assert [found[key] for key in counts] == [1, 2, 1, 3, 1]
    assert (found["absent"], found["empty"], found["unseen"]) == (1, 1, 0)
    [one] = found["per_phrase"]
    assert (one["text"], one["start"]) == ("snow", 4)  # "dog's" is two tokens


def test_an_unreadable_photo_is_left_out(tmp_path: Path) -> None:
    paths = noise_photos(tmp_path, ["a.png", "b.png"])
    paths[0].write_bytes(b"no photo")
    text = ("A dog", [[0, 2, "animal"]])
    errors: list[CaptionerError] = []

    found = measure_phrases(
        Told(),  # type: ignore[arg-type]
        {path: PhrasedPhoto.from_dict(photo(text)) for path in paths},
        on_error=errors.append,
    )

    assert [str(error).startswith(str(paths[0])) for error in errors] == [True]
    assert [one["photo"] for one in found["per_phrase"]] == ["b.png"]


@pytest.mark.parametrize(
    "changes",
    [
        {"width": None},
        {"boxes": {"animal": [[0, 0, 13, 4]]}},
        {"boxes": {"animal": [[4, 0, 4, 4]]}},
        {"boxes": {"animal": [[0, 0, 4]]}},
        {"boxes": []},
        {"captions": [{"words": "a dog", "phrases": [[1, 3, "animal"]]}]},
        {"captions": [{"words": ["a", "dog"], "phrases": []}]},
        {"captions": ["a dog"]},
    ],
)
def test_an_invalid_file_is_one_line(tmp_path: Path, changes: dict[str, Any]) -> None:
    path = tmp_path / "phrases.json"
    path.write_text(json.dumps({"good.jpg": photo(), "bad.jpg": photo(**changes)}))

    with pytest.raises(DataError, match=r"photo 'bad\.jpg' is invalid .*; use a phrases") as caught:
        read_phrases(path)

    assert "\n" not in str(caught.value)
