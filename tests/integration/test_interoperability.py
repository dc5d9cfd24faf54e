"""Results that other programs open, and the page about them, which is run."""

from __future__ import annotations

import dataclasses
import re
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from pages import commands, examples, read
from PIL import Image

import captioner
from captioner.cli.main import OK, SOME_FAILED, main
from captioner.inference import captioner as api

PAGE = read("docs/interoperability.md")
PYTHON = examples(PAGE, "python")


@pytest.fixture
def here(tiny, tmp_path, monkeypatch) -> Path:
    """A folder with ``photos``, ``photo.jpg`` and ``captions.json``; the tiny model is shipped."""
    monkeypatch.chdir(tmp_path)
    for module in ("captioner", "find_model", "folder", "names"):
        monkeypatch.setattr(f"captioner.inference.{module}.SHIPPED_MODEL", tiny.model)
    shutil.copytree(tiny.photos, "photos")
    shutil.copy("photos/1.png", "photo.jpg")
    shutil.copy(tiny.captions, "captions.json")
    return tmp_path


def run_example(number: int, names: dict[str, object] | None = None) -> dict[str, object]:
    names = {} if names is None else names
    exec(compile(PYTHON[number], f"docs/interoperability.md, example {number + 1}", "exec"), names)
    return names


def load(path: str) -> dict[str, np.ndarray]:
    with np.load(path) as archive:  # allow_pickle is False
        return dict(archive)


def test_the_page_runs(here, capsys):
    for program, *arguments in commands(*examples(PAGE, "bash")):
        assert program == "captioner"
        assert main(arguments) == OK, arguments
    capsys.readouterr()
    names = run_example(0)
    assert np.isclose(np.nanmax(names["pixels"]), names["maps"]["alphas"][0, 1].max(), atol=0.05)

    out = capsys.readouterr().out
    assert out.startswith("photos/1.png ")
    assert load("maps.npz").keys() == set(re.findall(r"^\| `(\w+)` \| \(", PAGE, re.M))
    assert load("dog.npz")["words"].tolist() == [["a", "dog", "runs"]]


def test_an_archive_holds_what_the_captions_hold(here):
    photos = sorted(Path("photos").iterdir())
    texts = ["a dog", "the man runs on grass"]
    words = [part for text in texts for part in ("--words", text)]
    assert main(["attend", "photos", "-o", "maps.npz", *words]) == OK
    model = api.load()

    maps = load("maps.npz")

    captions = [model.explain(photo, text) for photo in photos for text in texts]
    assert maps["captions"].tolist() == [caption.text for caption in captions]
    assert maps["photos"].tolist() == [str(photo) for photo in photos for _ in range(2)]
    assert maps["lengths"].tolist() == [2, 5] * 4
    assert (maps["sizes"] == [32, 40]).all()
    for row, caption in enumerate(captions):
        length = maps["lengths"][row]
        assert maps["words"][row, :length].tolist() == list(caption.words)
        np.testing.assert_allclose(maps["alphas"][row, :length], caption.alphas, atol=1e-5)
        np.testing.assert_allclose(maps["gates"][row, :length], caption.gates, atol=1e-5)
        np.testing.assert_allclose(maps["log_probs"][row, :length], caption.log_probs, atol=1e-4)
        np.testing.assert_allclose(maps["log_prob"][row], caption.log_prob, atol=1e-4)
        assert maps["geometry"][row].tolist() == [list(axis) for axis in caption.regions]
        assert not maps["alphas"][row, length:].any()
        assert set(maps["words"][row, length:]) <= {""}


def test_archives_are_deterministic_and_have_upright_sizes(here, capsys):
    exif = Image.Exif()
    exif[0x0112] = 6  # to be turned by 90 degrees
    Image.new("RGB", (60, 20)).save("photos/5.jpg", exif=exif)
    Path("photos/2.png").write_bytes(b"no photo")
    for name in ("one.npz", "two.npz"):
        assert main(["attend", "photos", "-o", name]) == SOME_FAILED
        assert "photos/2.png" in capsys.readouterr().err
    archive = captioner.MapArchive()
    archive.add("photos/5.jpg", api.load().caption("photos/5.jpg"))

    assert Path("one.npz").read_bytes() == Path("two.npz").read_bytes()
    maps = load("one.npz")
    assert maps["photos"].tolist() == [
        "photos/1.png",
        "photos/3.png",
        "photos/4.png",
        "photos/5.jpg",
    ]
    assert maps["sizes"][-1].tolist() == archive.arrays()["sizes"][0].tolist() == [60, 20]


def test_what_an_archive_cannot_hold(here):
    caption = api.load().caption("photo.jpg")
    archive = captioner.MapArchive()
    with pytest.raises(captioner.ConfigError, match="the archive is empty"):
        archive.save("none.npz")
    archive.add("photo.jpg", caption)
    other = dataclasses.replace(caption, alphas=np.zeros((len(caption.words), 3, 3)))
    with pytest.raises(captioner.ConfigError, match="differs from the grid"):
        archive.add("photo.jpg", other)
    with pytest.raises(captioner.ConfigError, match=r"use \.npz"):
        archive.save("maps.npy")


def test_the_fiftyone_recipe(here, monkeypatch):
    """With objects that only keep what they are given; see the page for FiftyOne itself."""

    def sample(filepath: str) -> dict[str, object]:
        return {"filepath": filepath}

    class Dataset(list):
        def __init__(self, name: str, overwrite: bool) -> None:
            super().__init__()

        add_sample = list.append

    fiftyone = SimpleNamespace(Sample=sample, Dataset=Dataset)
    fiftyone.Heatmap = fiftyone.Classification = SimpleNamespace
    monkeypatch.setitem(sys.modules, "fiftyone", fiftyone)
    assert main(["attend", "photos", "-o", "maps.npz"]) == OK

    dataset = run_example(1, run_example(0))["dataset"]

    maps = load("maps.npz")
    assert [sample["filepath"] for sample in dataset] == maps["photos"].tolist()
    for row, sample in enumerate(dataset):
        assert sample["caption"].label == maps["captions"][row]
        assert 0 < sample["caption"].confidence < 1
        heatmaps = [sample[name] for name in sample if name.startswith("word_")]
        assert [h.word for h in heatmaps] == maps["words"][row, : len(heatmaps)].tolist()
        assert {h.map.shape for h in heatmaps} == {(256, 320)}
        assert all(0 <= h.map.min() <= h.map.max() <= h.range[1] + 1e-6 for h in heatmaps)
