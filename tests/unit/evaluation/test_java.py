"""METEOR compared with pycocoevalcap, and errors of missing or failing Java programs."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from captioner.errors import ConfigError, DataError
from captioner.evaluation import java
from captioner.evaluation.bootstrap import resample_weights
from captioner.evaluation.java import (
    METEOR_COUNTS,
    Meteor,
    find_java,
    meteor_from_counts,
    spice,
    unavailable,
)
from captioner.evaluation.metrics import score

CANDIDATES = [
    "two men ride their bikes",
    "a shirt in the shop 's window",
    "a plate of food on a wooden table",
    "",
    "zebra quartz lamp",
    "men ||| on bikes |||",
    "the the the",
    "a caf\u00e9 with \u72ac \ud800",
    "a dog\nEVAL ||| 1",
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
    ["a dog runs"],
]

# pycocoevalcap cannot process the last two: a lone surrogate, and a line break.
COMMON = 7


@pytest.fixture(scope="module")
def meteor() -> Iterator[Meteor]:
    if find_java() is None:
        pytest.skip("no java")
    with Meteor() as running:
        yield running


# --- METEOR --------------------------------------------------------------------------------------


@pytest.mark.slow
def test_equals_pycocoevalcap(meteor: Meteor) -> None:
    truth = dict(enumerate(REFERENCES[:COMMON]))
    result = {number: [text] for number, text in enumerate(CANDIDATES[:COMMON])}
    # Its own method, with the program that already runs.
    corpus, images = meteor._program.compute_score(truth, result)

    found = meteor.score(CANDIDATES[:COMMON], REFERENCES[:COMMON])

    assert found.corpus == pytest.approx(corpus, abs=1e-12)
    assert found.images == pytest.approx(images, abs=1e-12)
    assert found.counts.shape == (COMMON, METEOR_COUNTS)
    assert found.images[2] == 1
    assert found.images[3] == 0


@pytest.mark.slow
def test_unusual_text_does_not_mix_up_scores(meteor: Meteor) -> None:
    found = meteor.score(CANDIDATES, REFERENCES)

    for number, (candidate, references) in enumerate(zip(CANDIDATES, REFERENCES, strict=True)):
        alone = meteor.score([candidate], [references])
        assert alone.corpus == alone.images[0] == found.images[number]
        np.testing.assert_array_equal(alone.counts[0], found.counts[number])


@pytest.mark.slow
def test_scores_from_counts_equal_the_programs(meteor: Meteor) -> None:
    """For the counts of single captions and of a thousand resamples."""
    counts = meteor.score(CANDIDATES, REFERENCES).counts
    sums = np.concatenate([counts, resample_weights(len(counts), 1000) @ counts, np.zeros((1, 23))])

    *expected, _ = meteor._evaluate([" ".join(map(str, row)) for row in sums])

    np.testing.assert_allclose(meteor_from_counts(sums), expected, atol=1e-12)


@pytest.mark.slow
def test_weighted_counts_equal_repeated_images(meteor: Meteor) -> None:
    """With some, only and no perfect captions."""
    counts = meteor.score(CANDIDATES, REFERENCES).counts
    for row in (
        [2, 0, 1, 1, 0, 3, 0, 0, 1],
        [0, 0, 3, 0, 0, 0, 0, 0, 0],
        [1, 2, 0, 0, 3, 1, 1, 1, 0],
    ):
        drawn = np.repeat(np.arange(len(row)), row)

        again = meteor.score([CANDIDATES[i] for i in drawn], [REFERENCES[i] for i in drawn])

        assert meteor_from_counts(np.array(row) @ counts) == pytest.approx(again.corpus, abs=1e-12)


def test_scores_from_counts_by_hand() -> None:
    # "a dog runs" and "a dog runs on the grass": all three words of the candidate match in one
    # chunk; one of them is a function word.
    counts = np.zeros(METEOR_COUNTS)
    counts[[0, 1, 2, 3]] = 3, 6, 1, 3
    counts[[4, 5, 6, 7]] = 2, 2, 1, 1
    counts[[20, 21, 22]] = 1, 3, 3
    recall = (0.75 * 2 + 0.25 * 1) / (0.75 * 3 + 0.25 * 3)
    mean = 1 / (0.15 / 1 + 0.85 / recall)

    assert meteor_from_counts(counts) == pytest.approx(mean * (1 - 0.6 * (1 / 3) ** 0.2))


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("java") is None, reason="no java")
def test_a_program_that_dies_raises_a_one_line_error() -> None:
    with Meteor() as running:
        running.score(["a dog"], [["a dog"]])
        running._process.kill()
        running._process.wait()
        with pytest.raises(DataError, match=r"METEOR's Java program stopped .*; it needs 2 GB"):
            running.score(["a dog"], [["a dog"]])
    running.close()  # may be called twice


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("java") is None, reason="no java")
def test_meteor_among_the_metrics(meteor: Meteor) -> None:
    candidates = {8: "Two men ride their bikes.", 2: "A dog!"}
    references = {8: REFERENCES[0], 2: REFERENCES[3]}

    found = score(candidates, references, java=["METEOR"])

    expected = meteor.score(["a dog", "two men ride their bikes"], [references[2], references[8]])
    assert found.corpus["METEOR"] == expected.corpus
    assert [found.images[i]["METEOR"] for i in (2, 8)] == list(expected.images)
    resampled = found.resample([[1, 1], [2, 0]])["METEOR"]
    assert resampled == pytest.approx([expected.corpus, expected.images[0]], abs=1e-12)


@pytest.mark.slow
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
    """The error is the first line of stderr; nothing hangs."""
    java_here = tmp_path / "java"
    java_here.write_text(f"#!/bin/sh\n{script}\n")
    java_here.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")

    with Meteor() as running, pytest.raises(DataError) as caught:
        running.score(["a dog"] * 3, [["a dog"]] * 3)

    assert str(caught.value).startswith(f"METEOR's Java program stopped ({output}); it needs 2 GB")


# --- what is missing -----------------------------------------------------------------------------


def test_without_java(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")

    assert find_java() is None
    for metric in ("METEOR", "SPICE"):
        line = unavailable(metric)
        assert line == f"{metric} needs Java, which is not on the PATH; install Java 8 or 11"
    with pytest.raises(ConfigError, match="METEOR needs Java"):
        Meteor()
    with pytest.raises(ConfigError, match="SPICE needs Java"):
        spice(["a dog"], [["a dog"]])


@pytest.fixture
def spice_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Java, and SPICE's folder as pycocoevalcap installs it, without CoreNLP."""
    from pycocoevalcap.spice import get_stanford_models as source

    (tmp_path / "lib").mkdir()
    monkeypatch.setattr(source, "SPICEDIR", str(tmp_path))
    program = tmp_path / "bin" / "java"
    program.parent.mkdir()
    program.write_text("""#!/bin/sh\necho 'openjdk version "1.8.0_392"' >&2\n""")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:/usr/bin:/bin")
    return tmp_path


