"""``captioner.train`` and ``captioner.evaluate``: the commands as functions."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

import captioner
from captioner.cli.main import OK, main
from captioner.errors import ConfigError, DataError, ImageError
from captioner.evaluation.report import as_json
from captioner.inference.folder import read_search
from captioner.options import TrainConfig
from captioner.training.api import build_config

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

    for results in (tiny.results, str(tiny.results), captions):
        report = captioner.evaluate(annotations=tiny.captions, compare=tiny.others, results=results)
        for name in ("metrics", "compare", "per_image", "statistics"):
            assert json.loads(as_json(report))[name] == expected[name]


@pytest.mark.parametrize(
    ("given", "error", "expected"),
    [
        ({}, ConfigError, "give either images .* or results"),
        ({"images": "photos"}, ConfigError, "give annotations .* or faithfulness"),
        ({"results": {1: "a dog"}}, ConfigError, "results needs references; give annotations too"),
        ({"results": {77: "a dog"}, "annotations": 0}, DataError, "given captions: image 77"),
        ({"results": {}, "annotations": 0, "beam_size": 3}, ConfigError, "omit beam_size"),
        (
            {"images": "photos", "annotations": 0, "num_captions": 3},
            ConfigError,
            "num_captions is 3, but only one",
        ),
        ({"images": "photos", "annotations": 0, "beams": 3}, ConfigError, "search option 'beams'"),
    ],
)
def test_evaluate_errors(given, error, expected, tiny) -> None:
    given = dict(given)
    if "annotations" in given:
        given["annotations"] = tiny.captions
    if "images" in given:
        given |= {"images": tiny.photos, "model": tiny.model}
    with pytest.raises(error, match=expected) as caught:
        captioner.evaluate(**given)
    assert "\n" not in str(caught.value)
    assert "--" not in str(caught.value)


@pytest.mark.parametrize("option", [{"device": "cuda"}, {"precision": "bf16"}])
def test_options_of_loading_are_refused_for_a_loaded_model(option, tiny) -> None:
    model = captioner.load(tiny.model)
    with pytest.raises(ConfigError, match=rf"model is loaded already; omit {next(iter(option))}"):
        captioner.evaluate(
            images=tiny.photos, annotations=tiny.captions, model=model, **option, progress=False
        )


def test_evaluate_raises_image_errors(tiny, tmp_path) -> None:
    for path in tiny.photos.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    (tmp_path / "2.png").write_text("no photo")

    with pytest.raises(ImageError, match=r"2\.png: not a supported image"):
        captioner.evaluate(annotations=tiny.captions, images=tmp_path, model=tiny.model)


def test_a_missing_extra_is_named(tiny, monkeypatch) -> None:
    for module in ("accelerate", "pycocoevalcap"):
        monkeypatch.setitem(sys.modules, module, None)

    with pytest.raises(ConfigError, match=r"pip install 'captioner\[train\]'"):
        captioner.train()
    with pytest.raises(ConfigError, match=r"pip install 'captioner\[evaluate\]'"):
        captioner.evaluate(annotations=tiny.captions, results={}, meteor=True)


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
    (row,) = result.metrics
    assert result.score == row["CIDEr"]
    assert captioner.load(result.model_folder).caption(tiny.photos / "1.png").words is not None

    with pytest.raises(ConfigError, match=r"run already contains a run; give resume to continue"):
        captioner.train(settings, run_folder=run)
    more = captioner.train(settings, run_folder=run, training={"epochs": 2}, resume=True)
    assert [row["epoch"] for row in more.metrics] == [1, 2]
    out, err = capfd.readouterr()
    assert out == ""
    assert "epoch 2" in err
    again = captioner.train(settings, run_folder=run, force=True, progress=False)
    assert [row["epoch"] for row in again.metrics] == [1]


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


@pytest.mark.slow
def test_train_warns_of_a_useless_model(training_settings, tmp_path, caplog) -> None:
    settings = training_settings | {"training": SHORT | {"lr": 0.0}}

    result = captioner.train(settings, run_folder=tmp_path / "run", progress=False)

    assert result.score == 0
    assert "the best model is of no use: " in caplog.text


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"traning": {}}, "unknown setting traning; did you mean training?"),
        ({"training": {"epoch": 3}}, "training.epoch; did you mean training.epochs?"),
        ({"training": {"lr": "fast"}}, "training.lr is 'fast'; give a number >= 0"),
        ({"training": 5}, "training is 5; give its settings by name"),
        ({"search": {"beam_size": 0}}, "search.beam_size is 0; give an integer >= 1"),
        ({"data": {"images": 3}}, "data.images is 3; give a list"),
        ({"run_folder": 3}, "run_folder is 3; give text"),
        ({"config": "none.yaml"}, "cannot read none.yaml"),
        ({"config": 5}, "the training config is 5; give a YAML file"),
    ],
)
def test_train_errors(given, expected) -> None:
    with pytest.raises(ConfigError) as caught:
        captioner.train(**given)

    assert expected in str(caught.value)
    assert "\n" not in str(caught.value)
