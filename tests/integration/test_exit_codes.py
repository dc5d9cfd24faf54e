"""The exit codes of the commands, which tell a script what was done."""

from __future__ import annotations

import errno
import shutil
from typing import Any

import pytest

from captioner.cli import main as main_module
from captioner.cli.main import INTERRUPTED, NOT_DONE, OK, SOME_FAILED, main
from captioner.errors import DataError

CONTRACT = [
    ("caption 1.png", OK),
    ("caption 1.png broken.png", SOME_FAILED),
    ("caption 1.png missing.png", SOME_FAILED),
    ("caption broken.png", SOME_FAILED),  # it was found, and captioner tried to read it
    ("caption missing.png", NOT_DONE),
    ("caption empty", NOT_DONE),
    ("caption 1.png --model missing", NOT_DONE),
    ("caption 1.png --format coco", OK),
    ("caption dog.png --format coco", NOT_DONE),  # no photo has an image id
    ("caption 1.png dog.png --format coco", SOME_FAILED),
    ("attend 1.png", OK),
    ("attend 1.png broken.png", SOME_FAILED),
    ("attend empty missing.png", NOT_DONE),
    ("apply one.csv --sidecar txt", OK),
    ("apply two.csv --sidecar txt", SOME_FAILED),
    ("apply none.csv --sidecar txt", NOT_DONE),
    ("alt site --empty", OK),
    ("alt empty", NOT_DONE),
    ("alt site --apply one.csv", NOT_DONE),
    ("evaluate --annotations CAPTIONS --results RESULTS", OK),
    ("evaluate --annotations CAPTIONS --results missing.json", NOT_DONE),
    ("calibrate --model MODEL --annotations missing.json --images empty", NOT_DONE),
    ("info --model MODEL", OK),
    ("info --model missing", NOT_DONE),
    ("export missing -o new", NOT_DONE),
    ("prepare dataset missing.csv -o new", NOT_DONE),
    ("prepare frequencies CAPTIONS -o f.json.gz", OK),
    ("prepare frequencies missing.json -o f.json.gz", NOT_DONE),
    ("prepare features missing.yaml -o new", NOT_DONE),
    ("train missing.yaml", NOT_DONE),
    ("push missing hf:user/name --dry-run", NOT_DONE),
    ("serve --model missing", NOT_DONE),
    ("help", OK),
    ("paint 1.png", NOT_DONE),
    ("", NOT_DONE),
]


@pytest.mark.parametrize(("line", "expected"), CONTRACT, ids=[line for line, _ in CONTRACT])
def test_the_exit_code_shows_what_was_done(line, expected, tiny, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("1.png", "dog.png"):
        shutil.copy(tiny.photos / "1.png", name)
    (tmp_path / "broken.png").write_bytes(b"\x89PNG")
    (tmp_path / "empty").mkdir()
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "index.html").write_text('<img src="1.png" alt="a dog">')
    rows = {"one": ["1.png"], "two": ["1.png", "missing.png"], "none": ["missing.png"]}
    for name, photos in rows.items():
        lines = ["image,caption", *(f"{photo},a dog" for photo in photos), ""]
        (tmp_path / f"{name}.csv").write_text("\n".join(lines))
    places = {name.upper(): str(path) for name, path in vars(tiny).items()}
    given = [places.get(word, word) for word in line.split()]
    if line.startswith(("caption", "attend")) and "--model" not in line:
        given += ["--model", str(tiny.model)]

    assert main(given) == expected


@pytest.mark.parametrize("debug", [False, True])
@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (DataError("the file is damaged; use another file"), NOT_DONE),
        (OSError(errno.ENOSPC, "No space left on device", "x.csv"), NOT_DONE),
        (ZeroDivisionError("a mistake in the program"), NOT_DONE),
        (KeyboardInterrupt(), INTERRUPTED),
    ],
    ids=lambda value: type(value).__name__,
)
def test_errors_that_end_a_command(error, expected, debug, *, monkeypatch, capsys) -> None:
    def failing(_: Any) -> int:
        raise error

    monkeypatch.setattr(main_module, "function_of", lambda _: failing)

    assert main(["info", *["--debug"] * debug]) == expected

    traceback = debug or isinstance(error, ZeroDivisionError)
    assert ("Traceback" in capsys.readouterr().err) == traceback