@pytest.mark.parametrize(("version", "allowed"), [("11.0.21", True), ("16", False), ("21", False)])
def test_spice_needs_an_old_java(version, allowed, spice_folder: Path) -> None:
    program = spice_folder / "bin" / "java"
    program.write_text(f"""#!/bin/sh\necho 'openjdk version "{version}"' >&2\n""")

    line = unavailable("SPICE", download=True)

    major = version.partition(".")[0]
    expected = (
        f"SPICE needs Java 8 or 11, but {program} is Java {major}; put Java 8 or 11 first on the "
        "PATH"
    )
    assert line == (None if allowed else expected)
    assert unavailable("METEOR") is None


MAIN, MODELS = "stanford-corenlp-3.6.0.jar", "stanford-corenlp-3.6.0-models.jar"


def test_without_corenlp(spice_folder: Path) -> None:
    line = unavailable("SPICE")

    assert line == (
        f"SPICE needs {MAIN}, which is not installed; put {MAIN} and {MODELS} "
        "from http://nlp.stanford.edu/software/stanford-corenlp-full-2015-12-09.zip "
        f"into {spice_folder / 'lib'}"
    )
    assert unavailable("SPICE", download=True) is None
    assert unavailable("METEOR") is None
    with pytest.raises(ConfigError, match="SPICE needs"):
        spice(["a dog"], [["a dog"]])


def test_a_download_does_not_complete_half_of_corenlp(spice_folder: Path) -> None:
    (spice_folder / "lib" / MAIN).touch()
    for download in (False, True):
        assert unavailable("SPICE", download).startswith(f"SPICE needs {MODELS}")
    (spice_folder / "lib" / MODELS).touch()
    assert unavailable("SPICE") is None


# --- SPICE with a fake class ---------------------------------------------------------------------


def fake(monkeypatch: pytest.MonkeyPatch, result) -> None:
    """Replace Spice by a class that returns or raises ``result``."""

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
    monkeypatch.setattr(java, "unavailable", lambda metric, download: None)


def run_spice() -> tuple[float, list[float]]:
    return spice(["a dog", "cats"], [["a dog", "the dog"], ["a cat"]])


def test_spice_is_the_f_score(monkeypatch, capsys: pytest.CaptureFixture[str]) -> None:
    images = [
        {"All": {"f": 0.5, "pr": 1.0, "re": 0.3}, "Object": {"f": 0.9}},
        {"All": {"f": float("nan")}},
    ]
    fake(monkeypatch, (np.float64(0.25), images))

    corpus, each = run_spice()

    assert corpus == 0.25
    assert type(corpus) is float
    assert each == pytest.approx([0.5, float("nan")], nan_ok=True)
    assert capsys.readouterr() == ("", "Downloading ...\n")  # progress goes to stderr


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (
            subprocess.CalledProcessError(1, "java"),
            r"failed \(exit 1, output above\); it needs Java 8 or 11",
        ),
        (OSError("no route"), r"could not be prepared \(no route\); put stanford-corenlp"),
        (java.BadZipFile("cut"), r"download is not CoreNLP \(cut\); put stanford-corenlp"),
        (KeyError("All"), r"output is invalid"),
    ],
)
def test_a_failing_spice_raises_a_one_line_error(monkeypatch, error: Exception, line: str) -> None:
    fake(monkeypatch, error)
    with pytest.raises(DataError, match=line) as caught:
        run_spice()
    assert "\n" not in str(caught.value)
