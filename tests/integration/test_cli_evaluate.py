"""``captioner evaluate`` and ``captioner prepare frequencies``, with models of random weights.

The numbers of reports are those of tests/golden and tests/unit/evaluation.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny_data import write_captions

import captioner
from captioner.cli.main import NOT_DONE, OK, SOME_FAILED
from captioner.evaluation import api
from captioner.evaluation.grounding import region_coverage
from captioner.evaluation.references import count_frequencies
from captioner.inference.names import FREQUENCIES
from captioner.text.tokenizer import tokenize

METRICS = ["Bleu_1", "Bleu_2", "Bleu_3", "Bleu_4", "ROUGE_L", "CIDEr"]
METRICS += ["supported_words", "supported_captions", "agreement", "length"]
Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def reported(run: Run, tmp_path: Path) -> Callable[..., dict[str, Any]]:
    """The report of the command with these arguments."""

    def report(*arguments: object) -> dict[str, Any]:
        target = tmp_path / "report.json"
        assert run("evaluate", *arguments, "-o", target, "--force")[0] == OK
        found: dict[str, Any] = json.loads(target.read_text(encoding="utf-8"))
        return found

    return report


@pytest.fixture
def scored(tiny) -> tuple[object, ...]:
    """A results file and its references."""
    return "--annotations", tiny.captions, "--results", tiny.results


@pytest.fixture
def captioned(tiny) -> tuple[object, ...]:
    """A model that captions the photos."""
    return "--images", tiny.photos, "--model", tiny.model


def written(path: Path, content: object) -> Path:
    path.write_text(json.dumps(content))
    return path


# --- a results file ------------------------------------------------------------------------------


def test_a_report_is_printed_and_written(tiny, scored, tmp_path, run) -> None:
    target = tmp_path / "new folder" / "report.json"
    assert run("evaluate", *scored, "-o", target)[0] == NOT_DONE  # no folder is created silently
    target.parent.mkdir()

    code, out, err = run("evaluate", *scored, "-o", target)

    report = json.loads(target.read_text())
    assert (code, err) == (OK, "")
    assert (report["results"], report["annotations"]) == (str(tiny.results), str(tiny.captions))
    for text in (*METRICS, "4 images are too few", "CIDEr of 4 images", "2 to 3 references"):
        assert text in out


def test_compare_reads_results_and_reports(tiny, scored, tmp_path, run, reported) -> None:
    other = tmp_path / "other.json"
    them = ("--annotations", tiny.captions, "--results", tiny.others)
    assert run("evaluate", *them, "-o", other)[0] == OK

    found = [reported(*scored, "--compare", one)["compare"] for one in (tiny.others, other)]

    assert [one.pop("with") for one in found] == [str(tiny.others), str(other)]
    assert found[0] == found[1]
    theirs = json.loads(other.read_text())["metrics"]
    for name in METRICS:
        assert found[0]["metrics"][name]["other"] == pytest.approx(theirs[name])


def test_references_are_neutral_if_the_captions_are(tiny, tmp_path, reported) -> None:
    results = written(tmp_path / "r.json", [{"image_id": 2, "caption": "a person runs"}])
    given = ("--annotations", tiny.captions, "--results", results)

    plain, neutral = reported(*given), reported(*given, "--neutral")

    assert neutral["metrics"]["Bleu_1"] > plain["metrics"]["Bleu_1"]
    assert "neutral" in neutral["references"]
    assert neutral["signature"] != plain["signature"]


# --- document frequencies ------------------------------------------------------------------------


def test_all_sources_of_frequencies_are_equal(tiny, scored, tmp_path, run, reported) -> None:
    """A file, references, a model and a run; a model's own are the default for its captions."""
    counted, best = tmp_path / "counted.json.gz", tmp_path / "run" / "best"
    shutil.copytree(tiny.model, best)
    for target in (counted, best.parent):
        assert run("prepare", "frequencies", tiny.captions, "-o", target)[0] == OK
    sources = (counted, tiny.captions, best.parent, best, best / FREQUENCIES)

    reports = [reported(*scored, "--frequencies", source) for source in sources]

    assert list(reported(*scored)["metrics"]) == METRICS
    for report in reports:
        assert report["metrics"] == reports[0]["metrics"]
        assert "CIDEr_D: document frequencies of 4 images" in report["signature"]

    others = count_frequencies({n: ["a dog", "the hat"] for n in range(9)})
    (best / FREQUENCIES).write_bytes(others.to_bytes())
    generated = ("--images", tiny.photos, "--annotations", tiny.captions, "--model")
    own, given = (reported(*generated, best, *x) for x in ((), ("--frequencies", counted)))
    assert "document frequencies of 9 images" in own["signature"]
    assert "document frequencies of 4 images" in given["signature"]
    assert list(reported(*generated, tiny.model)["metrics"]) == METRICS


