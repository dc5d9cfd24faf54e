"""Fitting a reading: what captions, annotators and lists of words say."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest

from captioner.data.example import Example
from captioner.errors import ConfigError


@pytest.fixture(scope="module")
def fitting(script) -> ModuleType:
    return script("fit_reading")


TABLE = {("dog",): "dog", ("dogs",): "dog", ("hot", "dog"): "hot dog", ("man",): "man"}


def test_the_longest_phrase_of_a_caption_counts(fitting) -> None:
    assert fitting.mentions(["Two dogs.", "a man"], TABLE) == {"dog", "man"}
    assert fitting.mentions(["a hot dog", "a hot-dog stand"], TABLE) == {"hot dog"}


def test_the_list_of_words(fitting, tmp_path) -> None:
    table = fitting.read_words(fitting.WORDS)
    assert table["teddy", "bears"] == "teddy bear"
    assert table["puppies",] == "puppy"
    assert all(len(phrase) <= 2 for phrase in table)
    path = tmp_path / "words.txt"
    path.write_text("# mine\n\nDog(s), hound(s)\ncat\n")
    assert fitting.read_words(path) == {
        ("dog",): "dog", ("dogs",): "dog", ("hound",): "dog", ("hounds",): "dog", ("cat",): "cat"
    }  # fmt: skip
    path.write_text("dog, pet\ncat, pet\n")
    with pytest.raises(ConfigError, match="'pet' counts as dog and as cat"):
        fitting.read_words(path)


def test_keywords_are_phrases_of_stems_that_the_reading_has(fitting) -> None:
    assert fitting.keywords_of(TABLE, ["dog", "hot"]) == {
        "dog": (("dog",),),
        "hot dog": (("hot", "dog"),),
    }


def test_captions_are_counted(fitting) -> None:
    captions = ("A dog and a dog.", "Two dogs.", "A cat.")
    photos = [Example(7, Path("x"), captions), Example(8, Path("y"), captions[:1])]

    found = fitting.count(photos, ["dog", "two", "sofa"])

    assert found.counts.tolist() == [[2, 1, 0], [1, 0, 0]]
    assert found.captions.tolist() == [3, 1]
