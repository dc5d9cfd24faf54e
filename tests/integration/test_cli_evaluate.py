"""``captioner evaluate`` and ``captioner prepare frequencies``, with models of random weights."""

from __future__ import annotations

import itertools
import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from captioner.cli.main import FAILED, OK, USAGE, main
from captioner.data.coco import read_captions
from captioner.evaluation import api
from captioner.evaluation.metrics import CaptionEvaluator
from captioner.evaluation.references import count_frequencies
from captioner.files import FREQUENCIES
from captioner.inference.folder import load_model
from captioner.text.tokenizer import tokenize

ONE_DOG = ("--forced-words", "dog", "--block-ngrams", "1")
METRICS = ["Bleu_1", "Bleu_2", "Bleu_3", "Bleu_4", "ROUGE_L", "CIDEr"]


def run(*arguments: object) -> int:
    return main([str(argument) for argument in arguments])


def evaluate(*arguments: object) -> int:
    return run("evaluate", *arguments)


def reported(path: Path, *arguments: object) -> dict[str, Any]:
    """Run a command and return its report."""
    target = path / "report.json"
    assert evaluate(*arguments, "-o", target, "--force") == OK
    report: dict[str, Any] = json.loads(target.read_text(encoding="utf-8"))
    return report


@pytest.fixture
def scored(tiny: SimpleNamespace) -> tuple[object, ...]:
    """A results file and its references."""
    return "--annotations", tiny.captions, "--results", tiny.results


@pytest.fixture
def captioned(tiny: SimpleNamespace) -> tuple[object, ...]:
    """A model that captions the photos."""
    return "--images", tiny.photos, "--model", tiny.model


def written(path: Path, content: object) -> Path:
    path.write_text(json.dumps(content))
    return path


# --- a results file ------------------------------------------------------------------------------


def test_a_report_is_printed_and_written(tiny, scored, tmp_path, capsys) -> None:
    target = tmp_path / "new folder" / "report.json"
    assert evaluate(*scored, "-o", target) == USAGE  # no folder is created silently
    target.parent.mkdir()
    capsys.readouterr()

    assert evaluate(*scored, "-o", target) == OK

    out, err = capsys.readouterr()
    report = json.loads(target.read_text())
    captions = {1: "a dog runs", 2: "a man runs", 3: "a man's hat", 4: "the the dog on"}
    expected = CaptionEvaluator(read_captions([tiny.captions])[1]).score(captions)
    assert err == ""
    assert report["metrics"] == pytest.approx(expected.corpus)
    assert list(report["intervals"]) == METRICS
    assert [one["image_id"] for one in report["per_image"]] == [1, 2, 3, 4]
    assert {one["image_id"]: one["caption"] for one in report["per_image"]} == captions
    assert report["per_image"][2]["ROUGE_L"] == pytest.approx(expected.images[3]["ROUGE_L"])
    assert (report["results"], report["annotations"]) == (str(tiny.results), str(tiny.captions))
    assert report["statistics"]["bad_endings"] == report["statistics"]["repeated_words"] == 0.25
    for text in (
        *METRICS,
        "4 images are too few",
        "CIDEr of 4 images",
        "2 to 3 references an image",
    ):
        assert text in out
    assert "images_without_caption" not in report


# --- comparison ----------------------------------------------------------------------------------


def test_compare_reads_results_and_reports(tiny, scored, tmp_path) -> None:
    other = tmp_path / "other.json"
    them = ("--annotations", tiny.captions, "--results", tiny.others)
    assert evaluate(*them, "-o", other) == OK

    by_results = reported(tmp_path, *scored, "--compare", tiny.others)["compare"]
    by_report = reported(tmp_path, *scored, "--compare", other)["compare"]

    assert by_results.pop("with") == str(tiny.others)
    assert by_report.pop("with") == str(other)
    assert by_results == by_report
    assert by_results["images"] == 4
    theirs = json.loads(other.read_text())["metrics"]
    for name in METRICS:
        assert by_results["metrics"][name]["other"] == pytest.approx(theirs[name])


def only_line(capsys: pytest.CaptureFixture[str]) -> str:
    """The one line of an error."""
    out, err = capsys.readouterr()
    (line,) = err.splitlines()
    assert out == ""
    assert line.startswith("captioner: ")
    return line


# --- document frequencies ------------------------------------------------------------------------


@pytest.fixture
def counted(tiny, tmp_path) -> Path:
    """A file written by ``prepare frequencies``."""
    target = tmp_path / "counted.json.gz"
    assert run("prepare", "frequencies", tiny.captions, "-o", target) == OK
    return target


