"""From a config to photos, vocabulary, model and optimizer."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from captioner.errors import ConfigError, ImageError, ModelError
from captioner.model_folder import load_model, save_model
from captioner.training.setup import make_average, make_optimizer, prepare, read_data
from captioner.vocabulary import END


@pytest.fixture
def two_files(squares: Path, tmp_path: Path) -> tuple[str, str]:
    """Captions of four photos to learn from and of the other four to validate on."""
    whole = json.loads((squares / "captions.json").read_text())
    files = []
    for name, half in (("train", slice(0, 4)), ("val", slice(4, 8))):
        part = {key: value[half] for key, value in whole.items()}
        file = tmp_path / f"{name}.json"
        file.write_text(json.dumps(part))
        files.append(str(file))
    return files[0], files[1]


# --- Data ---


def test_the_vocabulary_comes_from_the_training_captions_alone(
    configure: Any, two_files: tuple[str, str]
):
    train, val = two_files
    setup = prepare(configure(data={"train_annotations": [train], "val_annotations": [val]}))
    assert set(setup.stored.vocabulary.words) == {"a", "square", "red", "lime", "blue", "yellow"}
    assert [image.path.stem for image in setup.val] == ["cyan", "magenta", "white", "gray"]
    decoder = setup.stored.model.decoder
    assert decoder.word_output.out_features == len(setup.stored.vocabulary) == 10


def test_karpathys_split_rules_over_the_files(
    configure: Any, two_files: tuple[str, str], tmp_path: Path
):
    splits = ["val", "train", "restval", "test", "train", "val", "test", "restval"]
    images = [{"cocoid": number, "split": split} for number, split in enumerate(splits, start=1)]
    split_file = tmp_path / "dataset_coco.json"
    split_file.write_text(json.dumps({"images": images}))
    data = {
        "train_annotations": [two_files[0]],
        "val_annotations": [two_files[1]],
        "karpathy_split": str(split_file),
    }
    setup = prepare(configure(data=data))
    assert [item.image.image_id for item in setup.train] == [2, 3, 5, 8]
    assert [image.image_id for image in setup.val] == [1, 6]
    assert "red" not in setup.stored.vocabulary  # photo 1 is for validation


def test_one_file_for_both_with_karpathys_split_holds_every_caption_once(
    configure: Any, tmp_path: Path
):
    split_file = tmp_path / "dataset_coco.json"
    images = [{"cocoid": number, "split": "val" if number > 6 else "train"} for number in range(9)]
    split_file.write_text(json.dumps({"images": images}))
    train, val = read_data(configure(data={"karpathy_split": str(split_file)}).data)
    assert [len(image.captions) for image in [*train, *val]] == [1] * 8


def test_captions_are_numbered_and_cut(configure: Any):
    setup = prepare(configure(data={"max_words": 2}))  # of three
    words = [setup.stored.vocabulary.decode(item.tokens[0]) for item in setup.train]
    assert words == [["a", item.image.path.stem] for item in setup.train]
    bias = setup.stored.model.decoder.word_output.bias
    assert bias[END] == bias.min()  # nobody ends there
    setup = prepare(configure(data={"max_words": 3}))
    words = [setup.stored.vocabulary.decode(item.tokens[0]) for item in setup.train]
    assert words == [["a", item.image.path.stem, "square", "<end>"] for item in setup.train]


def test_rare_words_become_unknown(configure: Any):
    setup = prepare(configure(data={"vocabulary_threshold": 2}))
    assert setup.stored.vocabulary.words == ("a", "square")
    assert setup.stored.vocabulary.decode(setup.train[0].tokens[0])[:3] == ["a", "<unk>", "square"]


def test_settings_that_leave_nothing_are_named(configure: Any):
    with pytest.raises(ConfigError, match=r"val_annotations is empty"):
        prepare(configure(data={"val_annotations": []}))
    with pytest.raises(ConfigError, match=r"9 times .*vocabulary_threshold"):
        prepare(configure(data={"vocabulary_threshold": 9}))


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ({"attention": "aditive"}, "decoder.attention 'aditive' is unknown; give one of additive"),
        ({"attention": "concat", "query": "self"}, "decoder.query 'self' does not go with"),
        ({"attention": "fixed", "selection": "hard"}, "decoder.selection 'hard' does not go with"),
    ],
)
def test_words_of_the_decoder_are_judged_before_the_data_are_read(
    configure: Any, tmp_path: Path, words: dict[str, str], expected: str
):
    nowhere = str(tmp_path / "nowhere.json")  # reading it would be another error
    with pytest.raises(ConfigError, match=expected):
        prepare(configure(decoder=words, data={"train_annotations": [nowhere]}))


# --- Model ---


def test_words_that_the_search_cannot_say_are_told_before_training(configure: Any):
    with pytest.raises(ConfigError, match=r"forced_words contains xylophone, which the model does"):
        prepare(configure(search={"forced_words": ["xylophone"]}))


def test_the_seed_decides_the_initial_weights(configure: Any):
    def weights(seed: int) -> dict[str, torch.Tensor]:
        torch.rand(3)  # whatever was drawn before
        return prepare(configure(training={"seed": seed})).stored.model.state_dict()

    one, same, other = weights(1), weights(1), weights(2)
    assert all(torch.equal(one[name], same[name]) for name in one)
    assert not torch.equal(one["decoder.embedding.weight"], other["decoder.embedding.weight"])


def test_mean_and_std_are_the_encoders_unless_the_config_gives_others(configure: Any):
    stored = prepare(configure()).stored
    assert stored.model.preprocessing.mean == stored.model.encoder.mean
    stored = prepare(configure(encoder={"mean": [0, 0.5, 1], "std": [1, 2, 3]})).stored
    assert stored.model.preprocessing.mean == (0, 0.5, 1)
    assert stored.model.preprocessing.std == (1, 2, 3)
    assert stored.model.preprocessing.image_size == 48


def test_the_encoder_is_frozen_up_to_the_stage_that_learns(configure: Any):
    encoder = prepare(configure()).stored.model.encoder
    assert not any(p.requires_grad for p in encoder.parameters())
    encoder = prepare(configure(encoder={"finetune_from": "layer4"})).stored.model.encoder
    learning = {name for name, p in encoder.backbone.named_parameters() if p.requires_grad}
    assert learning
    assert all(name.startswith("layer4.") for name in learning)


# --- Second stage ---


@pytest.fixture
def first_stage(configure: Any, tmp_path: Path) -> Path:
    stored = prepare(configure(training={"seed": 5})).stored
    stored.info = {"training": "first"}
    save_model(tmp_path / "first", stored)
    return tmp_path / "first"


def test_a_second_stage_keeps_weights_and_words(
    configure: Any, first_stage: Path, two_files: tuple[str, str]
):
    config = configure(
        init_from=str(first_stage),
        data={"train_annotations": [two_files[0]]},
        encoder={"image_size": 64, "finetune_from": "layer4", "resize": "squash"},
        decoder={"dropout": 0.4},
        search={"beam_size": 4},
    )
    first, second = load_model(first_stage), prepare(config).stored
    assert second.vocabulary == first.vocabulary
    assert "gray" in second.vocabulary  # though it is not in this stage's captions
    weights = second.model.state_dict()
    assert all(torch.equal(weights[k], v) for k, v in first.model.state_dict().items())
    assert second.model.preprocessing.image_size == 64
    assert second.model.preprocessing.resize == "squash"
    assert second.model.preprocessing.mean == first.model.preprocessing.mean
    assert second.model.decoder.dropout.p == second.decoder.dropout == 0.4
    assert second.search.beam_size == 4
    assert any(p.requires_grad for p in second.model.encoder.parameters())


def test_a_second_stage_with_another_encoder_is_refused(configure: Any, first_stage: Path):
    other = configure(init_from=str(first_stage), encoder={"name": "timm/test_efficientnet"})
    with pytest.raises(ConfigError, match=r"test_efficientnet, but .*first holds timm/test_resnet"):
        prepare(other)


def stage_of(configure: Any, folder: Path, **decoder: Any) -> Path:
    save_model(folder, prepare(configure(decoder=decoder)).stored)
    return folder


def test_a_second_stage_keeps_its_models_attention(configure: Any, tmp_path: Path):
    words = {"attention": "general", "selection": "hard", "order": "luong", "projection_dim": 5}
    first = stage_of(configure, tmp_path / "first", **words)
    config = configure(init_from=str(first), encoder={"image_size": 96}, decoder={"dropout": 0.4})
    second = prepare(config).stored
    for name, value in words.items():
        assert getattr(second.decoder, name) == value
    assert config.decoder == second.decoder  # the run folder says so too
    assert second.model.grid == (3, 3)  # regions are only counted by 'location'


def test_a_second_stage_gives_location_as_many_regions_as_it_has_learned(
    configure: Any, tmp_path: Path
):
    first = stage_of(configure, tmp_path / "first", attention="location")
    larger = configure(init_from=str(first), encoder={"image_size": 96})
    expected = (
        r"^encoder\.image_size 96 gives 3 x 3 regions, but attention 'location' of .*first has "
        r"learned 2 x 2; give image_size 48$"
    )
    with pytest.raises(ConfigError, match=expected):
        prepare(larger)
    same_grid = prepare(configure(init_from=str(first), encoder={"image_size": 64})).stored
    assert same_grid.model.grid == (2, 2)
    rows = same_grid.model.decoder.attention.scorer.place.weight
    assert torch.equal(rows, load_model(first).model.decoder.attention.scorer.place.weight)


def test_a_second_stage_that_asks_for_another_decoder_is_refused(configure: Any, first_stage: Path):
    """It goes on with the decoder it has; the wish must not be passed over in silence."""
    other = configure(init_from=str(first_stage), decoder={"attention": "general"})

    with pytest.raises(ConfigError, match=r"decoder.attention is 'general'.*holds 'additive'"):
        prepare(other)


def test_rewards_are_no_matter_for_a_model_that_draws_its_regions(configure: Any, tmp_path: Path):
    """The decoder comes with the model: what it selects is known only when that is read."""
    first = stage_of(configure, tmp_path / "first", selection="hard")
    config = configure(init_from=str(first), training={"objective": "self_critical"})
    with pytest.raises(ConfigError, match=r"cannot train decoder.selection hard"):
        prepare(config)


@pytest.mark.parametrize("name", ["mean", "std"])
def test_a_second_stage_sees_photos_as_its_model_does(configure: Any, first_stage: Path, name: str):
    held = list(getattr(load_model(first_stage).model.preprocessing, name))
    prepare(configure(init_from=str(first_stage), encoder={name: held}))
    other = configure(init_from=str(first_stage), encoder={name: [0.1, 0.2, 0.3]})
    with pytest.raises(ConfigError, match=rf"encoder.{name} is .*0.3\], but .*first sees photos"):
        prepare(other)


def test_a_second_stage_from_nowhere_is_refused(configure: Any, tmp_path: Path):
    with pytest.raises(ModelError, match="does not exist"):
        prepare(configure(init_from=str(tmp_path / "nowhere")))


# --- Validation photos ---


def test_a_validation_photo_that_cannot_be_read_is_told_before_training(
    configure: Any, squares: Path, tmp_path: Path
):
    photos = tmp_path / "photos"
    shutil.copytree(squares / "photos", photos)
    (photos / "gray.png").write_bytes(b"no picture")
    data = {"images": [str(photos)]}
    with pytest.raises(ImageError, match=r"gray\.png"):
        prepare(configure(data=data))
    prepare(configure(data=data, training={"limit_val": 7}))  # it is the last, and not used


# --- Optimizer ---


def test_matrices_decay_and_vectors_do_not(configure: Any):
    config = configure(
        encoder={"finetune_from": "layer4"},
        training={"lr": 0.5, "encoder_lr": 0.25, "weight_decay": 0.125},
    )
    model = prepare(config).stored.model
    groups = make_optimizer(model, config.training).param_groups
    found = {id(p): group for group in groups for p in group["params"]}
    assert len(found) == sum(len(group["params"]) for group in groups)  # none twice
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            assert id(parameter) not in found, name
            continue
        group = found[id(parameter)]
        assert group["weight_decay"] == (0.125 if parameter.ndim > 1 else 0), name
        expected = 0.25 if name.startswith("encoder.") else 0.5
        assert group["lr"] == group["highest_lr"] == expected, name


def test_a_frozen_encoder_is_no_business_of_the_optimizer(configure: Any):
    model = prepare(configure()).stored.model
    groups = make_optimizer(model, configure().training).param_groups
    learning = {id(p) for group in groups for p in group["params"]}
    assert learning == {id(p) for p in model.decoder.parameters()}
    assert len(groups) == 2


# --- Average ---


@pytest.mark.parametrize("decay", [0.15, 0.5, 0.999])
def test_the_average_is_the_equation(decay: float):
    model = nn.Linear(2, 3)
    average = make_average(model, decay)
    assert average is not None
    expected = np.zeros((3, 2))
    for n in range(30):
        with torch.no_grad():
            model.weight.copy_(torch.randn(3, 2))
        average.update_parameters(model)
        weight = model.weight.detach().double().numpy()
        d = min(decay, (1 + n) / (10 + n)) if n > 0 else 0  # the first update copies
        expected = d * expected + (1 - d) * weight
        found = average.module.weight.detach().numpy()
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


def test_no_decay_no_average():
    assert make_average(nn.Linear(2, 3), 0) is None


def test_the_average_leaves_frozen_weights_as_they_are(configure: Any):
    model = prepare(configure()).stored.model
    average = make_average(model, 0.9)
    assert average is not None
    for _ in range(3):
        average.update_parameters(model)
    mine, theirs = average.module.state_dict(), model.state_dict()
    assert all(torch.equal(mine[name], theirs[name]) for name in theirs)
