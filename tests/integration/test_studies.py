"""The studies in scripts/, each run end to end on a small scale."""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from PIL import Image

from captioner import load
from captioner.cli.main import FAILED, OK, main

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "assets" / "examples"


def run(module: ModuleType, monkeypatch: pytest.MonkeyPatch, *arguments: object) -> None:
    monkeypatch.setattr(sys, "argv", ["script", *map(str, arguments)])
    module.main()


# --- numbers in words ----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def text(script) -> ModuleType:
    return script("studies/text_attention")


def parse_number(text: ModuleType, words: list[str]) -> int:
    """The number that the words spell; the inverse of ``spell``."""
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


def test_spelling_can_be_inverted(text) -> None:
    chance = random.Random(0)
    for test in (False, True):
        for _ in range(300):
            number = text.random_number(chance, test=test)
            words = text.spell(number)
            assert parse_number(text, words) == number
            assert len(words) <= text.MOST_WORDS
            assert text.is_for_test(number) == test


@pytest.mark.slow
def test_the_text_study_runs_and_keeps_its_models(text, tmp_path, monkeypatch) -> None:
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

    monkeypatch.setattr(text, "train", None)  # a second run must not train
    run(text, monkeypatch, *arguments)

    assert len(set(text.test_numbers(300))) == 300  # no duplicates
    assert set(first) == {"additive", "fixed"}
    wrong = [output for number, output in first["fixed"]["mistakes"] if output == number]
    assert wrong == []
    assert sum(first["fixed"]["numbers"]) == 40
    assert json.loads((tmp_path / "out" / "text_attention.json").read_text()) == first
    for name in ("text_accuracy.png", "text_alignment.png"):
        with Image.open(tmp_path / "out" / name) as picture:
            assert picture.size > (100, 100)


# --- mechanisms on photos ------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tiny_data(tmp_path_factory) -> Path:
    """Six photos and captions in the layout of ``prepare dataset``."""
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
def test_the_comparison_trains_each_mechanism_once(
    script, tiny_data, tmp_path, monkeypatch, capsys
) -> None:
    module = script("studies/compare_attention")
    names = ["additive", "dot_mean", "fixed"]

    def call(*arguments: str) -> None:  # two epochs are too few for nonzero scores
        assert main(list(arguments)) in ((OK, FAILED) if arguments[0] == "train" else (OK,))

    monkeypatch.setattr(module, "run_captioner", call)
    arguments = (
        "--data", tiny_data, "--images", tiny_data, "--work", tmp_path / "work",
        "--out", tmp_path / "out", "--epochs", 2, "--size", 16, "--rounds", 1,
        "--encoder", "timm/test_resnet", "--weights", "none", "--only", *names,
        "--words", "A red square.",
    )  # fmt: skip
    rows: list[dict[str, Any]] = []
    table = module.table
    monkeypatch.setattr(module, "table", lambda found: rows.extend(found) or table(found))
    run(module, monkeypatch, *arguments)
    models = [(tmp_path / "work" / name / "best" / "model.safetensors") for name in names]
    trained = [model.stat().st_mtime_ns for model in models]
    run(module, monkeypatch, *arguments)

    assert [model.stat().st_mtime_ns for model in models] == trained  # not trained again
    text = (tmp_path / "out" / "attention_table.md").read_text()
    assert [line.split("|")[1].strip() for line in text.splitlines()[2:]] == names
    for row in rows[: len(names)]:
        depends_on_state = row["name"] not in ("dot_mean", "fixed")
        assert (row["movement"] > 1e-6) == depends_on_state, row["name"]
        assert 0 <= row["entropy"] <= row["even_entropy"] + 1e-6
        assert row["step_ms"] > 0
    assert rows[2]["entropy"] == pytest.approx(rows[2]["even_entropy"], abs=1e-5)
    with Image.open(tmp_path / "out" / "attention_compared.jpg") as picture:
        assert picture.width > 200


# --- speed of decoding ---------------------------------------------------------------------------


@pytest.fixture(scope="module")
def speed(script) -> ModuleType:
    return script("benchmarks/decoding")


@pytest.mark.parametrize("max_length", [1, 2, 12])
def test_the_tutorial_loop_equals_greedy_search(speed, tiny, max_length) -> None:
    model = load(tiny.model, precision="fp32")
    photos = [*tiny.photos.iterdir(), *EXAMPLES.glob("*.jpg")]
    with torch.inference_mode():
        features = speed.encode(model, photos)

        line = speed.agreement(model.model.decoder, features, max_length)

    assert len(features) == len(photos) == 10
    assert line.endswith("greedy captions equal to the loop's: 10 of 10")


def test_jobs_rotate_within_rounds_and_ratios_are_per_round(script) -> None:
    measuring = script("benchmarks/measuring")
    now = 0.0
    done = []

    def job(name: str, seconds: float) -> Callable[[], None]:
        def run_it() -> None:
            nonlocal now
            now += seconds * (1 + len(done) // 2)  # the machine gets slower every round
            done.append(name)

        return run_it

    jobs = {"ours": job("ours", 1), "theirs": job("theirs", 3)}
    times = measuring.measure(jobs, rounds=3, clock=lambda: now)

    assert sorted(done[:2]) == ["ours", "theirs"]  # the warm-up
    assert done[2:] == ["ours", "theirs", "theirs", "ours", "ours", "theirs"]
    assert times == {"ours": [2, 3, 4], "theirs": [6, 9, 12]}
    assert measuring.ratios(times, "ours", "theirs") == [3, 3, 3]
    assert measuring.ratio(times, "ours", "theirs") == 3
    assert measuring.ratio(times, "ours", "theirs", {"ours": 2, "theirs": 1}) == 6
