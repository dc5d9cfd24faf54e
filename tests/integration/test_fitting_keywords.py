"""Fitting keywords: known answers, and words that depend on the photo."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import numpy as np
import pytest

from captioner.errors import ConfigError, DataError
from captioner.evaluation.calibration import logistic_regression
from captioner.inference.confidence import sigmoid


@pytest.fixture(scope="module")
def fitting(script) -> ModuleType:
    return script("fit_keywords")


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


def test_the_reading_is_that_of_newtons_method(fitting) -> None:
    random = np.random.default_rng(0)
    vectors = (random.normal(size=(300, 3)) * [1, 2, 5] + 1).astype(np.float32)
    labels = random.random((300, 2)) < 1 / (1 + np.exp(-vectors[:, :2]))
    scaled = (vectors - vectors.mean(axis=0)) / vectors.std(axis=0)

    weights, biases = fitting.linear_reading(vectors, labels, penalty=4.0)

    found = vectors @ weights.T + biases
    inputs = np.hstack([scaled, np.ones((300, 1))]).astype(float)
    for column in (0, 1):
        exact = logistic_regression(
            inputs, labels[:, column].astype(float), np.array([4.0, 4.0, 4.0, 1e-9])
        )
        assert found[:, column] == pytest.approx(inputs @ exact, abs=2e-3)


def photos(fitting: ModuleType, seed: int, count: int = 2000) -> Any:
    """A dog is mentioned in half of the photos whose first number is positive, a man at random."""
    random = np.random.default_rng(seed)
    vectors = np.sign(random.normal(size=(count, 5))).astype(np.float32)
    dogs = (vectors[:, 0] > 0) & (random.random(count) < 0.5)
    men = random.random(count) < 0.2
    columns = {"dog": dogs, "man": men}
    mentioned = [{word for word in columns if columns[word][row]} for row in range(count)]
    return fitting.Photos(vectors, mentioned)


def test_probabilities_are_those_of_new_photos(fitting) -> None:
    found, _ = fitting.fit(TABLE, photos(fitting, 0), photos(fitting, 1))

    assert (found.words, found.neutral_words) == (("dog", "man"), ("person",))  # no hot dog
    with_dogs, without = np.float32([1, 1, 1, 1, 1]), np.float32([-1, 1, 1, 1, 1])
    odds = found.weights @ np.stack([with_dogs, without], axis=1) + found.biases[:, None]
    dog, man, person = np.vectorize(sigmoid)(odds)
    assert dog == pytest.approx([0.5, 0.0], abs=0.1)
    assert man == pytest.approx([0.2, 0.2], abs=0.05)
    assert person == pytest.approx(man, abs=0.01)


def test_words_that_nobody_uses_are_an_error(fitting) -> None:
    with pytest.raises(DataError, match="no word of the list"):
        fitting.fit({("cat",): "cat"}, photos(fitting, 0), photos(fitting, 1))


def test_the_report_of_a_small_table(fitting) -> None:
    probabilities, labels = np.zeros((10, 12)), np.zeros((10, 12), bool)
    probabilities[:, 0], probabilities[:, 1] = 0.9, 0.4
    labels[:, 0], labels[0, 2] = True, True

    assert fitting.report(probabilities, labels) == (
        "12 keywords, 2.0 per photo: precision 50%, recall 91%, calibration error 0.250"
    )
