"""Caption statistics: known answers and invariants."""

from __future__ import annotations

import pytest

from captioner.evaluation.statistics import describe, describe_texts


@pytest.mark.parametrize(
    ("caption", "expected"),
    [
        ("a dog runs on grass", (False, False, False)),
        ("a a dog", (True, False, False)),
        ("a dog and a dog", (False, True, False)),
        ("very very very big dog", (True, True, False)),
        ("a dog with a", (False, False, True)),
        ("on the grass on the", (False, True, True)),
        ("a dog sits outside", (False, False, False)),
        ("dog", (False, False, False)),
        ("the", (False, False, True)),
        ("", (False, False, False)),
    ],
)
def test_flaws_by_hand(caption, expected) -> None:
    found = describe_texts([caption])

    assert (
        tuple(found[k] for k in ("repeated_words", "repeated_phrases", "bad_endings")) == expected
    )


def test_statistics_by_hand() -> None:
    captions = {
        3: "A dog runs.",
        1: "a dog, runs",  # the same words as image 3
        2: "the the cat is on a",
        9: "",
    }

    found = describe(captions, known=["A DOG runs!", "the cat"])

    assert found == {
        "images": 4,
        "length_mean": 3,
        "length_min": 0,
        "length_max": 6,
        "vocabulary": 7,
        "distinct": 0.5,
        "new": 0.5,
        "repeated_words": 0.25,
        "repeated_phrases": 0,
        "bad_endings": 0.25,
    }
