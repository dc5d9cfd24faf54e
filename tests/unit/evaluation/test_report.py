"""The report: scores with intervals, comparisons, signatures and text."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from typing import NamedTuple

import pytest

from captioner.errors import DataError
from captioner.evaluation.bootstrap import MIN_IMAGES
from captioner.evaluation.metrics import CaptionEvaluator
from captioner.evaluation.references import count_frequencies
from captioner.evaluation.report import (
    as_json,
    as_text,
    build,
    describe,
    describe_texts,
    difference,
    read_captions_of,
)

METRICS = ["Bleu_1", "Bleu_2", "Bleu_3", "Bleu_4", "ROUGE_L", "CIDEr"]
METRICS += ["supported_words", "supported_captions", "agreement", "length"]


WORDS = ("a", "the", "dog", "cat", "man", "runs", "sits", "on", "in", "near", "grass", "snow")


class Captions(NamedTuple):
    """Five references of each image, and captions of a good and a poor system."""

    references: dict[int, list[str]]
    good: dict[int, str]
    poor: dict[int, str]


def make_captions(count: int, seed: int = 0) -> Captions:
    """Make captions: every image has a random sentence, and its captions replace some words."""
    chance = random.Random(seed)
    sentences = [chance.choices(WORDS, k=chance.randint(4, 7)) for _ in range(count)]

    def texts(errors: float) -> dict[int, str]:
        return {
            i: " ".join(chance.choice(WORDS) if chance.random() < errors else w for w in sentence)
            for i, sentence in enumerate(sentences)
        }

    every = [texts(0.2) for _ in range(5)]
    references = {i: [one[i] for one in every] for i in range(count)}
    return Captions(references, texts(0.2), texts(0.6))


FEW = make_captions(40)
FREQUENCIES = count_frequencies(make_captions(50, seed=1).references)


def evaluator(**changes) -> CaptionEvaluator:
    return CaptionEvaluator(**{"references": FEW.references, **changes})


def test_too_few_images_give_no_intervals_and_no_test() -> None:
    some = {i: FEW.good[i] for i in range(MIN_IMAGES - 1)}

    report, scores = build(some, evaluator())
    found = difference(some, FEW.poor, evaluator())

    assert report["metrics"] == scores.corpus
    assert report["intervals"] == dict.fromkeys(METRICS)
    few = f"{MIN_IMAGES - 1} images are too few for"
    assert f"{few} confidence intervals; use {MIN_IMAGES} or more" in report["warnings"]
    assert found["warning"] == f"{few} a significance test; use {MIN_IMAGES} or more"
    for one in found["metrics"].values():
        assert one["difference"] == one["this"] - one["other"]
        assert one["interval"] is one["p_value"] is one["significant"] is None
    text = as_text({**report, "compare": {"with": "them.json", **found}})
    assert "significant," not in text
    assert "None" not in text
    assert strict_json(as_json(report)) == report


@pytest.mark.parametrize(
    ("images", "documents", "expected"),
    [
        (1, 100, ["CIDEr of one image is always 0", "; use CIDEr_D"]),
        (99, 100, ["CIDEr of 99 images is noisy", "; use CIDEr_D"]),
        (99, 99, ["CIDEr of 99 images is noisy", "; score 100 or more images, or use CIDEr_D"]),
        (99, None, ["CIDEr of 99 images is noisy", "; score 100 or more images, or use CIDEr_D"]),
        (100, None, None),
    ],
)
def test_cider_of_fewer_than_100_images_is_noisy(images, documents, expected) -> None:
    captions = dict.fromkeys(range(images), "a dog runs")
    references = {i: [f"a dog runs {i}"] for i in range(100)}
    frequencies = documents and count_frequencies({i: references[i] for i in range(documents)})

    report, _ = build(captions, CaptionEvaluator(references, frequencies))

    found = [one for one in report["warnings"] if "CIDEr" in one]
    assert len(found) == (expected is not None)
    for warning in found:
        assert all(part in warning for part in expected)


def test_a_clearly_better_system_is_significantly_better() -> None:
    found = difference(FEW.good, FEW.poor, evaluator(frequencies=FREQUENCIES))["metrics"]

    length = found.pop("length")  # both systems keep the length of the sentences
    assert (length["difference"], length["significant"]) == (0, False)
    for name, one in found.items():
        low, high = one["interval"]
        assert 0 < low < one["difference"] < high, name
        assert one["p_value"] < 0.05, name
        assert one["significant"] is True


def test_only_common_images_are_compared() -> None:
    mine = {i: FEW.good[i] for i in range(30)}
    theirs = {i: FEW.poor[i] for i in range(10, 40)}
    both = range(10, 30)

    found = difference(mine, theirs, evaluator())

    assert found["images"] == 20
    assert found == difference(
        {i: mine[i] for i in both}, {i: theirs[i] for i in both}, evaluator()
    )
    expected = evaluator().score({i: mine[i] for i in both}).corpus
    assert {name: one["this"] for name, one in found["metrics"].items()} == expected


def test_different_references_have_different_signatures() -> None:
    every = [
        {3: ["A dog", "One dog"], 9: ["A cat"]},
        {3: ["A dog.", "One dog"], 9: ["A cat"]},
        {4: ["A dog", "One dog"], 9: ["A cat"]},
    ]

    assert len({CaptionEvaluator(one).signature(one) for one in every}) == 3


@pytest.mark.parametrize(
    "content",
    [
        pytest.param(b'[{"image_id": 1, "caption": "a d', id="truncated"),
        pytest.param(b'[{"image_id": true, "caption": "a dog"}]', id="image_id is true"),
        pytest.param(b'[{"image_id": 1, "caption": 5}]', id="caption is a number"),
        pytest.param(b'[{"image_id": 1, "caption": ""}, {"image_id": 1, "caption": ""}]', id="two"),
    ],
)
def test_a_file_without_captions_raises_a_one_line_error(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "results.json"
    path.write_bytes(content)

    with pytest.raises(DataError, match="; use ") as caught:
        read_captions_of(path)

    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def strict_json(text: str) -> object:
    """Parse JSON without NaN and Infinity."""
    return json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is not valid JSON"))


def test_ids_and_captions_as_others_write_them(tmp_path: Path) -> None:
    """Ids may be text or 1.0. A caption that is null has no words."""
    file = tmp_path / "results.json"
    entries = [("1", "a dog"), (2.0, None), (3, "")]
    file.write_text(json.dumps([{"image_id": i, "caption": text} for i, text in entries]))
    assert read_captions_of(file) == {1: "a dog", 2: "", 3: ""}
    file.write_text(json.dumps({"1": "a dog", "2": None}))
    assert read_captions_of(file) == {1: "a dog", 2: ""}


def test_nan_becomes_null() -> None:
    nan = math.nan
    report = {"a": nan, "b": [1.5, nan], "c": {"d": (nan, 2)}, "e": [{"f": nan}], "g": "NaN"}

    assert strict_json(as_json(report)) == {
        "a": None, "b": [1.5, None], "c": {"d": [None, 2]}, "e": [{"f": None}], "g": "NaN",
    }  # fmt: skip
    assert math.isnan(report["a"])  # the report itself is unchanged


def test_text_is_in_points() -> None:
    report, _ = build(FEW.good, evaluator(frequencies=FREQUENCIES))
    compared = difference(FEW.good, FEW.poor, evaluator())
    lines = as_text({**report, "compare": {"with": "them.json", **compared}}).splitlines()

    assert not any(word in line for line in lines for word in ("{", "None", "array(", "np.float"))
    scored, compared_with = (line.split() for line in lines if line.startswith("CIDEr "))
    value, ends = report["metrics"]["CIDEr"], report["intervals"]["CIDEr"]
    low, high = (f"{100 * end:.2f}" for end in ends)
    assert scored == ["CIDEr", f"{100 * value:.2f}", low, "to", high]
    assert compared_with[-4:] == ["p", "<", "0.002,", "significant"]
    agreement, agreement_with = (line.split() for line in lines if line.startswith("agreement "))
    assert agreement[1] == agreement_with[1] == f"{report['metrics']['agreement']:.2f}"  # words


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
