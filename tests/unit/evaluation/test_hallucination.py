"""CHAIR on a small set by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest

from captioner.evaluation.hallucination import by_confidence, photo_objects
from captioner.evaluation.metrics import CaptionEvaluator

REFERENCES = {1: ["A dog on grass.", "A puppy."], 2: ["Two men."], 3: ["A cat."], 4: ["Grass."]}
ANNOTATED = [(1, "frisbee"), (2, "dog"), (9, "cat")]
CAPTIONS = {
    1: "A dog and a cat play with a frisbee near a cat",  # the cats are not there
    2: "a man with a dog",
    3: "some grass",
    4: "a kitten",  # not there
}


def test_objects_are_those_of_references_and_annotations() -> None:
    assert photo_objects(REFERENCES, ANNOTATED) == {
        1: {"dog", "frisbee"}, 2: {"person", "dog"}, 3: {"cat"}, 4: set(),
    }  # fmt: skip


def test_chair_by_hand() -> None:
    evaluator = CaptionEvaluator(REFERENCES, objects=photo_objects(REFERENCES, ANNOTATED))

    found = evaluator.score(CAPTIONS)

    assert found.corpus["CHAIR_i"] == pytest.approx(3 / 7)
    assert found.corpus["CHAIR_s"] == 2 / 4
    assert [one["CHAIR_s"] for one in found.images.values()] == [1, 0, 0, 1]
    assert [found.images[i]["CHAIR_i"] for i in (1, 2, 4)] == [0.5, 0, 1]
    assert math.isnan(found.images[3]["CHAIR_i"])
    drawn = found.resample([[2, 2, 0, 0], [0, 0, 4, 0]])
    assert drawn["CHAIR_i"] == pytest.approx([4 / 12, math.nan], nan_ok=True)
    assert drawn["CHAIR_s"].tolist() == [0.5, 0]


def test_references_alone_take_more_for_hallucinated() -> None:
    evaluator = CaptionEvaluator(REFERENCES, objects=photo_objects(REFERENCES, ()))

    assert evaluator.score(CAPTIONS).corpus["CHAIR_i"] == pytest.approx(5 / 7)


def test_chair_by_confidence() -> None:
    counts = np.array([[2, 4], [0, 2], [0, 0], [1, 1]], float)

    low, high = by_confidence(counts, [0.1, 0.8, 1.0, 0.199])

    assert low == {
        "from": 0, "to": 0.2, "captions": 2, "mentions": 5, "CHAIR_i": 3 / 5, "CHAIR_s": 1,
    }  # fmt: skip
    assert high == {
        "from": 0.8, "to": 1, "captions": 2, "mentions": 2, "CHAIR_i": 0, "CHAIR_s": 0,
    }  # fmt: skip
