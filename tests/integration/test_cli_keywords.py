"""scripts/fit_reading.py and ``caption --keywords``, with a random model."""

from __future__ import annotations

import csv
import json
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from PIL import Image
from tiny_data import write_captions

from captioner.cli.main import NOT_DONE, OK
from captioner.data.metadata import embedded_description
from captioner.errors import ConfigError
from captioner.inference.folder import load_model


@pytest.fixture(scope="module")
def own(
    tiny: SimpleNamespace, script: Any, tmp_path_factory: pytest.TempPathFactory
) -> SimpleNamespace:
    """Red photos show a man, blue ones a dog; every one shows grass."""
    folder = tmp_path_factory.mktemp("own")
    (folder / "photos").mkdir()
    random, captions = np.random.default_rng(0), {}
    for number in range(240):
        colour, text = [([1, 0, 0], "a man on grass"), ([0, 0, 1], "two dogs on grass")][number % 2]
        pixels = (random.integers(128, 256, size=(32, 40, 3)) * colour).astype(np.uint8)
        Image.fromarray(pixels).save(folder / "photos" / f"{number}.jpg")
        captions[f"{number}.jpg"] = [text] * 5
    names = [*captions]
    train, val = (
        write_captions(folder / f"{part}.json", {name: captions[name] for name in some}, first)
        for part, some, first in (("train", names[:200], 1), ("val", names[200:], 201))
    )
    command = ("--train", train, "--val", val, "--images", folder / "photos",
               "--features", folder / "features")  # fmt: skip

    def fit(model: Path, output: Path) -> None:
        fitting = script("fit_reading")
        with pytest.MonkeyPatch.context() as patch:
            stages = fitting.Stage(10, 20, 0.05, 0.5), fitting.Stage(10, 20, 0.02, 1.0)
            patch.setattr(fitting, "STAGES", stages)
            patch.setattr(sys, "argv", ["fit_reading", *map(str, (model, *command, "-o", output))])
            fitting.main()

    fit(tiny.model, folder / "model")
    return SimpleNamespace(folder=folder, model=folder / "model", fit=fit)


def test_a_reading_is_fitted_once(own) -> None:
    stored = load_model(own.model)
    assert stored.reading is not None
    assert stored.reading.stems == ("grass", "man", "dog")  # no "two", which the model cannot say

    with pytest.raises(ConfigError, match="already has a reading; add --force"):
        own.fit(own.model, own.folder / "twice")


def test_every_output_has_them(own, run, tmp_path) -> None:
    photos = [shutil.copy(own.folder / "photos" / name, tmp_path) for name in ("0.jpg", "1.jpg")]

    def caption(*arguments: object) -> str:
        command = ("caption", *photos, "--model", own.model, "--keywords", 2)
        code, out, _ = run(*command, *arguments)
        assert code == OK
        return out

    data = json.loads(caption("--format", "json", "--num-captions", 2))
    words = [[one["word"] for one in photo["captions"][0]["keywords"]] for photo in data]
    assert [set(some) for some in words] == [{"man", "grass"}, {"dog", "grass"}]
    assert "keywords" not in data[0]["captions"][1]
    joined = [", ".join(some) for some in words]
    texts = [photo["captions"][0]["text"] for photo in data]
    rows = csv.DictReader(caption("--format", "csv", "--num-captions", 2).splitlines())
    assert [row["keywords"] for row in rows] == [joined[0], "", joined[1], ""]
    assert caption("--sidecar", "txt").splitlines() == [
        f"{photo}: {text} [{some}]" for photo, text, some in zip(photos, texts, joined, strict=True)
    ]
    assert (tmp_path / "1.txt").read_text() == f"{texts[1]}, {joined[1]}\n"
    caption("--sidecar", "xmp")
    assert b"<rdf:li>dog</rdf:li>" in (tmp_path / "1.xmp").read_bytes()
    caption("--in-place")
    content = Path(photos[1]).read_bytes()
    assert embedded_description(content) == texts[1]
    assert b"\x1c\x02\x19\x00\x03dog" in content


def test_figures_and_pages_have_their_maps(own, run, tmp_path) -> None:
    photo = own.folder / "photos" / "1.jpg"
    command = ("attend", photo, "--model", own.model, "--keywords", 2, "-o")

    assert run(*command, tmp_path / "x.svg")[0] == OK
    assert run(*command, tmp_path / "x.html")[0] == OK
    assert run(*command, tmp_path / "x.gif")[0] == NOT_DONE

    assert "keywords: dog" in (tmp_path / "x.svg").read_text()
    assert '"keywords":[{"word":"' in (tmp_path / "x.html").read_text().replace(": ", ":")


def test_where_there_are_none_the_option_is_refused(own, tiny, run, tmp_path) -> None:
    photo = own.folder / "photos" / "1.jpg"
    for model, options, problem in (
        (own.model, ("--format", "coco"), "--format coco cannot store keywords"),
        (tiny.model, (), "does not support keywords; leave out keywords"),
        (tiny.model, ("--engine", "ray", "-o", tmp_path / "parts"), "captioner: --keywords is set"),
    ):
        code, _, err = run("caption", photo, "--model", model, "--keywords", 2, *options)
        assert code == NOT_DONE
        assert problem in err