# --- generated captions --------------------------------------------------------------------------


def test_captions_equal_those_of_caption(tiny, captioned, tmp_path, run, reported) -> None:
    search = ("--beam-size", "3", "--forced-words", "dog, hat", "--precision", "fp32")
    report = reported(*captioned, "--annotations", tiny.captions, *search)

    target = tmp_path / "results.json"
    command = ("caption", tiny.photos, "--model", tiny.model, *search)
    assert run(*command, "--format", "coco", "-o", target)[0] == OK

    captions = {one["image_id"]: one["caption"] for one in json.loads(target.read_text())}
    assert {one["image_id"]: one["caption"] for one in report["per_image"]} == captions
    assert all({"dog", "hat"} <= set(tokenize(text)) for text in captions.values())
    again = reported("--annotations", tiny.captions, "--results", target)
    assert again["metrics"] == report["metrics"]
    assert again["signature"] == report["signature"]


def test_an_unreadable_photo_is_named_and_counted(tiny, tmp_path, run) -> None:
    photos, target = tmp_path / "photos", tmp_path / "report.json"
    shutil.copytree(tiny.photos, photos)
    (photos / "3.png").write_bytes(b"no photo")
    arguments = ("--images", photos, "--model", tiny.model, "--annotations", tiny.captions)

    code, _, err = run("evaluate", *arguments, "--instances", tiny.instances, "-o", target)

    (line,) = err.splitlines()
    assert (code, "3.png" in line) == (SOME_FAILED, True)
    report = json.loads(target.read_text())
    assert [one["image_id"] for one in report["per_image"]] == [1, 2, 4]
    assert report["images_without_caption"] == 1
    assert report["attention"]["photos"] == 3


# --- attention and objects -----------------------------------------------------------------------


def test_attention_is_measured_with_and_without_references(tiny, captioned, reported) -> None:
    one_dog = ("--forced-words", "dog", "--block-ngrams", "1")
    arguments = (*captioned, "--instances", tiny.instances, *one_dog)

    alone = reported(*arguments)
    scored_too = reported(*arguments, "--annotations", tiny.captions)

    assert "metrics" not in alone
    assert list(scored_too["metrics"]) == [*METRICS, "CHAIR_i", "CHAIR_s"]
    found = alone["attention"]
    assert found == scored_too["attention"]
    assert (found["photos"], found["measured"]) == (4, 3)  # photo 4 contains no dog
    assert [one["image_id"] for one in found["per_name"]] == [1, 2, 3]
    assert {one["category"] for one in found["per_name"]} == {"dog"}
    assert 0 < found["correctness"] < 1


def test_inconsistent_image_ids_are_refused(tiny, captioned, tmp_path, run) -> None:
    """Otherwise attention on one photo would be compared with the masks of another."""
    content = json.loads(tiny.instances.read_text())
    names = [image["file_name"] for image in content["images"]]
    for image, name in zip(content["images"], names[::-1], strict=True):
        image["file_name"] = name
    instances = written(tmp_path / "turned.json", content)

    given = ("--instances", instances, "--annotations", tiny.captions)
    code, out, err = run("evaluate", *captioned, *given)
    assert (code, out, err.count("\n")) == (NOT_DONE, "", 1)
    assert "1.png" in err
    assert "4.png" in err


