"""``captioner attend``: figures, animations, pages, and contradicting options."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from PIL import Image

from captioner import Caption, load, overlay
from captioner.cli.main import FAILED, OK, USAGE, main


def attend(*arguments: object) -> int:
    return main(["attend", *map(str, arguments)])


def only_line(capsys: pytest.CaptureFixture[str]) -> str:
    (line,) = capsys.readouterr().err.strip().splitlines()
    return line


def data_of(path: Path) -> Any:
    found = re.search(r'id="captioner-data">(.*?)</script>', path.read_text("utf-8"), re.DOTALL)
    assert found is not None
    return json.loads(found[1])


@pytest.fixture
def photo(tiny) -> Path:
    return tiny.photos / "1.png"


@pytest.fixture
def caption(tiny, photo) -> Caption:
    return load(tiny.model).caption(photo, alternatives=5)


def same(path: Path, figure: Any) -> bool:
    with Image.open(path) as picture:
        return np.array_equal(np.asarray(picture.convert("RGB")), np.asarray(figure.image()))


# --- figures -------------------------------------------------------------------------------------


def test_two_models_are_drawn_side_by_side_with_labels(tiny, photo, tmp_path, capsys) -> None:
    models = ("--model", tiny.model, "--compare", tiny.stranger)

    assert attend(photo, "-o", tmp_path / "x.png", *models) == OK

    captions = [load(folder).caption(photo) for folder in (tiny.model, tiny.stranger)]
    labels = [str(tiny.model), str(tiny.stranger)]
    *printed, saved = capsys.readouterr().out.splitlines()
    assert saved == f"  saved as {tmp_path / 'x.png'}"
    assert printed == [
        f"{photo}: {caption.text} ({label})"
        for caption, label in zip(captions, labels, strict=True)
    ]
    assert same(tmp_path / "x.png", overlay(photo, captions, labels=labels))


def test_methods_are_drawn_side_by_side_with_labels(tiny, photo, tmp_path, capsys) -> None:
    options = ("--method", "attention", "--method", "grad_cam", "--method", "grad_cam")

    assert attend(photo, "-o", tmp_path / "x.png", "--model", tiny.model, *options) == OK

    model = load(tiny.model)
    captions = [model.caption(photo, method=name) for name in ("attention", "grad_cam")]
    assert capsys.readouterr().out.splitlines()[:-1] == [f"{photo}: {captions[0].text}"]
    assert same(tmp_path / "x.png", overlay(photo, captions, labels=["attention", "Grad-CAM"]))


@pytest.mark.parametrize("suffix", ["png", "html"])
def test_standard_output_is_the_file_and_nothing_else(
    tiny, photo, tmp_path, capsysbinary, suffix
) -> None:
    file, options = tmp_path / f"x.{suffix}", ["--format", "html"] * (suffix == "html")
    assert attend(photo, "-o", file, "--model", tiny.model) == OK
    capsysbinary.readouterr()

    assert attend(photo, "-o", "-", "--model", tiny.model, *options) == OK

    assert capsysbinary.readouterr().out == file.read_bytes()
    assert attend(tiny.photos, "-o", "-", "--model", tiny.model, "--format", "gif") == USAGE
    assert b"cannot write 4 photos to one .gif" in capsysbinary.readouterr().err


def test_outlines_of_named_objects(tiny, tmp_path, capsys) -> None:
    """Photo 1 has a dog in its left half."""
    photo, words = tiny.photos / "1.png", ("--words", "a dog runs")
    common = (photo, "--model", tiny.model, *words)

    assert attend(*common, "-o", tmp_path / "x.png", "--instances", tiny.instances) == OK

    half = np.zeros((32, 40), dtype=np.bool_)
    half[:, :20] = True
    explained = load(tiny.model).explain(photo, "a dog runs")
    assert same(tmp_path / "x.png", overlay(photo, explained, outlines=[{1: [half]}]))
    assert not same(tmp_path / "x.png", overlay(photo, explained))


def test_a_photo_whose_words_have_no_masks_is_reported(tiny, photo, tmp_path, capsys) -> None:
    common = ("--model", tiny.model, "--instances", tiny.instances, "--words", "the hat")

    assert attend(photo, "-o", tmp_path / "x.png", *common) == OK

    assert "1.png: the caption names no object that" in only_line(capsys)


def test_a_word_that_one_photo_lacks_does_not_stop_the_others(tiny, tmp_path, capsys) -> None:
    model = load(tiny.model)
    captions = {photo.name: model.caption(photo).words for photo in tiny.photos.iterdir()}
    everywhere = set.intersection(*map(set, captions.values()))
    word = next(w for words in captions.values() for w in words if w not in everywhere)
    present = [name for name, words in captions.items() if word in words]
    missing = [name for name, words in captions.items() if word not in words]
    assert present
    assert missing

    code = attend(tiny.photos, "-o", tmp_path / "out", "--model", tiny.model, "--only", word)

    assert code == FAILED
    drawn = sorted(path.name for path in (tmp_path / "out").iterdir())
    assert drawn == sorted(f"{Path(name).stem}_attention.png" for name in present)
    errors = capsys.readouterr().err
    assert all(f"{name}: {word!r} is not in the caption" in errors for name in missing)


# --- pages ---------------------------------------------------------------------------------------


def test_a_page_contains_captions_with_alternatives(tiny, photo, caption, tmp_path) -> None:
    assert attend(photo, "-o", tmp_path / "x.html", "--model", tiny.model) == OK

    (entry,) = data_of(tmp_path / "x.html")["entries"]
    assert entry["title"] == "1.png"
    assert entry["captions"] == [caption.as_dict(attention=True)]


def test_a_folder_becomes_a_gallery(tiny, tmp_path, capsys) -> None:
    (tmp_path / "broken.png").write_bytes(b"no photo")
    given = (tiny.photos, tmp_path / "broken.png")

    assert attend(*given, "-o", tmp_path / "all.html", "--model", tiny.model) == FAILED

    entries = data_of(tmp_path / "all.html")["entries"]
    printed, errors = capsys.readouterr()
    assert "broken.png" in errors
    lines = [f"{tiny.photos / e['title']}: {e['captions'][0]['text']}" for e in entries]
    assert [*lines, f"saved as {tmp_path / 'all.html'}"] == printed.splitlines()
    assert len(entries) == len(list(tiny.photos.iterdir()))


def test_a_photo_from_standard_input(tiny, photo, caption, tmp_path, monkeypatch) -> None:
    with photo.open("rb") as file:
        monkeypatch.setattr("sys.stdin", SimpleNamespace(buffer=file))
        assert attend("-", "-o", tmp_path / "x.html", "--model", tiny.model) == OK

    (entry,) = data_of(tmp_path / "x.html")["entries"]
    assert entry["title"] == ""
    assert entry["captions"] == [caption.as_dict(attention=True)]
