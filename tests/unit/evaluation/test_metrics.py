"""Caption metrics against pycocoevalcap with its own Java tokenizer, and known answers."""

from __future__ import annotations

import shutil

import pytest

from captioner.errors import DataError
from captioner.evaluation.metrics import Scores, score

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
ODD = {
    "a word": {3: "men", 12: "a", 5: "food", 7: "dog"},
    "nothing": {3: "", 12: "...", 5: "a plate of food", 7: "a dog"},
    "repetition": {3: "men men men men", 12: "the the the", 5: "a a a a a", 7: "dog dog"},
    "other words": {3: "zebra", 12: "quartz lamp", 5: "x y z w v", 7: "q"},
}


def oracle(candidates: dict[int, str]) -> Scores:
    """pycocoevalcap as its COCOEvalCap calls it."""
    from pycocoevalcap.bleu.bleu import Bleu
    from pycocoevalcap.cider.cider import Cider
    from pycocoevalcap.rouge.rouge import Rouge
    from pycocoevalcap.tokenizer.ptbtokenizer import PTBTokenizer

    tokenizer = PTBTokenizer()
    truth = tokenizer.tokenize({i: [{"caption": c} for c in cs] for i, cs in REFERENCES.items()})
    result = tokenizer.tokenize({i: [{"caption": c}] for i, c in candidates.items()})
    names = [f"Bleu_{n}" for n in range(1, 5)]
    corpus, images = {}, {i: {} for i in truth}
    whole, each = Bleu(4).compute_score(truth, result, verbose=0)
    parts = list(zip(names, whole, each, strict=True))
    parts += [
        (name, *scorer.compute_score(truth, result))
        for name, scorer in (("ROUGE_L", Rouge()), ("CIDEr", Cider()))
    ]
    for name, all_images, values in parts:
        corpus[name] = all_images
        for image_id, value in zip(truth, values, strict=True):
            images[image_id][name] = value
    return Scores(corpus, images)


@pytest.mark.skipif(shutil.which("java") is None, reason="no java")
@pytest.mark.filterwarnings("ignore::ResourceWarning")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("candidates", [CANDIDATES, *ODD.values()], ids=["plain", *ODD])
def test_pycocoevalcap_with_java_gives_the_same(candidates: dict[int, str]):
    expected, found = oracle(candidates), score(candidates, REFERENCES)
    assert found.corpus.keys() == expected.corpus.keys()
    assert found.corpus == pytest.approx(expected.corpus, abs=1e-9)
    assert found.images.keys() == expected.images.keys()
    for image_id in expected.images:
        assert found.images[image_id] == pytest.approx(expected.images[image_id], abs=1e-9)


def test_perfect_captions():
    scores = score({i: texts[0] for i, texts in REFERENCES.items()},
                   {i: texts[:1] for i, texts in REFERENCES.items()})  # fmt: skip
    expected = {f"Bleu_{n}": 1.0 for n in range(1, 5)} | {"ROUGE_L": 1.0, "CIDEr": 10.0}
    assert scores.corpus == pytest.approx(expected)
    assert all(type(value) is float for value in scores.corpus.values())


def test_bleu_by_hand():
    # "the cat" against "the cat sat down": both words right, brevity exp(1 - 4/2).
    scores = score({1: "the cat"}, {1: ["the cat sat down"]})
    assert scores.corpus["Bleu_1"] == pytest.approx(0.36787944, rel=1e-6)
    assert scores.corpus["Bleu_2"] == pytest.approx(0.36787944, rel=1e-6)


def test_cider_of_one_image_is_0():
    assert score({1: "a cat"}, {1: ["a cat"]}).corpus["CIDEr"] == 0


def test_signs_and_capitals_do_not_count():
    marked = score({1: "A DOG, isn't it?", 2: "cats."}, {1: ["a dog is n't it"], 2: ["Cats!"]})
    assert marked.corpus["ROUGE_L"] == pytest.approx(1)


def test_the_order_of_the_images_does_not_count():
    backwards = dict(reversed(CANDIDATES.items()))
    assert score(backwards, REFERENCES) == score(CANDIDATES, REFERENCES)


def test_references_of_other_images_do_not_count():
    one = {5: CANDIDATES[5], 7: CANDIDATES[7]}
    few = {i: REFERENCES[i] for i in one}
    assert score(one, REFERENCES) == score(one, few)


def test_nothing_is_printed(capfd: pytest.CaptureFixture[str]):
    score(CANDIDATES, REFERENCES)
    assert capfd.readouterr() == ("", "")


def test_images_without_references_are_named():
    with pytest.raises(DataError, match=r"2 of 4 images .* \(first: id 12\); give annotations"):
        score(CANDIDATES, {3: REFERENCES[3], 5: REFERENCES[5], 12: []})


def test_no_captions_at_all():
    with pytest.raises(DataError, match="no captions to score"):
        score({}, REFERENCES)
