"""``captioner.train`` and ``captioner.evaluate``: the commands as functions."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

import captioner
from captioner import extras
from captioner.cli.main import OK, main
from captioner.errors import CaptionerError, ConfigError, ImageError
from captioner.evaluation.report import as_json
from captioner.inference.config_file import read_search
from captioner.options import FaithfulnessOptions, TrainConfig
from captioner.training.config import build_config

# --- evaluate ------------------------------------------------------------------------------------


def by_command(tmp_path: Path, *arguments: object) -> dict[str, Any]:
    """The JSON report of the command."""
    target = tmp_path / "report.json"
    words = ["evaluate", *map(str, arguments), "-o", str(target)]
    assert main(words) == OK
    report: dict[str, Any] = json.loads(target.read_text(encoding="utf-8"))
    return report


def test_evaluate_returns_the_commands_report(tiny, tmp_path, capfd) -> None:
    given = {"annotations": tiny.captions, "images": tiny.photos, "instances": tiny.instances}
    words = [word for name, path in given.items() for word in (f"--{name}", path)]
    expected = by_command(tmp_path, *words, "--model", tiny.model, "--beam-size", 1)
    capfd.readouterr()

    report = captioner.evaluate(**given, model=tiny.model, beam_size=1, progress=False)

    assert json.loads(as_json(report)) == expected
    assert capfd.readouterr() == ("", "")
    model = captioner.load(tiny.model)
    loaded = captioner.evaluate(**given, model=model, beam_size=1)
    assert loaded["model"] == repr(model)
    assert loaded["metrics"] == report["metrics"]


def test_evaluate_scores_the_captions_of_any_system(tiny, tmp_path) -> None:
    entries = json.loads(tiny.results.read_text())
    captions = {entry["image_id"]: entry["caption"] for entry in entries}
    words = ("--annotations", tiny.captions, "--compare", tiny.others)
    expected = by_command(tmp_path, *words, "--results", tiny.results)

    for results in (tiny.results, str(tiny.results), captions, entries):
        report = captioner.evaluate(annotations=tiny.captions, compare=tiny.others, results=results)
        for name in ("metrics", "compare", "per_image", "statistics"):
            assert json.loads(as_json(report))[name] == expected[name]


def test_faithfulness_has_options_of_its_own(tiny) -> None:
    given = {"annotations": tiny.captions, "images": tiny.photos, "model": tiny.model}
    few = FaithfulnessOptions(max_words=1, steps=1, level="grid")
    found = captioner.evaluate(**given, faithfulness=few, progress=False)["faithfulness"]
    assert found["photos"] == len(found["per_word"]) == 4


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"results": {74: 5}}, "5 is not text"),
        ({"results": [{"image_id": 7.5, "caption": "a"}]}, "7.5 is not a whole number"),
        ({"results": [1]}, "not a COCO results file"),
        ({"annotations": {}}, "annotations is {}; use text"),
        ({"metoer": True}, "metoer is an unknown option; did you mean meteor?"),
    ],
)
def test_wrong_arguments_of_evaluate_are_one_line(tiny, options, expected) -> None:
    given = {"annotations": str(tiny.captions), "results": {1: "a dog"}} | options
    with pytest.raises(CaptionerError, match=re.escape(expected)) as caught:
        captioner.evaluate(**given)
    assert "\n" not in str(caught.value)


def test_evaluate_raises_image_errors(tiny, tmp_path) -> None:
    for path in tiny.photos.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    (tmp_path / "2.png").write_text("no photo")

    with pytest.raises(ImageError, match=r"2\.png: the file is not a supported image"):
        captioner.evaluate(annotations=tiny.captions, images=tmp_path, model=tiny.model)


# --- train ---------------------------------------------------------------------------------------

SHORT = {"epochs": 1, "batch_size": 2, "sample_images": 0, "trackers": []}


@pytest.mark.slow
def test_train_returns_the_best_model(tiny, training_settings, tmp_path, capfd) -> None:
    run = tmp_path / "run"
    settings = training_settings | {"training": SHORT}

    result = captioner.train(settings, run_folder=run, progress=False)

    assert capfd.readouterr() == ("", "")
    assert result.model_folder == run / "best"
    assert result.epoch == 1
    assert len(repr(result)) < 200 + len(str(run))
    (row,) = result.metrics
    assert result.score == row["CIDEr"]
    assert captioner.load(result.model_folder).caption(tiny.photos / "1.png").words is not None

    with pytest.raises(ConfigError, match=r"run already contains a run; add --resume to continue"):
        captioner.train(settings, run_folder=run)
    more = captioner.train(settings, run_folder=run, training={"epochs": 2}, resume=True)
    assert [row["epoch"] for row in more.metrics] == [1, 2]
    out, err = capfd.readouterr()
    assert out == ""
    assert "epoch 2" in err
    again = captioner.train(settings, run_folder=run, force=True, progress=False)
    assert [row["epoch"] for row in again.metrics] == [1]


def test_train_names_a_missing_extra(monkeypatch) -> None:
    monkeypatch.setattr(extras, "is_installed", lambda name: name != "accelerate")
    with pytest.raises(ConfigError, match=r"captioner train needs accelerate; run: pip install"):
        captioner.train("settings.yaml")  # cannot be read without the extra


def test_train_on_a_file_of_captions(tiny, training_settings, tmp_path) -> None:
    table = tmp_path / "captions.csv"
    rows = [f"{path.name},a dog runs" for path in sorted(tiny.photos.iterdir())]
    table.write_text("\n".join(["file,caption", *rows]))
    result = captioner.train(
        training_settings, run_folder=tmp_path / "run", captions=table, images=tiny.photos, val=0.4,
        training={**SHORT, "select": "loss"}, progress=False,
    )  # fmt: skip
    assert result.metrics[0]["epoch"] == 1
    held = json.loads((tmp_path / "run" / "data" / "captions_val.json").read_text())
    assert len(held["images"]) == round(0.4 * len(rows))
    with pytest.raises(ConfigError, match=r"data\.images cannot be combined"):
        captioner.train(training_settings, captions=table, data={"images": "photos"})


def test_train_config_from_a_file_a_dictionary_or_a_config(tmp_path) -> None:
    settings = {"training": {"lr": 0.001, "epochs": 4}, "data": {"images": ["photos"]}}
    (tmp_path / "train.yaml").write_text(yaml.safe_dump(settings).replace("0.001", "1e-3"))
    expected = TrainConfig(run_folder="runs/mine")
    expected.training.lr, expected.training.epochs, expected.data.images = 1e-3, 2, ["photos"]

    changes: dict[str, Any] = {"run_folder": Path("runs/mine"), "training": {"epochs": 2}}
    for config in (tmp_path / "train.yaml", settings, build_config(settings)):
        assert build_config(config, **changes) == expected
    assert build_config(None) == TrainConfig()
    assert build_config(data={"images": Path("photos")}).data.images == ["photos"]
    assert build_config(search={"max_length": 9}).search.beam_size == TrainConfig().search.beam_size


def test_search_options_come_from_the_initial_model(tiny, tmp_path) -> None:
    model = tmp_path / "model"
    shutil.copytree(tiny.model, model)
    stored = json.loads((model / "config.json").read_text())
    stored["search"] |= {"beam_size": 5, "max_length": 9}
    (model / "config.json").write_text(json.dumps(stored))
    held, _ = read_search(model)
    config = {"init_from": str(model), "search": {"max_length": 7}}

    assert build_config(init_from=model).search == held
    assert build_config(config).search == held.changed(max_length=7)
    assert build_config(config, search={"beam_size": 2}).search.beam_size == 2
    assert build_config(config, init_from=None).search.beam_size == TrainConfig().search.beam_size
