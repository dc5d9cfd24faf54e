"""``captioner calibrate`` and the confidence of captions, with a random model."""

from __future__ import annotations

import csv
import io
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from PIL import Image

from captioner import load
from captioner.cli.main import FAILED, OK, USAGE, main
from captioner.inference.folder import CONFIDENCE, fingerprint

COUNT = 120


def run(*arguments: object) -> int:
    return main([str(argument) for argument in arguments])


@pytest.fixture(scope="module")
def own(tiny: SimpleNamespace, tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    """Photos; for every second one, the references are the model's own captions."""
    folder = tmp_path_factory.mktemp("own")
    (folder / "photos").mkdir()
    random = np.random.default_rng(0)
    for number in range(COUNT):
        pixels = random.integers(256, size=(32, 40, 3)) * random.random(3)
        path = folder / "photos" / f"{number}.png"
        Image.fromarray(pixels.astype(np.uint8)).save(path)
    paths = [folder / "photos" / f"{number}.png" for number in range(COUNT)]
    model = folder / "model"
    shutil.copytree(tiny.model, model)
    found = load(model, precision="fp32").caption(paths)
    texts = [
        caption.text if number % 2 else "two men in the rain at night"
        for number, caption in enumerate(found)
    ]
    content = {
        "images": [{"id": n, "file_name": path.name} for n, path in enumerate(paths)],
        "annotations": [{"id": n, "image_id": n, "caption": t} for n, t in enumerate(texts)],
    }
    captions = folder / "captions.json"
    captions.write_text(json.dumps(content))
    assert run("prepare", "frequencies", tiny.captions, captions, "-o", model) == OK
    arguments = ("--annotations", captions, "--images", folder / "photos", "--precision", "fp32")
    calibrated = folder / "calibrated"
    shutil.copytree(model, calibrated)
    outputs = ("-o", folder / "report.json", "--diagram", folder / "diagram.png")
    assert run("calibrate", "--model", calibrated, *arguments, *outputs) == OK
    return SimpleNamespace(
        folder=folder, model=model, calibrated=calibrated, arguments=arguments, photos=paths,
        captions=captions,
    )  # fmt: skip


@pytest.fixture
def caption(own: SimpleNamespace, capsys: Any) -> Callable[..., tuple[int, str, str]]:
    """``caption("--format", "csv")``: exit code, standard output and standard error."""

    def call(*arguments: object, model: Path = own.calibrated) -> tuple[int, str, str]:
        capsys.readouterr()
        photos = own.photos[:4]
        code = run("caption", *photos, "--model", model, "--precision", "fp32", *arguments)
        return code, *capsys.readouterr()

    return call


# --- calibrate -----------------------------------------------------------------------------------


def test_the_report_and_the_diagram(own) -> None:
    report = json.loads((own.folder / "report.json").read_text())

    (group,) = report["groups"].values()
    assert group["photos"] == COUNT
    assert 0.4 <= group["right"] <= 0.6
    assert 0 <= group["calibration_error"] <= 1
    assert group["coverage"]["1"] == pytest.approx(1)
    assert report["words"]["doubtful"] + report["words"]["others"] > COUNT
    with Image.open(own.folder / "diagram.png") as diagram:
        assert diagram.format == "PNG"
        assert diagram.width > diagram.height


def test_captions_are_unchanged_but_have_a_confidence(own) -> None:
    before = load(own.model, precision="fp32").caption(own.photos[:8])
    after = load(own.calibrated, precision="fp32").caption(own.photos[:8])

    assert [one.text for one in after] == [one.text for one in before]
    assert all(one.confidence is None for one in before)
    assert all(0 <= one.confidence <= 1 for one in after)
    assert len({one.confidence for one in after}) > 1


def test_check_measures_the_confidence_of_captions(own, capsys, tmp_path) -> None:
    target = tmp_path / "check.json"
    before = fingerprint(own.calibrated)

    code = run("calibrate", "--check", "--model", own.calibrated, *own.arguments, "-o", target)

    assert code == OK
    assert fingerprint(own.calibrated) == before
    (group,) = json.loads(target.read_text())["groups"].values()
    confidences = [c.confidence for c in load(own.calibrated, precision="fp32").caption(own.photos)]
    found = sum(one["photos"] * one["confidence"] for one in group["bins"]) / COUNT
    assert found == pytest.approx(np.mean(confidences), abs=1e-4)
    assert "calibration error" in capsys.readouterr().out


def test_calibrating_again_needs_force_and_gives_the_same(own, capsys, tmp_path) -> None:
    model = tmp_path / "model"
    shutil.copytree(own.calibrated, model)
    command = ("calibrate", "--model", model, *own.arguments)

    assert run(*command) == USAGE
    assert "is calibrated already; give --force" in capsys.readouterr().err
    assert run(*command, "--force") == OK
    assert (model / CONFIDENCE).read_bytes() == (own.calibrated / CONFIDENCE).read_bytes()


def test_judged_captions_take_the_place_of_references(own, tmp_path, capsys) -> None:
    model, table = tmp_path / "model", tmp_path / "judged.csv"
    shutil.copytree(own.model, model)
    found = load(model, precision="fp32").caption(own.photos)
    rows = [
        (path.name, caption.text, grade)
        for number, (path, caption) in enumerate(zip(own.photos, found, strict=True))
        for grade in ("right", "right" if number % 2 else "partly")  # by two people
    ]
    rows[0] = rows[1] = (rows[0][0], "of a model before", "right")
    with table.open("w", newline="") as file:
        csv.writer(file).writerows(
            [("image", "caption", "grade"), *rows, (own.photos[0].name, "unjudged", "")]
        )
    command = ("calibrate", "--model", model, "--precision", "fp32", "--judged", table)
    command = (*command, "--images", own.folder / "photos")

    assert run(*command, "-o", tmp_path / "report.json") == OK

    report = json.loads((tmp_path / "report.json").read_text())
    assert report["judged_otherwise"] == 1
    assert report["groups"][""]["right"] == pytest.approx(60 / 119)
    assert report["groups"][""]["score"] == pytest.approx((60 + 59 * 0.75) / 119)
    assert run(*command, "--check") == OK
    assert run("calibrate", "--check", "--model", model, *own.arguments) == USAGE
    assert "fitted to judgements" in capsys.readouterr().err


@pytest.mark.parametrize(
    "text", ["image,caption\n0.png,a\n", "image,caption,grade\n0.png,a,good\n"]
)
def test_unusable_judgements_are_one_line(own, tmp_path, capsys, text) -> None:
    table = tmp_path / "judged.csv"
    table.write_text(text)
    images = ("--images", own.folder / "photos")

    assert run("calibrate", "--model", own.model, "--judged", table, *images) != OK
    assert "judged.csv:2" in capsys.readouterr().err


def test_training_photos_are_not_used_for_calibration(own, tmp_path, capsys) -> None:
    model = tmp_path / "model"
    shutil.copytree(own.model, model)

    code = run("calibrate", "--model", model, *own.arguments, "--train-annotations", own.captions)

    assert code == FAILED
    assert "0 training photos that are not calibrated with are too few" in capsys.readouterr().err
    assert not (model / CONFIDENCE).exists()


def test_the_temperature_is_that_of_the_logits(own, capsys) -> None:
    assert run("calibrate", "--model", own.model, *own.arguments, "--temperature", 1) == USAGE
    assert "--temperature is 1.0; confidence is" in capsys.readouterr().err
    assert not (own.model / CONFIDENCE).exists()


def test_a_broken_photo_is_reported_and_skipped(own, capsys, tmp_path) -> None:
    photos, model = tmp_path / "photos", tmp_path / "model"
    shutil.copytree(own.folder / "photos", photos)
    shutil.copytree(own.model, model)
    (photos / "7.png").write_bytes(b"\x89PNG")
    capsys.readouterr()

    code = run("calibrate", "--model", model, "--annotations", own.captions, "--images", photos)

    out, error = capsys.readouterr()
    assert code == FAILED
    assert "7.png" in error
    assert "119" in out
    assert (model / CONFIDENCE).exists()


# --- captions ------------------------------------------------------------------------------------


def test_unsure_captions_are_marked_in_text(caption) -> None:
    code, plain, _ = caption()
    _, all_unsure, _ = caption("--min-confidence", 1)
    _, none_unsure, _ = caption("--min-confidence", 0)

    assert code == OK
    assert none_unsure == plain
    assert "unsure" not in plain
    for before, after in zip(plain.splitlines(), all_unsure.splitlines(), strict=True):
        text, mark = after.split(" (unsure: ")
        assert text == before
        assert 0 <= float(mark.removesuffix(")")) < 1


def test_unsure_captions_are_left_out_or_hedged(caption) -> None:
    _, out, _ = caption("--format", "json")
    plain = {one["image"]: one["captions"][0] for one in json.loads(out)}
    least = float(np.median([best["confidence"] for best in plain.values()]))
    options = ("--min-confidence", least, "--format", "json", "--if-unsure")

    code, skipped, error = caption(*options, "skip")
    _, hedged, _ = caption(*options, "hedge")

    assert code == OK
    unsure = 0
    for one, other in zip(json.loads(skipped), json.loads(hedged), strict=True):
        best = plain[one["image"]]
        if best["confidence"] < least:
            unsure += 1
            assert one["captions"] == []
            assert other["captions"][0]["text"].endswith(f"perhaps {best['text']}")
        else:
            assert one["captions"] == other["captions"] == [best]
    assert f"left out {unsure} caption" in error


def test_confidence_in_json_and_csv(caption) -> None:
    _, out, _ = caption("--format", "json", "--num-captions", 2, "--min-confidence", 0.5)
    best, second = json.loads(out)[0]["captions"]
    _, table, _ = caption("--format", "csv", "--num-captions", 2, "--min-confidence", 0.5)
    rows = list(csv.DictReader(io.StringIO(table)))

    assert best["unsure"] is (best["confidence"] < 0.5)
    assert (second["confidence"], second["unsure"]) == (None, None)
    assert all(np.exp(best["log_probs"][i]) < 0.25 for i in best["doubtful"]), (
        "doubtful words are improbable"
    )
    assert float(rows[0]["confidence"]) == best["confidence"]
    assert rows[0]["unsure"] == ("yes" if best["unsure"] else "no")
    assert (rows[1]["confidence"], rows[1]["unsure"]) == ("", "")
    _, plain, _ = caption("--format", "csv")
    assert plain.splitlines()[0] == "image,rank,caption,log_prob,confidence"


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--temperature", "0.7"], "the model is calibrated for temperature 0.0; leave out temp"),
        (["--beam-size", "1"], "the model is calibrated for --beam-size 2; leave out --beam-size"),
        (["--banned-words", "dog"], "the model is calibrated for --banned-words none"),
        (["--format", "coco"], "marks captions in text, JSON and CSV, not --format coco"),
        (["--sidecar", "txt"], "marks captions in text, JSON and CSV, not --sidecar"),
    ],
)
def test_options_without_a_confidence(caption, arguments, expected) -> None:
    code, _, error = caption("--min-confidence", 0.5, *arguments)

    assert code == USAGE
    assert expected in error
    assert error.count("\n") == 1


def test_only_beam_searches_have_a_confidence(own) -> None:
    model = load(own.calibrated, precision="fp32")
    photo = own.photos[0]

    assert model.caption(photo, beam_size=1).confidence is None
    assert model.explain(photo, "a dog runs").confidence is None
    assert model.caption(photo, beam_size=4).confidence is not None
    assert [c.confidence is None for c in model.captions(photo, num_captions=2)] == [False, True]
