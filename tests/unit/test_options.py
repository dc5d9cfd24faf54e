"""Invalid settings are refused by name, and every config file loads."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
from pathlib import Path

import pytest
import yaml

from captioner.cli import train
from captioner.errors import ConfigError, OptionError
from captioner.option_fields import option_fields
from captioner.options import (
    DataConfig,
    DecoderConfig,
    EncoderConfig,
    SearchOptions,
    SelfCriticalConfig,
    TrainConfig,
    TrainingConfig,
)

CONFIGS = sorted((Path(__file__).parents[2] / "configs").glob("**/*.yaml"))

# Class, field, invalid values, the name in the message, and what the message says is allowed.
BAD = [
    (DataConfig, "min_captions", [0, -1], "data.min_captions", "an integer >= 1"),
    (DataConfig, "max_captions", [0, -1], "data.max_captions", "an integer >= 1"),
    (DataConfig, "max_words", [0], "data.max_words", "an integer >= 1"),
    (DataConfig, "vocabulary_threshold", [0, -3], "data.vocabulary_threshold", "an integer >= 1"),
    (DataConfig, "vocabulary_size", [0], "data.vocabulary_size", "an integer >= 1"),
    (DataConfig, "tokenizer", ["char"], "data.tokenizer", "words or bpe"),
    (DataConfig, "workers", [-1], "data.workers", "an integer >= 0"),
    (DataConfig, "bucket_batches", [0, -1], "data.bucket_batches", "an integer >= 1"),
    (DataConfig, "min_crop", [0.0, 1.1], "data.min_crop", "a number > 0 and <= 1"),
    (DataConfig, "color_jitter", [-0.1, 1.0], "data.color_jitter", "a number >= 0 and < 1"),
    (EncoderConfig, "image_size", [0, 31], "encoder.image_size", "an integer >= 32"),
    (EncoderConfig, "mean", [[], [0.5], [0.1] * 4], "encoder.mean", "3, one per colour channel"),
    (EncoderConfig, "std", [[], [0.5], [0.1] * 4], "encoder.std", "3, one per colour channel"),
    (EncoderConfig, "std", [[0.2, 0.0, 0.2], [0.2, 0.2, -1]], "encoder.std", "numbers > 0"),
    (DecoderConfig, "embed_dim", [0, -4], "decoder.embed_dim", "an integer >= 1"),
    (DecoderConfig, "hidden_dim", [0], "decoder.hidden_dim", "an integer >= 1"),
    (DecoderConfig, "attention_dim", [0], "decoder.attention_dim", "an integer >= 1"),
    (DecoderConfig, "heads", [0, -8], "decoder.heads", "an integer >= 1"),
    (DecoderConfig, "projection_dim", [-1], "decoder.projection_dim", "an integer >= 0"),
    (DecoderConfig, "query", ["photo", ""], "decoder.query", "hidden, self or mean"),
    (DecoderConfig, "selection", ["firm"], "decoder.selection", "soft or hard"),
    (DecoderConfig, "order", ["vinyals", "Luong"], "decoder.order", "bahdanau or luong"),
    (DecoderConfig, "dropout", [-0.1, 1.0, math.nan], "decoder.dropout", "a number >= 0 and < 1"),
    (SearchOptions, "beam_size", [0, -1], "beam_size", "an integer >= 1"),
    (SearchOptions, "max_length", [0], "max_length", "an integer >= 1"),
    (SearchOptions, "num_captions", [0, -1], "num_captions", "an integer >= 1"),
    (SearchOptions, "num_captions", [6], "num_captions", "at most beam_size (5)"),
    (SearchOptions, "beam_groups", [0, -2], "beam_groups", "an integer >= 1"),
    (SearchOptions, "beam_groups", [2, 10], "beam_groups", "a divisor of it"),
    (SearchOptions, "top_p", [0.0, -0.1, 1.01, math.nan], "top_p", "a number > 0 and <= 1"),
    *(
        (SearchOptions, name, [-1], name, "0")
        for name in ("min_length", "top_k", "seed", "block_ngrams", "candidates")
    ),
    *(
        (SearchOptions, name, [-0.5, math.nan, math.inf], name, "0")
        for name in ("temperature", "diversity")
    ),
    (
        SearchOptions,
        "length_penalty",
        [-0.5, 10.5, math.nan, math.inf],
        "length_penalty",
        "0 to 10",
    ),
    (SearchOptions, "guidance", [-0.1, 10.1, math.nan], "guidance", "0 to 10"),
    (SearchOptions, "rare_words", [-0.1, 1.1, math.nan], "rare_words", "0 to 1"),
    (SearchOptions, "beam_size", [2.0, "3", True], "beam_size", "an integer >= 1"),
    *(
        (TrainingConfig, name, [0, -1], f"training.{name}", "an integer >= 1")
        for name in ("epochs", "batch_size", "save_every", "plateau_patience", "keep_best")
    ),
    *(
        (TrainingConfig, name, [-1], f"training.{name}", ">= 0")
        for name in (
            "warmup_steps",
            "patience",
            "log_every",
            "sample_images",
            "limit_val",
            "micro_batch",
        )
    ),
    *(
        (TrainingConfig, name, [-0.1, math.nan], f"training.{name}", ">= 0")
        for name in (
            "lr",
            "encoder_lr",
            "weight_decay",
            "photo_words",
            "attention_penalty",
            "hard_reward",
            "hard_entropy",
        )
    ),
    (TrainingConfig, "seed", [-1, 2**31], "training.seed", "from 0 to 2,147,483,647"),
    (TrainingConfig, "epochs", [2.5, "3", True], "training.epochs", "an integer >= 1"),
    (TrainingConfig, "compile", ["no", 1], "training.compile", "true or false"),
    (TrainingConfig, "precision", ["half"], "training.precision", "auto, fp32, tf32, bf16 or fp16"),
    (EncoderConfig, "resize", ["stretch"], "encoder.resize", "squash or crop"),
    (TrainingConfig, "clip_norm", [0.0, -1.0, math.nan], "training.clip_norm", "a number > 0"),
    (
        TrainingConfig,
        "label_smoothing",
        [-0.1, 1.0],
        "training.label_smoothing",
        "a number >= 0 and < 1",
    ),
    (TrainingConfig, "ema_decay", [-0.1, 1.0], "training.ema_decay", "a number >= 0 and < 1"),
    (
        TrainingConfig,
        "scheduled_sampling",
        [-0.1, 1.1, math.nan],
        "scheduled_sampling",
        "a number from 0 to 1",
    ),
    (TrainingConfig, "schedule", ["linear", ""], "training.schedule", "cosine or plateau"),
    (
        TrainingConfig,
        "objective",
        ["cider", ""],
        "training.objective",
        "cross_entropy or self_critical",
    ),
    (SelfCriticalConfig, "samples", [0, -1], "self_critical.samples", "an integer >= 1"),
    (SelfCriticalConfig, "samples", [1], "self_critical.samples", "2 or more, or baseline greedy"),
    (SelfCriticalConfig, "max_length", [1, 0], "self_critical.max_length", "an integer >= 2"),
    (SelfCriticalConfig, "baseline", ["mean"], "self_critical.baseline", "leave_one_out or greedy"),
    *(
        (SelfCriticalConfig, name, [-0.5, math.nan], f"self_critical.{name}", ">= 0")
        for name in ("cider", "bleu", "cross_entropy")
    ),
]


@pytest.mark.parametrize(
    ("kind", "field", "value", "name", "allowed"),
    [(kind, field, value, *parts) for kind, field, values, *parts in BAD for value in values],
)
def test_the_error_for_a_bad_value_names_what_is_allowed(kind, field, value, name, allowed) -> None:
    with pytest.raises(ConfigError) as caught:
        kind(**{field: value})

    message = str(caught.value)
    assert name in message
    assert allowed in message
    assert "\n" not in message
    if not isinstance(value, list):
        assert str(value) in message


@pytest.mark.parametrize(
    "kind",
    [
        DataConfig,
        EncoderConfig,
        DecoderConfig,
        SearchOptions,
        TrainingConfig,
        SelfCriticalConfig,
    ],
)
def test_every_numeric_option_has_bad_values_here(kind) -> None:
    numbers = {f.name for f in option_fields(kind).values() if f.type in (int, float)}

    assert numbers <= {field for known, field, *_ in BAD if known is kind}


@pytest.mark.parametrize(
    "config",
    [
        DataConfig(max_captions=1, max_words=1, workers=0, vocabulary_threshold=1),
        EncoderConfig(image_size=32, mean=[0.0, 0.0, 0.0], std=[0.1, 0.1, 0.1]),
        DecoderConfig(embed_dim=1, hidden_dim=1, attention_dim=1, dropout=0.0),
        DecoderConfig(heads=1, projection_dim=0),
        SearchOptions(beam_size=1, num_captions=1, max_length=1, length_penalty=0.0),
        SearchOptions(beam_groups=1, min_length=0, max_length=1, block_ngrams=0),
        SearchOptions(beam_groups=5, diversity=0.0),
        SearchOptions(beam_size=6, num_captions=6, beam_groups=6, min_length=19),
        SearchOptions(beam_size=1, temperature=1e-9, top_p=1e-9, top_k=1, seed=0),
        SearchOptions(max_length=3, forced_words=("a", "dog"), banned_words=()),
        TrainingConfig(epochs=1, batch_size=1, save_every=1, lr=0.0, patience=0, limit_val=0),
        TrainingConfig(attention_penalty=0.0, hard_reward=0.0, hard_entropy=0.0),
        TrainingConfig(scheduled_sampling=1.0, micro_batch=0, plateau_patience=1, keep_best=1),
        DataConfig(bucket_batches=1, features="f"),
        SelfCriticalConfig(samples=2, max_length=2, cider=0.0, bleu=1e-9),
        SelfCriticalConfig(samples=1, baseline="greedy", cider=1e-9, bleu=0.0),
    ],
    ids=lambda config: type(config).__name__,
)
def test_limits_of_the_ranges_are_valid(config) -> None:
    assert dataclasses.replace(config) == config


# --- Settings that contradict each other ---

SELF_CRITICAL = {"objective": "self_critical"}


@pytest.mark.parametrize(
    ("make", "parts"),
    [
        (lambda: DataConfig(features="f", shards="s"), ["data.features", "data.shards"]),
        (lambda: SelfCriticalConfig(cider=0.0, bleu=0.0), ["cider", "bleu", "both 0"]),
        (
            lambda: TrainConfig(
                training=TrainingConfig(**SELF_CRITICAL), decoder=DecoderConfig(selection="hard")
            ),
            ["objective self_critical", "decoder.selection hard"],
        ),
        (
            lambda: TrainConfig(training=TrainingConfig(**SELF_CRITICAL, scheduled_sampling=0.1)),
            ["training.scheduled_sampling", "self_critical", "give 0"],
        ),
    ],
)
def test_contradicting_settings_are_named(make, parts) -> None:
    with pytest.raises(ConfigError) as caught:
        make()

    message = str(caught.value)
    assert [part for part in parts if part not in message] == []
    assert "\n" not in message


# --- Combining search options ---

SAMPLING = {"temperature": 0.7, "beam_size": 1}
# Each option with the options that it requires.
CHOICES: dict[str, dict[str, object]] = {
    "greedy": {"beam_size": 1},
    "beam": {"beam_size": 4},
    "several": {"beam_size": 4, "num_captions": 4},
    "min_length": {"min_length": 5},
    "max_length": {"max_length": 9},
    "length_penalty": {"length_penalty": 0.7},
    "sampling": SAMPLING,
    "several samples": {**SAMPLING, "num_captions": 9},
    "top_k": {**SAMPLING, "top_k": 5},
    "top_p": {**SAMPLING, "top_p": 0.9},
    "seed": {**SAMPLING, "seed": 3},
    "groups": {"beam_size": 4, "beam_groups": 2},
    "diversity": {"beam_size": 4, "beam_groups": 2, "diversity": 2.0},
    "block_ngrams": {"block_ngrams": 3},
    "forced": {"forced_words": ("dog", "cat")},
    "banned": {"banned_words": ("man",)},
    "repeats": {"block_repeats": True},
    "guided": {"guidance": 0.3},
    "rare": {"rare_words": 0.2},
    "guard": {"guard_endings": True},
    "candidates": {"beam_size": 4, "candidates": 4},
    "sampled candidates": {**SAMPLING, "candidates": 9},
}
# All pairs that do not set an option to two different values.
PAIRS = [
    pair
    for pair in itertools.combinations(CHOICES, 2)
    if all(
        CHOICES[pair[0]][name] == CHOICES[pair[1]][name]
        for name in CHOICES[pair[0]].keys() & CHOICES[pair[1]].keys()
    )
]
REFUSED = {
    frozenset((name, "forced"))
    for name in ("sampling", "several samples", "top_k", "top_p", "seed", "groups", "diversity")
} | {frozenset((name, "sampled candidates")) for name in ("forced", "groups", "diversity")}


@pytest.mark.parametrize("pair", PAIRS, ids=" and ".join)
def test_two_options_are_refused_only_if_they_contradict(pair) -> None:
    options = CHOICES[pair[0]] | CHOICES[pair[1]]

    if frozenset(pair) in REFUSED:
        with pytest.raises(ConfigError, match="give one of the two"):
            SearchOptions(**options)
        return
    found = SearchOptions(**options)

    assert {name: getattr(found, name) for name in options} == options


@pytest.mark.parametrize(
    ("options", "parts"),
    [
        ({"num_captions": 6}, ["num_captions is 6", "beam_size (5)", "temperature"]),
        ({"beam_size": 2, "num_captions": 3}, ["num_captions is 3", "beam_size (2)"]),
        ({"temperature": 0.5}, ["temperature 0.5", "beam_size 5", "num_captions"]),
        ({"temperature": 0.5, "beam_size": 2}, ["temperature 0.5", "beam_size 2"]),
        (SAMPLING | {"forced_words": ["dog"]}, ["temperature", "forced_words", "one of the two"]),
        ({"top_k": 5}, ["top_k 5", "give a temperature"]),
        ({"top_p": 0.5}, ["top_p 0.5", "give a temperature"]),
        ({"beam_size": 4, "beam_groups": 3}, ["beam_groups is 3", "beam_size (4)"]),
        (SAMPLING | {"beam_groups": 2}, ["temperature", "beam_groups", "one of the two"]),
        ({"seed": 3}, ["seed 3", "give a temperature"]),
        ({"diversity": 3.0}, ["diversity 3.0", "give beam_groups"]),
        (
            {"beam_size": 4, "beam_groups": 2, "forced_words": ["dog"]},
            ["beam_groups", "forced_words", "one of the two"],
        ),
        ({"min_length": 20}, ["min_length is 20", "max_length 20"]),
        ({"min_length": 3, "max_length": 3}, ["min_length is 3", "max_length 3"]),
        ({"forced_words": "a b c", "max_length": 3}, ["forced_words has 3", "max_length is 3"]),
        (
            {"forced_words": "Dog cat man", "banned_words": "man dog"},
            ["dog, man", "forced_words and banned_words"],
        ),
    ],
    ids=str,
)
def test_a_contradiction_names_all_options_involved(options, parts) -> None:
    with pytest.raises(ConfigError) as caught:
        SearchOptions(**options)

    message = str(caught.value)
    assert [part for part in parts if part not in message] == []
    assert "\n" not in message
    assert "give" in message or "remove" in message


@pytest.mark.parametrize("name", ["forced_words", "banned_words"])
@pytest.mark.parametrize(
    "given",
    [
        "dog, cat",
        "dog,cat",
        " dog  cat ",
        "dog,,cat,",
        ["dog", "cat"],
        ("dog", "cat"),
        "dog cat dog",
        "[dog, cat]",
        "Dog, CAT.",
    ],
    ids=repr,
)
def test_word_lists_are_parsed_to_tuples(name, given) -> None:
    options = SearchOptions(**{name: given})

    assert getattr(options, name) == ("dog", "cat")
    assert options == SearchOptions(**{name: ("dog", "cat")})
    assert hash(options) == hash(SearchOptions(**{name: ("dog", "cat")}))


@pytest.mark.parametrize("given", ["", " , ", [], ()], ids=repr)
def test_empty_word_lists(given) -> None:
    assert SearchOptions(forced_words=given, banned_words=given) == SearchOptions()


def test_word_lists_are_tokenized() -> None:
    given = ["T-shirt", "1,000", "On", "no"]

    assert SearchOptions(banned_words=given).banned_words == ("t-shirt", "1,000", "on", "no")
    assert SearchOptions(banned_words="[on, no, yes]").banned_words == ("on", "no", "yes")


@pytest.mark.parametrize("given", [["a dog"], "isn't", ["dog", "..."]], ids=repr)
def test_entries_must_be_single_words(given) -> None:
    with pytest.raises(ConfigError, match=r"^forced_words contains .*; give single words$"):
        SearchOptions(forced_words=given)


def test_search_options_round_trip_through_json() -> None:
    options = SearchOptions(
        beam_size=1,
        num_captions=7,
        temperature=0.8,
        top_k=9,
        top_p=0.9,
        seed=4,
        banned_words=("man", "犬"),
        guard_endings=True,
    )

    read = json.loads(json.dumps(dataclasses.asdict(options)))

    assert SearchOptions(**read) == options
    forced = SearchOptions(forced_words=("dog",), block_ngrams=2, min_length=3)
    assert SearchOptions(**json.loads(json.dumps(dataclasses.asdict(forced)))) == forced


@pytest.mark.parametrize("text", ["[dog, cat]", '["dog", "cat"]'])
def test_words_in_a_config_file_are_a_list(tmp_path, text) -> None:
    path = tmp_path / "words.yaml"
    path.write_text(f"search: {{forced_words: {text}, beam_size: 2}}", encoding="utf-8")

    config, _ = train.read([str(path)])

    assert config.search == SearchOptions(beam_size=2, forced_words=("dog", "cat"))


def test_a_contradiction_in_a_config_file_is_one_line(tmp_path) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text("search: {temperature: 0.5, beam_size: 3}", encoding="utf-8")

    with pytest.raises(
        ConfigError, match=r"search\.temperature 0\.5 .* search\.beam_size 3"
    ) as caught:
        train.read([str(path)])
    assert "\n" not in str(caught.value)


def test_errors_spell_options_for_each_interface() -> None:
    with pytest.raises(OptionError) as caught:
        SearchOptions(num_captions=6)

    assert "num_captions is 6; give at most beam_size (5)" in str(caught.value)
    spelled = caught.value.spelled(lambda name: f"<{name}>")
    assert "<num_captions> is 6; give at most <beam_size> (5)" in spelled


def test_values_in_messages_are_not_respelled() -> None:
    with pytest.raises(OptionError) as caught:
        SearchOptions(forced_words=["{top_k} {"])

    assert "'{top_k} {'" in caught.value.spelled(str.upper)
    assert "FORCED_WORDS" in caught.value.spelled(str.upper)


# --- Config files ---


def test_default_lists_are_not_shared() -> None:
    one, other = TrainConfig(), TrainConfig()

    one.data.images.append("photos")

    assert other.data.images == []


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.name)
def test_every_config_file_loads(path) -> None:
    config, flags = train.read([str(path)])

    assert isinstance(config, TrainConfig)
    assert flags == (False, False, False, None)
    written = yaml.safe_load(path.read_text(encoding="utf-8"))
    for section, settings in written.items():  # no setting is ignored
        if not isinstance(settings, dict):
            assert getattr(config, section) == settings
            continue
        for name, value in settings.items():
            assert getattr(getattr(config, section), name) == value, f"{section}.{name}"


def test_config_files_exist() -> None:
    assert CONFIGS


def test_the_command_line_overrides_the_file() -> None:
    path = CONFIGS[0]

    config, flags = train.read(
        [
            str(path),
            "--training.epochs",
            "3",
            "--run-folder",
            "elsewhere",
            "--resume",
            "auto",
            "--force",
        ]
    )

    assert (config.training.epochs, config.run_folder, *flags) == (
        3,
        "elsewhere",
        True,
        True,
        False,
        None,
    )


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
        ("training: {objective: cider}", "objective"),
        ("training: {schedule: linear}", "schedule"),
        ("self_critical: {baseline: mean}", "baseline"),
        ("self_critical: {samples: 1}", "self_critical.samples"),
        ("data: {features: f, shards: s}", "data.features and data.shards"),
        (
            "{training: {objective: self_critical}, decoder: {selection: hard}}",
            "decoder.selection hard",
        ),
        ("colour: red", "colour"),
    ],
)
def test_a_bad_config_file_is_a_config_error(tmp_path, text, named) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text(text, encoding="utf-8")

    with pytest.raises(ConfigError, match=named) as caught:
        train.read([str(path)])
    assert "\n" not in str(caught.value)