def test_hallucinated_objects_are_counted(tiny, tmp_path, reported) -> None:
    content = json.loads(tiny.instances.read_text())
    content["images"] = content["images"][:3]
    instances = written(tmp_path / "instances.json", content)
    texts = {1: "a dog and a zebra", 2: "some grass", 4: "a zebra"}
    results = [{"image_id": i, "caption": text} for i, text in texts.items()]
    given = ("--annotations", tiny.captions, "--results", written(tmp_path / "r.json", results))

    by_both = reported(*given, "--instances", instances, "--compare", tiny.others)
    by_references = reported(*given, "--chair")
    photos = {"1.png": [1, [1]], "2.png": [2, [1]], "3.png": [3, [1]]}
    objects = written(tmp_path / "o.json", {"classes": ["person", "dog"], "photos": photos})
    by_objects = reported(*given, "--objects", objects)

    names = {one["image_id"]: one["CHAIR_i"] for one in by_both["per_image"]}
    assert names == {1: 0.5, 2: None, 4: 1}
    assert by_both["metrics"]["CHAIR_i"] == by_both["metrics"]["CHAIR_s"] == pytest.approx(2 / 3)
    assert by_both["compare"]["metrics"]["CHAIR_s"]["this"] == pytest.approx(2 / 3)
    assert by_objects["metrics"] == by_both["metrics"]
    assert "1 of 3 photos have no annotated objects" in by_objects["warnings"][-1]
    assert "3 of 3 photos have no annotated objects" in by_references["warnings"][-1]
    assert by_references["metrics"]["CHAIR_i"] == pytest.approx(2 / 3)


def test_attention_is_measured_in_boxes_of_phrases(tiny, captioned, tmp_path, run, reported):
    """Of all photos in the folder with phrases, or of those that are scored."""
    boxes = {"left": [[0, 0, 20, 32]]}  # the left half of each photo
    texts = {"2.png": "A man runs .", "4.png": "The man runs on the grass", "other.png": "A dog"}
    entries = {
        name: {
            "width": 40,
            "height": 32,
            "boxes": boxes,
            "captions": [{"words": text, "phrases": [[0, 2, "left"]]}],
        }
        for name, text in texts.items()
    }
    given = (*captioned, "--phrases", written(tmp_path / "phrases.json", entries))
    one = write_captions(tmp_path / "one.json", {"4.png": ["A man."]}, first=4)

    alone, scored_too = reported(*given), reported(*given, "--annotations", one)

    assert "metrics" not in alone
    model, found = captioner.load(tiny.model), alone["phrase_attention"]["per_phrase"]
    assert [(one["photo"], one["text"]) for one in found] == [("2.png", "man"), ("4.png", "man")]
    for row in found:
        expected = model.explain(tiny.photos / row["photo"], texts[row["photo"]])
        left = np.arange(40) < np.full((32, 1), 20)
        share = (expected.alphas[1] * region_coverage(left, expected.regions, (2, 2))).sum()
        assert row["correctness"] == pytest.approx(share, abs=1e-4)
    assert scored_too["phrase_attention"]["per_phrase"] == found[1:]
    assert list(scored_too["metrics"]) == METRICS

    stranger = written(tmp_path / "stranger.json", {"other.png": entries["other.png"]})
    code, _, err = run("evaluate", *captioned, "--phrases", stranger)
    assert (code, err.count("\n")) == (NOT_DONE, 1)
    assert "has no phrases for the photos in" in err


# --- METEOR and SPICE ----------------------------------------------------------------------------


def test_missing_java_is_an_error_before_photos_are_captioned(
    tiny, captioned, tmp_path, monkeypatch, run
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(api, "load", None)

    code, _, err = run("evaluate", "--annotations", tiny.captions, *captioned, "--meteor")

    assert (code, err.count("\n")) == (NOT_DONE, 1)
    assert "but no java program is on the PATH; install Java, or leave out" in err


def test_a_failing_java_skips_meteor(scored, tmp_path, monkeypatch, run) -> None:
    (tmp_path / "java").write_text("#!/bin/sh\necho Error: no memory >&2; exit 1\n")
    (tmp_path / "java").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    target = tmp_path / "report.json"

    code, out, err = run("evaluate", *scored, "--meteor", "-o", target)

    (line,) = err.splitlines()
    assert (code, "CIDEr" in out) == (SOME_FAILED, True)
    assert line.endswith("; continuing with the other metrics")
    report = json.loads(target.read_text())
    assert list(report["metrics"]) == METRICS
    assert "METEOR" not in report["signature"]
