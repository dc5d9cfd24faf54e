"""The search options on the command line, of ``captioner caption`` and ``captioner attend``.

What each of them does to a search stands in tests/unit/decoding; here they arrive there.
"""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from PIL import Image

from captioner import load, overlay
from captioner.cli.main import FAILED, OK, USAGE, main
from captioner.config import SearchOptions
from captioner.tokenizer import tokenize
from captioner.vocabulary import BAD_ENDINGS


def run(*arguments: object) -> int:
    return main([str(argument) for argument in arguments])


@pytest.fixture
def say(tiny: SimpleNamespace, capsys: pytest.CaptureFixture[str]) -> Any:
    """``say("--beam-size", 3)``: the words of every caption of the four photos."""

    def captions(*arguments: object, model: Path = tiny.model) -> list[list[str]]:
        capsys.readouterr()
        command = ("caption", tiny.photos, "--model", model, "--format", "jsonl")
        assert run(*command, "--precision", "fp32", *arguments) == OK
        out, err = capsys.readouterr()
        assert err == ""
        entries = [json.loads(line) for line in out.splitlines()]
        assert len(entries) == 4
        return [caption["words"] for entry in entries for caption in entry["captions"]]

    return captions


def only_line(capsys: pytest.CaptureFixture[str]) -> str:
    """The one line of an error."""
    out, err = capsys.readouterr()
    (line,) = err.splitlines()
    assert out == ""
    assert line.startswith("captioner: ")
    return line


# --- words ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "given", ["man, runs", "man,runs", "man runs", "[man, runs]", "[man,runs]", "runs, man"]
)
def test_forced_words_however_they_are_written(given: str, say) -> None:
    said = say("--forced-words", given)

    assert said == say("--forced-words", "man, runs")
    assert all({"man", "runs"} <= set(words) for words in said)
    assert said != say()


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("on", {"on"}),
        ("[on, dog]", {"on", "dog"}),
        ("[dog, on]", {"on", "dog"}),
        ("[man, 's]", {"man", "'s"}),
        ("man, 's", {"man", "'s"}),
        ("['s]", {"'s"}),
    ],
)
def test_words_are_words_and_no_yaml(given: str, words: set[str], say) -> None:
    """In YAML ``on`` is true and ``'`` begins a quotation."""
    assert all(words <= set(said) for said in say("--forced-words", given))
    assert not any(words & set(said) for said in say("--banned-words", given))


@pytest.mark.parametrize("given", ["", "[]", " "])
def test_an_empty_list_of_words_changes_nothing(given: str, say) -> None:
    assert say("--forced-words", given, "--banned-words", given) == say()


def test_banned_words_are_not_said(say) -> None:
    usual = {word for words in say() for word in words}
    banned = sorted(usual)[0]

    assert usual
    assert not any(banned in words for words in say("--banned-words", banned))


@pytest.mark.parametrize("given", ["[dog", "dog]", "[dog, [hat]]", "[dog: hat]", "[", "{dog}"])
def test_odd_brackets_are_passed_over_or_are_one_line(given: str, tiny, capsys) -> None:
    command = ("caption", tiny.photos / "1.png", "--model", tiny.model, "--forced-words", given)

    code = run(*command)

    out, err = capsys.readouterr()
    assert (code, len(out.splitlines()), len(err.splitlines())) in {(OK, 1, 0), (USAGE, 0, 1)}
    assert "forced-words" in err or "dog" not in given or "dog" in tokenize(out)


# --- rules ---------------------------------------------------------------------------------------


def test_endings_are_guarded_when_asked(say) -> None:
    guarded = say("--guard-endings", "--min-length", 2)
    free = say("--no-guard-endings", "--min-length", 2)

    assert free == say("--min-length", 2)
    assert not any(words[-1] in BAD_ENDINGS for words in guarded)


def test_a_model_s_own_guard_can_be_taken_off(say, make_model, tmp_path) -> None:
    guarded = make_model(tmp_path / "guarded", 1, guard_endings=True)

    assert say(model=guarded) == say("--guard-endings")
    assert say("--no-guard-endings", model=guarded) == say()


def test_no_phrase_twice(say) -> None:
    for words in say("--block-ngrams", 1, "--min-length", 4):
        assert len(set(words)) == len(words) >= 4


# --- drawing -------------------------------------------------------------------------------------


