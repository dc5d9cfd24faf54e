"""Test several data sets in one model, each with its own start token."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from captioner import load
from captioner.cli.main import OK, main
from captioner.errors import ConfigError, DataError
from captioner.inference.folder import save_model
from captioner.text.vocabulary import START, Vocabulary
from captioner.training.loop import start
from captioner.training.names import METRICS
from captioner.training.run_folder import read_rows
from captioner.training.setup import prepare

OFFSET = 1_000


@pytest.fixture
def two_styles(squares: Path, tmp_path: Path) -> dict[str, Any]:
    """Captions in two styles for the squares: "a red square" and "look red"."""
    content = json.loads((squares / "captions.json").read_text())
    for image in content["images"]:
        image["id"] += OFFSET
    for entry in content["annotations"]:
        entry["image_id"] += OFFSET
        entry["caption"] = f"Look, {entry['caption'].split()[1]}!"
    other = tmp_path / "other.json"
    other.write_text(json.dumps(content))
    files = [str(squares / "captions.json"), str(other)]
    return {
        "train_annotations": files,
        "val_annotations": files,
        "styles": ["plain", "loud"],
        "val_styles": ["plain", "loud"],
    }


def test_each_style_has_its_own_start_token() -> None:
    words = Vocabulary(["a", "dog"], ["plain", "loud"])
    assert len(words) == 6  # the decoder's outputs
    assert [words.start(style) for style in ("", "plain", "loud")] == [6, 6, 7]
    assert Vocabulary(["a", "dog"]).start() == START
    assert words != Vocabulary(["a", "dog"])
    with pytest.raises(ConfigError, match="'shy'; use plain, loud"):
        words.start("shy")
    with pytest.raises(ConfigError, match="leave out the style"):
        Vocabulary(["a"]).start("plain")
    with pytest.raises(ConfigError, match="occurs twice"):
        Vocabulary(["a"], ["plain", "plain"])


@pytest.mark.slow
def test_one_model_memorizes_two_styles(two_styles: Any, configure: Any, tmp_path: Path) -> None:
    """The photos are the same, so only the start token selects the caption."""
    config = configure(
        data=two_styles,
        training={"epochs": 5, "lr": 2e-2, "batch_size": 16, "patience": 0},
        decoder={"dropout": 0.0, "hidden_dim": 32},
    )
    setup = prepare(config)
    setup.train = setup.train * 40  # an epoch is 40 steps, between two validations
    start(setup, tmp_path / "run", resume=False)

    rows = read_rows(tmp_path / "run" / METRICS)
    best = max(rows, key=lambda row: row["CIDEr"])
    assert best["CIDEr"] == pytest.approx((best["CIDEr/plain"] + best["CIDEr/loud"]) / 2)
    model = load(tmp_path / "run" / "best", precision="fp32")
    assert model.stored.vocabulary.styles == ("plain", "loud")
    photos = sorted(Path(config.data.images[0]).glob("*.png"))
    for style, pattern in (("plain", "a {} square"), ("loud", "look {}")):
        captions = [model.caption(photo, style=style).text for photo in photos]
        assert captions == [pattern.format(photo.stem) for photo in photos]
    assert model.caption(photos[0]).text == model.caption(photos[0], style="plain").text
    with pytest.raises(ConfigError, match="no style 'shy'"):
        model.caption(photos[0], style="shy")

    loud = model.explain(photos[0], f"look {photos[0].stem}", style="loud")
    plain = model.explain(photos[0], f"look {photos[0].stem}", style="plain")
    assert loud.log_prob > plain.log_prob + 1


def test_fine_tuning_adds_a_style_that_starts_like_the_default(
    two_styles: Any, configure: Any, squares: Path, tmp_path: Path
) -> None:
    first = prepare(configure(data=two_styles)).stored
    for parameter in first.model.decoder.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    save_model(tmp_path / "first", first)
    styles = {"styles": ["plain", "mine"], "val_styles": ["plain", "mine"]}
    other = json.loads(Path(two_styles["train_annotations"][1]).read_text())
    other["annotations"][0]["caption"] = "Hello, hello!"  # a new word as well as a new style
    Path(two_styles["train_annotations"][1]).write_text(json.dumps(other))
    second = prepare(configure(data=two_styles | styles, init_from=str(tmp_path / "first")))
    assert second.stored.vocabulary.styles == ("plain", "loud", "mine")
    assert second.stored.vocabulary.words[-1] == "hello"

    save_model(tmp_path / "second", second.stored)
    before, after = (load(tmp_path / name, precision="fp32") for name in ("first", "second"))
    photo = squares / "photos" / "red.png"
    old = {style: before.caption(photo, style=style) for style in ("plain", "loud")}
    for style, kept in (("plain", "plain"), ("loud", "loud"), ("mine", "plain")):
        found = after.caption(photo, style=style)
        assert found.text == old[kept].text
        assert found.log_prob == pytest.approx(old[kept].log_prob, rel=1e-5)


def test_data_sets_may_use_the_same_ids(configure: Any, tmp_path: Path) -> None:
    """Two data sets may both be numbered from 1, as ``captioner prepare dataset`` does."""
    files, folders = [], []
    for name, color in (("cats", "red"), ("dogs", "blue")):
        folder = tmp_path / name
        folder.mkdir()
        Image.new("RGB", (64, 48), color).save(folder / f"{name}.png")
        captions = [{"id": 1, "image_id": 1, "caption": f"some {name}"}]
        content = {"images": [{"id": 1, "file_name": f"{name}.png"}], "annotations": captions}
        (tmp_path / f"{name}.json").write_text(json.dumps(content))
        files.append(str(tmp_path / f"{name}.json"))
        folders.append(str(folder))
    data = {
        "train_annotations": files, "val_annotations": files, "images": folders,
        "styles": ["cats", "dogs"], "val_styles": ["cats", "dogs"], "repeats": [1, 2],
    }  # fmt: skip

    setup = prepare(configure(data=data))

    seen = [(photo.image_id, photo.path.stem, photo.style) for photo in setup.train]
    assert seen == [(1, "cats", "cats"), (2, "dogs", "dogs"), (2, "dogs", "dogs")]
    assert [(image.image_id, image.style) for image in setup.val] == [(1, "cats"), (2, "dogs")]
    with pytest.raises(DataError, match="--first-id"):  # features are stored by id
        prepare(configure(data=data | {"features": str(tmp_path / "features")}))


@pytest.mark.slow
def test_training_from_stage_features_equals_training_from_photos(
    squares: Path, configure: Any, tmp_path: Path
) -> None:
    config = configure(
        encoder={
            "name": "timm/tf_efficientnet_lite0", "image_size": 64, "finetune_from": "blocks.5"
        },
        training={
            "epochs": 2, "batch_size": 4, "lr": 1e-3, "encoder_lr": 1e-3, "ema_decay": 0.9
        },
    )  # fmt: skip
    torch.manual_seed(0)
    start(prepare(config), tmp_path / "photos", resume=False)
    settings = tmp_path / "photos" / "config.yaml"
    features = str(tmp_path / "features")
    assert main(["prepare", "features", str(settings), "-o", features, "--dtype", "float32"]) == OK
    cached = replace(config, data=replace(config.data, features=features))
    start(prepare(cached), tmp_path / "features_run", resume=False)

    def losses(run: str) -> list[float]:
        return [row["loss"] for row in read_rows(tmp_path / run / METRICS)]

    assert losses("features_run") == pytest.approx(losses("photos"), rel=1e-4)

    rewarded = configure(  # the encoder's first stages are unchanged
        encoder={"name": "timm/tf_efficientnet_lite0", "image_size": 64},
        training={"objective": "self_critical", "epochs": 1, "batch_size": 4, "ema_decay": 0.9},
        self_critical={"cross_entropy": 0.5},
        init_from=str(tmp_path / "features_run" / "best"),
    )
    rewarded.data.features = features
    start(prepare(rewarded), tmp_path / "rewarded", resume=False)
    assert "reward" in read_rows(tmp_path / "rewarded" / METRICS)[0]

    later = replace(config.encoder, finetune_from="blocks.4")
    with pytest.raises(ConfigError, match=r"the input of blocks\.5, .*'blocks\.4'"):
        prepare(replace(cached, encoder=later))
    shutil.rmtree(features)
    frozen = configure(encoder={"name": "timm/tf_efficientnet_lite0", "image_size": 64})
    frozen.data.features = features
    (tmp_path / "frozen.yaml").write_text(settings.read_text().replace("blocks.5", "null"))
    assert main(["prepare", "features", str(tmp_path / "frozen.yaml"), "-o", features]) == OK
    with pytest.raises(ConfigError, match="the output of the encoder"):
        prepare(replace(frozen, encoder=config.encoder))
