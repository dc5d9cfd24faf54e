"""Every setting that cannot work is refused by name, and every config file loads."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

import pytest
import yaml

from captioner.cli import train
from captioner.config import (
    DataConfig,
    DecoderConfig,
    EncoderConfig,
    SearchOptions,
    TrainConfig,
    TrainingConfig,
)
from captioner.errors import ConfigError

CONFIGS = sorted((Path(__file__).parents[2] / "configs").glob("**/*.yaml"))

# Class, field, values that cannot work, the name in the message, what the message allows.
BAD = [
    (DataConfig, "max_captions", [0, -1], "data.max_captions", "1 or more"),
    (DataConfig, "max_words", [0], "data.max_words", "1 or more"),
    (DataConfig, "vocabulary_threshold", [0, -3], "data.vocabulary_threshold", "1 or more"),
    (DataConfig, "workers", [-1], "data.workers", "0 or more"),
    (EncoderConfig, "image_size", [0, 31], "encoder.image_size", "32 or more"),
    (EncoderConfig, "mean", [[], [0.5], [0.1] * 4], "encoder.mean", "3, one a colour channel"),
    (EncoderConfig, "std", [[], [0.5], [0.1] * 4], "encoder.std", "3, one a colour channel"),
    (EncoderConfig, "std", [[0.2, 0.0, 0.2], [0.2, 0.2, -1]], "encoder.std", "more than 0"),
    (DecoderConfig, "embed_dim", [0, -4], "decoder.embed_dim", "1 or more"),
    (DecoderConfig, "hidden_dim", [0], "decoder.hidden_dim", "1 or more"),
    (DecoderConfig, "attention_dim", [0], "decoder.attention_dim", "1 or more"),
    (DecoderConfig, "heads", [0, -8], "decoder.heads", "1 or more"),
    (DecoderConfig, "projection_dim", [-1], "decoder.projection_dim", "1 or more, or 0 for none"),
    (DecoderConfig, "query", ["photo", ""], "decoder.query", "hidden, self or mean"),
    (DecoderConfig, "selection", ["firm"], "decoder.selection", "soft or hard"),
    (DecoderConfig, "order", ["vinyals", "Luong"], "decoder.order", "bahdanau or luong"),
    (DecoderConfig, "dropout", [-0.1, 1.0, math.nan], "decoder.dropout", "0 up to below 1"),
    (SearchOptions, "beam_size", [0, -1], "beam-size", "1 (greedy) or more"),
    (SearchOptions, "max_length", [0], "max-length", "1 or more"),
    (SearchOptions, "num_captions", [0, 6], "num-captions", "1 to beam-size (5)"),
    (SearchOptions, "length_penalty", [-0.5, math.nan], "length-penalty", "0 or more"),
    *(
        (TrainingConfig, name, [0, -1], f"training.{name}", "1 or more")
        for name in ("epochs", "batch_size", "save_every")
    ),
    *(
        (TrainingConfig, name, [-1], f"training.{name}", "0 or more")
        for name in ("warmup_steps", "patience", "sample_images", "limit_val")
    ),
    *(
        (TrainingConfig, name, [-0.1, math.nan], f"training.{name}", "0 or more")
        for name in (
            "lr",
            "encoder_lr",
            "weight_decay",
            "attention_penalty",
            "hard_reward",
            "hard_entropy",
        )
    ),
    (TrainingConfig, "clip_norm", [0.0, -1.0, math.nan], "training.clip_norm", "more than 0"),
    (TrainingConfig, "label_smoothing", [-0.1, 1.0], "training.label_smoothing", "0 up to below 1"),
    (TrainingConfig, "ema_decay", [-0.1, 1.0], "training.ema_decay", "0 up to below 1"),
]


@pytest.mark.parametrize(
    ("kind", "field", "value", "name", "allowed"),
    [(kind, field, value, *told) for kind, field, values, *told in BAD for value in values],
)
def test_a_bad_value_is_named_with_what_is_allowed(kind, field, value, name, allowed) -> None:
    with pytest.raises(ConfigError) as caught:
        kind(**{field: value})

    message = str(caught.value)
    assert name in message
    assert allowed in message
    assert "\n" not in message
    if not isinstance(value, list):
        assert str(value) in message


@pytest.mark.parametrize(
    "kind", [DataConfig, EncoderConfig, DecoderConfig, SearchOptions, TrainingConfig]
)
def test_every_number_has_a_range_that_is_tested(kind) -> None:
    numbers = {f.name for f in dataclasses.fields(kind) if f.type in ("int", "float")}
    # seed may be any number
    assert numbers - {"seed"} <= {field for known, field, *_ in BAD if known is kind}


@pytest.mark.parametrize(
    "config",
    [
        DataConfig(max_captions=1, max_words=1, workers=0, vocabulary_threshold=1),
        EncoderConfig(image_size=32, mean=[0.0, 0.0, 0.0], std=[0.1, 0.1, 0.1]),
        DecoderConfig(embed_dim=1, hidden_dim=1, attention_dim=1, dropout=0.0),
        DecoderConfig(heads=1, projection_dim=0),
        SearchOptions(beam_size=1, num_captions=1, max_length=1, length_penalty=0.0),
        TrainingConfig(epochs=1, batch_size=1, save_every=1, lr=0.0, patience=0, limit_val=0),
        TrainingConfig(attention_penalty=0.0, hard_reward=0.0, hard_entropy=0.0),
    ],
    ids=lambda config: type(config).__name__,
)
def test_the_edges_of_the_ranges_are_allowed(config) -> None:
    assert dataclasses.replace(config) == config


def test_no_two_runs_share_a_list() -> None:
    one, other = TrainConfig(), TrainConfig()

    one.data.images.append("photos")

    assert other.data.images == []


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.name)
def test_every_config_file_loads(path) -> None:
    config, resume, force = train.read([str(path)])

    assert isinstance(config, TrainConfig)
    assert (resume, force) == (False, False)
    written = yaml.safe_load(path.read_text(encoding="utf-8"))
    for room, settings in written.items():  # nothing in the file was left out or turned
        if not isinstance(settings, dict):
            assert getattr(config, room) == settings
            continue
        for name, value in settings.items():
            assert getattr(getattr(config, room), name) == value, f"{room}.{name}"


def test_there_are_config_files() -> None:
    assert CONFIGS


def test_the_command_line_changes_what_the_file_says() -> None:
    path = CONFIGS[0]

    config, resume, force = train.read(
        [str(path), "--training.epochs", "3", "--run", "elsewhere", "--resume", "auto", "--force"]
    )

    assert (config.training.epochs, config.run, resume, force) == (3, "elsewhere", True, True)


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("training: {epochs: 0}", "training.epochs"),
        ("training: {epochs: many}", "epochs"),
        ("training: {epoch: 3}", "epoch"),
        ("encoder: {resize: stretch}", "resize"),
        ("decoder: {query: photo}", "query"),
        ("decoder: {selection: firm}", "selection"),
        ("decoder: {order: vinyals}", "order"),
        ("decoder: {heads: 0}", "decoder.heads"),
        ("training: {hard_reward: -1}", "training.hard_reward"),
        ("colour: red", "colour"),
    ],
)
def test_a_bad_config_file_is_a_config_error(tmp_path, text, named) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text(text, encoding="utf-8")

    with pytest.raises(ConfigError, match=named) as caught:
        train.read([str(path)])
    assert "\n" not in str(caught.value)
