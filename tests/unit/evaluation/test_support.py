"""Metrics of support, compared with answers worked out by hand on a small set."""

from __future__ import annotations

import math

import pytest

from captioner.evaluation.metrics import CaptionEvaluator

REFERENCES = {
    1: ["A dog runs on grass.", "Two dogs running."],
    2: ["A man in a red hat.", "A man.", "The old man smiles", "..."],
    3: ["A cat."],
}
CAPTIONS = {
    1: "The dogs run, and a dog runs on snow",  # dog 2 of 2, run 2 of 2, snow 0 of 2
    2: "a red hat on a man",  # red 1 of 4, hat 1 of 4, man 3 of 4
    3: "it is on the",  # no content word
}


def test_support_by_hand() -> None:
    found = CaptionEvaluator(REFERENCES).score(CAPTIONS)

    assert found.corpus["supported_words"] == pytest.approx(5 / 6)
    assert found.corpus["supported_captions"] == pytest.approx(2 / 3)
    assert found.corpus["agreement"] == pytest.approx((2 + 5 / 4 + 0) / 3)
    assert found.corpus["length"] == pytest.approx((9 + 6 + 4) / 3)
    images = found.images
    assert [images[i]["supported_words"] for i in (1, 2)] == pytest.approx([2 / 3, 1])
    assert math.isnan(images[3]["supported_words"])
    assert [one["supported_captions"] for one in images.values()] == [0, 1, 1]
    assert [one["agreement"] for one in images.values()] == pytest.approx([2, 5 / 4, 0])


def test_supported_words_are_stored_as_two_counts() -> None:
    counts = CaptionEvaluator(REFERENCES).score(CAPTIONS).counts["supported_words"]

    assert counts.tolist() == [[2, 3], [3, 3], [0, 0]]


def test_support_of_resamples() -> None:
    drawn = CaptionEvaluator(REFERENCES).score(CAPTIONS).resample([[2, 1, 0], [0, 0, 3]])

    assert drawn["supported_words"] == pytest.approx([7 / 9, math.nan], nan_ok=True)
    assert drawn["supported_captions"] == pytest.approx([1 / 3, 1])
    assert drawn["agreement"] == pytest.approx([(4 + 5 / 4) / 3, 0])
