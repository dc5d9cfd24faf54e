"""From a CSV file and a folder of photos to a fine-tuned model, as in docs/finetuning.md."""

from __future__ import annotations

import csv
import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from pages import ROOT, commands, examples, read
from PIL import Image

from captioner.cli.main import NOT_DONE, OK, main
from captioner.evaluation.references import count_frequencies
from captioner.inference.folder import load_model
from captioner.inference.names import FREQUENCIES


@pytest.fixture
def own(tmp_path: Path, make_model: Any, monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A folder with photos/, captions.csv and configs/; a tiny model replaces the shipped one."""
    (tmp_path / "photos").mkdir()
    rows = []
    for number in range(1, 13):
        name, color = f"{number}.jpg", ("red", "blue")[number % 2]
        Image.new("RGB", (40, 32), color).save(tmp_path / "photos" / name)
        rows += [(name, f"A {color} dog runs."), (name, "The zebra.")]
    with (tmp_path / "captions.csv").open("w", newline="") as file:
        csv.writer(file).writerows([("file", "caption"), *rows])
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    shipped = make_model(tmp_path / "shipped_model", 1, beam_size=4, guard_endings=True)
    monkeypatch.setattr("captioner.inference.find_model.SHIPPED_MODEL", shipped)
    monkeypatch.chdir(tmp_path)
    return SimpleNamespace(folder=tmp_path, rows=rows, shipped=shipped)


@pytest.mark.slow
def test_every_command_of_the_page_runs(own, capsys) -> None:
    (own.shipped / FREQUENCIES).write_bytes(count_frequencies({1: ["a dog"]}).to_bytes())
    blocks = examples(read("docs/finetuning.md"), "bash")
    steps = [words for words in commands(*blocks) if words[0] == "captioner"]
    assert len(steps) == 5
    for _, *arguments in steps:
        if arguments[0] == "train":  # twelve photos are too few for a CIDEr above 0
            arguments.append("training.select=loss")
        assert main(arguments) == OK, capsys.readouterr().err
    best = load_model("runs/mine/best")
    assert {"zebra", "red", "blue"} <= set(best.vocabulary.words)
    assert best.frequencies is not None
    assert Path("attention.png").is_file()
    assert load_model(own.shipped).search == best.search


# Captions of such a short run score 0, which is an error; selecting by loss is not.
SHORT = (
    "training.epochs=1", "training.trackers=[]", "training.sample_images=0",
    "training.select=loss",
)  # fmt: skip
DATA = ("--data", "captions.csv", "--images", "photos")


def test_data_and_images_prepare_and_train(own, capsys) -> None:
    arguments = ["train", "configs/finetune.yaml", *DATA, "--val", "0.25", *SHORT]

    assert main([*arguments, "--run-folder", "run"]) == OK

    shown = capsys.readouterr().err
    assert "train: 9 photos, 18 captions" in shown
    assert "9 training photos, 3 validation photos" in shown
    settings = yaml.safe_load(Path("run/config.yaml").read_text())
    assert settings["data"]["train_annotations"] == ["run/data/captions_train.json"]
    assert settings["data"]["images"] == ["photos"]
    assert settings["encoder"]["image_size"] == 64  # as the model
    assert settings["search"]["guard_endings"] is True
    assert settings["search"]["beam_size"] == 4

    again = [*arguments, "--run-folder", "run", "--resume"]
    assert main(again) == OK
    Path("captions.csv").write_text("file,caption\n1.jpg,a hat\n2.jpg,a dog\n")
    capsys.readouterr()
    assert main(again) == NOT_DONE
    assert "prepared from other captions" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (
            ["captions.csv"],
            "captions.csv contains captions, not settings; to train on them, run captioner train "
            "--data captions.csv --images FOLDER --init-from shipped",
        ),
        (["photos/1.jpg"], "photos/1.jpg is not valid YAML \\("),
        ([*DATA, "--val", "0"], "captions.csv has no validation photos; set val"),
        (
            ["--data", "unreadable.csv", "--images", "photos", "--val", "0.5"],
            "unreadable.csv: no photo for validation can be read .* first: gone3.jpg",
        ),
        ([*DATA, "--caption-column", "words"], r"no column 'words' \(found: file, caption"),
    ],
)
def test_errors_about_files_are_one_line_with_advice(own, arguments, expected, capsys) -> None:
    Path("unreadable.csv").write_text("file,caption\n1.jpg,a dog\ngone3.jpg,a cat\n")
    assert main(["train", *arguments]) == NOT_DONE
    [line] = capsys.readouterr().err.splitlines()
    assert re.search(expected, line)
    assert len(line) < 400


def test_the_image_folder_of_hugging_face_needs_no_images_option(own, capsys) -> None:
    with Path("photos/metadata.jsonl").open("w") as file:
        for name, caption in own.rows:
            file.write(json.dumps({"file_name": name, "text": caption}) + "\n")
    arguments = ["train", "configs/finetune.yaml", "--data", "photos", *SHORT, "--dry-run"]
    assert main(arguments) == OK
    assert "11 training photos, 1 validation photo," in capsys.readouterr().err
