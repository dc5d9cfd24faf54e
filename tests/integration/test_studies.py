"""The studies under scripts/: their rules are right, and each runs from end to end in small."""

from __future__ import annotations

import importlib.util
import json
import random
import sys
from pathlib import Path
from types import ModuleType

import pytest
from PIL import Image

from captioner.errors import ConfigError

ROOT = Path(__file__).parents[2]


def script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "scripts" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run(module: ModuleType, monkeypatch: pytest.MonkeyPatch, *arguments: object) -> None:
    monkeypatch.setattr(sys, "argv", ["script", *map(str, arguments)])
    module.main()


# --- numbers in words ----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def text() -> ModuleType:
    return script("study_text_attention")


@pytest.mark.parametrize(
    ("number", "words"),
    [
        (0, "zero"),
        (7, "seven"),
        (13, "thirteen"),
        (20, "twenty"),
        (85, "eighty five"),
        (100, "one hundred"),
        (6_208, "six thousand two hundred eight"),
        (40_000_006, "forty million six"),
        (10**21, "one sextillion"),
    ],
)
def test_numbers_are_spelt(text, number, words) -> None:
    assert " ".join(text.spell(number)) == words


def understood(text: ModuleType, words: list[str]) -> int:
    """The number that words mean, read the other way round: by adding up."""
    values = {word: n for n, word in enumerate(text.ONES)}
    values |= {word: 10 * n for n, word in enumerate(text.TENS, 2)}
    total = group = 0
    for word in words:
        if word == "hundred":
            group *= 100
        elif word in text.SCALES:
            total, group = total + group * 1000 ** (text.SCALES.index(word) + 1), 0
        else:
            group += values[word]
    return total + group


def test_spelling_loses_nothing(text) -> None:
    chance = random.Random(0)
    for test in (False, True):
        for _ in range(300):
            number = text.draw_number(chance, test=test)
            words = text.spell(number)
            assert understood(text, words) == number
            assert len(words) <= text.MOST_WORDS
            assert text.is_for_test(number) == test


def test_a_batch_holds_the_words_and_the_digits(text) -> None:
    source, target = text.batch_of([6208, 5])

    assert text.SOURCE.decode(source[0].tolist()) == text.spell(6208)
    assert text.SOURCE.decode(source[1].tolist())[:2] == ["five", "<pad>"]
    assert text.TARGET.decode(target[0, 0].tolist()) == ["<start>", "6", "2", "0", "8", "<end>"]


def test_the_twins_differ_in_nothing_but_attention(text) -> None:
    one, other = text.build("additive"), text.build("fixed")

    shapes = [{n: p.shape for n, p in model.named_parameters()} for model in (one, other)]
    own = set(shapes[0].items()) ^ set(shapes[1].items())
    assert {name.partition(".scorer")[0] for name, _ in own} == {"decoder.attention"}


@pytest.mark.slow
def test_the_text_study_runs_and_keeps_what_it_trained(text, tmp_path, monkeypatch) -> None:
    arguments = (
        "--out",
        tmp_path / "out",
        "--work",
        tmp_path / "work",
        "--steps",
        3,
        "--tests",
        40,
    )
    run(text, monkeypatch, *arguments)
    first = json.loads((tmp_path / "out" / "text_attention.json").read_text())

    monkeypatch.setattr(text, "train", None)  # a second run trains nothing
    run(text, monkeypatch, *arguments)

    assert len(set(text.draw_tests(300))) == 300  # a number that is tested twice counts twice
    assert set(first) == {"additive", "fixed"}
    wrong = [said for number, said in first["fixed"]["mistakes"] if said == number]
    assert wrong == []
    assert sum(first["fixed"]["numbers"]) == 40
    assert json.loads((tmp_path / "out" / "text_attention.json").read_text()) == first
    for name in ("text_accuracy.png", "text_alignment.png"):
        with Image.open(tmp_path / "out" / name) as picture:
            assert picture.size > (100, 100)


# --- mechanisms on photos ------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tiny_data(tmp_path_factory) -> Path:
    """Six photos and their captions under the names that ``prepare dataset`` gives."""
    folder = tmp_path_factory.mktemp("data")
    colours = ("red", "blue", "white", "green", "gray", "pink")
    images = [{"id": n, "file_name": f"{c}.png"} for n, c in enumerate(colours)]
    captions = [
        {"id": 5 * n + k, "image_id": n, "caption": f"A {c} square."}
        for n, c in enumerate(colours)
        for k in range(5)
    ]
    for colour in colours:
        Image.new("RGB", (40, 32), colour).save(folder / f"{colour}.png")
    for part in ("train", "val"):
        (folder / f"captions_{part}.json").write_text(
            json.dumps({"images": images, "annotations": captions})
        )
    return folder


@pytest.mark.slow
def test_the_comparison_trains_every_mechanism_once(tiny_data, tmp_path, monkeypatch) -> None:
    module = script("compare_attention")
    arguments = (
        "--data", tiny_data, "--images", tiny_data, "--work", tmp_path / "work",
        "--out", tmp_path / "out", "--epochs", 2, "--size", 16, "--rounds", 1,
        "--encoder", "timm/test_resnet", "--weights", "none", "--words", "A red square.",
    )  # fmt: skip
    with pytest.raises(ConfigError, match="zeppelin"):
        run(module, monkeypatch, *arguments[:-1], "A red zeppelin.")
    run(module, monkeypatch, *arguments)
    table = (tmp_path / "out" / "attention_table.md").read_text()
    monkeypatch.setattr(module, "run", None)  # a second run trains nothing
    run(module, monkeypatch, *arguments)
    with pytest.raises(ConfigError, match=r"training.epochs 2, now it is 3"):
        run(module, monkeypatch, *arguments, "--epochs", 3)

    rows = [line.split("|")[1].strip() for line in table.splitlines()[2:]]
    assert rows == list(module.MECHANISMS)
    results = {name: json.loads((tmp_path / "work" / f"{name}.json").read_text()) for name in rows}
    for name, result in results.items():
        asked_by_state = not name.endswith(("_self", "_mean")) and not name.startswith("fixed")
        assert (result["movement"] > 1e-6) == asked_by_state, name
        assert (tmp_path / "work" / name / "model.safetensors").is_file()
        assert 0 <= result["entropy"] <= result["even_entropy"] + 1e-6
    assert results["fixed"]["entropy"] == pytest.approx(results["fixed"]["even_entropy"], abs=1e-5)
    with Image.open(tmp_path / "out" / "attention_compared.jpg") as picture:
        assert picture.width > 200