def with_frequencies(tiny: SimpleNamespace, folder: Path, data: bytes) -> Path:
    """A copy of the model with a frequencies file."""
    shutil.copytree(tiny.model, folder)
    (folder / FREQUENCIES).write_bytes(data)
    return folder


def test_all_sources_of_frequencies_are_equal(tiny, scored, counted, tmp_path) -> None:
    model = with_frequencies(tiny, tmp_path / "model", counted.read_bytes())
    run_folder = tmp_path / "run"
    shutil.copytree(tiny.model, run_folder / "best")
    assert run("prepare", "frequencies", tiny.captions, "-o", run_folder) == OK

    reports = [
        reported(tmp_path, *scored, "--frequencies", source)
        for source in (counted, tiny.captions, model, model / FREQUENCIES, run_folder)
    ]

    plain = reported(tmp_path, *scored)
    for report in reports:
        assert report["metrics"] == reports[0]["metrics"]
        assert "CIDEr_D: document frequencies of 4 images" in report["signature"]
        # Counted over the references, they are those of CIDEr.
        assert report["metrics"]["CIDEr_D"] == pytest.approx(plain["metrics"]["CIDEr"])
    assert list(plain["metrics"]) == METRICS


def test_the_model_s_own_frequencies_are_the_default(tiny, counted, tmp_path) -> None:
    others = count_frequencies({n: ["a dog", "the hat"] for n in range(9)})
    model = with_frequencies(tiny, tmp_path / "model", others.to_bytes())
    arguments = ("--images", tiny.photos, "--annotations", tiny.captions, "--model")

    own = reported(tmp_path, *arguments, model)
    given = reported(tmp_path, *arguments, model, "--frequencies", counted)
    none = reported(tmp_path, *arguments, tiny.model)

    assert "document frequencies of 9 images" in own["signature"]
    assert "document frequencies of 4 images" in given["signature"]
    assert own["metrics"].keys() == given["metrics"].keys() == {*METRICS, "CIDEr_D"}
    assert list(none["metrics"]) == METRICS


# --- generated captions --------------------------------------------------------------------------


def test_captions_equal_those_of_caption(tiny, captioned, tmp_path) -> None:
    search = ("--beam-size", "3", "--forced-words", "dog, hat", "--precision", "fp32")
    report = reported(tmp_path, *captioned, "--annotations", tiny.captions, *search)

    target = tmp_path / "results.json"
    command = ("caption", tiny.photos, "--model", tiny.model, *search)
    assert run(*command, "--format", "coco", "-o", target) == OK

    captions = {one["image_id"]: one["caption"] for one in json.loads(target.read_text())}
    assert {one["image_id"]: one["caption"] for one in report["per_image"]} == captions
    assert all({"dog", "hat"} <= set(tokenize(text)) for text in captions.values())
    again = reported(tmp_path, "--annotations", tiny.captions, "--results", target)
    assert again["metrics"] == report["metrics"]
    assert again["signature"] == report["signature"]


def test_an_unreadable_photo_is_named_and_counted(tiny, tmp_path, capsys) -> None:
    photos, target = tmp_path / "photos", tmp_path / "report.json"
    shutil.copytree(tiny.photos, photos)
    (photos / "3.png").write_bytes(b"no photo")
    arguments = ("--images", photos, "--model", tiny.model, "--annotations", tiny.captions)

    assert evaluate(*arguments, "--instances", tiny.instances, "-o", target) == FAILED

    (line,) = capsys.readouterr().err.splitlines()
    assert "3.png" in line
    report = json.loads(target.read_text())
    assert [one["image_id"] for one in report["per_image"]] == [1, 2, 4]
    assert report["images_without_caption"] == 1
    assert report["attention"]["photos"] == 3


# --- attention -----------------------------------------------------------------------------------


def test_attention_is_measured_with_and_without_references(tiny, captioned, tmp_path) -> None:
    arguments = (*captioned, "--instances", tiny.instances, *ONE_DOG)

    alone = reported(tmp_path, *arguments)
    scored_too = reported(tmp_path, *arguments, "--annotations", tiny.captions)

    assert "metrics" not in alone
    assert list(scored_too["metrics"]) == [*METRICS, "CHAIR_i", "CHAIR_s"]
    assert alone["attention"] == scored_too["attention"]
    found = alone["attention"]
    assert (found["photos"], found["measured"]) == (4, 3)
    assert found["absent"] >= 1  # photo 4 contains no dog
    assert found["names"] == sum(found[k] for k in ("measured", "absent", "unseen", "ignored"))
    assert [one["image_id"] for one in found["per_name"]] == [1, 2, 3]
    assert {one["category"] for one in found["per_name"]} == {"dog"}
    # The crop has 32 of 40 columns, from the 4th on; the first 16 of them are dog.
    _, columns = load_model(tiny.model).model.geometry.placed(64, 4 / 40, 0, 36 / 40, 1)
    borders = 40 * columns.borders(2)
    inside = [(min(20, b) - min(20, a)) / (b - a) for a, b in itertools.pairwise(borders)]
    assert found["uniform"] == pytest.approx(sum(inside) / 2)
    assert 0 < found["correctness"] < 1