def test_one_word_to_draw_from_is_greedy(say) -> None:
    assert say("--temperature", 1, "--top-k", 1) == say("--beam-size", 1)
    assert say("--temperature", 5, "--top-p", 1e-9) == say("--beam-size", 1)


def test_the_seed_decides_what_is_drawn(say) -> None:
    drawn = ("--temperature", 2, "--top-k", 5, "--num-captions", 3)

    first = say(*drawn, "--seed", 7)

    assert len(first) == 4 * 3
    assert first == say(*drawn, "--seed", 7, "--batch-size", 1)
    assert first != say(*drawn, "--seed", 8)


def test_a_model_that_draws_is_searched_by_a_beam_size(say, make_model, tmp_path) -> None:
    drawing = make_model(tmp_path / "drawing", 1, beam_size=1, temperature=1.5, top_k=4)

    assert say("--beam-size", 2, model=drawing) == say("--beam-size", 2)
    assert say("--temperature", 1.5, "--top-k", 4) == say(model=drawing)


# --- groups and several models -------------------------------------------------------------------


def test_groups_say_different_things(say) -> None:
    wide = ("--beam-size", 4, "--num-captions", 4)

    groups = say(*wide, "--beam-groups", 4, "--diversity", 50)

    first_words = [
        {words[0] if words else "" for words in groups[n : n + 4]} for n in (0, 4, 8, 12)
    ]
    assert all(len(words) == 4 for words in first_words)
    assert say(*wide, "--beam-groups", 1) == say(*wide)


def test_two_models_caption_as_they_do_in_python(tiny, say) -> None:
    together = load(tiny.model, tiny.twin, precision="fp32")

    said = say("--model", tiny.twin, "--beam-size", 3, "--num-captions", 3)

    expected = [
        list(caption.words)
        for photo in sorted(tiny.photos.iterdir())
        for caption in together.captions(photo, beam_size=3, num_captions=3)
    ]
    assert said == expected
    assert say("--model", tiny.model) == say()  # a model with itself


def test_models_of_different_words_are_one_line(tiny, capsys) -> None:
    models = ("--model", tiny.model, "--model", tiny.stranger)

    assert run("caption", tiny.photos, *models) == USAGE

    assert "vocabularies of model 1 and model 2 differ" in only_line(capsys)


# --- pictures ------------------------------------------------------------------------------------


def test_attend_draws_what_the_search_options_find(tiny, tmp_path, capsys) -> None:
    photo, target = tiny.photos / "1.png", tmp_path / "dog.png"
    search = ("--forced-words", "[dog, hat]", "--precision", "fp32")

    assert run("attend", photo, "-o", target, "--model", tiny.model, *search) == OK
    drawn = capsys.readouterr().out
    assert run("caption", photo, "--model", tiny.model, *search) == OK

    assert drawn == capsys.readouterr().out
    assert {"dog", "hat"} <= set(tokenize(drawn.partition(": ")[2]))
    with Image.open(target) as picture:
        assert picture.width > 40


def test_attend_draws_every_sample_of_two_models_in_one_picture(tiny, tmp_path, capsys) -> None:
    models = ("--model", tiny.model, "--model", tiny.twin)
    drawing = ("--temperature", 1, "--top-k", 4, "--num-captions", 3, "--min-length", 1)

    assert run("attend", tiny.photos / "1.png", "-o", tmp_path / "x.png", *models, *drawing) == OK

    said = [line.partition(": ")[2] for line in capsys.readouterr().out.splitlines()]
    model = load(tiny.model, tiny.twin)
    drawn = model.captions(
        tiny.photos / "1.png", temperature=1, top_k=4, num_captions=3, min_length=1
    )
    assert said == [caption.text for caption in drawn]
    with Image.open(tmp_path / "x.png") as picture:
        whole = np.asarray(picture.convert("RGB"))
    wanted = np.asarray(overlay(tiny.photos / "1.png", drawn).image())
    assert np.array_equal(whole, wanted)


@pytest.mark.parametrize(
    "search",
    [("--temperature", 1), ("--forced-words", "dog"), ("--no-guard-endings",), ("--seed", 0)],
)
def test_attend_searches_nothing_where_the_words_are_given(search, tiny, tmp_path, capsys) -> None:
    words = ("-o", tmp_path / "x.png", "--words", "a dog runs")

    assert run("attend", tiny.photos / "1.png", "--model", tiny.model, *words, *search) == USAGE

    line = only_line(capsys)
    assert "--words" in line
    assert search[0].removeprefix("--no-").removeprefix("--") in line
    assert list(tmp_path.iterdir()) == []


