"""METEOR compared with pycocoevalcap, and errors of missing or failing Java programs."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from captioner.errors import ProgramError
from captioner.evaluation.java import (
    find_java,
    meteor_counts,
    meteor_from_counts,
    spice,
    unavailable,
)

CANDIDATES = [
    "two men ride their bikes",
    "a shirt in the shop 's window",
    "a plate of food on a wooden table",
    "",
    "zebra quartz lamp",
    "men ||| on bikes |||",
    "the the the",
    "a caf\u00e9 with \u72ac \ud800",
]
REFERENCES = [
    ["two men ride bikes quickly", "a man rides another man follows him", "two riders"],
    ["a t-shirt for $ 5 hangs in the shop window", "a shop window -lrb- closed -rrb-"],
    ["a plate of food on a wooden table"],
    ["a dog", "the dog is n't playing with a red ball"],
    ["", "a horse"],
    ["some cyclists", "men on bicycles | here"],
    ["the dog"],
    ["a caf\u00e9 with \u732b", "caf\u00e9"],
]

# pycocoevalcap cannot process the last caption, which has a lone surrogate.
COMMON = 7


@pytest.mark.slow
@pytest.mark.skipif(find_java() is None, reason="no java")
def test_equals_pycocoevalcap_and_unusual_text_does_not_mix_up_scores() -> None:
    """The sets are single captions, and captions of which some, all or none are perfect."""
    from pycocoevalcap.meteor.meteor import Meteor

    every = meteor_counts(CANDIDATES, REFERENCES)
    program = Meteor()

    for drawn in (range(COMMON), [0, 0, 2, 3, 5, 5, 5], [2, 2, 2], [0, 1, 1, 4, 4, 4, 5, 6]):
        corpus, images = program.compute_score(
            {n: REFERENCES[i] for n, i in enumerate(drawn)},
            {n: [CANDIDATES[i]] for n, i in enumerate(drawn)},
        )
        chosen = every[list(drawn)]
        assert meteor_from_counts(chosen) == pytest.approx(images, abs=1e-12)
        assert meteor_from_counts(chosen.sum(axis=0)) == pytest.approx(corpus, abs=1e-12)
    program.meteor_p.stdout.close()
    program.meteor_p.stderr.close()
    assert meteor_from_counts(every)[2:4].tolist() == [1, 0]
    backwards = meteor_counts(CANDIDATES[::-1], REFERENCES[::-1])
    np.testing.assert_array_equal(every, backwards[::-1])


def put_java(folder: Path, script: str, monkeypatch: pytest.MonkeyPatch) -> Path:
    program = folder / "java"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    return program


@pytest.mark.skipif(shutil.which("sh") is None, reason="no shell")
@pytest.mark.parametrize(
    ("script", "output"),
    [
        ("exit 1", "no output"),
        ("echo Error: no memory >&2; echo more >&2; exit 1", "Error: no memory"),
        ("echo odd; read line; echo 1 2; exec sleep 1", "no output"),
    ],
)
def test_a_failing_java(script, output, tmp_path: Path, monkeypatch) -> None:
    """The error message is the first line of stderr, and nothing hangs."""
    put_java(tmp_path, script, monkeypatch)

    with pytest.raises(ProgramError) as caught:
        meteor_counts(["a dog"] * 3, [["a dog"]] * 3)

    assert str(caught.value).startswith(f"METEOR's Java program stopped ({output}); free 2 GB")


@pytest.mark.parametrize(("version", "allowed"), [("11.0.21", True), ("16", False)])
def test_spice_needs_an_old_java(version, allowed, tmp_path: Path, monkeypatch) -> None:
    program = put_java(tmp_path, f"echo 'openjdk version \"{version}\"' >&2", monkeypatch)

    expected = (
        f"SPICE needs Java 8 or 11, but {program} is Java {version}; put Java 8 or 11 first on the "
        "PATH"
    )
    assert unavailable("SPICE") == (None if allowed else expected)
    assert unavailable("METEOR") is None


def run_spice(monkeypatch: pytest.MonkeyPatch, result) -> np.ndarray:
    """Score captions with a fake Spice that returns or raises ``result``."""

    class Spice:
        def __init__(self) -> None:
            sys.stdout.write("Downloading ...\n")

        def compute_score(self, gts, res):
            assert gts == {0: ["a dog", "the dog"], 1: ["a cat"]}
            assert res == {0: ["a dog"], 1: ["cats"]}
            if isinstance(result, Exception):
                raise result
            return result

    from pycocoevalcap.spice import spice as module

    monkeypatch.setattr(module, "Spice", Spice)
    return spice(["a dog", "cats"], [["a dog", "the dog"], ["a cat"]])


def test_spice_is_the_f_score(monkeypatch, capsys: pytest.CaptureFixture[str]) -> None:
    images = [
        {"All": {"f": 0.5, "pr": 1.0, "re": 0.3}, "Object": {"f": 0.9}},
        {"All": {"f": float("nan")}},
    ]

    found = run_spice(monkeypatch, (np.float64(0.25), images))

    assert found == pytest.approx([0.5, float("nan")], nan_ok=True)
    assert capsys.readouterr() == ("", "Downloading ...\n")  # progress goes to stderr


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (
            subprocess.CalledProcessError(1, "java"),
            r"failed with exit status 1 \(see its output above\); use Java 8 or 11",
        ),
        (OSError("no route"), r"\(OSError\('no route'\)\); make .*lib writable, or copy"),
    ],
)
def test_a_failing_spice_raises_a_one_line_error(monkeypatch, error: Exception, line: str) -> None:
    with pytest.raises(ProgramError, match=line) as caught:
        run_spice(monkeypatch, error)
    assert "\n" not in str(caught.value)
