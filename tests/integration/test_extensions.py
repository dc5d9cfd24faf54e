"""A scorer and an encoder from another package: installed, used by commands, and missing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from captioner.cli.main import NOT_DONE, main

PACKAGE = '''
import torch
from torch import nn

from captioner.model.attention import Scorer, widen
from captioner.model.attention_variants import dot_products


class Halves(Scorer):
    """Dot products with a projection of the query."""

    def __init__(self, sizes):
        super().__init__(sizes)
        self.query = nn.Linear(sizes.query, sizes.features, bias=False)

    def forward(self, query, keys):
        return dot_products(widen(self.query(query)), keys) / 2


class Patches(nn.Module):
    def __init__(self, pretrained):
        super().__init__()
        self.project = nn.Conv2d(3, 12, 16, stride=16)

    def forward(self, images):
        return self.project(images)
'''

COMMANDS = """
import sys
from captioner.cli.main import main

names = ["decoder.attention=halves", "encoder.name=acme_patches"]
assert main(["train", "train.yaml", *names]) == 0
assert main(["caption", sys.argv[1], "--model", "run/best"]) == 0
"""


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """A folder with a package and its metadata, as pip installs them."""
    folder = tmp_path / "site"
    info = folder / "acme_captioner-1.2.dist-info"
    info.mkdir(parents=True)
    (folder / "acme_layers.py").write_text(PACKAGE)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: acme-captioner\nVersion: 1.2\n")
    (info / "entry_points.txt").write_text(
        "[captioner.scorers]\nhalves = acme_layers:Halves\n"
        "[captioner.encoders]\nacme_patches = acme_layers:Patches\n"
    )
    return folder


@pytest.mark.slow
def test_a_package_adds_a_scorer_and_an_encoder(
    package, tiny, training_settings, tmp_path, monkeypatch, *, capsys
) -> None:
    monkeypatch.chdir(tmp_path)
    settings = training_settings | {
        "run_folder": "run",
        "training": {"epochs": 1, "select": "loss", "sample_images": 0, "trackers": []},
        "search": {"beam_size": 2, "min_length": 2, "max_length": 6},  # no empty captions
    }
    Path("train.yaml").write_text(yaml.safe_dump(settings))
    photo = str(tiny.photos / "1.png")
    paths = [str(package), *filter(None, [os.environ.get("PYTHONPATH")])]

    done = subprocess.run(
        [sys.executable, "-c", COMMANDS, photo],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True,
        text=True,
        check=False,
    )

    assert done.returncode == 0, done.stderr
    assert f"{photo}: " in done.stdout
    config = json.loads(Path("run/best/config.json").read_text())
    record = {"module": "acme_layers", "package": "acme-captioner", "version": "1.2"}
    assert config["requires"] == [
        {"kind": "encoder", "name": "acme_patches", **record},
        {"kind": "scorer", "name": "halves", **record},
    ]

    assert main(["caption", photo, "--model", "run/best"]) == NOT_DONE  # without the package
    [line] = capsys.readouterr().err.splitlines()
    assert "acme-captioner" in line
