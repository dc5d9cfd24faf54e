"""Test the preparation of data sets and of a new or an initial model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from toy_captioner import add_reading

from captioner.data.example import Example
from captioner.errors import ConfigError, DataError, ImageError
from captioner.inference.folder import load_model, save_model
from captioner.text.vocabulary import END, UNKNOWN
from captioner.training.config import build_config
from captioner.training.data import check_images
from captioner.training.setup import open_encoder, prepare

# --- Model ---


def test_initial_weights_depend_on_the_seed(configure: Any):
    def weights(seed: int) -> dict[str, torch.Tensor]:
        torch.rand(3)  # the state of the generator does not matter
        return prepare(configure(training={"seed": seed})).stored.model.state_dict()

    one, same, other = weights(1), weights(1), weights(2)
    assert all(torch.equal(one[name], same[name]) for name in one)
    assert not torch.equal(one["decoder.embedding.weight"], other["decoder.embedding.weight"])


# --- Second stage ---


def test_a_second_stage_keeps_weights_and_vocabulary(
    configure: Any, first_stage: str, two_files: tuple[str, str]
):
    config = configure(
        init_from=first_stage,
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


def test_a_run_starts_a_reading_of_the_words_of_its_captions(configure: Any) -> None:
    stored = prepare(configure(training={"reading": 0.5})).stored

    assert stored.reading.stems[0] == "squar"  # in every caption
    assert {"red", "cyan"} < {*stored.reading.stems}
    assert "a" not in stored.reading.stems
    shares = stored.model.reading.mean.bias.sigmoid()
    assert shares.tolist() == pytest.approx([8.5 / 9, *[1.5 / 9] * 8])
    assert stored.model.reading.dropout.p == 0.2
    assert prepare(configure()).stored.reading is None


def test_a_reading_needs_frequent_words(configure: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("captioner.training.reading.MIN_PHOTOS", 9)
    with pytest.raises(DataError, match="no content word occurs in the captions of 9 training"):
        prepare(configure(training={"reading": 0.5}))


@pytest.mark.parametrize(
    ("changes", "kept"),
    [
        ({}, True),
        ({"encoder": {"finetune_from": "layer4"}}, False),
        ({"encoder": {"image_size": 64}}, False),
        ({"encoder": {"finetune_from": "layer4"}, "training": {"reading": 0.5}}, True),
    ],
    ids=["frozen", "fine-tuned", "another size", "trained on"],
)
def test_a_second_stage_keeps_the_reading_of_the_same_features(
    configure: Any, first_stage: str, tmp_path: Path, changes: dict[str, Any], kept: bool
) -> None:
    first = load_model(first_stage)
    add_reading(first, "red", "blue")
    save_model(tmp_path / "first", first)
    first = load_model(tmp_path / "first")  # rounded

    stored = prepare(configure(init_from=str(tmp_path / "first"), **changes)).stored

    reading, trained = stored.model.reading, "training" in changes
    assert (stored.reading is not None) == (reading is not None) == kept
    if kept:
        assert stored.reading.stems == first.reading.stems
        assert stored.reading.rows == first.reading.rows
        assert stored.reading.keywords == ({} if trained else first.reading.keywords)
        assert torch.equal(reading.mean.weight, first.model.reading.mean.weight)
        assert all(part.requires_grad == trained for part in reading.parameters())


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (
            {"encoder": {"name": "timm/test_efficientnet"}},
            "test_efficientnet', but .* with 'timm/t",
        ),
        # Equal to the default, and yet another value than the model's.
        (
            {"decoder": {"attention": "additive"}},
            "is 'additive', but .* with 'general'",
        ),
    ],
)
def test_a_setting_that_differs_from_the_initial_model_is_refused(
    configure: Any, tmp_path: Path, given: dict[str, Any], expected: str
):
    first = stage_of(configure, tmp_path / "first", attention="general")
    config = build_config(configure(init_from=str(first)), **given)
    with pytest.raises(ConfigError, match=expected):
        prepare(config)


def test_a_second_stage_of_words_refuses_captions_without_spaces(
    configure: Any, first_stage: str, two_files: tuple[str, str]
):
    chinese = json.loads(Path(two_files[0]).read_text())
    for entry in chinese["annotations"]:
        entry["caption"] = "一只小狗在草地上跑"
    Path(two_files[0]).write_text(json.dumps(chinese))
    config = configure(init_from=first_stage, data={"train_annotations": [two_files[0]]})
    with pytest.raises(ConfigError, match=r"no spaces between words .* data.tokenizer=bpe"):
        prepare(config)


def stage_of(configure: Any, folder: Path, **decoder: Any) -> Path:
    save_model(folder, prepare(configure(decoder=decoder)).stored)
    return folder


def test_a_second_stage_inherits_the_attention_and_what_is_not_given(
    configure: Any, tmp_path: Path
):
    settings = {"attention": "general", "selection": "hard", "order": "luong", "projection_dim": 5}
    first = prepare(
        configure(encoder={"image_size": 96, "resize": "squash"}, decoder=settings)
    ).stored
    save_model(tmp_path / "run" / "best", first)
    unset = {"name": None, "image_size": None, "resize": None}
    given = configure(init_from=str(tmp_path / "run"), encoder=unset, decoder={"dropout": 0.4})

    setup = prepare(build_config(given))

    second, resolved = setup.stored, setup.config.encoder
    assert {name: getattr(second.decoder, name) for name in settings} == settings
    assert second.decoder.dropout == 0.4
    assert second.model.preprocessing == first.model.preprocessing
    assert setup.config.decoder == second.decoder  # saved in the run folder
    found = (resolved.name, resolved.image_size, resolved.resize)
    assert found == ("timm/test_resnet", 96, "squash")
    assert given.decoder.attention == "additive"  # the caller's config is not changed
    assert open_encoder(build_config(given))[1] == first.model.preprocessing  # for features
    given.encoder.image_size = 128
    larger = prepare(build_config(given)).stored.model
    assert larger.grid == (4, 4)  # only 'location' depends on the number of regions


@pytest.mark.parametrize("attention", ["additive", "concat"])
def test_sharpened_attention_multiplies_the_scores(configure: Any, tmp_path: Path, attention: str):
    first = stage_of(configure, tmp_path / "first", attention=attention)
    config = build_config(configure(init_from=str(first), training={"sharpen_attention": 1.5}))
    features = torch.randn(1, 4, 512)
    scores = []
    for stored in (load_model(first), prepare(config).stored):
        decoder = stored.model.decoder
        scorer = decoder.attention.scorer
        keys = scorer.keys(features[..., : scorer.sizes.features])
        scores.append(scorer(torch.ones(1, 1, scorer.sizes.query), keys))
    torch.testing.assert_close(scores[1], 1.5 * scores[0])


def test_sharpened_attention_is_refused_for_other_scores(configure: Any, tmp_path: Path):
    first = stage_of(configure, tmp_path / "first", attention="general")
    given = configure(init_from=str(first), training={"sharpen_attention": 1.5})
    with pytest.raises(ConfigError, match=r"sharpen_attention supports .* not general"):
        build_config(given)


def test_a_second_stage_at_another_image_size_resamples_position_embeddings(
    configure: Any, tmp_path: Path
):
    vit = {"name": "timm/test_vit", "weights": "none", "image_size": 48}
    save_model(tmp_path / "first", prepare(configure(encoder=vit)).stored)

    config = configure(
        init_from=str(tmp_path / "first"), encoder={"name": "timm/test_vit", "image_size": 64}
    )
    second = prepare(config).stored.model

    assert second.grid == (4, 4)
    assert second.encoder.backbone.pos_embed.shape == (1, 17, 64)
    features = open_encoder(config)[0]  # as prepare features does
    for name, value in features.state_dict().items():
        assert torch.equal(value, second.encoder.state_dict()[name]), name


def logits_of(stored: Any) -> torch.Tensor:
    """Return the logits of the word after "a red" for a gray photo, (V,)."""
    model = stored.model.eval()
    features = model.encode(torch.full((1, 48, 48, 3), 90, dtype=torch.uint8))
    tokens = [stored.vocabulary.start(), *stored.vocabulary.encode(["a", "red"])]
    unrolled = model.decoder(model.decoder.memory(features), torch.tensor([[tokens]]))
    return model.decoder.readout(unrolled.embedded, *unrolled.outputs)[0, 0, -1]


@pytest.mark.parametrize("styles", [[], ["plain"]])
def test_new_words_share_the_probability_of_an_unknown_word(
    configure: Any, two_files: tuple[str, str], tmp_path: Path, styles: list[str]
):
    """The probabilities of all known words are unchanged."""
    data = {"train_annotations": [two_files[0]], "styles": styles}
    first = prepare(configure(data=data)).stored
    torch.nn.init.normal_(first.model.decoder.word_output.bias)
    save_model(tmp_path / "first", first)
    first = load_model(tmp_path / "first")
    both = {"train_annotations": list(two_files), "styles": ["plain", "new"] if styles else []}

    second = prepare(configure(data=both, init_from=str(tmp_path / "first"))).stored

    old, new = first.vocabulary, second.vocabulary
    assert new.words == (*old.words, "cyan", "gray", "magenta", "white")
    assert new.styles == (("plain", "new") if styles else ())
    before, after = (logits_of(stored).softmax(-1) for stored in (first, second))
    known = [token for token in range(len(old)) if token != UNKNOWN]
    torch.testing.assert_close(after[known], before[known])
    added = after[len(old) :]
    torch.testing.assert_close(added.sum() + after[UNKNOWN], before[UNKNOWN])
    torch.testing.assert_close(added, added[:1].expand(4))  # each new word occurs once
    save_model(tmp_path / "second", second)
    assert load_model(tmp_path / "second").vocabulary == new


def test_threshold_and_option_select_new_words(
    configure: Any, two_files: tuple[str, str], tmp_path: Path
):
    save_model(
        tmp_path / "first", prepare(configure(data={"train_annotations": [two_files[0]]})).stored
    )
    content = json.loads(Path(two_files[1]).read_text())
    content["annotations"].append({"id": 99, "image_id": 5, "caption": "It is cyan."})
    Path(two_files[1]).write_text(json.dumps(content))

    def new_words(**data: Any) -> tuple[str, ...]:
        data = {"train_annotations": [two_files[1]], **data}
        stored = prepare(configure(data=data, init_from=str(tmp_path / "first"))).stored
        return stored.vocabulary.words[len(load_model(tmp_path / "first").vocabulary.words) :]

    assert new_words(vocabulary_threshold=2) == ("cyan",)
    assert new_words(vocabulary_threshold=3) == ()
    assert new_words(extend_vocabulary=False) == ()


# --- Data -----------------------------------------------------------------------------------------


def test_vocabulary_is_built_from_training_captions_only(
    configure: Any, two_files: tuple[str, str]
):
    train, val = two_files
    setup = prepare(configure(data={"train_annotations": [train], "val_annotations": [val]}))
    assert set(setup.stored.vocabulary.words) == {"a", "square", "red", "lime", "blue", "yellow"}
    assert [image.path.stem for image in setup.val] == ["cyan", "magenta", "white", "gray"]
    decoder = setup.stored.model.decoder
    assert decoder.word_output.out_features == len(setup.stored.vocabulary) == 10


def test_the_karpathy_split_overrides_the_files(
    configure: Any, two_files: tuple[str, str], tmp_path: Path
):
    splits = ["val", "train", "restval", "test", "train", "val", "test", "restval"]
    images = [
        {"cocoid": number, "split": split, "filename": f"{number}.png", "sentences": []}
        for number, split in enumerate(splits, start=1)
    ]
    split_file = tmp_path / "dataset_coco.json"
    split_file.write_text(json.dumps({"images": images}))
    data = {
        "train_annotations": [two_files[0]],
        "val_annotations": [two_files[1]],
        "karpathy_split": str(split_file),
    }
    setup = prepare(configure(data=data))
    assert [item.image_id for item in setup.train] == [2, 3, 5, 8]
    assert [image.image_id for image in setup.val] == [1, 6]
    assert "red" not in setup.stored.vocabulary  # photo 1 is for validation


def test_captions_are_encoded_and_truncated(configure: Any):
    setup = prepare(configure(data={"max_words": 2}))  # captions have three words
    words = [setup.stored.vocabulary.decode(item.tokens[0]) for item in setup.train]
    assert words == [["a", item.path.stem] for item in setup.train]
    bias = setup.stored.model.decoder.word_output.bias
    assert bias[END] == bias.min()  # truncation is not learned as an ending
    setup = prepare(configure(data={"max_words": 3}))
    words = [setup.stored.vocabulary.decode(item.tokens[0]) for item in setup.train]
    assert words == [["a", item.path.stem, "square", "<end>"] for item in setup.train]


def test_a_truncated_validation_photo_is_found_before_the_first_step(tmp_path: Path):
    photo = tmp_path / "a.jpg"
    noise = np.random.default_rng(0).integers(256, size=(64, 64, 3), dtype=np.uint8)
    Image.fromarray(noise).save(photo)
    check_images([Example(1, photo, ("a dog",))], None)
    photo.write_bytes(photo.read_bytes()[:-1000])
    both = [Example(n, photo, ("a dog",)) for n in (1, 2)]
    with pytest.raises(ImageError, match=r"a\.jpg: the image is truncated.* \(and 1 more\)"):
        check_images(both, None)