# --- what cannot be ------------------------------------------------------------------------------

CONTRADICTIONS = [
    (["--beam-size", "0"], ["beam-size", "1"]),
    (["--beam-size", "2.5"], ["beam", "2.5"]),
    (["--temperature", "-1"], ["temperature", "a finite number >= 0"]),
    (["--temperature", "inf"], ["temperature", "inf"]),
    (["--temperature", "nan"], ["temperature", "nan"]),
    (["--temperature", "1", "--beam-size", "2"], ["temperature", "beam-size"]),
    (["--temperature", "1", "--top-p", "0"], ["top-p", "0"]),
    (["--temperature", "1", "--seed", "-1"], ["seed", "-1"]),
    (["--temperature", "1", "--beam-groups", "2"], ["temperature", "beam-groups"]),
    (["--diversity", "2"], ["diversity", "beam-groups"]),
    (["--seed", "3"], ["seed", "temperature"]),
    (["--top-k", "3"], ["top-k", "temperature"]),
    (["--top-p", "0.5"], ["top-p", "temperature"]),
    (["--beam-size", "4", "--beam-groups", "3"], ["beam-groups", "4"]),
    (["--beam-size", "2", "--beam-groups", "2", "--forced-words", "dog"],
     ["beam-groups", "forced-words"]),
    (["--temperature", "1", "--forced-words", "dog"], ["temperature", "forced-words"]),
    (["--forced-words", "dog", "--banned-words", "hat, dog"], ["dog", "forced", "banned"]),
    (["--forced-words", "unicorn"], ["forced-words", "unicorn"]),
    (["--banned-words", "!"], ["banned-words", "'!'", "not a word"]),
    (["--min-length", "6", "--max-length", "6"], ["min-length", "max-length"]),
    (["--num-captions", "3", "--beam-size", "2"], ["num-captions", "beam-size"]),
    (["--guard-endings", "maybe"], ["maybe"]),
    (["--block-ngrams", "1", "--min-length", "12", "--max-length", "20"], ["block-ngrams"]),
]  # fmt: skip


@pytest.mark.parametrize(("arguments", "named"), CONTRADICTIONS, ids=" ".join)
def test_what_cannot_be_is_one_line_that_names_it(arguments, named, tiny, tmp_path, capsys) -> None:
    photo = tiny.photos / "1.png"
    scored = ["evaluate", "--annotations", tiny.captions, "--images", tiny.photos]
    commands = [["caption", photo], ["attend", photo, "-o", tmp_path / "x.png"]]
    if "--num-captions" not in arguments:  # which evaluate refuses by itself
        commands.append([*scored, "-o", tmp_path / "r.json"])
    for command in commands:
        assert run(*command, "--model", tiny.model, *arguments) in (USAGE, FAILED)
        line = only_line(capsys)
        for word in named:
            assert word in line
        assert list(tmp_path.iterdir()) == []


def test_results_hold_one_caption_a_photo(tiny, capsys) -> None:
    several = ("--temperature", 1, "--num-captions", 2)

    assert run("caption", tiny.photos, "--format", "coco", *several) == USAGE

    assert "--num-captions 1" in only_line(capsys)


@pytest.mark.parametrize("command", ["caption", "attend", "evaluate"])
def test_help_tells_every_search_option(command: str, capsys) -> None:
    with pytest.raises(SystemExit) as left:
        run(command, "--help")
    assert left.value.code == 0
    out = capsys.readouterr().out.replace("_", "-")
    for field in dataclasses.fields(SearchOptions):
        assert f"--{field.name.replace('_', '-')}" in out
    assert "--no-guard-endings" in out


def test_several_captions_of_a_draw_tell_how_probable_they_are(tiny, capsys) -> None:
    drawing = ("--temperature", 1, "--num-captions", 5, "--format", "json")

    assert run("caption", tiny.photos / "1.png", "--model", tiny.model, *drawing) == OK

    (entry,) = json.loads(capsys.readouterr().out)
    assert len(entry["captions"]) == 5
    assert all(caption["log_prob"] < 0 < math.inf for caption in entry["captions"])
