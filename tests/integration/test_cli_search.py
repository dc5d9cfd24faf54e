"""The search options of ``captioner caption`` and ``captioner attend``.

tests/unit/decoding tests their effects; these tests check that the options are passed on.
"""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from captioner import load
from captioner.cli.main import OK, USAGE, main


def run(*arguments: object) -> int:
    return main([str(argument) for argument in arguments])


@pytest.fixture
def caption(tiny: SimpleNamespace, capsys: pytest.CaptureFixture[str]) -> Any:
    """``caption("--beam-size", 3)``: the words of every caption of the four photos."""

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


# --- groups and several models -------------------------------------------------------------------


def test_an_ensemble_gives_the_same_captions_as_in_python(tiny, caption) -> None:
    ensemble = load(tiny.model, tiny.twin, precision="fp32")

    found = caption("--model", tiny.twin, "--beam-size", 3, "--num-captions", 3)

    expected = [
        list(one.words)
        for photo in sorted(tiny.photos.iterdir())
        for one in ensemble.captions(photo, beam_size=3, num_captions=3)
    ]
    assert found == expected
    assert caption("--model", tiny.model) == caption()  # a single model


# --- pictures ------------------------------------------------------------------------------------


def test_attend_refuses_search_options_with_given_words(tiny, tmp_path, capsys) -> None:
    words = ("-o", tmp_path / "x.png", "--words", "a dog runs", "--no-guard-endings")

    assert run("attend", tiny.photos / "1.png", "--model", tiny.model, *words) == USAGE

    line = only_line(capsys)
    assert "--words" in line
    assert "guard-endings" in line
    assert list(tmp_path.iterdir()) == []
