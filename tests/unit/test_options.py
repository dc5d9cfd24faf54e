"""Options: one schema for all interfaces, contradictions, config files."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
from pathlib import Path
from typing import Any

import pytest
import yaml
from annotated_types import Interval

from captioner.cli import train
from captioner.cli.main import COMMANDS, parser_of
from captioner.errors import ConfigError
from captioner.options import (
    DataConfig,
    DecoderConfig,
    EncoderConfig,
    FaithfulnessOptions,
    SearchOptions,
    SelfCriticalConfig,
    TrainConfig,
    TrainingConfig,
)
from captioner.schema import Checked, OptionField, build_options, option_fields

CONFIGS = sorted((Path(__file__).parents[2] / "configs").glob("**/*.yaml"))
SECTIONS: list[Any] = [
    DataConfig, EncoderConfig, DecoderConfig, TrainingConfig, SelfCriticalConfig,
    SearchOptions, TrainConfig, FaithfulnessOptions,
]  # fmt: skip
SCHEMAS = [*SECTIONS, *(parser_of(command).options for command in COMMANDS)]


def bad_values(field: OptionField) -> list[Any]:
    """Return values that an option rejects: of wrong types, and just outside its bounds."""
    bounds, number = field.bounds, field.kind in (int, float)
    bad: list[Any] = ["x", True] if number else []
    bad += [math.nan] if number and bounds != Interval() else []
    bad += [0.5] if field.kind is int else []
    bad += [limit for limit in (bounds.gt, bounds.lt) if limit is not None]
    bad += [limit - 1 for limit in (bounds.ge,) if limit is not None]
    bad += [limit + 1 for limit in (bounds.le,) if limit is not None]
    bad += ["no such value"] if field.choices else []
    bad += ["yes", 1] if field.kind is bool else []
    bad = [[value] for value in bad] if field.is_list else bad
    return [*bad, 3.5] if field.is_list or not number else bad


@pytest.mark.parametrize("schema", SCHEMAS, ids=lambda schema: schema.__name__)
def test_every_option_has_help_and_checks_its_values(schema) -> None:
    fields = option_fields(schema)
    required = {n: ["x"] if f.is_list else "x" for n, f in fields.items() if f.required}
    for name, field in fields.items():
        if dataclasses.is_dataclass(field.type):
            continue
        assert field.help, name
        assert field.help.endswith((".", ")")), name
        assert field.required or field.allows(field.default), name
        for limit in (field.bounds.ge, field.bounds.le):
            assert limit is None or field.allows([limit] if field.is_list else limit), name
        for value in bad_values(field):
            if name in ("forced_words", "banned_words"):
                continue
            with pytest.raises(ConfigError) as caught:
                build_options(schema, required, {name: value})
            message = str(caught.value)
            assert "\n" not in message
            assert name in message
            assert field.allowed in message
            if issubclass(schema, Checked):
                with pytest.raises(ConfigError, match=name):
                    schema(**required | {name: value})


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"traning": {}}, "traning is an unknown setting; did you mean training?"),
        ({"training": {"epoch": 3}}, "training.epoch is an unknown setting; did you mean"),
        ({"training": {"learning_rate": 1}}, "learning_rate is an unknown setting; did you mean"),
        ({"training": {"optimizer": "sgd"}}, "an unknown setting; use epochs, batch_size,"),
        ({"search": {"num_beams": 3}}, "setting; did you mean search.beam_size?"),
        ({"epochs": 3}, "epochs is an unknown setting; did you mean training.epochs?"),
        ({"training": 5}, "training is 5; use a mapping of setting names to values"),
        ({"training": {"lr": "fast"}}, "training.lr is 'fast'; use a number > 0"),
        ({"training": {"lr": 0}}, "training.lr is 0; use a number > 0"),
        ({"data": {"styles": ["a"]}}, "data.styles has 1 entries, but data.train_"),
        ({"self_critical": {"cider": 0.0}}, "cider and self_critical.bleu are both 0"),
        ({"self_critical": {"samples": 1}}, "self_critical.samples is 1"),
        (
            {"training": {"objective": "self_critical"}, "decoder": {"selection": "hard"}},
            "training.objective self_critical cannot train decoder.selection hard",
        ),
        (
            {"training": {"objective": "self_critical"}},
            "training.objective self_critical needs a trained model",
        ),
    ],
)  # fmt: skip
def test_wrong_settings_are_named(given, expected) -> None:
    with pytest.raises(ConfigError) as caught:
        build_options(TrainConfig, given)
    assert expected in str(caught.value)
    assert "\n" not in str(caught.value)


def test_later_layers_replace_settings_of_earlier_ones() -> None:
    first = {"data": {"images": ["a", "b"]}, "training": {"epochs": 3}}
    second = {"data": {"images": Path("c")}, "training": TrainingConfig(lr=1.0)}

    built = build_options(TrainConfig, TrainConfig(), first, second, {"run_folder": Path("r")})

    assert (built.data.images, built.training.epochs, built.training.lr) == (["c"], 20, 1.0)
    assert built.run_folder == "r"
    built.data.images.append("photos")
    assert TrainConfig().data.images == []


# --- search options ------------------------------------------------------------------------------

SAMPLING = {"temperature": 0.7, "beam_size": 1}
# Each option with the options that it requires.
CHOICES: dict[str, dict[str, object]] = {
    "greedy": {"beam_size": 1},
    "several": {"beam_size": 4, "num_captions": 4},
    "min_length": {"min_length": 5},
    "max_length": {"max_length": 9},
    "sampling": {**SAMPLING, "num_captions": 9, "top_k": 5, "top_p": 0.9, "seed": 3},
    "groups": {"beam_size": 4, "beam_groups": 2, "diversity": 2.0},
    "block_ngrams": {"block_ngrams": 3, "block_repeats": True, "guard_endings": True},
    "forced": {"forced_words": ("dog", "cat")},
    "banned": {"banned_words": ("man",)},
    "rare": {"rare_words": 0.2},
    "candidates": {"beam_size": 4, "candidates": 4},
    "sampled candidates": {**SAMPLING, "candidates": 9},
}
REFUSED = [{"sampling", "forced"}, {"groups", "forced"}, {"sampled candidates", "forced"}]


def test_two_options_are_refused_only_if_they_contradict() -> None:
    for one, other in itertools.combinations(CHOICES, 2):
        options = CHOICES[one] | CHOICES[other]
        if any(CHOICES[one].get(name, value) != value for name, value in CHOICES[other].items()):
            continue  # two values for one option
        if {one, other} in REFUSED:
            with pytest.raises(ConfigError, match="use only one of them"):
                SearchOptions(**options)
            continue
        found = SearchOptions(**options)
        assert {name: getattr(found, name) for name in options} == options
        assert SearchOptions(**json.loads(json.dumps(dataclasses.asdict(found)))) == found


@pytest.mark.parametrize(
    ("options", "parts"),
    [
        ({"num_captions": 6}, ["num_captions is 6", "beam_size is 5", "temperature"]),
        ({"temperature": 0.5}, ["temperature is 0.5", "beam_size is 5", "num_captions"]),
        ({"top_k": 5}, ["top_k is 5", "set temperature above 0"]),
        ({"beam_size": 4, "beam_groups": 3}, ["beam_groups is 3", "beam_size (4)"]),
        ({"diversity": 3.0}, ["diversity is 3.0", "set beam_groups"]),
        ({"candidates": 1}, ["candidates is 1", "2 or more"]),
        ({"min_length": 20}, ["min_length is 20", "max_length is 20"]),
        ({"forced_words": "a b c", "max_length": 3}, ["forced_words has 3", "max_length is 3"]),
        ({"forced_words": "Dog cat", "banned_words": "dog"}, ["dog", "forced_words and banned"]),
        ({"forced_words": ["a dog"]}, ["forced_words contains 'a dog'", "use single words"]),
    ],
    ids=str,
)
def test_a_contradiction_names_all_options_involved(options, parts) -> None:
    with pytest.raises(ConfigError) as caught:
        SearchOptions(**options)
    assert [part for part in parts if part not in str(caught.value)] == []
    assert "\n" not in str(caught.value)


def test_a_changed_length_penalty_needs_a_search_that_uses_it() -> None:
    shipped = SearchOptions(length_penalty=0.5, certainty=0.7)  # the penalty is for certainty 0
    assert shipped.changed(**dataclasses.asdict(shipped)) == shipped
    assert shipped.changed(certainty=0, length_penalty=1).length_penalty == 1
    with pytest.raises(ConfigError, match=r"length_penalty is 1, .* certainty is 0\.7"):
        shipped.changed(length_penalty=1)


@pytest.mark.parametrize("given", ["Dog, cat", "[dog cat]", ["dog", "CAT"], ("dog", "cat", "dog")])
def test_word_lists_are_tokenized(given) -> None:
    assert SearchOptions(forced_words=given).forced_words == ("dog", "cat")


def test_another_strategy_drops_the_options_of_the_first() -> None:
    sampling = SearchOptions(
        beam_size=1, temperature=0.8, top_k=5, num_captions=4, max_length=7, banned_words=("hat",)
    )
    assert sampling.changed() == sampling
    assert sampling.changed(seed=3).num_captions == 4
    searched = sampling.changed(beam_size=3)
    assert (searched.temperature, searched.top_k, searched.num_captions) == (0, 0, 1)
    assert (searched.max_length, searched.banned_words) == (7, ("hat",))
    assert sampling.changed(temperature=0).beam_size == SearchOptions.beam_size
    groups = SearchOptions(beam_size=4, beam_groups=2, max_length=7)
    sampled = groups.changed(temperature=1.0)
    assert (sampled.beam_size, sampled.beam_groups, sampled.max_length) == (1, 1, 7)


# --- config files --------------------------------------------------------------------------------


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.name)
def test_every_config_file_loads(path) -> None:
    config = train.read_config(*train.train.parser().parse([str(path)]))

    written = yaml.safe_load(path.read_text(encoding="utf-8"))
    for section, settings in written.items():  # no setting is ignored
        if not isinstance(settings, dict):
            assert getattr(config, section) == settings
            continue
        for name, value in settings.items():
            assert getattr(getattr(config, section), name) == value, f"{section}.{name}"


def test_an_error_in_a_config_file_names_it(tmp_path) -> None:
    path = tmp_path / "bad.yaml"
    for text, expected in (
        ("training: {epochs: 0}", "bad.yaml: training.epochs is 0; use an integer >= 1"),
        ("training: {epoch: 0}", "bad.yaml: training.epoch is an unknown setting"),
        ("search: {temperature: 0.5}", "search.temperature is 0.5 (sampling), but beam_size"),
        ("- a", "bad.yaml: config is ['a']; use a mapping of setting names to values"),
        ("a: [", "bad.yaml is not valid YAML"),
    ):
        path.write_text(text)
        with pytest.raises(ConfigError) as caught:
            train.read_config(*train.train.parser().parse([str(path)]))
        assert expected in str(caught.value)
        assert "\n" not in str(caught.value)


def test_strangers_cannot_choose_a_search_without_bounds() -> None:
    unbounded = {
        name
        for name, one in option_fields(SearchOptions).items()
        if one.kind in (int, float) and one.untrusted is None
        if one.bounds.le is None and (one.bounds.lt is None or one.bounds.lt == math.inf)
    }

    assert unbounded == set()
