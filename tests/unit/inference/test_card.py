"""Model cards: contents, and no private file names."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path

import pytest
import yaml

from captioner.cli.main import OK, main
from captioner.errors import ConfigError
from captioner.inference.card import is_generated, make_card, readable, write_card
from captioner.inference.folder import load_model, save_model
from captioner.inference.stored_model import StoredModel
from captioner.options import PRIVATE, CardOptions, TrainConfig
from captioner.schema import build_options, option_fields

SECRET = "/home/alice/clients"
ROW = {"epoch": 3, "step": 1200, "CIDEr": 0.4321, "Bleu_4": 0.2}
ROW |= {"train_photos": 5000, "val_photos": 1}


@pytest.fixture
def best(stored_model: StoredModel, tmp_path: Path) -> Path:
    """The best model of a run whose settings name private files."""
    settings = {
        "run_folder": f"{SECRET}/run",
        "init_from": f"{SECRET}/other",
        "data": {
            "train_annotations": [f"{SECRET}/train.json"],
            "val_annotations": [f"{SECRET}/val.json"],
            "images": [f"{SECRET}/photos"],
            "features": f"{SECRET}/features",
            "karpathy_split": f"{SECRET}/dataset_coco.json",
            "max_captions": 3,
        },
        "encoder": {"weights": f"{SECRET}/weights.pth"},
    }
    stored_model.info = {"training": ROW}
    folder = tmp_path / "pets" / "best"
    save_model(folder, stored_model)
    config = dataclasses.asdict(build_options(TrainConfig, settings))
    # Settings of an earlier version, removed since.
    config["data"]["shards"] = f"{SECRET}/shards"
    config["distillation"] = {"models": [f"{SECRET}/teacher"]}
    (folder.parent / "config.yaml").write_text(yaml.safe_dump(config))
    return folder


def header_of(card: str) -> dict:
    return yaml.safe_load(card.split("---\n")[1])


def test_a_card_has_the_training_settings_but_no_file_names(best):
    card = make_card(best)

    assert "\n# pets\n" in card
    assert (
        "The model was trained on 5,000 photos. Its weights are from epoch 3, step 1,200." in card
    )
    assert "on 1 photo: CIDEr 43.2, BLEU-4 20.0" in card
    assert "data:\n  max_captions: 3\n" in card
    assert "init_from: (the author's own model)" in card
    for private in ("alice", "train.json", "photos\n", "features", "shards", "[]", "license"):
        assert private not in card
    result = header_of(card)["model-index"][0]["results"][0]
    assert result["dataset"]["name"] == "validation during training, 1 photo"
    assert {"type": "cider", "name": "CIDEr", "value": 43.2} in result["metrics"]


def test_every_setting_with_a_path_is_private():
    for section in option_fields(TrainConfig).values():
        kind = section.type if dataclasses.is_dataclass(section.type) else TrainConfig
        for name, option in option_fields(kind).items():
            if option.shown.value in ("FILE", "FOLDER"):
                assert PRIVATE in option.marks, name


def test_a_card_of_scores_with_intervals(best, tmp_path):
    report = {
        "annotations": f"{SECRET}/test.json",
        "images": 60,
        "metrics": {"CIDEr": 0.5, "Bleu_4": 0.1},
        "intervals": {"CIDEr": [0.4, 0.6], "Bleu_4": None},
        "signature": "captioner x",
        "search": "beam_size 3",
    }
    (tmp_path / "report.json").write_text(json.dumps(report))
    path = str(tmp_path / "report.json")
    options = CardOptions(license="mit", datasets=["me/photos"], reports=[path])

    card = make_card(best, "me/dogs", options)

    assert "| test, 60 | 10.0 | 50.0 (40.0 to 60.0) |" in card
    assert "- test: search: beam_size 3; captioner x" in card
    assert "Validation during training" not in card
    assert "alice" not in card
    fields = header_of(card)
    assert (fields["license"], fields["datasets"]) == ("mit", ["me/photos"])
    assert fields["model-index"][0]["name"] == "dogs"
    with pytest.raises(ConfigError, match="two reports are about the data set 'test'"):
        make_card(best, options=CardOptions(reports=[path] * 2))
    (tmp_path / "report.json").write_text(json.dumps({"attention": {}}))
    with pytest.raises(ConfigError, match="is not a report with caption scores"):
        make_card(best, options=options)


def test_an_edited_card_does_not_count_as_generated(best, tmp_path):
    write_card(best)
    card = (best / "README.md").read_text()

    assert is_generated(card)
    assert not is_generated(card.replace("# pets", "# my pets"))
    assert not is_generated("")
    copy = shutil.copytree(best, tmp_path / "copy")
    moved = make_card(copy)
    assert "data:\n  max_captions: 3\n" in moved
    assert is_generated(moved)
    (copy / "README.md").write_text("# My own\n\n## Training\n\nA secret.\n")
    assert "secret" not in make_card(copy)


def test_escape_sequences_are_not_shown_in_a_terminal(best):
    """A card may come from anyone."""
    card = make_card(best).replace("# pets", "# \x1b[31mpets\x07")

    text = readable(card)

    assert text.startswith("# [31mpets\n\nThis model describes a photo")
    assert text.endswith("```")
    assert readable("# plain\n") == "# plain"


def test_a_model_without_training_has_a_card(stored_model, tmp_path):
    stored_model.info = {}
    save_model(tmp_path / "plain", stored_model)

    card = make_card(tmp_path / "plain")

    assert "model-index" not in header_of(card)
    for heading in ("## Scores", "## Training"):
        assert heading not in card
    write_card(tmp_path / "plain")
    assert make_card(tmp_path / "plain") == card
    assert load_model(tmp_path / "plain").info == {}


def test_a_score_that_is_undefined_is_left_out(best, capsys):
    path = best / "config.json"
    config = json.loads(path.read_text())
    config["info"]["training"] |= {"CIDEr": None, "Bleu_4": None}  # as written for NaN
    path.write_text(json.dumps(config))
    card = make_card(best)
    assert "model-index" not in header_of(card)
    assert "## Scores" not in card
    assert main(["info", "--model", str(best)]) == OK
    assert "CIDEr" not in capsys.readouterr().out


def test_a_card_names_the_packages_and_the_code_that_the_model_needs(best):
    path = best / "config.json"
    config = json.loads(path.read_text())
    package = {"kind": "encoder", "name": "patches", "module": "acme", "package": "acme-layers"}
    script = {"kind": "scorer", "name": "mine", "module": "__main__"}
    path.write_text(json.dumps(config | {"requires": [package, package, script]}))
    card = make_card(best)
    assert "pip install captioner acme-layers\n" in card
    assert "scorer `mine` is the author's own code" in card
