"""``captioner attend``: figures, animations and pages."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from PIL import Image

from captioner import load, overlay
from captioner.cli.main import OK, SOME_FAILED, main


@pytest.fixture
def attend(tiny, run, tmp_path) -> Any:
    """``attend(photo, "--only", "dog", to="x.png")``: with the tiny model."""
    return lambda *given, to: run("attend", *given, "-o", tmp_path / to, "--model", tiny.model)


@pytest.fixture
def photo(tiny) -> Path:
    return tiny.photos / "1.png"


def data_of(path: Path) -> Any:
    found = re.search(r'id="captioner-data">(.*?)</script>', path.read_text("utf-8"), re.DOTALL)
    assert found is not None
    return json.loads(found[1])


def same(path: Path, figure: Any) -> bool:
    with Image.open(path) as picture:
        return np.array_equal(np.asarray(picture.convert("RGB")), np.asarray(figure.image()))


# --- figures -------------------------------------------------------------------------------------


def test_models_and_methods_are_drawn_side_by_side(tiny, photo, tmp_path, attend) -> None:
    code, out, _ = attend(photo, "--compare", tiny.stranger, to="x.png")

    captions = [load(folder).caption(photo) for folder in (tiny.model, tiny.stranger)]
    labels = [str(tiny.model), str(tiny.stranger)]
    *printed, saved = out.splitlines()
    assert (code, saved) == (OK, f"  saved as {tmp_path / 'x.png'}")
    assert printed == [
        f"{photo}: {caption.text} ({label})"
        for caption, label in zip(captions, labels, strict=True)
    ]
    assert same(tmp_path / "x.png", overlay(photo, captions, labels=labels))

    methods = ("attention", "grad_cam", "grad_cam")
    options = [word for method in methods for word in ("--method", method)]
    code, out, _ = attend(photo, *options, to="y.png")

    captions = [load(tiny.model).caption(photo, method=name) for name in methods[:2]]
    assert (code, out.splitlines()[:-1]) == (OK, [f"{photo}: {captions[0].text}"])
    assert same(tmp_path / "y.png", overlay(photo, captions, labels=["attention", "Grad-CAM"]))


@pytest.mark.parametrize("suffix", ["png", "html"])
def test_standard_output_is_the_file_and_nothing_else(
    tiny, photo, tmp_path, capsysbinary, suffix
) -> None:
    command = ["attend", str(photo), "--model", str(tiny.model), "--format", suffix]
    assert main([*command, "-o", str(tmp_path / "out")]) == OK
    capsysbinary.readouterr()

    assert main([*command, "-o", "-"]) == OK

    assert capsysbinary.readouterr().out == next((tmp_path / "out").iterdir()).read_bytes()


def test_outlines_of_named_objects(tiny, photo, tmp_path, attend) -> None:
    """Photo 1 has a dog in its left half, and no hat."""
    given = (photo, "--instances", tiny.instances, "--words")
    assert attend(*given, "a dog runs", to="x.png")[0] == OK

    half = np.zeros((32, 40), dtype=np.bool_)
    half[:, :20] = True
    explained = load(tiny.model).explain(photo, "a dog runs")
    assert same(tmp_path / "x.png", overlay(photo, explained, outlines=[{1: [half]}]))
    assert not same(tmp_path / "x.png", overlay(photo, explained))

    code, _, err = attend(*given, "the hat", to="y.png")
    assert (code, "1.png: no outlines are drawn, because" in err) == (OK, True)


def test_a_word_that_one_photo_lacks_does_not_stop_the_others(tiny, tmp_path, attend) -> None:
    model = load(tiny.model)
    captions = {photo.name: model.caption(photo).words for photo in tiny.photos.iterdir()}
    everywhere = set.intersection(*map(set, captions.values()))
    word = next(w for words in captions.values() for w in words if w not in everywhere)
    missing = [name for name, words in captions.items() if word not in words]
    assert 0 < len(missing) < len(captions)

    code, _, err = attend(tiny.photos, "--only", word, to="out")

    assert code == SOME_FAILED
    drawn = {path.name.replace("_attention", "") for path in (tmp_path / "out").iterdir()}
    assert drawn == captions.keys() - missing
    assert all(f"{name}: {word!r} is not in the caption" in err for name in missing)


# --- pages ---------------------------------------------------------------------------------------


def test_a_folder_becomes_a_gallery(tiny, tmp_path, attend) -> None:
    (tmp_path / "broken.png").symlink_to("broken.png")

    code, printed, err = attend(tiny.photos, tmp_path / "broken.png", to="all.html")

    assert (code, "broken.png" in err) == (SOME_FAILED, True)
    entries = data_of(tmp_path / "all.html")["entries"]
    lines = [f"{tiny.photos / e['title']}: {e['captions'][0]['text']}" for e in entries]
    assert [*lines, f"  saved as {tmp_path / 'all.html'}"] == printed.splitlines()
    assert len(entries) == len(list(tiny.photos.iterdir()))


def test_a_gallery_for_a_client(tiny, tmp_path, attend) -> None:
    assert attend(tiny.photos, "--plain", "--title", "<Our> summer", to="all.html")[0] == OK

    assert "<h1>&lt;Our&gt; summer</h1>" in (tmp_path / "all.html").read_text("utf-8")
    for entry in data_of(tmp_path / "all.html")["entries"]:
        assert entry["captions"][0].keys().isdisjoint({"confidence", "left_out", "log_prob"})


def test_a_gallery_with_corrected_captions(tiny, run, tmp_path, monkeypatch, attend) -> None:
    monkeypatch.chdir(tiny.photos)
    model, names = load(tiny.model), sorted(path.name for path in tiny.photos.iterdir())
    changed, strange, *same = names
    rows = [f"{changed},Dog dog.", f"{strange},dog labradoodle"]
    rows += [f"{name},{model.caption(name).text}" for name in same[1:]]  # one photo has no row
    (tmp_path / "captions.csv").write_text("image,caption\n" + "\n".join(rows))

    code, _, err = attend(".", "--captions", tmp_path / "captions.csv", to="all.html")

    assert (code, "labradoodle" in err, same[0] in err) == (OK, True, True)
    entries = data_of(tmp_path / "all.html")["entries"]
    found = {entry["title"]: entry["captions"] for entry in entries}
    expected = model.explain(changed, "dog dog")
    assert found[changed][0]["log_probs"] == pytest.approx(expected.log_probs.tolist(), abs=1e-3)
    assert found[changed][0]["text"] == "Dog dog."
    assert found[strange][0]["words"] == ["dog", "labradoodle"]
    assert all(found[name][0]["text"] == model.caption(name).text for name in same)


def test_a_photo_from_standard_input(tiny, photo, tmp_path, monkeypatch, attend) -> None:
    with photo.open("rb") as file:
        monkeypatch.setattr("sys.stdin", SimpleNamespace(buffer=file))
        assert attend("-", to="x.html")[0] == OK

    (entry,) = data_of(tmp_path / "x.html")["entries"]
    caption = load(tiny.model).caption(photo, alternatives=5)
    assert (entry["title"], entry["captions"]) == ("", [caption.to_dict(attention=True)])
