"""The report: scores with intervals, comparisons, signatures and text."""

from __future__ import annotations

import json
import math
import random
import re
from pathlib import Path
from typing import NamedTuple

import pytest

from captioner import __version__
from captioner.errors import DataError
from captioner.evaluation.bootstrap import MIN_IMAGES
from captioner.evaluation.metrics import CaptionEvaluator
from captioner.evaluation.references import count_frequencies
from captioner.evaluation.report import (
    as_json,
    as_text,
    build,
    difference,
    read_captions_of,
)

METRICS = ["Bleu_1", "Bleu_2", "Bleu_3", "Bleu_4", "ROUGE_L", "CIDEr"]


class Captions(NamedTuple):
    """References of five references and captions of two systems."""

    references: dict[int, list[str]]
    good: dict[int, str]
    """Mostly correct captions."""
    poor: dict[int, str]
    """Often wrong captions."""


SUBJECTS = ("a dog", "two men", "a young girl", "three children", "a brown horse", "a woman")
VERBS = ("runs", "is jumping", "sits down", "looks up", "plays with a ball", "waits")
PLACES = ("on the grass", "near the water", "in the snow", "on a street", "by a red wall")


def make_captions(count: int, seed: int = 0) -> Captions:
    """Random references that mostly agree about an image, and captions of two systems."""
    chance = random.Random(seed)
    facts = [[chance.choice(part) for part in (SUBJECTS, VERBS, PLACES)] for _ in range(count)]

    def describe(fact: list[str], error_rate: float) -> str:
        words = [
            chance.choice(part) if chance.random() < error_rate else true
            for true, part in zip(fact, (SUBJECTS, VERBS, PLACES), strict=True)
        ]
        return " ".join(words[: chance.choice((2, 3, 3))])

    return Captions(
        {
            i: [describe(fact, 0.2).capitalize() + "." for _ in range(5)]
            for i, fact in enumerate(facts)
        },
        {i: describe(fact, 0.2) for i, fact in enumerate(facts)},
        {i: describe(fact, 0.6) for i, fact in enumerate(facts)},
    )


FEW = make_captions(40)
FREQUENCIES = count_frequencies(make_captions(50, seed=1).references)


def evaluator(**changes) -> CaptionEvaluator:
    return CaptionEvaluator(**{"references": FEW.references, **changes})


# --- build ---------------------------------------------------------------------------------------


def test_too_few_images_give_no_intervals_and_no_test() -> None:
    some = {i: FEW.good[i] for i in range(MIN_IMAGES - 1)}

    report, scores = build(some, evaluator())
    found = difference(some, FEW.poor, evaluator())

    assert report["metrics"] == scores.corpus
    assert report["intervals"] == dict.fromkeys(METRICS)
    few = f"{MIN_IMAGES - 1} images are too few for"
    assert f"{few} confidence intervals (needs {MIN_IMAGES})" in report["warnings"]
    assert found["warning"] == f"{few} a significance test (needs {MIN_IMAGES})"
    for one in found["metrics"].values():
        assert one["difference"] == one["this"] - one["other"]
        assert one["interval"] is one["p_value"] is one["significant"] is None
    text = as_text({**report, "compare": {"with": "them.json", **found}})
    assert "significant," not in text
    assert "None" not in text
    assert strict_json(as_json(report)) == report


# --- difference ----------------------------------------------------------------------------------


def test_a_clearly_better_system_is_significantly_better() -> None:
    found = difference(FEW.good, FEW.poor, evaluator(frequencies=FREQUENCIES))

    for name, one in found["metrics"].items():
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


# --- signature -----------------------------------------------------------------------------------


def digest(line: str) -> str:
    (found,) = re.findall(r"references ([0-9a-f]{12})$", line)
    return found


def test_the_signature_names_versions_metrics_and_references() -> None:
    line = evaluator(frequencies=FREQUENCIES, java=["METEOR"]).signature(range(40))

    assert line.startswith(f"captioner {__version__}")
    for part in (
        "PTB tokens (captioner.tokenizer)",
        "CIDEr_D: document frequencies of 50 images",
        "METEOR 1.5",
        "40 images",
        "5 references an image",
    ):
        assert part in line
    assert "\n" not in line


