"""Caption metrics compared with pycocoevalcap and its Java tokenizer, and known answers.

test_java.py tests METEOR itself.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from captioner.errors import DataError
from captioner.evaluation import java
from captioner.evaluation.metrics import CaptionEvaluator, Scores
from captioner.evaluation.references import count_frequencies
from captioner.text.tokenizer import caption_tokens

REFERENCES = {
    7: ["A dog's ball lies on the grass.", "The dog isn't playing with a red ball!"],
    3: ["Two men ride bikes, quickly.", "A man rides; another man follows him.", "Two riders."],
    12: ["A T-shirt for $5 hangs in the shop window", "A shop window (closed) with shirts"],
    5: ["A plate of food on a wooden table.", "a plate of food on a table"],
}
CANDIDATES = {
    3: "Two men ride their bikes.",
    12: "a shirt in the shop's window",
    5: "a plate of food on a wooden table",
    7: "a dog's ball isn't on the grass",
}
REPETITION = {3: "men men men men", 12: "the the the", 5: "a a a a a", 7: "dog dog"}


def score(candidates: dict[int, str], references: dict[int, list[str]], **settings) -> Scores:
    return CaptionEvaluator(references, **settings).score(candidates)


def scored(truth: dict[int, list[str]], result: dict[int, list[str]]) -> dict[str, tuple]:
    """Score tokens, joined by spaces, with pycocoevalcap: all images together, and each image."""
    from pycocoevalcap.bleu.bleu import Bleu
    from pycocoevalcap.cider.cider import Cider
    from pycocoevalcap.rouge.rouge import Rouge

    found = {"ROUGE_L": Rouge().compute_score(truth, result)}
    found["CIDEr"] = Cider().compute_score(truth, result)
    whole, each = Bleu(4).compute_score(truth, result, verbose=0)
    return found | {f"Bleu_{n}": (whole[n - 1], each[n - 1]) for n in range(1, 5)}


WORD = st.sampled_from(["a", "dog", "cat", "runs", "on", "1 1/2"])
TEXT = st.lists(WORD, max_size=8).map(" ".join)
TRUTH = st.dictionaries(st.integers(0, 99), st.lists(TEXT, min_size=1, max_size=3), min_size=1)


@given(truth=TRUTH.filter(lambda t: any(map(any, t.values()))), data=st.data())
def test_equals_pycocoevalcap(truth: dict[int, list[str]], data: st.DataObject):
    candidates = {i: data.draw(TEXT) for i in truth}

    found = score(candidates, truth)

    tokens = {i: [" ".join(caption_tokens(t)) for t in truth[i]] for i in sorted(truth)}
    expected = scored(tokens, {i: [" ".join(caption_tokens(candidates[i]))] for i in tokens})
    assert expected.keys() <= found.corpus.keys()
    for name, (whole, each) in expected.items():
        assert found.corpus[name] == pytest.approx(whole, abs=1e-9)
        assert [found.images[i][name] for i in tokens] == pytest.approx([*each], abs=1e-9)


def test_references_without_words_give_zero():
    """pycocoevalcap raises an error."""
    found = CaptionEvaluator({1: ["..."], 2: ["😀"]}).score({1: "a dog", 2: ""}).corpus
    assert found["CIDEr"] == 0
    assert found["Bleu_4"] < 1e-6


def test_images_without_references_are_named():
    with pytest.raises(DataError, match=r"2 of 4 images .*, such as image 7; add captions"):
        score(CANDIDATES, {3: REFERENCES[3], 5: REFERENCES[5], 12: []})


FREQUENCIES = count_frequencies(REFERENCES | {99: ["a dog on a bike"]})


@given(row=st.lists(st.integers(0, 3), min_size=4, max_size=4).filter(any), odd=st.booleans())
def test_weights_equal_repeated_images(row: list[int], odd: bool):
    candidates = REPETITION if odd else CANDIDATES
    ids = sorted(candidates)
    drawn = dict(enumerate(i for i, times in zip(ids, row, strict=True) for _ in range(times)))
    again = score(
        {new: candidates[old] for new, old in drawn.items()},
        {new: REFERENCES[old] for new, old in drawn.items()},
        frequencies=FREQUENCIES,
    )

    found = score(candidates, REFERENCES, frequencies=FREQUENCIES).resample([row])

    for name in found.keys() - {"CIDEr"}:  # its document frequencies would change
        assert found[name] == pytest.approx([again.corpus[name]], abs=1e-12, nan_ok=True), name


def test_cider_d_with_the_references_own_frequencies_is_cider():
    own = count_frequencies(REFERENCES)

    found = score(CANDIDATES, REFERENCES, frequencies=own)

    assert found.corpus["CIDEr_D"] == pytest.approx(found.corpus["CIDEr"], abs=1e-9)
    for values in found.images.values():
        assert values["CIDEr_D"] == pytest.approx(values["CIDEr"], abs=1e-9)


def test_meteor_and_spice_are_scored_on_request(monkeypatch: pytest.MonkeyPatch):
    calls = []

    def spice(candidates, references):
        calls.append((candidates, references))
        return np.array([0.1, math.nan, 0.2, 0.3])

    counts = np.arange(1.0, 1 + 4 * java.METEOR_COUNTS).reshape(4, -1)
    monkeypatch.setitem(java.PROGRAMS, "SPICE", spice)
    monkeypatch.setitem(java.PROGRAMS, "METEOR", lambda texts, truth: counts)

    evaluator = CaptionEvaluator(REFERENCES, java=["METEOR", "SPICE"])
    found = evaluator.score(CANDIDATES)

    ((candidates, references),) = calls
    assert candidates[0] == "two men ride their bikes"  # image 3 has the lowest id
    assert references[0][2] == "two riders"
    assert [found.images[i]["SPICE"] for i in (3, 7, 12)] == [0.1, 0.2, 0.3]
    assert np.isnan(found.images[5]["SPICE"])
    assert np.isnan(found.corpus["SPICE"])
    assert found.corpus["METEOR"] == java.meteor_from_counts(counts.sum(axis=0))
    assert "METEOR 1.5 | SPICE 1.0" in evaluator.signature(CANDIDATES)
