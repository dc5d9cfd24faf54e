"""Caption statistics: known answers and invariants."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from captioner.evaluation.statistics import describe, describe_texts

FLAWS = ("repeated_words", "repeated_phrases", "bad_endings")


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


@given(
    st.lists(st.lists(st.sampled_from(["a", "dog", "the", "runs"]), max_size=5), min_size=1),
    st.randoms(use_true_random=False),
)
def test_order_and_ids_do_not_matter(captions, random) -> None:
    texts = [" ".join(words) for words in captions]
    shuffled = random.sample(texts, len(texts))

    found = describe(dict(enumerate(texts)), texts[:1])

    assert describe({7 + i: text for i, text in enumerate(shuffled)}, texts[:1]) == pytest.approx(
        found
    )
    assert all(0 <= found[name] <= 1 for name in ("distinct", "new", *FLAWS))
    assert found["length_min"] <= found["length_mean"] <= found["length_max"]