def test_inconsistent_image_ids_are_refused(tiny, captioned, tmp_path, capsys) -> None:
    """Otherwise attention on one photo would be compared with the masks of another."""
    content = json.loads(tiny.instances.read_text())
    names = [image["file_name"] for image in content["images"]]
    for image, name in zip(content["images"], names[::-1], strict=True):
        image["file_name"] = name
    instances = written(tmp_path / "turned.json", content)

    given = ("--instances", instances, "--annotations", tiny.captions)
    assert evaluate(*captioned, *given) == FAILED
    line = only_line(capsys)
    assert "1.png" in line
    assert "4.png" in line


# --- hallucinated objects ------------------------------------------------------------------------


def test_hallucinated_objects_are_counted(tiny, tmp_path, capsys) -> None:
    content = json.loads(tiny.instances.read_text())
    content["images"] = content["images"][:3]
    instances = written(tmp_path / "instances.json", content)
    texts = {1: "a dog and a zebra", 2: "some grass", 4: "a zebra"}
    results = [{"image_id": i, "caption": text} for i, text in texts.items()]
    given = ("--annotations", tiny.captions, "--results", written(tmp_path / "r.json", results))

    by_both = reported(tmp_path, *given, "--instances", instances, "--compare", tiny.others)
    text = capsys.readouterr().out
    by_references = reported(tmp_path, *given, "--chair")

    names = {one["image_id"]: one["CHAIR_i"] for one in by_both["per_image"]}
    assert names == {1: 0.5, 2: None, 4: 1}
    assert by_both["metrics"]["CHAIR_i"] == by_both["metrics"]["CHAIR_s"] == pytest.approx(2 / 3)
    assert by_both["compare"]["metrics"]["CHAIR_s"]["this"] == pytest.approx(2 / 3)
    assert "share of the captions that name such an object" in text
    assert "1 of 3 photos have no annotated objects" in text
    assert "3 of 3 photos have no annotated objects" in by_references["warnings"][-1]
    assert by_references["metrics"]["CHAIR_i"] == pytest.approx(2 / 3)


# --- neutral words -------------------------------------------------------------------------------


def test_references_are_neutral_if_the_captions_are(tiny, tmp_path) -> None:
    results = [{"image_id": 2, "caption": "a person runs"}]
    given = ("--annotations", tiny.captions, "--results", written(tmp_path / "r.json", results))

    plain = reported(tmp_path, *given)
    neutral = reported(tmp_path, *given, "--neutral")

    assert neutral["metrics"]["Bleu_1"] > plain["metrics"]["Bleu_1"]
    assert "neutral" in neutral["references"]
    assert neutral["signature"] != plain["signature"]


# --- METEOR and SPICE ----------------------------------------------------------------------------


def false_java(folder: Path, monkeypatch: pytest.MonkeyPatch, script: str | None) -> None:
    """Put a ``java`` script on the PATH; None: no java."""
    programs = folder / "bin"
    programs.mkdir()
    monkeypatch.setenv("PATH", f"{programs}:/usr/bin:/bin" if script else str(programs))
    if script:
        (programs / "java").write_text(f"#!/bin/sh\n{script}\n")
        (programs / "java").chmod(0o755)


def test_missing_java_is_an_error_before_photos_are_captioned(
    tiny, captioned, tmp_path, monkeypatch, capsys
) -> None:
    false_java(tmp_path, monkeypatch, None)
    monkeypatch.setattr(api, "load", None)

    code = evaluate("--annotations", tiny.captions, *captioned, "--meteor")

    assert code == USAGE
    assert only_line(capsys) == (
        "captioner: METEOR needs Java, which is not on the PATH; install Java 8 or 11, or omit "
        "--meteor"
    )


def test_a_failing_java_skips_meteor(scored, tmp_path, monkeypatch, capsys) -> None:
    false_java(tmp_path, monkeypatch, "echo Error: no memory >&2; exit 1")
    target = tmp_path / "report.json"

    assert evaluate(*scored, "--meteor", "-o", target) == FAILED

    out, err = capsys.readouterr()
    (line,) = err.splitlines()
    assert "METEOR's Java program stopped (Error: no memory)" in line
    assert line.endswith("; continuing with the other metrics")
    report = json.loads(target.read_text())
    assert list(report["metrics"]) == METRICS
    assert "METEOR" not in report["signature"]
    assert "CIDEr" in out
