"""Training and evaluation on real photos; needs ../shared/data beside the checkout."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from captioner.cli.main import OK, main
from captioner.evaluation.java import find_java

ROOT = Path(__file__).parents[2]
DATA = ROOT.parent / "shared" / "data"
pytestmark = [
    pytest.mark.data,
    pytest.mark.slow,
    pytest.mark.skipif(not DATA.is_dir(), reason="../shared/data is missing"),
]


# The second set takes a minute and finds what the first one does.
@pytest.mark.parametrize(
    "name", ["coco_val", pytest.param("flickr8k_val", marks=pytest.mark.stress)]
)
def test_the_model_card_holds(name, tmp_path):
    """The shipped model's validation scores are those that its config states."""
    if name == "coco_val":
        annotations, images = DATA / name / "annotations" / "captions.json", DATA / name / "images"
    else:
        assert main(["prepare", "dataset", str(DATA / "flickr8k"), "-o", str(tmp_path)]) == OK
        annotations, images = tmp_path / "captions_val.json", DATA / "flickr8k" / "images"
    report = tmp_path / "report.json"
    arguments = ["--annotations", str(annotations), "--images", str(images)]
    arguments += ["--style", name.removesuffix("_val"), "-o", str(report), "--precision", "fp32"]
    arguments += ["--meteor"] if find_java() else []
    assert main(["evaluate", *arguments]) == OK
    measured = json.loads(report.read_text())["metrics"]
    config = json.loads((ROOT / "captioner" / "pretrained" / "config.json").read_text())
    stated = config["info"]["scores"][name]
    for metric in stated.keys() & measured.keys():  # METEOR needs Java
        # Rounding differs between machines, which changes a few words in a thousand captions.
        assert measured[metric] == pytest.approx(stated[metric], abs=0.005), metric
    assert measured.keys() >= {"Bleu_4", "CIDEr"}


# --- attention -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def attention(tmp_path_factory) -> dict[str, Any]:
    """The shipped model's attention report for COCO's masks."""
    path = tmp_path_factory.mktemp("attention") / "report.json"
    annotations = DATA / "coco128" / "annotations"
    arguments = ["--images", str(DATA / "coco128" / "images"), "-o", str(path)]
    arguments += ["--instances", str(annotations / "instances.json")]
    assert main(["evaluate", *arguments]) == OK
    found: dict[str, Any] = json.loads(path.read_text())["attention"]
    return found


def test_attention_is_on_named_objects_more_than_elsewhere(attention) -> None:
    assert attention["measured"] >= 30
    assert attention["correctness"] > 1.1 * attention["uniform"]
    assert attention["correctness"] > 1.05 * attention["shuffled"]
    assert attention["intervals"]["ratio"][0] > 1  # significantly
    assert attention["pointing"] > attention["pointing_uniform"]
    assert attention["entropy"] < attention["entropy_even"] == pytest.approx(math.log(100))
    assert 0 < attention["movement"] < 1
    assert 0 < attention["gate"] < 1
