"""Training and evaluation on real photos; needs ../shared/data beside the checkout."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from pycocoevalcap.bleu.bleu import Bleu
from pycocoevalcap.cider.cider import Cider
from pycocoevalcap.rouge.rouge import Rouge
from pycocoevalcap.tokenizer.ptbtokenizer import PTBTokenizer

from captioner.cli.main import OK, main
from captioner.data.coco import read_captions
from captioner.evaluation.java import find_java
from captioner.evaluation.metrics import CaptionEvaluator

ROOT = Path(__file__).parents[2]
DATA = ROOT.parent / "shared" / "data"
pytestmark = [
    pytest.mark.data,
    pytest.mark.slow,
    pytest.mark.skipif(not DATA.is_dir(), reason="../shared/data is missing"),
]


@pytest.mark.parametrize("name", ["coco_val", "flickr8k_val"])
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


# --- comparison with Java ------------------------------------------------------------------------


@pytest.fixture(scope="module")
def human_captions(tmp_path_factory) -> tuple[dict[int, str], dict[int, list[str]]]:
    """300 validation photos: one human caption each, with the other four as references."""
    folder = tmp_path_factory.mktemp("flickr8k")
    assert main(["prepare", "dataset", str(DATA / "flickr8k"), "-o", str(folder)]) == OK
    _, captions = read_captions([folder / "captions_val.json"])
    some = random.Random(0).sample(
        sorted(i for i, texts in captions.items() if len(texts) == 5), 300
    )
    return {i: captions[i][i % 5] for i in some}, {
        i: [text for number, text in enumerate(captions[i]) if number != i % 5] for i in some
    }


def by_java(captions: dict[int, str], references: dict[int, list[str]]) -> SimpleNamespace:
    """Score as pycocoevalcap's COCOEvalCap does, with its tokenizer and scorers."""
    tokenizer = PTBTokenizer()
    truth = tokenizer.tokenize({i: [{"caption": c} for c in references[i]] for i in captions})
    result = tokenizer.tokenize({i: [{"caption": c}] for i, c in captions.items()})
    whole, each = Bleu(4).compute_score(truth, result, verbose=0)
    found = {f"Bleu_{n + 1}": (whole[n], each[n]) for n in range(4)}
    found["ROUGE_L"] = Rouge().compute_score(truth, result)
    found["CIDEr"] = Cider().compute_score(truth, result)
    images: dict[int, dict[str, float]] = {i: {} for i in truth}
    for metric, (_, values) in found.items():
        for image_id, value in zip(truth, values, strict=True):
            images[image_id][metric] = float(value)
    corpus = {metric: float(value) for metric, (value, _) in found.items()}
    return SimpleNamespace(corpus=corpus, images=images)


@pytest.mark.skipif(find_java() is None, reason="java is not installed")
@pytest.mark.filterwarnings("ignore::ResourceWarning")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("variant", ["as it is", "of other photos", "cut"])
def test_human_captions_score_as_in_pycocoevalcap(variant, human_captions) -> None:
    """Every metric, over all photos and for each one."""
    captions, references = human_captions
    if variant == "of other photos":
        texts = list(captions.values())
        captions = dict(zip(captions, texts[1:] + texts[:1], strict=True))
    elif variant == "cut":
        captions = {i: " ".join(text.split()[:4]) for i, text in captions.items()}

    ours = CaptionEvaluator(references).score(captions)
    theirs = by_java(captions, references)

    assert ours.images.keys() == theirs.images.keys()
    for one, other in [(ours.corpus, theirs.corpus)] + [
        (ours.images[i], theirs.images[i]) for i in ours.images
    ]:
        for metric, value in other.items():
            assert one[metric] == pytest.approx(value, abs=1e-6), metric
    assert 0 < theirs.corpus["Bleu_4"] < theirs.corpus["Bleu_1"] < 1
    assert theirs.corpus["CIDEr"] > 0.01


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
