"""scripts/fit_keywords.py and ``caption --keywords``, with a random model."""

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

from captioner.cli.main import FAILED, OK, USAGE, main
from captioner.data.metadata.embedding import embedded_description
from captioner.errors import ConfigError
from captioner.inference.folder import KEYWORDS, load_model

COUNT = 240


def run(*arguments: object) -> int:
    return main([str(argument) for argument in arguments])


@pytest.fixture(scope="module")
def own(
    tiny: SimpleNamespace, script: Any, tmp_path_factory: pytest.TempPathFactory
) -> SimpleNamespace:
    """Red photos show a man, blue ones a dog; every one shows grass."""
    folder = tmp_path_factory.mktemp("own")
    (folder / "photos").mkdir()
    random = np.random.default_rng(0)
    images, annotations = [], []
    for number in range(COUNT):
        colour, text = [([1, 0, 0], "a man on grass"), ([0, 0, 1], "two dogs on grass")][number % 2]
        pixels = (random.integers(128, 256, size=(32, 40, 3)) * colour).astype(np.uint8)
        Image.fromarray(pixels).save(folder / "photos" / f"{number}.jpg")
        images.append({"id": number, "file_name": f"{number}.jpg"})
        annotations.append({"id": number, "image_id": number, "caption": text})
    (folder / "captions.json").write_text(
        json.dumps({"images": images, "annotations": annotations})
    )
    model = folder / "model"
    shutil.copytree(tiny.model, model)
    captions = ("--train", folder / "captions.json", "--val", folder / "captions.json")
    command = (model, *captions, "--images", folder / "photos")

    def fit() -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sys, "argv", ["fit_keywords", *map(str, command)])
            script("fit_keywords").main()

    fit()
    return SimpleNamespace(folder=folder, model=model, plain=tiny.model, fit=fit)


def test_keywords_are_fitted_once(own) -> None:
    stored = load_model(own.model).keywords
    assert stored is not None
    assert stored.words == ("man", "dog", "grass")

    with pytest.raises(ConfigError, match=f"{KEYWORDS} exists; give --force"):
        own.fit()


def test_every_output_has_them(own, capsys, tmp_path) -> None:
    photos = [shutil.copy(own.folder / "photos" / name, tmp_path) for name in ("0.jpg", "1.jpg")]

    def caption(*arguments: object) -> str:
        capsys.readouterr()
        assert run("caption", *photos, "--model", own.model, "--keywords", 2, *arguments) == OK
        return capsys.readouterr().out

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
    data = Path(photos[1]).read_bytes()
    assert embedded_description(data) == texts[1]
    assert b"\x1c\x02\x19\x00\x03dog" in data
    neutral = json.loads(caption("--format", "json", "--neutral"))[0]["captions"][0]["keywords"]
    assert {one["word"] for one in neutral} == {"person", "grass"}


def test_figures_and_pages_have_their_maps(own, tmp_path) -> None:
    photo = own.folder / "photos" / "1.jpg"
    command = ("attend", photo, "--model", own.model, "--keywords", 2, "-o")

    assert run(*command, tmp_path / "x.svg") == OK
    assert run(*command, tmp_path / "x.html") == OK
    assert run(*command, tmp_path / "x.gif") == USAGE

    assert "keywords: dog" in (tmp_path / "x.svg").read_text()
    assert '"keywords":[{"word":"' in (tmp_path / "x.html").read_text().replace(": ", ":")


def test_formats_without_room_are_refused(own, capsys) -> None:
    command = ("caption", own.folder / "photos" / "1.jpg", "--model", own.model, "--keywords", 2)

    assert run(*command, "--format", "coco") == USAGE
    assert "--format coco has no keywords" in capsys.readouterr().err


def test_a_model_without_keywords_is_refused_at_once(own, capsys, monkeypatch) -> None:
    monkeypatch.setattr("captioner.inference.captioner.load", None)

    assert run("caption", "x.jpg", "--model", own.plain, "--keywords", 2) in (USAGE, FAILED)

    assert "has no keywords; fit some with scripts/fit_keywords.py" in capsys.readouterr().err