@pytest.mark.parametrize(
    "references",
    [
        pytest.param({3: ["A dog.", "One dog."], 9: ["A cat"]}, id="one letter differs"),
        pytest.param({4: ["A dog", "One dog"], 9: ["A cat"]}, id="another image"),
    ],
)
def test_different_references_have_different_digests(references: dict[int, list[str]]) -> None:
    first = {3: ["A dog", "One dog"], 9: ["A cat"]}

    assert digest(CaptionEvaluator(references).signature(references)) != digest(
        CaptionEvaluator(first).signature(first)
    )


# --- reading captions ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "content",
    [
        pytest.param(b'[{"image_id": 1, "caption": "a d', id="truncated"),
        pytest.param(b'[{"image_id": true, "caption": "a dog"}]', id="image_id is true"),
        pytest.param(b'[{"image_id": 1, "caption": null}]', id="caption is null"),
    ],
)
def test_a_file_without_captions_raises_a_one_line_error(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "results.json"
    path.write_bytes(content)

    with pytest.raises(DataError, match="; give ") as caught:
        read_captions_of(path)

    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


# --- JSON ----------------------------------------------------------------------------------------


def strict_json(text: str) -> object:
    """Parse JSON, rejecting NaN and Infinity."""

    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is not valid JSON")

    return json.loads(text, parse_constant=refuse)


def test_nan_becomes_null() -> None:
    nan = math.nan
    report = {"a": nan, "b": [1.5, nan], "c": {"d": (nan, 2)}, "e": [{"f": nan}], "g": "NaN"}

    assert strict_json(as_json(report)) == {
        "a": None, "b": [1.5, None], "c": {"d": [None, 2]}, "e": [{"f": None}], "g": "NaN",
    }  # fmt: skip
    assert math.isnan(report["a"])  # the report itself is unchanged


# --- text ----------------------------------------------------------------------------------------


def lines_of(report: dict) -> list[str]:
    text = as_text(report)
    assert "Traceback" not in text
    assert not any(word in text for word in ("{", "None", "array(", "np.float"))
    return text.splitlines()


def row(lines: list[str], name: str) -> str:
    """The line with this name in the first 22 columns."""
    (found,) = [line for line in lines if line[:22].strip() == name]
    return found


def test_text_scores_and_intervals_are_in_points() -> None:
    report, _ = build(FEW.good, evaluator(frequencies=FREQUENCIES))

    lines = lines_of(report)

    for name, value in report["metrics"].items():
        low, high = report["intervals"][name]
        assert re.findall(r"-?\d+\.\d\d", row(lines, name)) == [
            f"{100 * number:.2f}" for number in (value, low, high)
        ]
    assert lines[lines.index(row(lines, "Bleu_1")) - 1].startswith("points and 95% intervals")
    assert row(lines, "signature").endswith(report["signature"])
    assert row(lines, "note").endswith(report["warnings"][0])
    assert row(lines, "images").split() == ["images", "40"]


def test_text_of_a_comparison() -> None:
    report, _ = build(FEW.good, evaluator())
    report["compare"] = {"with": "them.json", **difference(FEW.good, FEW.poor, evaluator())}

    lines = lines_of(report)

    start = lines.index("compared with them.json on 40 common images") + 1
    for name, line in zip(METRICS, lines[start:], strict=False):
        one = report["compare"]["metrics"][name]
        numbers = [one["this"], one["other"], one["difference"], *one["interval"]]
        assert line.startswith(name)
        assert [float(n) for n in re.findall(r"[+-]?\d+\.\d\d\b(?!\d)", line)] == [
            float(f"{100 * number:.2f}") for number in numbers
        ]
        p_value = "< 0.002" if one["p_value"] < 0.002 else f"{one['p_value']:.3f}"
        assert line.endswith(f"p {p_value}, significant")
    same = {**report, "compare": {"with": "me", **difference(FEW.good, FEW.good, evaluator())}}
    assert as_text(same).count("p 1.000, not significant") == len(METRICS)
