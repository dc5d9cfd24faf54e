"""``captioner calibrate`` and the confidence of captions, with a random model."""

from __future__ import annotations

import csv
import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from PIL import Image
from tiny_data import noise_photos, write_captions

from captioner import load
from captioner.cli.main import NOT_DONE, OK, SOME_FAILED, main
from captioner.data.images import open_image
from captioner.inference.captioner import Captioner
from captioner.inference.folder import fingerprint
from captioner.inference.names import CONFIDENCE
from captioner.inference.reading import Reading
from captioner.search.worth import FUNCTION_WORD
from captioner.text.content import stem

COUNT = 120
Run = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="module")
def own(tiny: SimpleNamespace, tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    """Photos; for every second one, the references are the model's own captions."""
    folder = tmp_path_factory.mktemp("own")
    model, calibrated = folder / "model", folder / "calibrated"
    shutil.copytree(tiny.model, model)
    photos = noise_photos(folder / "photos", [f"{n}.png" for n in range(COUNT)], (40, 32))
    found = load(model, precision="fp32").caption(photos)
    texts = [
        caption.text if number % 2 else "two men in the rain at night"
        for number, caption in enumerate(found)
    ]
    references = {photo.name: [text] for photo, text in zip(photos, texts, strict=True)}
    captions = write_captions(folder / "captions.json", references, first=0)
    arguments = ("--annotations", captions, "--images", folder / "photos", "--precision", "fp32")
    outputs = ("-o", folder / "report.json", "--diagram", folder / "diagram.png")
    count = ("prepare", "frequencies", tiny.captions, captions, "-o", model)
    assert main([*map(str, count)]) == OK
    shutil.copytree(model, calibrated)
    command = ("calibrate", "--model", calibrated, *arguments, *outputs)
    assert main([*map(str, command)]) == OK
    return SimpleNamespace(
        folder=folder, model=model, calibrated=calibrated, arguments=arguments, photos=photos,
        captions=captions, texts=[caption.text for caption in found],
    )  # fmt: skip


@pytest.fixture
def model(own: SimpleNamespace, tmp_path: Path) -> Path:
    """A copy of the model that is not calibrated."""
    return Path(shutil.copytree(own.model, tmp_path / "model"))


@pytest.fixture
def caption(own: SimpleNamespace, run: Run) -> Run:
    """Captions of four photos with the calibrated model."""
    common = (*own.photos[:4], "--model", own.calibrated, "--precision", "fp32")
    return lambda *arguments: run("caption", *common, *arguments)


# --- calibrate -----------------------------------------------------------------------------------


def test_captions_stay_and_get_a_confidence(own) -> None:
    (group,) = json.loads((own.folder / "report.json").read_text())["groups"].values()
    assert group["photos"] == COUNT
    assert 0.4 <= group["right"] <= 0.6
    with Image.open(own.folder / "diagram.png") as diagram:
        assert diagram.size == (400, 400)
    model, photo = load(own.calibrated, precision="fp32"), own.photos[0]
    found = model.caption(own.photos[:8])
    assert [one.text for one in found] == own.texts[:8]
    assert all(0 <= one.confidence <= 1 for one in found)
    assert len({one.confidence for one in found}) > 1

    assert model.caption(photo, beam_size=1).confidence is None
    assert model.explain(photo, "a dog runs").confidence is None
    assert model.caption(photo, beam_size=4).confidence is not None
    assert [c.confidence is None for c in model.captions(photo, num_captions=2)] == [False, True]


def test_check_measures_the_confidence_of_captions(own, run, tmp_path) -> None:
    target = tmp_path / "check.json"
    before = fingerprint(own.calibrated)

    code, out, _ = run(
        "calibrate", "--check", "--model", own.calibrated, *own.arguments, "-o", target
    )

    assert (code, "calibration error" in out) == (OK, True)
    assert fingerprint(own.calibrated) == before
    (group,) = json.loads(target.read_text())["groups"].values()
    confidences = [c.confidence for c in load(own.calibrated, precision="fp32").caption(own.photos)]
    found = sum(one["photos"] * one["confidence"] for one in group["bins"]) / COUNT
    assert found == pytest.approx(np.mean(confidences), abs=1e-4)


def test_calibrating_again_needs_force_and_gives_the_same(own, run, tmp_path) -> None:
    model = Path(shutil.copytree(own.calibrated, tmp_path / "model"))
    command = ("calibrate", "--model", model, *own.arguments)

    code, _, err = run(*command)
    assert (code, "is already calibrated; add --force" in err) == (NOT_DONE, True)
    assert run(*command, "--force")[0] == OK
    assert (model / CONFIDENCE).read_bytes() == (own.calibrated / CONFIDENCE).read_bytes()


def test_judged_captions_take_the_place_of_references(own, model, run, tmp_path) -> None:
    table, images = tmp_path / "judged.csv", ("--images", own.folder / "photos")
    rows = [
        (path.name, text, grade)
        for number, (path, text) in enumerate(zip(own.photos, own.texts, strict=True))
        for grade in ("right", "right" if number % 2 else "partly")  # by two people
    ]
    rows[0] = rows[1] = (rows[0][0], "of a model before", "right")
    with table.open("w", newline="") as file:
        csv.writer(file).writerows(
            [("image", "caption", "grade"), *rows, (own.photos[0].name, "unjudged", "")]
        )
    command = ("calibrate", "--model", model, "--precision", "fp32", "--judged", table, *images)

    assert run(*command, "-o", tmp_path / "report.json")[0] == OK

    report = json.loads((tmp_path / "report.json").read_text())
    assert report["judged_otherwise"] == 1
    assert report["groups"][""]["right"] == pytest.approx(60 / 119)
    assert report["groups"][""]["score"] == pytest.approx((60 + 59 * 0.75) / 119)
    assert run(*command, "--check")[0] == OK
    code, _, err = run("calibrate", "--check", "--model", model, *own.arguments)
    assert (code, "set judged to" in err) == (NOT_DONE, True)

    for text in ("image,caption\n0.png,a\n", "image,caption,grade\n0.png,a,good\n", "caf\xe9\n"):
        table.write_text(text, encoding="latin-1")
        code, _, err = run(*command, "--force")
        assert (code != OK, "judged.csv" in err) == (True, True)


def test_what_a_model_cannot_be_calibrated_with(own, model, run) -> None:
    """Other images of a single kind, objects of another form, another search than in use."""
    shutil.copytree(own.folder / "photos", model / "kinds" / "one")
    (model / "objects.json").write_text("[1]")
    for options, problem in (
        (("--other-images", model / "kinds"), "has 1 subfolder with images; use two or more"),
        (("--objects", model / "objects.json"), "objects.json"),
        (("--temperature", 1), "temperature is 1.0, but sampled captions"),
    ):
        code, _, err = run("calibrate", "--model", model, *own.arguments, *options)
        assert code == NOT_DONE
        assert problem in err
        assert not (model / CONFIDENCE).exists()


@pytest.mark.slow
def test_words_of_a_model_with_a_reading_have_a_truth(own, model, run, tmp_path, monkeypatch):
    """The truth comes from annotations, the confidence from judgements, 0 from other images."""
    plain = load(model, precision="fp32")
    true = {plain.prepare(open_image(path)).seed for path in own.photos[1::2]}

    def rows(self: Captioner) -> np.ndarray:
        """All content words have one row."""
        words = [self.stored.vocabulary.shown([n])[0] for n in range(len(self.stored.vocabulary))]
        return np.array([FUNCTION_WORD if stem(word) is None else 0 for word in words])

    def encode(self: Captioner, *arguments: Any) -> Any:
        """Its log-odds say which references are captions."""
        encoded = plain_encode(self, *arguments)
        z = [(seed in true) + np.random.default_rng(seed).normal() / 2 for seed in encoded.seeds]
        z = np.array(z, np.float32)[:, None]
        return encoded._replace(reading=Reading(z, z[:, None]))

    plain_encode = Captioner._encode
    monkeypatch.setattr(Captioner, "_rows", property(rows))
    monkeypatch.setattr(Captioner, "_encode", encode)
    table = tmp_path / "judged.csv"

    def judge(texts: Sequence[str]) -> None:
        grades = ["right" if number % 4 == 1 else "wrong" for number in range(COUNT)]
        names = [path.name for path in own.photos]
        with table.open("w", newline="") as file:
            judged = zip(names, texts, grades, strict=True)
            csv.writer(file).writerows([("image", "caption", "grade"), *judged])

    judge(own.texts)
    for kind, value in (("black", 0), ("white", 255)):
        (tmp_path / "kinds" / kind).mkdir(parents=True)
        for number in range(10):
            image = Image.new("RGB", (40, 32 + number), (value,) * 3)
            image.save(tmp_path / "kinds" / kind / f"{number}.png")
    judged = ("--judged", table, "--images", own.folder / "photos", "--precision", "fp32")
    others = ("--other-images", tmp_path / "kinds", "-o", tmp_path / "report.json")
    command = ("calibrate", "--model", model, *judged)

    code, out, _ = run(*command, "--annotations", own.captions, *others)

    assert (code, "mean truth" in out) == (OK, True)
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["truth"]["words"]["auroc"] > 0.8
    assert report["groups"][""]["right"] == 0.25
    assert report["groups"][""]["auroc"] > 0.6
    assert [one["images"] for one in report["other_kinds"].values()] == [10, 10]
    calibrated = load(model, precision="fp32")
    black, white = (tmp_path / "kinds" / kind / "0.png" for kind in ("black", "white"))
    assert [calibrated.caption(image).confidence for image in (black, white)] == [0, 0]

    check = ("calibrate", "--check", *command[1:], "--annotations", own.captions)
    assert "phrases" in run(*check)[1]
    judge([one.text for one in calibrated.caption(own.photos)])  # the truth changes captions
    assert run(*command, "--force")[0] == OK  # judgements alone do not change the truth
    assert load(model).stored.calibrator.truth == calibrated.stored.calibrator.truth


def test_a_broken_photo_is_reported_and_skipped(own, model, run, tmp_path) -> None:
    photos = Path(shutil.copytree(own.folder / "photos", tmp_path / "photos"))
    (photos / "7.png").write_bytes(b"\x89PNG")

    code, out, err = run(
        "calibrate", "--model", model, "--annotations", own.captions, "--images", photos
    )

    assert (code, "7.png" in err, "119" in out) == (SOME_FAILED, True, True)
    assert (model / CONFIDENCE).exists()


# --- captions ------------------------------------------------------------------------------------


def test_unsure_captions_are_marked_left_out_or_hedged(caption) -> None:
    _, out, _ = caption("--format", "json")
    plain = {one["image"]: one["captions"][0] for one in json.loads(out)}
    least = float(np.median([best["confidence"] for best in plain.values()]))
    options = ("--min-confidence", least, "--format", "json", "--if-unsure")

    marked, skipped, hedged = (caption(*options, what) for what in ("mark", "skip", "hedge"))

    assert [code for code, _, _ in (marked, skipped, hedged)] == [OK] * 3
    unsure = 0
    entries = (json.loads(out) for _, out, _ in (marked, skipped, hedged))
    for one, other, third in zip(*entries, strict=True):
        best = plain[one["image"]]
        doubtful = best["confidence"] < least
        unsure += doubtful
        assert one["captions"] == [{**best, "unsure": doubtful}]
        if doubtful:
            assert other["captions"] == []
            assert third["captions"][0]["text"].endswith(f"perhaps {best['text']}")
        else:
            assert other["captions"] == third["captions"] == [best]
    assert unsure == 2
    assert f"{unsure} captions left out, because" in skipped[2]

    _, table, _ = caption("--min-confidence", least, "--format", "csv", "--num-captions", 2)
    rows = [(row["unsure"], bool(row["confidence"])) for row in csv.DictReader(table.splitlines())]
    assert sorted(rows[::2]) == [*[("no", True)] * 2, *[("yes", True)] * 2]
    assert rows[1::2] == [("", False)] * 4  # of the best captions alone


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--temperature", "0.7"], "the model is calibrated for temperature 0.0; leave out temp"),
        (["--beam-size", "1"], "the model is calibrated for beam_size 2; leave out beam_size"),
        (["--banned-words", "dog"], "the model is calibrated for banned_words none"),
        (["--format", "coco"], "--format coco cannot mark the unsure captions of --min-confidence"),
    ],
)
def test_options_without_a_confidence(caption, arguments, expected) -> None:
    code, _, error = caption("--min-confidence", 0.5, *arguments)

    assert code == NOT_DONE
    assert expected in error
    assert error.count("\n") == 1
